"""What a layer keeps for backward, and how that is switched."""

import weakref
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from liger_kernel._recompute import Recomputed

#: What a layer may keep for backward, from most to least.
LEVELS = {
    "all": "everything that backward reads",
    "cheap": "all but what this library's operators recompute from the rest",
    "input": "its input (gradient checkpointing)",
    "host": "its input, in pinned memory of the host",
}
_SMALL = 1 << 20  # bytes of a tensor that is not worth a transfer


class Host:
    """Inputs of layers in pinned memory, copied by a stream of their own: out behind the forward pass, and back, one
    layer ahead of the backward pass."""

    def __init__(self, device):
        self.stream = torch.cuda.Stream(device)
        self.free: dict[tuple, list[Tensor]] = {}
        self.last: Callable = lambda: None

    def checkpoint(self, function, *args):
        with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda saved: saved()):
            return checkpoint(function, *args, use_reentrant=False)

    def _pack(self, t):
        if not t.is_cuda or t.nbytes < _SMALL or not t.is_contiguous():
            return lambda: t
        kept = _OnHost(self, t, self.last)
        self.last = weakref.ref(kept)
        return kept


class _OnHost:
    """A tensor in pinned memory. `before` gives the one that was put there before it, which backward reads after it."""

    def __init__(self, host: Host, t: Tensor, before: Callable):
        self.host, self.before, self.like = host, before, t.new_empty(0)
        self.key = t.shape, t.dtype
        free = host.free.setdefault(self.key, [])
        self.buffer = free.pop() if free else torch.empty(t.shape, dtype=t.dtype, pin_memory=True)
        self.fetched: tuple[Tensor, torch.cuda.Event] | None = None
        host.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(host.stream):
            self.buffer.copy_(t, non_blocking=True)
        t.record_stream(host.stream)

    def fetch(self) -> tuple[Tensor, torch.cuda.Event]:
        if self.fetched is None:
            t = self.like.new_empty(self.buffer.shape)
            self.host.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.host.stream):
                t.copy_(self.buffer, non_blocking=True)
                self.fetched = t, self.host.stream.record_event()
        return self.fetched

    def __call__(self) -> Tensor:
        t, ready = self.fetch()
        self.fetched = None
        torch.cuda.current_stream().wait_event(ready)
        if (before := self.before()) is not None:
            before.fetch()
        return t

    def __del__(self):
        self.host.free[self.key].append(self.buffer)


class Layer:
    """A layer that transformers can checkpoint, and how it was."""

    names = "gradient_checkpointing", "_gradient_checkpointing_func"

    def __init__(self, name: str, module: nn.Module):
        self.name, self.module = name, module
        self.before = {key: vars(module)[key] for key in self.names if key in vars(module)}
        self.recomputed: Recomputed | None = None

    def set(self, level: str, host: Host | None = None):
        self.restore()
        self.module.gradient_checkpointing = level in ("input", "host")
        checkpointed = partial(checkpoint, use_reentrant=False) if host is None or level != "host" else host.checkpoint
        self.module._gradient_checkpointing_func = checkpointed
        if level == "cheap":
            self.recomputed = Recomputed(self.module)
        for experts in self.experts():  # by default they recompute gate and up
            experts.liger_keeps = level == "all"

    def experts(self) -> Iterator[nn.Module]:
        return (module for module in self.module.modules() if hasattr(type(module), "liger_keeps"))

    def restore(self):
        if self.recomputed is not None:
            self.recomputed.remove()
            self.recomputed = None
        for experts in self.experts():
            vars(experts).pop("liger_keeps", None)
        for key in self.names:
            vars(self.module).pop(key, None)
        vars(self.module).update(self.before)


def outermost(model) -> Iterator[tuple[str, nn.Module]]:
    """The layers of a model that transformers can checkpoint, and that are in no other such layer."""
    for name, child in model.named_children():
        if any(cls.__name__ == "GradientCheckpointingLayer" for cls in type(child).__mro__):
            yield name, child
        else:
            yield from ((f"{name}.{inner}", module) for inner, module in outermost(child))
