"""Kullback-Leibler divergence (Kullback & Leibler 1951)."""

import torch

from liger_kernel._library import ops
from liger_kernel.ops.divergence import IGNORE_INDEX, KL, LOG_KL, gradient
from liger_kernel.ops.utils import reduction_code


class LigerKLDivLossFunction:
    @staticmethod
    def apply(y_pred, y_true, reduction="batchmean", log_target=False, eps=1e-10):
        """t · (ln max(t, eps) − y), or eᵗ · (t − y) with log_target, for log-probabilities y and a target t, both
        [rows, cols].

        The dtypes may differ; the loss is float, a scalar or, with "none", [rows, cols]. The target gets no gradient.
        Raises ValueError for an unknown reduction.
        """
        return ops.divergence(
            y_pred,
            y_true,
            None,
            LOG_KL if log_target else KL,
            float(eps),
            IGNORE_INDEX,
            reduction_code(reduction),
            torch.float32,
        )


def kldiv_forward_triton(y_pred, y_true, log_target, reduction, eps):
    """The loss, without autograd."""
    return LigerKLDivLossFunction.apply(y_pred.detach(), y_true.detach(), reduction, log_target, eps)


def kldiv_backward_triton(target, grad_output, new_grads, log_target):
    """The gradient of the elements' losses times grad_output, written to new_grads."""
    return new_grads.copy_(gradient(target, target, LOG_KL if log_target else KL)).mul_(grad_output)
