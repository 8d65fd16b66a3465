"""What the losses have in common: forward makes the gradients, backward multiplies them and needs no weight, which FSDP
or ZeRO may have taken away."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from liger_kernel._library import ops
from liger_kernel.operators.common import first_derivative_only, roots, unscaled, wanted_gradients

P = ParamSpec("P")
R = TypeVar("R")


def breaks_graph(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator of a Function's forward: torch.compile breaks its graph here, instead of tracing what makes the
    gradients. It cannot trace super() either, so that such a forward calls its base by name."""

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            torch._dynamo.graph_break()
        return function(*args, **kwargs)

    return wrapper


def loss_with_gradients(
    ctx: Any, head: Callable[..., Tensor], loss_of: Callable[[Tensor], tuple[Tensor, Sequence[Tensor]]],
    *tensors: Tensor | None,
) -> tuple[Tensor, tuple[Tensor, ...]]:  # fmt: skip
    """(loss, aux) = loss_of(logp) for logp = head(*tensors), float, without autograd. ctx gets the loss's gradients for
    those tensors that require one, for `scaled_gradients`. What is in loss_of beside logp gets none."""
    wanted = wanted_gradients(ctx, *tensors)
    leaves: list[Any] = [t if t is None else t.detach().requires_grad_(w) for t, w in zip(tensors, wanted)]
    with torch.set_grad_enabled(any(wanted)):
        logp = head(*leaves)
        point = logp.detach().requires_grad_(any(wanted))
        loss, aux = loss_of(point)
    gradients: list[Tensor | None] = [None] * len(leaves)
    grad_scale: Tensor | None = None
    if any(wanted):
        coefficient = torch.autograd.grad(loss, point)[0] if loss.requires_grad else torch.zeros_like(point)
        inputs = [t for t, w in zip(leaves, wanted) if w]
        if any(t.dtype == torch.float16 for t in inputs):
            grad_scale = _float16_scale(coefficient)
            coefficient = coefficient * grad_scale
        made = iter(torch.autograd.grad(logp, inputs, coefficient))
        gradients = [next(made) if w else None for w in wanted]
    save_gradients(ctx, tensors, gradients, grad_scale)
    return loss.detach().float(), tuple(a.detach() if a.ndim else a.detach().float() for a in aux)


def save_gradients(
    ctx: Any, tensors: Sequence[Tensor | None], gradients: Sequence[Tensor | None], grad_scale: Tensor | None
) -> None:
    """For `scaled_gradients`: gradients of these tensors, multiplied by grad_scale where there is one."""
    ctx.save_for_backward(grad_scale, *gradients)
    ctx.roots = roots(*tensors)


def scaled_gradients(ctx: Any, grad_output: tuple[Any, ...]) -> tuple[Tensor | None, ...]:
    """The saved gradients times the loss's, in fresh memory. grad_output is what backward was called with, or a tuple
    of that: both are how subclasses hand it on."""
    upstream = grad_output[0]
    return _scaled(ctx, upstream[0] if isinstance(upstream, tuple) else upstream)


def gradients_of_arguments(ctx: Any, grad_output: tuple[Any, ...], bias: int) -> tuple[Tensor | None, ...]:
    """What backward returns: `scaled_gradients` at forward's arguments 0, 1 and `bias`, and None for all others."""
    of_input, of_weight, of_bias = scaled_gradients(ctx, grad_output)
    found = of_input, of_weight, *[None] * (bias - 2), of_bias
    return *found, *[None] * (len(ctx.needs_input_grad) - len(found))


@first_derivative_only
def _scaled(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
    grad_scale, *gradients = ctx.saved_tensors
    upstream = unscaled(upstream, grad_scale)
    return tuple(None if t is None else ops.scale_backward(t, upstream) for t in gradients)


def _float16_scale(coefficient: Tensor) -> Tensor:
    """A power of two: float16 gradients, which wait for the loss scale, neither vanish, a token's share of one being
    small, nor overflow when they are summed."""
    total = coefficient.abs().sum()
    # Beyond these bounds the power, or what is divided by it, leaves float.
    power = torch.floor(6 - torch.log2(total)).clamp(-100, 100)
    return torch.where((total > 0) & total.isfinite(), torch.exp2(power), 1.0)
