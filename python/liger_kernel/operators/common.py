"""What the families share: reductions, dtypes, DTensors, and gradients that refuse a second derivative."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from liger_kernel._library import ops

#: The codes of libliger's reductions are their places here.
REDUCTIONS = ("none", "mean", "sum", "batchmean")
IGNORE_INDEX = -100


def reduction_code(reduction: str, valid: Sequence[str] = REDUCTIONS) -> int:
    """The code of a reduction; raises ValueError, which lists the valid ones, for another."""
    if reduction not in valid:
        raise ValueError(f"reduction must be one of {', '.join(map(repr, valid))}, got {reduction!r}")
    return REDUCTIONS.index(reduction)


def check_label(name: str, label: Any) -> None:
    """Raises TypeError where the label is no integer."""
    if not hasattr(type(label), "__index__"):
        raise TypeError(f"{name} must be an integer, got {label!r}")


def promoted(*tensors: Tensor | None) -> tuple[Any, ...]:
    """The tensors in the dtype that torch's arithmetic between them has; None stays None."""
    dtypes = {t.dtype for t in tensors if t is not None}
    if len(dtypes) == 1:
        return tensors
    dtype = functools.reduce(torch.promote_types, dtypes)
    return tuple(t if t is None or t.dtype == dtype else t.to(dtype) for t in tensors)


def beside(x: Tensor, weight: Tensor | None) -> Tensor | None:
    """A weight in a dtype that kernels take beside x: its own, or float32, where it is neither x's nor float32."""
    return weight if weight is None or weight.dtype in (x.dtype, torch.float32) else weight.float()


def is_dtensor(x: Any) -> bool:
    if x.__class__ is Tensor or x.__class__ is torch.nn.Parameter:  # asked at each call
        return False
    return isinstance(x, getattr(getattr(torch.distributed, "tensor", None), "DTensor", ()))


def full_tensor(x: Any, *others: Any) -> Any:
    """The whole value of a DTensor that stands beside plain tensors; anything else as it is."""
    return x.full_tensor() if is_dtensor(x) and not any(is_dtensor(other) for other in others) else x


def placed_as(x: Tensor, like: Any) -> Tensor:
    """A plain tensor, the same on every rank, as a DTensor placed like `like`, if that is one; a DTensor as it is."""
    if not is_dtensor(like) or is_dtensor(x):
        return x
    return torch.distributed.tensor.distribute_tensor(x, like.device_mesh, like.placements, src_data_rank=None)


def autocast_dtype(tensor: Tensor) -> torch.dtype | None:
    """The dtype that autocast asks for on the tensor's device, or None."""
    device = tensor.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


class _Refusal(torch.autograd.Function):
    """The gradients as they are; their own derivative, with respect to anything they depend on, is an error."""

    @staticmethod
    def forward(ctx, name, count, *tensors):
        ctx.name = name
        return tuple(t.detach() for t in tensors[:count])

    @staticmethod
    def backward(ctx, *ignored):
        raise RuntimeError(f"{ctx.name} has no second derivative")


def first_derivative_only(backward: Callable[..., Any]) -> Callable[..., Any]:
    """For the backward of an autograd.Function: a derivative of its gradients is an error.

    torch's once_differentiable knows of the upstream gradient alone: where that is a constant, it gives zeros for a
    derivative with respect to an input. `ctx.roots` are tensors in the graph of inputs that are not saved.
    """

    @functools.wraps(backward)
    def wrapper(ctx, *upstream):
        differentiated = torch.is_grad_enabled() and not torch.compiler.is_compiling()
        saved = ctx.saved_tensors if differentiated else ()
        with torch.no_grad():
            gradients = backward(ctx, *upstream)
        if not differentiated:
            return gradients
        gradients = gradients if isinstance(gradients, tuple) else (gradients,)
        given = [g for g in gradients if g is not None]
        roots = [t for t in (*saved, *getattr(ctx, "roots", ()), *upstream) if t is not None]
        name = type(ctx).__name__.removesuffix("Backward").lstrip("_")
        refused = iter(_Refusal.apply(name, len(given), *given, *roots))
        return tuple(g if g is None else next(refused) for g in gradients)

    return wrapper


def roots(*tensors: Tensor | None) -> Sequence[Tensor]:
    """Numbers in the graph of each tensor, which keep none of its memory."""
    if torch.compiler.is_compiling():  # refuses second derivatives by itself
        return ()
    with torch.enable_grad():
        return [t.expand(0, *t.shape).sum() for t in tensors if t is not None and t.requires_grad]


def wanted_gradients(ctx: Any, *tensors: Tensor | None) -> list[bool]:
    """Whether the gradient of each tensor, which may be None, is wanted; for the forward of an autograd.Function, whose
    node has no edges under no_grad."""
    # A traced node shows no edges.
    recorded = torch.compiler.is_compiling() or any(function for function, _ in ctx.next_functions)
    return [recorded and t is not None and t.requires_grad for t in tensors]


def unscaled(upstream: Tensor, grad_scale: Tensor | None) -> Tensor:
    """The upstream gradient, which multiplies what a forward pass has kept, divided by that one's grad_scale, which is
    None or empty but for float16."""
    return upstream if grad_scale is None or grad_scale.ndim else upstream.float() / grad_scale


def unscaled_gradient(gradient: Tensor, grad_scale: Tensor | None) -> Tensor:
    """A gradient that a forward pass has kept, divided by its grad_scale, in its dtype."""
    return gradient if grad_scale is None or grad_scale.ndim else ops.scale_backward(gradient, 1 / grad_scale)


def accumulate(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a b, summed in total's dtype."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    elif a.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))
