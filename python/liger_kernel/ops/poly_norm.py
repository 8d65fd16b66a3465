"""PolyNorm (Zhuo et al. 2024, arXiv:2411.03884)."""

from liger_kernel._library import ops
from liger_kernel.ops.utils import calculate_settings


def _check(W, B):
    if W.shape[0] != 3:
        raise AssertionError(f"the weight has 3 elements, for the third, second and first power, not {W.shape[0]}")
    if B.numel() != 1:
        raise AssertionError(f"the bias is one number, not {B.numel()}")


class LigerPolyNormFunction:
    @staticmethod
    def apply(X, W, B, eps=1e-6, in_place=True):
        """W[0] · N(X³) + W[1] · N(X²) + W[2] · N(X) + B with N(u) = u / sqrt(mean(u²) + eps) over the last dimension.

        in_place is a hint: no argument is changed. Raises AssertionError for other sizes of W and B.
        """
        _check(W, B)
        return ops.poly_norm(X, W, B, float(eps))


def poly_norm_forward(X, W, B, eps=1e-6):
    """(y, X [rows, H], rstd [rows, 3], BLOCK_SIZE, num_warps), without autograd."""
    _check(W, B)
    y, rstd = ops.poly_norm_forward(X, W, B, float(eps))
    return y, X.reshape(-1, X.shape[-1]), rstd.reshape(-1, 3), *calculate_settings(min(X.shape[-1], 65536))


def poly_norm_backward(dY, X, W, RSTD, BLOCK_SIZE=None, num_warps=None, in_place=False):
    """(dX, dW, dB) from what poly_norm_forward returned."""
    dX, dW, dB = ops.poly_norm_backward(dY.reshape(X.shape), X, W, W.new_zeros(()), RSTD, True, True, True)
    return dX.reshape(dY.shape), dW, dB
