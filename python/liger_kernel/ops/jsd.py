"""Generalised Jensen-Shannon divergence (Lin 1991; Agarwal et al. 2024, arXiv:2306.13649)."""

from liger_kernel._library import ops
from liger_kernel.ops.divergence import JENSEN_SHANNON, check_labels, loss_and_gradient
from liger_kernel.ops.utils import reduction_code


class LigerJSDFunction:
    @staticmethod
    def apply(_input, target, shift_labels=None, beta=0.5, ignore_index=-100):
        """β KL(P ‖ M) + (1 − β) KL(Q ‖ M), M = β P + (1 − β) Q, for _input = ln Q and target = ln P, both [rows, cols].

        β = 0 is KL(P ‖ Q), β = 1 KL(Q ‖ P). The mean over the rows whose shift_labels [rows] is not ignore_index, in
        _input's dtype; 0 where there is none. The target gets no gradient. Raises AssertionError for labels of another
        shape, ValueError for β outside [0, 1].
        """
        check_labels(shift_labels, _input.shape[0], ignore_index)
        return ops.divergence(
            _input,
            target,
            shift_labels,
            JENSEN_SHANNON,
            float(beta),
            ignore_index,
            reduction_code("batchmean"),
            _input.dtype,
        )


def jsd_forward(_input, target, shift_labels, beta, ignore_index, has_label):
    """(loss, gradient of _input), without autograd."""
    labels = shift_labels if has_label else None
    return loss_and_gradient(
        _input, target, labels, JENSEN_SHANNON, float(beta), ignore_index, "batchmean", _input.dtype
    )


def jsd_backward(dX, grad_output):
    return dX * grad_output
