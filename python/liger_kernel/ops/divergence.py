"""What kl_div, jsd and tvd share: one operator, whose table of formulas is in liger/core/math.h."""

import torch

from liger_kernel._library import ops
from liger_kernel.ops.utils import check_label, reduction_code

#: Rows of libliger's table of divergences.
KL, LOG_KL, REVERSE_KL, JENSEN_SHANNON, TOTAL_VARIATION = range(5)

IGNORE_INDEX = -100


def check_labels(labels, rows, ignore_index):
    check_label("ignore_index", ignore_index)
    if labels is not None and labels.shape != (rows,):
        raise AssertionError(f"shift_labels must be [{rows}], got {list(labels.shape)}")


def gradient(x, target, kind, parameter=0.0, labels=None, ignore_index=IGNORE_INDEX):
    """The elements' own gradients, not divided by anything."""
    ones = torch.ones((), device=x.device).expand(x.shape)
    return ops.divergence_backward(ones, x, target, labels, kind, parameter, ignore_index)


def loss_and_gradient(x, target, labels, kind, parameter, ignore_index, reduction, dtype):
    """Both in one pass, without autograd; single losses come with their elements' own gradients."""
    x, target = x.detach(), target.detach()
    loss, dx, rest = ops.divergence_forward(
        x, target, labels, kind, parameter, ignore_index, reduction_code(reduction), dtype, True
    )
    if reduction == "none":
        return loss, gradient(x, target, kind, parameter, labels, ignore_index)
    return loss, dx if rest.ndim else dx * rest
