"""Total variation distance (Wen et al. 2023, arXiv:2307.15190)."""

import torch

from liger_kernel._library import ops
from liger_kernel.ops.divergence import TOTAL_VARIATION, check_labels, loss_and_gradient
from liger_kernel.ops.utils import reduction_code


class LigerTVDLossFunction:
    @staticmethod
    def apply(p, q, shift_labels=None, reduction="batchmean", ignore_index=-100):
        """½ |p − q| for probabilities p and q, both [rows, cols], of any dtypes.

        Rows whose shift_labels [rows] is ignore_index do not count; 0 where all are. The loss is float, a scalar or,
        with "none", [rows, cols]. q gets no gradient. Raises AssertionError for labels of another shape, ValueError for
        an unknown reduction.
        """
        check_labels(shift_labels, p.shape[0], ignore_index)
        return ops.divergence(
            p, q, shift_labels, TOTAL_VARIATION, 0.0, ignore_index, reduction_code(reduction), torch.float32
        )


def tv_distance_forward_triton(p, q, shift_labels, reduction, ignore_index, has_label):
    """(loss, gradient of p), without autograd."""
    return loss_and_gradient(
        p, q, shift_labels if has_label else None, TOTAL_VARIATION, 0.0, ignore_index, reduction, torch.float32
    )


def tvd_backward_triton(grad_output, grads):
    return grads * grad_output
