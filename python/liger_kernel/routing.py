"""Router replay: a trainer's mixtures of experts choose the experts that the rollout engine chose (Ma et al. 2025,
arXiv:2510.11370).

```python
with liger_kernel.routing.replay(model, ids):
    loss = model(**inputs).loss
loss.backward()
```

docs/routing.md has what is replayed, the formats of ids, and a table of model families.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from liger_kernel._routing import choice, routers
from liger_kernel._routing.formats import from_requests, from_sglang, from_verl

__all__ = ["Accepting", "Recorded", "accept", "from_requests", "from_sglang", "from_verl", "record", "replay"]

#: Attributes by which modules hold the function that checkpoints their layers: those of transformers (which
#: liger_kernel.memory sets, too), and torch's CheckpointWrapper.
_CHECKPOINTS = ("_gradient_checkpointing_func", "checkpoint_fn")


@contextlib.contextmanager
def replay(model: nn.Module, ids: Tensor) -> Iterator[None]:
    """Within, every router of `model` chooses for each token the experts that `ids` name, in their order.

    ids are integers of any width, [tokens, layers, k] or [batch, seq, layers, k], on any device, in the order in which
    the routers see the tokens. layers are all decoder layers of the model, each at its number, or those that have a
    router. A token whose k ids in a layer are not different experts, such as −1 or zeros where nothing was recorded,
    chooses there as without ids.

    Weights are made from the model's own scores at these experts, with gradients to the router. What is not the choice
    stays as it is: the load-balancing loss is that of the model's own logits.

    Backward may run outside: layers that transformers, liger_kernel.memory or torch's CheckpointWrapper checkpoint run
    again with the ids of their forward pass. Another function that checkpoints needs backward inside, and raises
    RuntimeError elsewhere. The model may be patched or not, and in DDP, FSDP, PEFT or torch.compile.

    Raises ValueError for a shape of ids that fits neither count of layers, with both counts, or not the number of
    experts or tokens of a router, with its name; for a model without routers, and for one whose routers cannot be
    replayed; TypeError for ids that are no integers.
    """
    found = routers.routers_of(model)
    placed = {
        device: found.columns(ids if device is None else ids.to(device, non_blocking=True))
        for device in {*map(_device, found.each)}
    }
    told = [
        (router.module, choice.Replay(router.name, placed[_device(router)][number]))
        for number, router in enumerate(found.each)
    ]
    with contextlib.ExitStack() as stack:
        for owner, name, function in _checkpoints(model):
            inside = {*owner.modules()}
            if mine := [pair for pair in told if pair[0] in inside]:
                vars(owner)[name] = bound = _bound(function, mine)
                stack.callback(_unbind, owner, name, bound, function)
        for module, own in told:
            stack.callback(_leave, module, own, choice.put(module, "liger_replay", own))
        yield


def _device(router: routers.Router) -> torch.device | None:
    """Where a router's ids are: where its parameters are. One that runs elsewhere moves them at each call."""
    parameter = next(router.module.parameters(), None)
    return None if parameter is None or parameter.is_meta else parameter.device


def _leave(module: nn.Module, own: choice.Replay, before: Any) -> None:
    choice.put(module, "liger_replay", choice.Left(module, own.name) if own.unbound and before is None else before)


def _checkpoints(model: nn.Module) -> Iterator[tuple[nn.Module, str, Any]]:
    for module in model.modules():
        for name in _CHECKPOINTS:
            if name in vars(module):
                yield module, name, vars(module)[name]


def _bound(checkpoint, told):
    """A function that checkpoints as `checkpoint` does, and runs again with the same ids."""

    def call(function, *args, **kwargs):
        # A compiler keeps what it traces: it does not run the function again.
        return checkpoint(function if torch.compiler.is_compiling() else choice.Within(function, told), *args, **kwargs)

    return call


def _unbind(owner, name, bound, function):
    if vars(owner).get(name) is bound:  # not where a plan of memory was made meanwhile
        vars(owner)[name] = function


class Recorded:
    """What record() gives."""

    def __init__(self, layers: int, each: list[tuple[int, choice.Record]]):
        self._layers, self._each = layers, each

    @property
    def ids(self) -> Tensor:
        """The ids that the model's last forward pass chose, [tokens, all layers, k], int16 (int32 for more than 32768
        experts); −1 in layers without a router. Raises RuntimeError where no router has run."""
        kept = {layer: record.ids for layer, record in self._each if record.ids is not None}
        if not kept:
            raise RuntimeError("no router has run inside of record(...)")
        first = next(iter(kept.values()))
        missing = torch.full_like(first, -1)
        return torch.stack([kept.get(layer, missing).to(first.device) for layer in range(self._layers)], 1)


@contextlib.contextmanager
def record(model: nn.Module) -> Iterator[Recorded]:
    """Within, keeps the experts that every router of `model` chooses: `with record(model) as recorded`, then
    `recorded.ids`. Inside of replay(...) these are the experts that were replayed. Raises what replay raises."""
    found = routers.routers_of(model)
    kept = [(router, choice.Record(router.name)) for router in found.each]
    with contextlib.ExitStack() as stack:
        for router, own in kept:
            stack.callback(choice.put, router.module, "liger_record", choice.put(router.module, "liger_record", own))
        yield Recorded(found.layers, [(router.layer, own) for router, own in kept])


class Accepting:
    """What accept() returns; `remove()` takes it back."""

    def __init__(self, model: nn.Module, keyword: str):
        self._keyword = keyword
        self._open: list[contextlib.AbstractContextManager] = []
        self._handles = (
            model.register_forward_pre_hook(self._begin, with_kwargs=True),
            model.register_forward_hook(self._end, always_call=True),
        )

    def _begin(self, model, args, kwargs):
        ids = kwargs.pop(self._keyword, None)
        context = contextlib.nullcontext() if ids is None else replay(model, ids)
        context.__enter__()
        self._open.append(context)
        return args, kwargs

    def _end(self, *_):
        if self._open:  # not where another hook has raised before _begin
            self._open.pop().__exit__(None, None, None)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


def accept(model: nn.Module, keyword: str = "routed_experts") -> Accepting:
    """Have calls of `model` take ids by a keyword, `model(**inputs, routed_experts=ids)`, as replay(model, ids) around
    the call. A call without it, or with None, routes as it is."""
    return Accepting(model, keyword)
