"""What several modules of a layer compute, by one operator where a call of each would run what its class says and
nothing else; by the modules themselves elsewhere.

The host, which runs modules and records a graph of their operators, is what a small step waits for.
"""

import functools
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from liger_kernel import _recompute
from liger_kernel._library import ops
from liger_kernel.operators.common import beside
from liger_kernel.operators.coverage import DENSE, NORM_KERNELS, is_bare, is_recorded, kernels_cover
from liger_kernel.operators.linear import qkv
from liger_kernel.operators.norm import LigerRMSNorm, casting_code, eps_of, weight_in


def projections(x: Tensor, *layers: nn.Module) -> Sequence[Tensor]:
    """Each of three layers of x."""
    found = qkv(x, *layers)
    return [layer(x) for layer in layers] if found is None else found


def heads(x: Tensor, shape: Any, *layers: nn.Module) -> Sequence[Tensor]:
    """layer(x).view(shape).transpose(1, 2) for each of three layers of x [batch, seq, columns]; shape is [batch, seq,
    heads, columns of a head]."""
    usual = x.dim() == 3 and len(shape) == 4 and shape[2] == -1 and tuple(shape[:2]) == x.shape[:2]
    found = qkv(x, *layers, head_dim=shape[3]) if usual else None
    return [layer(x).view(shape).transpose(1, 2) for layer in layers] if found is None else found


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
