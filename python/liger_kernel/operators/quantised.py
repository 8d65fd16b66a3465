"""Operators on frozen weights that bitsandbytes holds in four bits."""

import copy
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from liger_kernel._library import ops
from liger_kernel.operators.common import first_derivative_only


def is_linear_in_4_bits(module: nn.Module) -> bool:
    """Whether a module is a Linear4bit of bitsandbytes: nf4 or fp4."""
    bitsandbytes = sys.modules.get("bitsandbytes")
    return bitsandbytes is not None and type(module) is bitsandbytes.nn.Linear4bit


def weight_in_4_bits(module: nn.Module, x: torch.Tensor | None) -> torch.Tensor | None:
    """The weight of a Linear4bit that a call with x multiplies by in x's dtype, or in autocast's; None for any other
    module, where the layer would cast x, and in inference on a CPU, for which bitsandbytes has packed the weight.
    Without x, the weight whatever its state is."""
    if not is_linear_in_4_bits(module):
        return None
    weight = module.weight
    if x is None:
        return weight
    device = x.device.type
    if not is_in_4_bits(weight) or weight.quant_state is None or weight.requires_grad:
        return None
    if _is_packed(weight) and not torch.is_grad_enabled():
        return None
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    return weight if x.dtype == dtype and module.compute_dtype in (None, dtype) else None


def is_in_4_bits(weight: Any) -> bool:
    """Whether a weight is one that weight_in_4_bits may give. Asked of every argument of an operator."""
    return type(weight).__name__ == "Params4bit"


def _is_packed(weight):
    """Whether bitsandbytes has put a weight in another order, as it does in evaluation on CPUs with bfloat16."""
    return getattr(weight.quant_state, "packing_format_for_cpu", False)


def _whole(weight, dtype):
    """A weight in four bits as a matrix."""
    functional, data, state = sys.modules["bitsandbytes"].functional, weight.data, weight.quant_state
    if _is_packed(weight):
        scales, state = state.absmax, copy.copy(state)  # which is written to
        state.original_nested = False
        data, state = functional._convert_weight_packed_for_cpu_inverse(data, state)
        state.absmax = scales.t().flatten().float()  # by rows again, which the inverse leaves out
    return functional.dequantize_4bit(data, state).to(dtype)


def _like_whole(weight, x):
    """A tensor of the shape and dtype of a weight in four bits, where nobody reads its numbers."""
    return x.new_empty(1).expand(weight.quant_state.shape)


class _OnQuantised(torch.autograd.Function):
    """An operator whose schemas are <name>_forward and <name>_backward. Weights in four bits are made whole for each
    pass and are not kept between them. With a list `unfinished`, forward leaves out the last GEMM, and appends what it
    has for _finish."""

    @staticmethod
    def forward(ctx, name, count, unfinished, options, x, *arguments):
        starts = unfinished is not None
        at = _OPERATORS[name]
        last = at.weight if starts else None
        whole = [
            t if not is_in_4_bits(t) else _like_whole(t, x) if i == last else _whole(t, x.dtype)
            for i, t in enumerate(arguments)
        ]
        results = getattr(ops, f"{name}_start" if starts else f"{name}_forward")(x, *whole, *options)
        if starts:
            unfinished += results
            results = results[: at.results]
        kept, ctx.is_saved = results[count:], [isinstance(t, torch.Tensor) and not is_in_4_bits(t) for t in arguments]
        ctx.save_for_backward(x, *kept, *(t for t, is_saved in zip(arguments, ctx.is_saved) if is_saved))
        ctx.others = [None if is_saved else t for t, is_saved in zip(arguments, ctx.is_saved)]
        ctx.name, ctx.kept, ctx.options = name, len(kept), options
        return tuple(results[:count]) if count > 1 else results[0]

    @staticmethod
    @first_derivative_only
    def backward(ctx, *grads):
        x, *saved = ctx.saved_tensors
        kept, small = saved[: ctx.kept], iter(saved[ctx.kept :])
        arguments = [
            next(small) if is_saved else _whole(t, x.dtype) if is_in_4_bits(t) else t
            for t, is_saved in zip(ctx.others, ctx.is_saved)
        ]
        count = _OPERATORS[ctx.name].differentiable
        wanted = ctx.needs_input_grad[4 : 5 + count]
        gradients = getattr(ops, f"{ctx.name}_backward")(*grads, x, *arguments, *kept, *wanted, *ctx.options)
        found = [gradient if want else None for gradient, want in zip(gradients, wanted)]
        return None, None, None, None, *found, *(None for _ in range(len(arguments) - count))


class _Operator(NamedTuple):
    """How many of the arguments behind x have gradients: the first ones. Where forward is in two parts: which arguments
    are the weight of the last GEMM and its scale, which results of <name>_forward its low-rank term and what its
    adapter was cast to, and how many results that has. Those of <name>_start are y, the others of these, and what the
    last GEMM reads unless that is x."""

    differentiable: int
    weight: int | None = None
    weight_scale: int = 0
    low: int = 0
    cast: int = 0
    results: int = 0


_OPERATORS = {
    "linear": _Operator(5, weight=0, weight_scale=5, low=1, cast=2, results=3),
    "qkv": _Operator(12),
    **dict.fromkeys(
        ("activated_linear", "gated_linear"), _Operator(4, weight=0, weight_scale=4, low=1, cast=2, results=3)
    ),
    "gated_mlp": _Operator(12, weight=8, weight_scale=14, low=2, cast=6, results=7),
}


def _finish(name, x, arguments, unfinished):
    """The last GEMM of an operator, into y."""
    at = _OPERATORS[name]
    seen = unfinished[-1] if len(unfinished) > at.results else x
    weight, *adapter = arguments[at.weight :][:4]
    whole = _whole(weight, x.dtype) if is_in_4_bits(weight) else weight
    low, cast, scale = unfinished[at.low], unfinished[at.cast], arguments[at.weight_scale]
    ops.linear_finish(unfinished[0], seen, whole, *adapter, low, cast, scale, arguments[-1])


def call(
    name: str, count: int, x: torch.Tensor, arguments: Sequence[Any], options: Sequence[Any] = (), parts: bool = True
) -> Any:
    """The first `count` results of the operator `name` for x and arguments, of which weights are in four bits. `parts`
    says that the options let its last GEMM be left out."""
    # As the operators themselves do: where gradient checkpointing runs a layer again for what it keeps, the last GEMM
    # is not needed.
    eager = not torch.compiler.is_compiling() and torch._C._len_torch_dispatch_stack() == 0
    if _OPERATORS[name].weight is None or not parts or not eager or not torch.is_grad_enabled():
        return _OnQuantised.apply(name, count, None, options, x, *arguments)
    unfinished: list[torch.Tensor] = []
    y = _OnQuantised.apply(name, count, unfinished, options, x, *arguments)
    with torch.no_grad():
        _finish(name, x, arguments, unfinished)
    return y
