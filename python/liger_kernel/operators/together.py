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
from liger_kernel.operators.linear import Layer, layer_of
from liger_kernel.operators.norm import LigerRMSNorm, casting_code, eps_of, weight_in
from liger_kernel.operators.quantised import call, is_in_4_bits


def is_recorded(x: Any) -> bool:
    """Whether autograd records what is done to x, and nobody else does: a compiler fuses what it sees, and modes, as
    those of selective checkpointing, look for torch's operators."""
    return (
        x.__class__ is Tensor
        and torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and torch._C._len_torch_dispatch_stack() == 0
    )


def gated_mlp(mlp: Any, x: Tensor, activation: int, recompute: bool = False) -> Tensor | None:
    """down_proj(act(gate_proj(x)) · up_proj(x)), of which backward keeps gate and up but not their product, and with
    `recompute` neither; None where the modules must be called. Adapters on the projections are part of it."""
    if not kernels_cover(x, GATED_KERNELS):
        return None
    modules = mlp._modules
    layers = _layers(x, [modules.get(name) for name in ("gate_proj", "up_proj", "down_proj")])
    if layers is None:
        return None
    if not _are_adapted(layers) and not (is_recorded(x) and mlp.liger_whole):
        return None
    gate, up, down = layers
    arguments = (*gate[:4], *up[:4], *down[:4], gate.scale, up.scale, down.scale, activation, recompute)
    return call("lora_mlp", 1, x, *arguments) if _are_quantised(layers) else ops.lora_mlp(x, *arguments)


def _layers(x: Tensor, modules: Sequence[Any]) -> list[Layer] | None:
    """What calls of modules with x compute; None where an operator of all of them computes something else."""
    layers = []
    for module in modules:
        if (layer := layer_of(module, x)) is None or layer.dropout is not None:
            return None
        layers.append(layer)
    return layers


def _are_adapted(layers: Sequence[Layer]) -> bool:
    """Whether one of three layers has an adapter: its operator then also pays where autograd is not all that looks
    on."""
    first, second, third = layers  # no loop: every call of every layer asks
    return first.a is not None or second.a is not None or third.a is not None


def _are_quantised(layers: Sequence[Layer]) -> bool:
    first, second, third = layers
    return is_in_4_bits(first.weight) or is_in_4_bits(second.weight) or is_in_4_bits(third.weight)


def qkv(x: Tensor, *modules: nn.Module) -> Sequence[Tensor] | None:
    """Each of three linear layers of x; None where the modules must be called."""
    if torch.compiler.is_compiling() or not kernels_cover(x):
        return None
    layers = _layers(x, modules)
    if layers is None or not (is_recorded(x) or _are_adapted(layers) and not x.is_inference()):
        return None
    q, k, v = layers
    arguments = *q[:4], *k[:4], *v[:4], q.scale, k.scale, v.scale
    return call("lora_qkv", 3, x, *arguments) if _are_quantised(layers) else ops.lora_qkv(x, *arguments, 0)


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
