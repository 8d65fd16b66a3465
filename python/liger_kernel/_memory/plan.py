"""The levels of a model's layers that fit into a budget; liger_kernel.memory.plan."""

import contextlib
import logging
import os
import re
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_leaves

from liger_kernel._memory.layers import LEVELS, Host, Layer, outermost
from liger_kernel._memory.measure import NEVER, Measured, measure
from liger_kernel.utils import is_dtensor, warn_once

log = logging.getLogger(__name__)

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def bytes_of(budget: int | float | str, device: torch.device | None = None) -> int:
    """A number of bytes, also as "70GiB" or "70 GB", as "90%" of the device's memory, and as "auto": 90 % of what other
    processes leave of it. Without a device, the last two are 0."""
    if not isinstance(budget, str):
        return int(budget)
    if budget.strip().lower() == "auto":
        return 0 if device is None else int(0.9 * _memory_of(device)[0])
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*(%|[A-Za-z]*)\s*", budget)
    if not found or found[2] != "%" and found[2].upper() not in _UNITS:
        raise ValueError(f'a budget is a number of bytes, a text such as "70GiB" or "90%", or "auto", got {budget!r}')
    if found[2] != "%":
        return int(float(found[1]) * _UNITS[found[2].upper()])
    return 0 if device is None else int(float(found[1]) / 100 * _memory_of(device)[1])


def _memory_of(device: torch.device) -> tuple[int, int]:
    """The bytes of a device that this process has or can have, and all of them."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device), total
    page = os.sysconf("SC_PAGE_SIZE")
    return page * os.sysconf("SC_AVPHYS_PAGES"), page * os.sysconf("SC_PHYS_PAGES")


class Plan:
    """What liger_kernel.memory.plan returns. Printed, it is a table of the layers.

    Attributes:
        levels: of each layer, by name: a key of LEVELS.
        peak_bytes: the most that torch's allocator will have given out in a step.
        seconds: of forward and backward.
        checkpointed_bytes, checkpointed_seconds: the same with every layer checkpointed.
        costs: of each kind of layers: {level: Cost}.
    """

    def __init__(self, layers, measured: Measured, levels: list[str], budget: int):
        self._layers, self._measured, self.budget = layers, measured, budget
        self.levels = {layer.name: level for layer, level in zip(layers, levels)}
        self.costs = measured.costs
        self.peak_bytes, self.seconds = measured.peak(levels), measured.time(levels)
        every = ["input"] * len(levels)
        self.checkpointed_bytes, self.checkpointed_seconds = measured.peak(every), measured.time(every)

    def apply(self) -> "Plan":
        """Have the layers keep what was planned; returns the plan."""
        apply(self._layers, self.levels.values())
        return self

    def undo(self) -> None:
        """Have the layers keep what they kept before plan()."""
        for layer in self._layers:
            layer.restore()

    def __str__(self):
        rows = [("layers", "keep", "MB per layer", "ms per layer")]
        levels = list(self.levels.values())
        for kind, costs in enumerate(self.costs):
            mine = [level for level, k in zip(levels, self._measured.kinds) if k == kind]
            for level, cost in costs.items():
                known = cost.bytes < NEVER
                rows.append((str(mine.count(level)), LEVELS[level], f"{cost.bytes / 1e6:,.1f}" if known else "too many",
                             f"{cost.seconds * 1e3:,.2f}"))  # fmt: skip
        widths = [max(map(len, column)) for column in zip(*rows)]
        lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths)).rstrip() for row in rows]
        gib = lambda bytes: f"{bytes / 2**30:.2f} GiB"
        ms = lambda seconds: f"{seconds * 1e3:,.1f} ms"
        lines.append(
            f"peak {gib(self.peak_bytes)} of {gib(self.budget)}, {ms(self.seconds)}; with every layer checkpointed"
            f" {gib(self.checkpointed_bytes)}, {ms(self.checkpointed_seconds)}"
        )
        return "\n".join(lines)


def apply(layers: list[Layer], levels: Iterable[str]) -> None:
    levels = list(levels)
    host = Host(next(layers[0].module.parameters()).device) if "host" in levels else None
    for layer, level in zip(layers, levels):
        layer.set(level, host)


def layers_of(model: nn.Module) -> list[Layer]:
    """Raises ValueError where there are none."""
    if layers := [Layer(name, module) for name, module in outermost(model)]:
        return layers
    raise ValueError(f"liger_kernel.memory: {type(model).__name__} has no layers that transformers can checkpoint")


class Kept:
    """What liger_kernel.memory.keep returns."""

    def __init__(self, model: nn.Module, level: str):
        if level not in LEVELS:
            raise ValueError(f"memory.keep: level must be one of {', '.join(LEVELS)}, got {level!r}")
        self._layers = layers_of(model)
        if level == "host" and (device := next(model.parameters()).device).type != "cuda":
            raise ValueError(f"memory.keep: the model is on {device}: pinned memory of the host is for a GPU")
        apply(self._layers, [level] * len(self._layers))

    def undo(self) -> None:
        """Have the layers keep what they kept before."""
        for layer in self._layers:
            layer.restore()


def make_plan(model: nn.Module, loss: Callable[[], Tensor], budget, more_bytes: int, agree: bool) -> Plan:
    """The plan for the step of which `loss` computes the loss; `more_bytes` are added to its peak. With `agree` all
    processes call it, and have one plan."""
    bytes_of(budget)
    if not model.training:
        raise ValueError("memory.plan: the model is in evaluation, where transformers checkpoints nothing")
    layers = layers_of(model)
    device = next(model.parameters()).device
    limit = bytes_of(budget, device)
    try:
        layers, measured = measure(model, loss, layers, device, more_bytes, agree)
    finally:
        for layer in layers:
            layer.restore()
        if device.type == "cuda":  # blocks of other sizes than those that the plan's steps ask for
            torch.cuda.empty_cache()
    return Plan(layers, measured, _choose(measured, limit, device.type == "cuda"), limit)


def bytes_of_moments(parameters: Iterable[Tensor]) -> int:
    """What the two moments of an Adam take."""
    local = lambda p: p.to_local() if is_dtensor(p) else p
    return sum(2 * local(p).nbytes for p in parameters if p.requires_grad)


def _choose(measured: Measured, budget: int, has_host: bool) -> list[str]:
    """The levels: from every layer checkpointed on, first what saves the most time per byte, the last layers first,
    whose memory backward frees first."""
    count = len(measured.kinds)
    levels = ["input"] * count
    for i in range(count if has_host else 0):
        if measured.peak(levels) <= budget:
            break
        levels[i] = "host"
    if (least := measured.peak(levels)) > budget:
        raise ValueError(
            f"memory.plan: {budget / 2**30:.2f} GiB are too few: {least / 2**30:.2f} GiB are in use at the peak even "
            f"with every layer {'in memory of the host' if has_host else 'checkpointed'}; take a smaller batch or "
            "shorter sequences"
        )
    steps = []
    for i in range(count):
        at = {level: measured.cost(i, level) for level in ("input", "cheap", "all")}
        smaller = at["cheap"].bytes < 0.99 * at["all"].bytes
        ways = [("input", "cheap"), ("cheap", "all")] if smaller else []
        for low, high in (*ways, ("input", "all")):
            saved, taken = at[low].seconds - at[high].seconds, at[high].bytes - at[low].bytes
            if saved >= 0:
                steps.append((saved / max(taken, 1), i, low, high))
    steps.sort(key=lambda s: (-s[0], -s[1]))
    changed = True
    while changed:
        changed = False
        for _, i, low, high in steps:
            if levels[i] == low:
                tried = [*levels[:i], high, *levels[i + 1 :]]
                if measured.peak(tried) <= budget:
                    levels, changed = tried, True
    return levels


def _is_sharded(model) -> bool:
    by_fsdp = any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules())
    return by_fsdp or any(is_dtensor(p) or hasattr(p, "ds_id") for p in model.parameters())  # by FSDP2, by ZeRO-3


def _is_fsdp2(model) -> bool:
    """Whether FSDP2 shards the model as a whole."""
    return isinstance(model, getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ()))


@contextlib.contextmanager
def _reducing(model) -> Iterator[None]:
    """Has the backward passes of a model under FSDP2 reduce gradients, also where those of the present step wait."""
    states = [module._get_fsdp_state() for module in model.modules() if _is_fsdp2(module)]
    groups = [g for s in states for g in getattr(s, "_fsdp_param_groups", None) or [s._fsdp_param_group] if g]
    waits = not all(group.reduce_grads for group in groups)
    if waits:
        model.set_requires_gradient_sync(True)
    try:
        yield
    finally:
        if waits:
            model.set_requires_gradient_sync(False)


class Planner:
    """Makes a plan when a model first runs in training, and again for a batch that has more tokens. Before the
    optimizer has taken a step, room is left for the moments of an Adam. Processes plan by themselves: their batches
    grow at different steps, and what DDP exchanges does not depend on what layers keep.

    Under FSDP2 they plan together, before FSDP2 gathers anything: between two steps, the first time after one step with
    every layer checkpointed. They look whether the batches of one of them have grown after 1, 2, 4, 8, ... steps.
    """

    def __init__(self, model: nn.Module, budget: int | float | str):
        bytes_of(budget)  # raises where it is no budget; the device is known when the model first runs
        self.budget, self.tokens, self.busy = budget, 0, False
        self.plan: Plan | None = None
        self.has_states = False
        self.kept: Kept | None = None  # under FSDP2, until there is a plan
        self.steps = self.seen = self.rounds = 0
        self.largest: tuple[int, tuple, dict] = 0, (), {}
        this = weakref.ref(self)  # the hook is that of all optimizers, and outlives the model

        def note(*_):
            if (planner := this()) is not None:
                planner.has_states = True
                planner.steps += 1

        weakref.finalize(self, register_optimizer_step_post_hook(note).remove)
        self.handle = model.register_forward_pre_hook(self._before, with_kwargs=True)

    def _before(self, model, args, kwargs):
        if self.busy or not model.training or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        tokens = max((t.shape[:2].numel() for t in tensors), default=0)
        if tokens <= self.tokens and not _is_fsdp2(model):
            return
        kept = "memory budget: layers keep what they kept, because the model is"
        if kwargs.get("labels") is None:
            return warn_once(f"{kept} called without labels")
        if _is_fsdp2(model):
            if (tokens := self._agreed_tokens(model, tokens, args, kwargs)) <= self.tokens:
                return
            _, args, kwargs = self.largest
        elif _is_sharded(model):
            return warn_once(f"{kept} sharded: call liger_kernel.memory.plan between two steps")
        self.busy = True
        try:
            if (before := self.plan or self.kept) is not None:
                before.undo()
            moments = 0 if self.has_states else bytes_of_moments(model.parameters())
            loss = lambda: model(*args, **kwargs).loss
            with _reducing(model) if _is_fsdp2(model) else contextlib.nullcontext():
                self.plan = make_plan(model, loss, self.budget, moments, agree=_is_fsdp2(model)).apply()
        finally:
            self.busy = False
        self.largest = 0, (), {}
        self.tokens = tokens  # not where the batch, or memory, was at fault: the next one plans
        log.warning("memory budget, for %d tokens:\n%s", tokens, str(self.plan))  # a record that is kept keeps no model

    def _agreed_tokens(self, model, tokens, args, kwargs) -> int:
        """Under FSDP2: the most tokens that a process has had in a batch since the last plan, where processes are to
        agree on another; 0 elsewhere."""
        if self.kept is None:  # FSDP2 has put its own hook before this one
            model._forward_pre_hooks.move_to_end(self.handle.id, last=False)
            self.kept = Kept(model, "input")
        if tokens > max(self.tokens, self.largest[0]) or not self.largest[1] and not self.largest[2]:
            self.largest = tokens, args, kwargs
        if self.steps == self.seen:
            return 0
        self.seen, self.rounds = self.steps, self.rounds + 1
        if self.rounds & (self.rounds - 1):
            return 0
        most = torch.tensor(self.largest[0], device=next(model.parameters()).device)
        torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX)
        return int(most)
