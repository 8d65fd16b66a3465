"""LayerNorm (Ba et al. 2016, arXiv:1607.06450)."""

from liger_kernel._library import ops
from liger_kernel.ops.utils import beside, calculate_settings


def _check(X, *vectors):
    for v in vectors:
        if v is not None and X.shape[-1] != v.shape[0]:
            raise ValueError(f"the input's last dimension is {X.shape[-1]}, a weight or bias has {v.shape[0]}")


class LigerLayerNormFunction:
    @staticmethod
    def apply(X, W, B, eps):
        """(X − mean) / sqrt(variance + eps) · W + B over the last dimension.

        X [..., H]; W and B [H] of any dtype that X may have, or None; the result has X's dtype. Raises ValueError where
        a width differs.
        """
        try:
            return ops.layer_norm(X, beside(X, W), beside(X, B), float(eps))
        except RuntimeError:
            _check(
                X, W, B
            )  # says it in the API's own exception; asked before, it would add half to the time of a small call
            raise


def layer_norm_forward(X, W, B, eps):
    """(y, X [rows, H], mean [rows], rstd [rows], BLOCK_SIZE, num_warps), without autograd."""
    _check(X, W, B)
    y, mean, rstd = ops.layer_norm_forward(X, W, B, float(eps))
    return (
        y,
        X.reshape(-1, X.shape[-1]),
        mean.reshape(-1),
        rstd.reshape(-1),
        *calculate_settings(min(X.shape[-1], 65536)),
    )


def layer_norm_backward(dY, X, W, B, Mean, RSTD):
    """(dX, dW, dB) from what layer_norm_forward returned."""
    dX, dW, dB = ops.layer_norm_backward(dY.reshape(X.shape), X, W, B, Mean, RSTD, True, True, True)
    return dX.reshape(dY.shape), dW, dB
