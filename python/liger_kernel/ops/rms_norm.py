"""RMSNorm (Zhang & Sennrich 2019, arXiv:1910.07467)."""

from liger_kernel._library import ops
from liger_kernel.ops.utils import beside, calculate_settings, full_tensor

_CASTING = {"none": -1, "llama": 0, "gemma": 1}


def casting_code(mode) -> int:
    """The code of a casting mode, "llama", "gemma" or "none"; raises AssertionError for another."""
    code = _CASTING.get(mode, mode)
    if code not in _CASTING.values():
        raise AssertionError(f"casting_mode is one of {list(_CASTING)}, not {mode!r}")
    return code


def check_width(x, w):
    if w is not None and x.shape[-1] != w.shape[0]:
        raise AssertionError(f"the input's last dimension is {x.shape[-1]}, the weight has {w.shape[0]}")


class LigerRMSNormFunction:
    @staticmethod
    def apply(X, W, eps, offset=0.0, casting_mode="llama", in_place=True, row_mode=None):
        """y = X / rms(X) · (W + offset) over the last dimension.

        X [..., H]; W [H] of any dtype that X may have, or None; y has X's dtype. casting_mode says where the matched
        model rounds. in_place and row_mode are accepted as hints: no argument is ever changed. DTensors stay sharded;
        beside a plain W a DTensor is gathered, and y is plain. Raises AssertionError where H and W differ.
        """
        try:
            return ops.rms_norm(
                X if W is None else full_tensor(X, W),
                beside(X, W),
                float(eps),
                float(offset),
                casting_code(casting_mode),
            )
        except RuntimeError:
            check_width(X, W)  # see LigerLayerNormFunction
            raise


def rms_norm_forward(X, W, eps, offset, casting_mode, row_mode=None):
    """(y, X [rows, H], rstd [rows], BLOCK_SIZE, num_warps, code of casting_mode), without autograd."""
    check_width(X, W)
    y, rstd = ops.rms_norm_forward(X, W, float(eps), float(offset), casting_code(casting_mode))
    block, warps = calculate_settings(min(X.shape[-1], 65536))
    return y, X.reshape(-1, X.shape[-1]), rstd.reshape(-1), block, warps, casting_code(casting_mode)


def rms_norm_backward(
    dY, X, W, RSTD, offset, casting_mode, BLOCK_SIZE=None, num_warps=None, in_place=False, row_mode=None
):
    """(dX, dW or None) from what rms_norm_forward returned."""
    dX, dW = ops.rms_norm_backward(
        dY.reshape(X.shape), X, W, RSTD, float(offset), casting_code(casting_mode), True, W is not None
    )
    return dX.reshape(dY.shape), dW if W is not None else None
