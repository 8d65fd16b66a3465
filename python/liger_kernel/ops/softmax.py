"""Softmax over the last dimension."""

from liger_kernel._library import ops
from liger_kernel.ops.utils import calculate_settings

#: Rows of libliger's table of maps to probabilities.
SOFTMAX, SPARSEMAX = range(2)


class LigerSoftmaxFunction:
    @staticmethod
    def apply(input_):
        """exp(x) / Σ exp(x) over the last dimension of x [..., n], summed in float, in x's dtype."""
        return ops.softmax(input_, SOFTMAX)


def _softmax_forward(x):
    """(y, BLOCK_SIZE, num_warps, whether a row takes several blocks), without autograd."""
    block, warps = calculate_settings(min(x.shape[-1], 65536))
    return ops.softmax_forward(x, SOFTMAX), block, warps, x.shape[-1] > block


def _softmax_backward(dy, y, BLOCK_SIZE=None, num_warps=None, multi_block_launch=None):
    return ops.softmax_backward(dy, y, SOFTMAX)
