"""What a step takes: bytes over its course, and bytes and seconds of a layer at each level."""

import time
import weakref
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from liger_kernel._memory.layers import Host, Layer
from liger_kernel.utils import is_dtensor, world_size

_REPEATS = 3
NEVER = 1 << 50  # bytes of a layer that no GPU holds


class _DeviceMeter:
    """Bytes that torch's allocator has given out on a GPU."""

    def __init__(self, device):
        self.device = device
        self.wait = partial(torch.cuda.synchronize, device)
        self.now = partial(torch.cuda.memory_allocated, device)
        self.peak = partial(torch.cuda.max_memory_allocated, device)
        self.forget_peak = partial(torch.cuda.reset_peak_memory_stats, device)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        pass


class _HostMeter(TorchDispatchMode):
    """Bytes of the tensors that operators return on a CPU, whose allocator does not count them."""

    def __init__(self):
        super().__init__()
        self.bytes = self.most = 0
        self.known: dict[int, weakref.finalize] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        results = function(*args, **kwargs or {})
        for t in tree_leaves(results):
            if not isinstance(t, Tensor):
                continue
            storage = t.untyped_storage()
            if (key := storage._cdata) not in self.known and key not in given:  # views of parameters are none of it
                self.bytes += storage.nbytes()
                self.most = max(self.most, self.bytes)
                self.known[key] = weakref.finalize(storage, self._free, key, storage.nbytes())
        return results

    def _free(self, key, size):
        self.bytes -= size
        del self.known[key]

    def wait(self):
        pass

    def now(self):
        return self.bytes

    def peak(self):
        return self.most

    def forget_peak(self):
        self.most = self.bytes


@dataclass(frozen=True)
class Cost:
    """Of a layer at one level: the bytes that it holds between its forward and its backward, beyond its input, and the
    seconds of both passes."""

    bytes: int
    seconds: float


@dataclass(frozen=True)
class _Segment:
    """A part of a step in which every layer was at Measured.base, the most bytes that were in use in it, and the layers
    that held something for backward meanwhile."""

    peak: int
    holding: frozenset[int]


@dataclass
class Measured:
    """What plans are made of."""

    kinds: list[int]  # of each layer
    costs: list[dict[str, Cost]]  # of each kind
    segments: list[_Segment]
    seconds: float  # of forward and backward, with every layer at `base`
    more_bytes: int  # that will be in use throughout, beyond those
    input_bytes: list[int]  # of each kind
    base: str  # "input", or "host" where that does not fit

    def cost(self, layer: int, level: str) -> Cost:
        return self.costs[self.kinds[layer]][level]

    def peak(self, levels: list[str]) -> int:
        more = [self.cost(i, level).bytes - self.cost(i, self.base).bytes for i, level in enumerate(levels)]
        most = max(s.peak + sum(more[i] for i in s.holding) for s in self.segments)
        fetched = [self.input_bytes[self.kinds[i]] for i, level in enumerate(levels) if level == "host" != self.base]
        return most + self.more_bytes + 2 * max(fetched, default=0)  # this layer's, and the one that comes next

    def time(self, levels: list[str]) -> float:
        return self.seconds + sum(
            self.cost(i, level).seconds - self.cost(i, self.base).seconds for i, level in enumerate(levels)
        )


def _backward(results: list[Tensor], inputs: list[Tensor]) -> None:
    """Makes gradients that go nowhere; what is sharded has them made and reduced by its own hooks, and keeps those that
    it had."""
    upstream = [torch.ones_like(t) for t in results]
    if any(map(is_dtensor, inputs)):
        had = [t.grad for t in inputs]
        for t in inputs:
            t.grad = None
        torch.autograd.backward(results, upstream)
        for t, gradient in zip(inputs, had):
            t.grad = gradient
    else:
        torch.autograd.grad(results, inputs, upstream, allow_unused=True)


def measure(model, loss, layers, device, more_bytes, agree) -> tuple[list[Layer], Measured]:
    """The layers that run, in their order, and what they cost: with `agree`, to the rank that needs most.

    Where a step does not fit with the inputs of layers on the GPU, it is measured with them on the host. One rank of
    several cannot do so: the others wait for it in the collectives of the first attempt.
    """
    several = agree and world_size() > 1
    if device.type == "cuda" and not several:
        try:
            return _measure(model, loss, layers, device, more_bytes, "input")
        except torch.OutOfMemoryError:
            pass  # what the failed step holds goes with its frames
        torch.cuda.empty_cache()
        return _measure(model, loss, layers, device, more_bytes, "host")
    layers, measured = _measure(model, loss, layers, device, more_bytes, "input")
    return layers, _agreed(measured) if several else measured


def _measure(model, loss, layers, device, more_bytes, base) -> tuple[list[Layer], Measured]:
    parameters = [p for p in model.parameters() if p.requires_grad]
    step = lambda: _backward([loss()], parameters)
    host = Host(device) if base == "host" else None
    for layer in layers:
        layer.set(base, host)
    meter = _DeviceMeter(device) if device.type == "cuda" else _HostMeter()
    with torch.random.fork_rng([device] if device.type == "cuda" else []), meter:
        calls = _calls_of(layers, step)
        layers = [layer for layer in layers if layer in calls]
        kinds: list[int] = []
        costs: list[dict[str, Cost]] = []
        input_bytes: list[int] = []
        numbers: dict[Any, int] = {}
        for layer in layers:
            kind = numbers.setdefault(calls[layer].kind, len(numbers))
            kinds.append(kind)
            if kind == len(costs):
                costs.append(_costs(layer, calls[layer], meter, device))
                input_bytes.append(calls[layer].input_bytes)
                layer.set(base, host)
                calls[layer].forget()
        segments, seconds = _timeline(layers, step, meter)
    return layers, Measured(kinds, costs, segments, seconds, more_bytes, input_bytes, base)


def _agreed(measured: Measured) -> Measured:
    """What the rank with the least room measured: ranks that checkpoint other layers would wait for each other."""
    every: list = [None] * world_size()
    torch.distributed.all_gather_object(every, measured)
    return max(every, key=lambda m: m.peak(["input"] * len(m.kinds)))


def _without_cache(value):
    """An argument of a layer, but None for keys and values of earlier tokens, whatever it is called: the layer is to
    run several times."""
    of = (cls for cls in type(value).__mro__ if cls.__module__.partition(".")[0] == "transformers")
    return None if any(cls.__name__.endswith("Cache") for cls in of) else value


class _Call:
    """How a layer was called."""

    def __init__(self, module, args, kwargs, device):
        args, kwargs = tuple(map(_without_cache, args)), {name: _without_cache(value) for name, value in kwargs.items()}
        if "use_cache" in kwargs:
            kwargs["use_cache"] = False
        leaf = lambda t: t.detach().requires_grad_(t.requires_grad) if isinstance(t, Tensor) else t
        self.args, self.kwargs = tree_map(leaf, (args, kwargs))
        self.autocast = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        shapes = lambda ts: tuple((tuple(t.shape), t.dtype, t.requires_grad) for t in ts)
        self.kind = type(module), shapes(module.parameters()), shapes(tensors)
        self.input_bytes = next((t.nbytes for t in args if isinstance(t, Tensor)), 0)

    def forget(self):
        self.args = self.kwargs = None


@contextmanager
def _hooks(handles):
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _calls_of(layers, step) -> dict[Layer, _Call]:
    """The first call of each layer that runs in a step, in their order; of a kind, the first has its arguments."""
    calls: dict[Layer, _Call] = {}

    def note(layer, module, args, kwargs):
        if layer in calls:
            return
        call = _Call(module, args, kwargs, next(module.parameters()).device.type)
        if any(call.kind == other.kind for other in calls.values()):
            call.forget()
        calls[layer] = call

    hook = lambda layer: layer.module.register_forward_pre_hook(partial(note, layer), with_kwargs=True)
    with _hooks([hook(layer) for layer in layers]):
        step()
    return calls


def _costs(layer, call, meter, device) -> dict[str, Cost]:
    module = layer.module
    parameters = [p for p in module.parameters() if p.requires_grad]
    given = [t for t in tree_leaves((call.args, call.kwargs)) if isinstance(t, Tensor) and t.requires_grad]
    on, dtype = call.autocast

    def passes():
        begin = meter.now()
        with torch.autocast(device.type, dtype, enabled=on):
            results = module(*call.args, **call.kwargs)
        results = [t for t in tree_leaves(results) if isinstance(t, Tensor) and t.requires_grad]
        kept = meter.now() - begin - sum(t.nbytes for t in results)
        _backward(results, given + parameters)
        return kept

    costs = {}
    for level in ("all", "cheap", "input"):
        layer.set(level)
        try:
            costs[level] = Cost(max(0, passes()), float("inf"))
        except torch.OutOfMemoryError:
            costs[level] = Cost(NEVER, float("inf"))
    # In turns, that what changes meanwhile, as clocks do, changes all levels alike; the passes before have warmed up.
    # A step gathers FSDP2's parameters while the layer before computes.
    gather = getattr(module, "unshard", None)
    for level in _REPEATS * [level for level in costs if costs[level].bytes < NEVER]:
        layer.set(level)
        if gather is not None:
            gather()
        meter.wait()
        begin = time.perf_counter()
        passes()
        meter.wait()
        seconds = time.perf_counter() - begin
        costs[level] = replace(costs[level], seconds=min(costs[level].seconds, seconds))
    for less, more in (("input", "cheap"), ("cheap", "all")):  # noise may say that doing more takes less time
        costs[more] = replace(costs[more], seconds=min(costs[more].seconds, costs[less].seconds))
    if device.type == "cuda":
        late = max(0.0, 2 * _transfer_seconds(call, meter) - costs["input"].seconds)
        bytes = costs["input"].bytes - call.input_bytes
        costs["host"] = Cost(bytes, costs["input"].seconds + late)
    return costs


def _transfer_seconds(call, meter):
    """Of a layer's input to the host."""
    t = next(t for t in call.args if isinstance(t, Tensor))
    buffer = torch.empty(t.shape, dtype=t.dtype, pin_memory=True)
    buffer.copy_(t, non_blocking=True)
    meter.wait()
    begin = time.perf_counter()
    buffer.copy_(t, non_blocking=True)
    meter.wait()
    return time.perf_counter() - begin


def _timeline(layers, step, meter) -> tuple[list[_Segment], float]:
    """The segments of a step, and its seconds."""
    segments: list[_Segment] = []
    holding: set[int] = set()
    seen: set[int] = set()

    def cut():
        segments.append(_Segment(meter.peak(), frozenset(holding)))
        meter.forget_peak()

    def begins_backward(i, gradient):
        if i in holding:
            cut()
            holding.discard(i)

    def ends_forward(i, module, args, results):
        if i not in seen and torch.is_grad_enabled():
            cut()
            seen.add(i)
            holding.add(i)
            result = next((t for t in tree_leaves(results) if isinstance(t, Tensor) and t.requires_grad), None)
            if result is not None:
                result.register_hook(partial(begins_backward, i))

    with _hooks([layer.module.register_forward_hook(partial(ends_forward, i)) for i, layer in enumerate(layers)]):
        meter.wait()
        meter.forget_peak()
        begin = time.perf_counter()
        step()
        meter.wait()
        seconds = time.perf_counter() - begin
    cut()
    return segments, seconds
