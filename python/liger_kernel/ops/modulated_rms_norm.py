"""RMSNorm with a scale and a shift for each sample or token (adaptive norm; Peebles & Xie 2022, arXiv:2212.09748)."""

from liger_kernel._library import ops
from liger_kernel.ops.rms_norm import casting_code, check_width
from liger_kernel.ops.utils import beside, calculate_settings, full_tensor


def _check(X, W, scale, shift):
    check_width(X, W)
    if X.numel() == 0:
        return
    width, rows = X.shape[-1], X.numel() // X.shape[-1]
    if scale.numel() == 0 or scale.numel() % width != 0:
        raise AssertionError(f"scale has {scale.numel()} elements, which is no multiple of the width {width}")
    if rows % (scale.numel() // width) != 0:
        raise AssertionError(f"scale has {scale.numel() // width} rows, which do not divide the input's {rows}")
    if shift is not None and shift.numel() != scale.numel():
        raise AssertionError(f"shift has {shift.numel()} elements, scale {scale.numel()}")


def _rows(t, width):
    return None if t is None else t.reshape(-1 if width else 1, width)


class LigerModulatedRMSNormFunction:
    @staticmethod
    def apply(X, W, scale, shift, eps, offset=0.0, casting_mode="llama", in_place=True):
        """rms_norm(X) · (1 + scale) + shift; see LigerRMSNormFunction.

        scale and shift (or None) hold a row of X's width for all rows of X, for each of equal runs of them, or for
        every one, of any dtype that X may have. in_place is a hint: no argument is changed. Raises AssertionError for
        sizes that do not fit.
        """
        X = full_tensor(X, scale)
        _check(X, W, scale, shift)
        width = X.shape[-1]
        W, scale, shift = (beside(X, t) for t in (W, scale, shift))
        return ops.modulated_rms_norm(
            X, W, _rows(scale, width), _rows(shift, width), float(eps), float(offset), casting_code(casting_mode)
        )


def modulated_rms_norm_forward(X, W, scale, shift, eps, offset, casting_mode):
    """(y, rstd [rows], BLOCK_SIZE, num_warps, code of casting_mode, rows for each row of scale), without autograd."""
    _check(X, W, scale, shift)
    width, code = X.shape[-1], casting_code(casting_mode)
    y, rstd = ops.modulated_rms_norm_forward(
        X, W, _rows(scale, width), _rows(shift, width), float(eps), float(offset), code
    )
    return y, rstd.reshape(-1), *calculate_settings(min(width, 65536)), code, X.numel() // max(1, scale.numel())


def modulated_rms_norm_backward(
    dY,
    X,
    W,
    scale,
    shift,
    RSTD,
    offset,
    casting_mode,
    BLOCK_SIZE=None,
    num_warps=None,
    rows_per_modulation=None,
    in_place=False,
):
    """(dX, dW or None, dScale, dShift or None) from what modulated_rms_norm_forward returned."""
    width = X.shape[-1]
    dX, dW, dScale, dShift = ops.modulated_rms_norm_backward(
        full_tensor(dY).reshape(X.shape),
        X,
        W,
        _rows(scale, width),
        _rows(shift, width),
        RSTD,
        float(offset),
        casting_code(casting_mode),
        True,
        W is not None,
        True,
        shift is not None,
    )
    return (
        dX.reshape(dY.shape),
        dW if W is not None else None,
        dScale.reshape(scale.shape),
        None if shift is None else dShift.reshape(shift.shape),
    )
