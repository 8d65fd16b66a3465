"""The residual stream: a sum and the norm after it, by one operator where a call of the norm would run what its class
says and nothing else."""

import functools
from typing import Any

from torch import Tensor

from liger_kernel import _recompute
from liger_kernel._library import ops
from liger_kernel.operators.common import beside
from liger_kernel.operators.coverage import DENSE, NORM_KERNELS, is_bare, is_recorded, kernels_cover
from liger_kernel.operators.norm import LigerRMSNorm, casting_code, eps_of, weight_in


def is_rms_norm(cls: Any) -> bool:
    """Whether modules of a class, or of the variant that a patch has made of one, run LigerRMSNorm's forward."""
    return _is_rms_norm(cls)


@functools.cache
def _is_rms_norm(cls):
    part: Any = getattr(vars(cls).get("liger_part"), "part", cls)
    return issubclass(part, LigerRMSNorm) and part.forward is LigerRMSNorm.forward


vars(is_rms_norm)["_dynamo_marked_constant"] = True  # as in coverage.py


def norm_options(norm: Any, x: Any) -> tuple[float, float, int] | None:
    """(eps, offset, casting) of what a call of `norm` with x would run, where that is RMSNorm and nothing else, in x's
    dtype; None elsewhere."""
    if not is_rms_norm(norm.__class__) or not is_bare(norm):
        return None
    weight, mode = weight_in(norm), norm.casting_mode
    # A weight of another type changes that of the result where it is rounded before the weight.
    if weight is None or type(weight) not in DENSE or not weight.dim():
        return None
    if weight.dtype is not x.dtype and mode != "gemma":
        return None
    return float(eps_of(norm)), float(norm.offset), casting_code(mode)


def normalise(norm: Any, x: Any, read_in: int) -> Tensor:
    """norm(x), for a module that reads its rows in eight bits (linear.read_in), or not."""
    if read_in >= 0 and is_recorded(x) and kernels_cover(x, NORM_KERNELS):
        if (options := norm_options(norm, x)) is not None:
            given = beside(x, weight_in(norm))
            y = ops.rms_norm(x, given, *options, read_in)
            _recompute.note(ops.rms_norm, (x, given, *options), y)
            return y
    return norm(x)


def add_and_normalise(norm: Any, a: Any, b: Any, read_in: int = -1) -> tuple[Tensor, Tensor]:
    """(a + b, norm(a + b)); read_in: see normalise."""
    if is_recorded(a) and b.__class__ is Tensor and a.dtype is b.dtype and a.shape == b.shape and a.device == b.device:
        if (options := norm_options(norm, a)) is not None and kernels_cover(a, NORM_KERNELS):
            given = beside(a, weight_in(norm))
            y, total = ops.fused_add_rms_norm(a, b, given, *options, read_in)
            _recompute.note(ops.rms_norm, (total, given, *options), y)
            return total, y
    total = a + b
    return total, norm(total)
