"""GroupNorm (Wu & He 2018, arXiv:1803.08494)."""

from liger_kernel._library import ops
from liger_kernel.ops.utils import calculate_settings


class LigerGroupNormFunction:
    @staticmethod
    def apply(X, affine_scaling_weight, affine_shifting_bias, num_channels, num_groups, eps):
        """(X − mean) / sqrt(variance + eps) over each group of channels of a sample, times a channel's weight, plus its
        bias.

        X [N, num_channels, ...]; weight and bias [num_channels] in X's dtype or float, or None.
        """
        return ops.group_norm(X, affine_scaling_weight, affine_shifting_bias, num_groups, float(eps))


def group_norm_forward(X, num_channels, num_groups, W, B, eps):
    """(y, X, mean [N, groups], rstd [N, groups], BLOCK_SIZE), without autograd."""
    y, mean, rstd = ops.group_norm_forward(X, W, B, num_groups, float(eps))
    return y, X, mean, rstd, calculate_settings(min(X[0].numel() // num_groups, 65536))[0]


def group_norm_backward(dY, X, W, B, Mean, RSTD, num_channels, num_groups):
    """(dX, dW, dB) from what group_norm_forward returned."""
    return ops.group_norm_backward(dY, X, W, B, Mean, RSTD, num_groups, True, True, True)
