"""Logits that are computed only where they are read: a head's result for other people's code that reads a few of its
numbers, or sums over a row."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from liger_kernel.operators.common import autocast_dtype
from liger_kernel.operators.coverage import DENSE, is_bare, kernels_cover
from liger_kernel.operators.head import class_logits, linear_log_prob

_NO_SUBCLASS = torch._C.DisableTorchFunctionSubclass


class LazyLogits(Tensor):
    """z [..., V] of a head, or log_softmax(z), with z = y · scale / temperature, or tanh(y · scale) / temperature, y =
    hidden weightᵀ + bias.

    Slices of tokens, products with numbers, tanh and log_softmax stay lazy. gather, topk, argmax and logsumexp run on
    linear_log_prob and class_logits, and return float. Any other function gets the whole tensor, which is computed once
    by plain torch.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    state: dict[str, Any]
    made: Tensor | None

    @staticmethod
    def __new__(cls, hidden: Tensor, weight: Tensor, bias: Tensor | None, **state: Any) -> "LazyLogits":
        shape, dtype = (*hidden.shape[:-1], len(weight)), state["dtype"]
        new = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=hidden.device)  # type: ignore[attr-defined]
        new.hidden, new.weight, new.bias, new.state, new.made = hidden, weight, bias, state, None
        return new

    @classmethod
    def of(cls, hidden: Tensor, weight: Tensor, bias: Tensor | None = None, max_bytes: int = 0) -> "LazyLogits":
        """The logits as a head computes them here and now: under this autocast, with or without gradients."""
        autocast = autocast_dtype(hidden)
        return cls(
            hidden, weight, bias, scale=1.0, temperature=1.0, capped=False, normalised=False, max_bytes=max_bytes,
            autocast=autocast, grad=torch.is_grad_enabled(), dtype=autocast or hidden.dtype,
        )  # fmt: skip

    def but(self, hidden: Tensor | None = None, **state: Any) -> "LazyLogits":
        hidden = self.hidden if hidden is None else hidden
        return LazyLogits(hidden, self.weight, self.bias, **(self.state | state))

    @contextlib.contextmanager
    def as_made(self, grad: bool = True) -> Iterator[None]:
        autocast = self.state["autocast"]
        with (
            torch.set_grad_enabled(grad and self.state["grad"] and torch.is_grad_enabled()),
            torch.autocast(self.hidden.device.type, autocast, enabled=autocast is not None),
        ):
            yield

    @property
    def map(self) -> dict[str, Any]:
        """The options of linear_log_prob and class_logits."""
        softcap = 1.0 if self.state["capped"] else None
        return dict(temperature=self.state["temperature"], softcap=softcap, logit_scale=self.state["scale"])

    def log_prob(self, ids: Tensor | None, grad: bool = True, **options: Any) -> Any:
        """linear_log_prob of these logits; of None, with all tokens."""
        if ids is None:
            ids = torch.zeros(self.hidden.shape[:-1], dtype=torch.long, device=self.hidden.device)
            options["valid_count"] = ids.numel()
        with self.as_made(grad):
            return linear_log_prob(
                self.hidden, self.weight, ids, self.bias, max_bytes=self.state["max_bytes"], **self.map, **options
            )

    def at(self, class_ids: Tensor) -> Tensor:
        """The numbers at these classes [..., K]."""
        if self.state["normalised"]:
            return self.log_prob(None, class_ids=class_ids)[-1]
        alike = self.state["autocast"] is None and self.hidden.dtype == self.weight.dtype
        if alike and (self.bias is None or self.bias.dtype == self.weight.dtype):
            with self.as_made():
                return class_logits(self.hidden, self.weight, class_ids, self.bias, **self.map)
        _, lse, logp = self.log_prob(None, outputs=("lse",), class_ids=class_ids)
        return logp + lse.unsqueeze(-1)

    def whole(self) -> Tensor:
        if self.made is None:
            state = self.state
            with _NO_SUBCLASS(), self.as_made():
                y = nn.functional.linear(self.hidden, self.weight, self.bias)
                y = y * state["scale"] if state["scale"] != 1 else y
                y = y.tanh() if state["capped"] else y
                y = y / state["temperature"] if state["temperature"] != 1 else y
                self.made = (y.log_softmax(-1) if state["normalised"] else y).to(state["dtype"])
        return self.made

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if getattr(func, "__self__", func) in _ABOUT:
            with _NO_SUBCLASS():
                return func(*args, **kwargs)
        if (run := _LAZY.get(func)) is not None and args and isinstance(args[0], cls) and args[0].made is None:
            with _NO_SUBCLASS():
                found = run(*args, **kwargs)
            if found is not NotImplemented:
                return found
        return _of_whole(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _of_whole(func, args, kwargs or {})  # C++ that asks nobody, such as a hook's


def _of_whole(func, args, kwargs):
    args, kwargs = tree_map(lambda t: t.whole() if isinstance(t, LazyLogits) else t, (args, kwargs))
    return func(*args, **kwargs)


#: What is asked of the wrapper itself.
_ABOUT = {
    *(torch.Tensor.shape, torch.Tensor.dtype, torch.Tensor.device, torch.Tensor.ndim, torch.Tensor.is_cuda),
    *(torch.Tensor.layout, torch.Tensor.is_nested, torch.Tensor.is_sparse, torch.Tensor.size, torch.Tensor.dim),
    *(torch.Tensor.numel, torch.Tensor.is_floating_point, torch.is_floating_point, torch.Tensor.__len__),
}


def _is_last(z, dim):
    return dim in (-1, z.ndim - 1)


def _rows(z, index):
    """Some of the tokens; all classes of each."""
    taken = 0
    for each in index if isinstance(index, tuple) else (index,):
        if isinstance(each, Tensor) and each.dtype == torch.bool:
            taken += each.ndim
        elif isinstance(each, (int, slice, Tensor)) and not isinstance(each, bool):
            taken += 1
        else:
            return NotImplemented
    leading = z.ndim - 1
    all_classes = isinstance(index, tuple) and isinstance(index[-1], slice) and index[-1] == slice(None)
    if taken <= leading or (taken == leading + 1 and all_classes):
        return z.but(z.hidden[index])
    return NotImplemented


def _times(z, factor, power=1):
    number = isinstance(factor, (int, float)) and 0 < factor < float("inf")
    if not number or z.state["normalised"]:
        return NotImplemented
    if power < 0 or z.state["capped"]:
        return z.but(temperature=z.state["temperature"] * float(factor) ** -power)
    return z.but(scale=z.state["scale"] * float(factor))


def _over(z, divisor, rounding_mode=None):
    return NotImplemented if rounding_mode else _times(z, divisor, -1)


def _tanh(z):
    if z.state["capped"] or z.state["normalised"]:
        return NotImplemented
    return z.but(scale=z.state["scale"] / z.state["temperature"], temperature=1.0, capped=True)


def _log_softmax(z, dim=None, _stacklevel=3, dtype=None):
    fits = dim is not None and _is_last(z, dim) and not z.state["normalised"]
    return z.but(normalised=True, dtype=dtype or z.dtype) if fits else NotImplemented


def _gather(z, dim, index, sparse_grad=False):
    return z.at(index) if _is_last(z, dim) and index.shape[:-1] == z.shape[:-1] else NotImplemented


def _logsumexp(z, dim, keepdim=False):
    dim = dim[0] if isinstance(dim, (tuple, list)) and len(dim) == 1 else dim
    if not _is_last(z, dim) or z.state["normalised"]:
        return NotImplemented
    lse = z.log_prob(None, outputs=("lse",))[1]
    return lse.unsqueeze(-1) if keepdim else lse


def _topk(z, k, dim=-1, largest=True, sorted=True):
    if not _is_last(z, dim) or not largest:
        return NotImplemented
    ids = z.log_prob(None, grad=False, top_k=k)[-1]
    return torch.return_types.topk((z.at(ids), ids))


def _argmax(z, dim=None, keepdim=False):
    if dim is None or not _is_last(z, dim):
        return NotImplemented
    found = z.log_prob(None, grad=False, outputs=("argmax",))[1]
    return found.unsqueeze(-1) if keepdim else found


_LAZY: dict[Any, Callable[..., Any]] = {
    torch.Tensor.__getitem__: _rows,
    **dict.fromkeys((torch.mul, torch.Tensor.mul, torch.Tensor.__mul__, torch.Tensor.__rmul__), _times),
    **dict.fromkeys((torch.div, torch.Tensor.div, torch.Tensor.__truediv__, torch.true_divide), _over),
    **dict.fromkeys((torch.tanh, torch.Tensor.tanh), _tanh),
    **dict.fromkeys((torch.log_softmax, torch.Tensor.log_softmax, nn.functional.log_softmax), _log_softmax),
    **dict.fromkeys((torch.gather, torch.Tensor.gather), _gather),
    **dict.fromkeys((torch.logsumexp, torch.Tensor.logsumexp), _logsumexp),
    **dict.fromkeys((torch.topk, torch.Tensor.topk), _topk),
    **dict.fromkeys((torch.argmax, torch.Tensor.argmax), _argmax),
    torch.Tensor.float: lambda z: z.but(dtype=torch.float32),
}


def _head_of(model):
    """The head of a model, if it computes logits by nothing but its weight and bias, and is not sharded: then the
    weight is gone after the model's forward."""
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    plain = type(head) is nn.Linear or getattr(type(head), "plain_logits", False)
    if not plain or not is_bare(head) or type(head.weight) not in DENSE:
        return None
    return head if head.weight.shape == (head.out_features, head.in_features) else None


def _forward(head, max_bytes, hidden, **asked):
    if not asked and all(t is None or kernels_cover(t) for t in (hidden, head.weight, head.bias)):
        return LazyLogits.of(hidden, head.weight, head.bias, max_bytes)
    return type(head).forward(head, hidden, **asked)


@contextlib.contextmanager
def lazy_heads(*models: Any, max_bytes: int = 0) -> Iterator[bool]:
    """In here, the heads of these models return LazyLogits, where there are kernels; yields whether one may."""
    heads = {id(head): head for model in models if (head := _head_of(model)) is not None}
    for head in heads.values():
        head.forward = functools.partial(_forward, head, max_bytes)
    try:
        yield bool(heads)
    finally:
        for head in heads.values():
            del head.forward


def with_lazy_heads(
    original: Callable[..., Any], max_bytes: int, redirect: Callable[..., Any],
    serves: Callable[[Any], bool] = lambda trainer: True,
) -> Callable[..., Any]:  # fmt: skip
    """A trainer's compute_loss, within which the heads of student and teacher are lazy.

    It runs within the forward of what wraps the student (DDP, FSDP), by redirect(wrapper, student, function): the
    head's weight is used after the student's forward. `serves` may refuse a trainer. Outputs that are returned are not
    lazy.
    """

    @functools.wraps(original)
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if return_outputs or not serves(self):
            return original(self, model, inputs, return_outputs, num_items_in_batch)
        student = self.accelerator.unwrap_model(model)
        with lazy_heads(student, getattr(self, "teacher_model", None), max_bytes=max_bytes) as lazy:
            if student is model or not lazy:
                return original(self, model, inputs, return_outputs, num_items_in_batch)
            return redirect(model, student, lambda: original(self, student, inputs, return_outputs, num_items_in_batch))

    return compute_loss
