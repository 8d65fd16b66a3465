"""What several modules of a layer compute, by one operator where a call of each would run what its class says and
nothing else; by the modules themselves elsewhere.

The host, which runs modules and records a graph of their operators, is what a small step waits for.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from liger_kernel import _recompute
from liger_kernel._library import ops
from liger_kernel.operators.common import beside
from liger_kernel.operators.coverage import DENSE, GATED_KERNELS, NORM_KERNELS, is_bare, kernels_cover
from liger_kernel.operators.norm import LigerRMSNorm, casting_code


def is_recorded(x: Any) -> bool:
    """Whether autograd records what is done to x, and nobody else does: a compiler fuses what it sees, and modes, as
    those of selective checkpointing, look for torch's operators."""
    return (
        x.__class__ is Tensor
        and torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and torch._C._len_torch_dispatch_stack() == 0
    )


def matrices(x: Tensor, *layers: Any) -> list[tuple[Tensor, Tensor | None]] | None:
    """The weight and the bias of each layer; None where a call of one with x is more than a product with its weight: an
    adapter, a hook, offloading, a shard, a quantised weight."""
    found = []
    casts = torch.is_autocast_enabled(x.device.type)
    for layer in layers:
        if type(layer) is not nn.Linear or not is_bare(layer):
            return None
        weight, bias = layer._parameters.get("weight"), layer._parameters.get("bias")
        if type(weight) not in DENSE or not (bias is None or type(bias) in DENSE):
            return None
        if not casts and (weight.dtype != x.dtype or bias is not None and bias.dtype != x.dtype):
            return None
        found.append((weight, bias))
    return found


def gated_mlp(mlp: Any, x: Tensor, activation: int) -> Tensor | None:
    """down_proj(act(gate_proj(x)) · up_proj(x)), of which backward keeps gate and up but not their product; None where
    the modules must be called."""
    if not is_recorded(x) or not kernels_cover(x, GATED_KERNELS):
        return None
    modules = mlp._modules
    found = matrices(x, modules.get("gate_proj"), modules.get("up_proj"), modules.get("down_proj"))
    if found is None:
        return None
    (gate, gate_bias), (up, up_bias), (down, down_bias) = found
    return ops.lora_mlp(
        x, gate, gate_bias, None, None, up, up_bias, None, None, down, down_bias, None, None,
        1.0, 1.0, 1.0, activation, False,
    )  # fmt: skip


def projections(x: Tensor, *layers: nn.Module) -> Sequence[Tensor]:
    """Each of three layers of x."""
    found = _together(x, layers, 0)
    return [layer(x) for layer in layers] if found is None else found


def heads(x: Tensor, shape: Any, *layers: nn.Module) -> Sequence[Tensor]:
    """layer(x).view(shape).transpose(1, 2) for each of three layers of x [batch, seq, columns]; shape is [batch, seq,
    heads, columns of a head]."""
    usual = x.dim() == 3 and len(shape) == 4 and shape[2] == -1 and tuple(shape[:2]) == x.shape[:2]
    found = _together(x, layers, shape[3]) if usual else None
    return [layer(x).view(shape).transpose(1, 2) for layer in layers] if found is None else found


def _together(x, layers, head_dim):
    if not is_recorded(x) or not kernels_cover(x):
        return None
    found = matrices(x, *layers)
    if found is None:
        return None
    (q, q_bias), (k, k_bias), (v, v_bias) = found
    return ops.lora_qkv(
        x, q, q_bias, None, None, k, k_bias, None, None, v, v_bias, None, None, 1.0, 1.0, 1.0, head_dim
    )  # fmt: skip


@functools.cache
def is_rms_norm(cls: Any) -> bool:
    """Whether modules of a class, or of the variant that a patch has made of one, run LigerRMSNorm's forward."""
    part: Any = getattr(vars(cls).get("liger_part"), "part", cls)
    return issubclass(part, LigerRMSNorm) and part.forward is LigerRMSNorm.forward


def add_and_normalise(norm: Any, a: Any, b: Any) -> tuple[Tensor, Tensor]:
    """(a + b, norm(a + b))."""
    if is_recorded(a) and b.__class__ is Tensor and a.dtype is b.dtype and a.shape == b.shape and a.device == b.device:
        if is_rms_norm(norm.__class__) and is_bare(norm) and kernels_cover(a, NORM_KERNELS):
            weight, mode = norm._parameters.get("weight"), norm.casting_mode
            # A weight of another type changes that of the result where it is rounded before the weight.
            if type(weight) in DENSE and (weight.dtype is a.dtype or mode == "gemma"):
                options = float(norm.variance_epsilon), float(norm.offset), casting_code(mode)
                given = beside(a, weight)
                y, total = ops.fused_add_rms_norm(a, b, given, *options)
                _recompute.note(ops.rms_norm, (total, given, *options), y)
                return total, y
    total = a + b
    return total, norm(total)
