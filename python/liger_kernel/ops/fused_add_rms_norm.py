"""The sum of a residual stream and a block's output, and its RMSNorm, in one pass."""

from liger_kernel._library import ops
from liger_kernel.ops.rms_norm import casting_code, check_width
from liger_kernel.ops.utils import beside, calculate_settings, promoted


class LigerFusedAddRMSNormFunction:
    @staticmethod
    def apply(X, R, W, eps, offset=0.0, casting_mode="llama", in_place=False):
        """(rms_norm(S), S) for S = X + R in the dtype that torch's sum has, to which S is rounded; see
        LigerRMSNormFunction. in_place is a hint: no argument is changed."""
        check_width(X, W)
        X, R = promoted(X, R)
        return ops.fused_add_rms_norm(X, R, beside(X, W), float(eps), float(offset), casting_code(casting_mode))


def fused_add_rms_norm_forward(X, R, W, eps, offset, casting_mode):
    """(y, S, rstd [rows], BLOCK_SIZE, num_warps, num_stages, code of casting_mode), without autograd."""
    check_width(X, W)
    y, s, rstd = ops.fused_add_rms_norm_forward(X, R, W, float(eps), float(offset), casting_code(casting_mode))
    return y, s, rstd.reshape(-1), *calculate_settings(min(X.shape[-1], 65536)), 1, casting_code(casting_mode)


def fused_add_rms_norm_backward(
    dY, dS_out, S, W, RSTD, offset, casting_mode, BLOCK_SIZE=None, num_warps=None, num_stages=None, in_place=False
):
    """(dX, dR, dW) from what fused_add_rms_norm_forward returned; dX and dR are one tensor."""
    dS = None if dS_out is None else dS_out.reshape(S.shape)
    dX, dW = ops.fused_add_rms_norm_backward(
        dY.reshape(S.shape), dS, S, W, RSTD, float(offset), casting_code(casting_mode), True, W is not None
    )
    dX = dX.reshape(dY.shape)
    return dX, dX, dW if W is not None else None
