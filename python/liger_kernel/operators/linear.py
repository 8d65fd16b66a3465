"""Linear layers, as operators take them: a matrix, a bias, perhaps an adapter; plain, or in four bits."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from liger_kernel.operators.coverage import DENSE, is_bare
from liger_kernel.operators.quantised import weight_in_4_bits


class Layer(NamedTuple):
    """y = x weightᵀ + bias + scale · (dropout(x) aᵀ) bᵀ; a, b and dropout are None where there is no adapter."""

    weight: Tensor
    bias: Tensor | None
    a: Tensor | None = None
    b: Tensor | None = None
    scale: float = 1.0
    dropout: nn.Module | None = None


def layer_of(module: Any, x: Tensor) -> Layer | None:
    """What a call of a linear layer with x computes; None where that is more than a Layer: a hook, offloading, a shard,
    a dtype that the call would refuse, another adapter than `liger_layer` of the module's class describes."""
    cls = type(module)
    if cls is nn.Linear:
        return _plain(module, x)
    if (describe := getattr(cls, "liger_layer", None)) is not None:
        return describe(module, x) if is_bare(module) else None
    if module is not None and (weight := weight_in_4_bits(module, x)) is not None and is_bare(module):
        bias = module.bias
        return Layer(weight, bias) if bias is None or bias.dtype == x.dtype and not bias.requires_grad else None
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
    if weight.dtype == x.dtype and (bias is None or bias.dtype == x.dtype) or is_autocast(x):
        return Layer(weight, bias)
    return None


def tensor_of(module: nn.Module, name: str) -> Any:
    """A parameter of a module, from where torch keeps it, which is faster than an attribute; a replica of
    torch.nn.DataParallel has a tensor in its place."""
    found = module._parameters.get(name)
    return module.__dict__.get(name) if found is None else found


def is_autocast(x: Tensor) -> bool:
    """Whether a linear layer would cast x."""
    return torch.is_autocast_enabled(x.device.type)
