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


@functools.cache
def is_rms_norm(cls: Any) -> bool:
    """Whether modules of a class, or of the variant that a patch has made of one, run LigerRMSNorm's forward."""
    part: Any = getattr(vars(cls).get("liger_part"), "part", cls)
    return issubclass(part, LigerRMSNorm) and part.forward is LigerRMSNorm.forward


def add_and_normalise(norm: Any, a: Any, b: Any) -> tuple[Tensor, Tensor]:
    """(a + b, norm(a + b))."""
    if is_recorded(a) and b.__class__ is Tensor and a.dtype is b.dtype and a.shape == b.shape and a.device == b.device:
        if is_rms_norm(norm.__class__) and is_bare(norm) and kernels_cover(a, NORM_KERNELS):
            weight, mode = weight_in(norm), norm.casting_mode
            # A weight of another type changes that of the result where it is rounded before the weight.
            if (
                weight is not None
                and type(weight) in DENSE
                and weight.dim()
                and (weight.dtype is a.dtype or mode == "gemma")
            ):
                options = float(eps_of(norm)), float(norm.offset), casting_code(mode)
                given = beside(a, weight)
                y, total = ops.fused_add_rms_norm(a, b, given, *options)
                _recompute.note(ops.rms_norm, (total, given, *options), y)
                return total, y
    total = a + b
    return total, norm(total)
