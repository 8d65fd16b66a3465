"""Linear layers as operators take them, and their operators (formulas in liger/ops.h): one layer, three of one input, a
gated MLP, and the last layer of one, or of an MLP without a gate. A layer is a matrix, perhaps in four or eight bits,
perhaps with a bias and an adapter."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from liger_kernel._library import ops
from liger_kernel.operators import quantised
from liger_kernel.operators.coverage import (
    ACTIVATION_KERNELS,
    DENSE,
    GATED_KERNELS,
    is_bare,
    is_recorded,
    kernels_cover,
)
from liger_kernel.operators.eight_bit import NUMBERS, LigerLinear8bit
from liger_kernel.operators.quantised import is_in_4_bits, weight_in_4_bits


class Layer(NamedTuple):
    """y = x weightᵀ + bias + scale · (dropout(x) aᵀ) bᵀ; a, b and dropout are None where there is no adapter. With
    weight_scale, weight is in eight bits."""

    weight: Tensor
    bias: Tensor | None
    a: Tensor | None = None
    b: Tensor | None = None
    scale: float = 1.0
    dropout: nn.Module | None = None
    weight_scale: Tensor | None = None


def layer_of(module: Any, x: Tensor | None = None) -> Layer | None:
    """What a call of a linear layer with x computes; None where that is more than a Layer: a hook, offloading, a shard,
    a dtype that the call would refuse, another adapter than `liger_layer` of the module's class describes. Without x,
    which has no adapter: what a call with an x of the layer's dtype computes."""
    cls = type(module)
    if cls is nn.Linear:
        return _plain(module, x)
    if x is not None and (describe := getattr(cls, "liger_layer", None)) is not None:
        return describe(module, x) if is_bare(module) else None
    if cls is LigerLinear8bit:
        return _in_8_bits(module, x)
    if module is not None and (weight := weight_in_4_bits(module, x)) is not None and is_bare(module):
        bias = module.bias
        if bias is None or x is None or bias.dtype == x.dtype and not bias.requires_grad:
            return Layer(weight, bias)
    return None


def _plain(module, x):
    if not is_bare(module):
        return None
    parameters = module._parameters
    weight, bias = parameters.get("weight"), parameters.get("bias")
    if weight is None:  # a replica of torch.nn.DataParallel
        weight, bias = tensor_of(module, "weight"), tensor_of(module, "bias")
    if type(weight) not in DENSE or not (bias is None or type(bias) in DENSE):
        return None
    if x is None:
        return Layer(weight, bias) if kernels_cover(weight) else None
    if weight.dtype == x.dtype and (bias is None or bias.dtype == x.dtype) or is_autocast(x):
        return Layer(weight, bias)
    return None


def _in_8_bits(module, x):
    if not is_bare(module):
        return None
    weight, scale, bias = tensor_of(module, "weight"), module._buffers["weight_scale"], tensor_of(module, "bias")
    if not (bias is None or x is None or bias.dtype == x.dtype or is_autocast(x)):
        return None
    return Layer(weight, bias, weight_scale=scale)


def tensor_of(module: nn.Module, name: str) -> Any:
    """A parameter of a module, from where torch keeps it, which is faster than an attribute; a replica of
    torch.nn.DataParallel has a tensor in its place."""
    found = module._parameters.get(name)
    return module.__dict__.get(name) if found is None else found


def is_autocast(x: Tensor) -> bool:
    """Whether a linear layer would cast x."""
    return torch.is_autocast_enabled(x.device.type)


def _three(x, modules):
    """The layers that three modules are for x; None where an operator of all of them computes something else."""
    layers = []
    for module in modules:
        if (layer := layer_of(module, x)) is None or layer.dropout is not None:
            return None
        layers.append(layer)
    return layers


def _are_adapted(layers):
    """Whether one of three layers has an adapter: its operator then also pays where autograd is not all that looks
    on."""
    first, second, third = layers  # no loop: every call of every layer asks
    return first.a is not None or second.a is not None or third.a is not None


def _are_quantised(layers):
    first, second, third = layers
    return is_in_4_bits(first.weight) or is_in_4_bits(second.weight) or is_in_4_bits(third.weight)


def read_in(module: Any) -> int:
    """The number of the format of eight bits in which the first layers of attention, or of a gated MLP, read their
    input; −1 where they do not, or where a hook may see that input first."""
    modules = module._modules
    layer = modules.get("q_proj") or modules.get("gate_proj") or modules.get("w1")
    if layer is None:
        return -1
    base = layer._modules.get("base_layer", layer)
    return NUMBERS[base.format] if base.__class__ is LigerLinear8bit and is_bare(module) else -1


def linear(x: Tensor, layer: Layer, dropped: Tensor | None = None) -> Tensor:
    """A layer of x, whose adapter sees `dropped`, x after its dropout, instead of x where it is given."""
    weight, bias, a, b, scale, _, weight_scale = layer
    arguments = weight, bias, a, b, dropped, weight_scale, scale
    if is_in_4_bits(weight):
        return quantised.call("linear", 1, x, arguments)
    return ops.linear(x, *arguments)


def qkv(x: Tensor, *modules: nn.Module) -> Any:
    """Three layers of x; None where the modules must be called."""
    if torch.compiler.is_compiling() or not kernels_cover(x):
        return None
    layers = _three(x, modules)
    if layers is None or not (is_recorded(x) or _are_adapted(layers) and not x.is_inference()):
        return None
    q, k, v = layers
    scales = q.weight_scale, k.weight_scale, v.weight_scale, q.scale, k.scale, v.scale
    if _are_quantised(layers):
        return quantised.call("qkv", 3, x, (*q[:4], *k[:4], *v[:4], *scales))
    return ops.qkv(x, *q[:4], *k[:4], *v[:4], *scales)


#: The names of a gated MLP's layers: gate, up, down.
GATE_UP_DOWN = ("gate_proj", "up_proj", "down_proj")


def gated_mlp(
    mlp: Any, x: Tensor, activation: int, gate_multiplier: float = 1.0, down_multiplier: float = 1.0, chunk: int = 0,
    recompute: bool = False, names: tuple[str, str, str] = GATE_UP_DOWN,
) -> Tensor | None:  # fmt: skip
    """down_multiplier · down_proj(act(gate_multiplier · gate_proj(x)) · up_proj(x)), of the layers with these names,
    `chunk` tokens at a time, or all for 0; backward keeps gate and up but not their product, and with `recompute`
    neither. None where the modules must be called. Adapters on the projections are part of it."""
    if not kernels_cover(x, GATED_KERNELS):
        return None
    modules = mlp._modules
    layers = _three(x, map(modules.get, names))
    if layers is None:
        return None
    if not (recompute or _are_adapted(layers) or is_recorded(x) and getattr(mlp, "liger_whole", True)):
        return None
    gate, up, down = layers
    scales = gate.weight_scale, up.weight_scale, down.weight_scale, gate.scale, up.scale, down.scale
    arguments = (*gate[:4], *up[:4], *down[:4], *scales)
    options = activation, gate_multiplier, down_multiplier, chunk, recompute
    if _are_quantised(layers):
        return quantised.call("gated_mlp", 1, x, arguments, options, down_multiplier == 1 and not chunk)
    return ops.gated_mlp(x, *arguments, *options)


def gated_linear(mlp: Any, name: str, x: Tensor, activation: int, *clamps: float) -> Tensor | None:
    """layer(act(gate) · up) for the layer `name` of a gated MLP and x [..., 2F] = [gate, up]; clamps are limit, alpha
    and up_offset. Backward keeps x but not the product. None where the module must be called. An adapter on the layer
    is part of it."""
    if not kernels_cover(x, GATED_KERNELS):
        return None
    return _last_layer("gated_linear", mlp, name, x, activation, 1.0, *clamps)


def activated_linear(mlp: Any, name: str, x: Tensor, activation: int) -> Tensor | None:
    """layer(act(x)) for the layer `name` of an MLP without a gate. Backward keeps x but not act(x). None where the
    module must be called. An adapter on the layer is part of it."""
    if not kernels_cover(x, ACTIVATION_KERNELS):
        return None
    return _last_layer("activated_linear", mlp, name, x, activation)


def _last_layer(op, mlp, name, x, *options):
    layer = layer_of(mlp._modules.get(name), x)
    if layer is None or layer.dropout is not None:
        return None
    if layer.a is None and not (is_recorded(x) and getattr(mlp, "liger_whole", True)):
        return None
    arguments = *layer[:4], layer.weight_scale, layer.scale
    if is_in_4_bits(layer.weight):
        return quantised.call(op, 1, x, arguments, options)
    return getattr(ops, op)(x, *arguments, *options)
