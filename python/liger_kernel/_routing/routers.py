"""The routers of a model, and the layers that they are in."""

import functools
import inspect
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn

from liger_kernel._routing.choice import experts, top_k
from liger_kernel.operators.router import Replayable

#: Routers that choose by other means than the top k of their scores -> why nothing is replayed.
UNSERVED = (
    (r"Phimoe\w*", "its sparsemixer draws the experts one after the other, and masks scores by them"),
    (r"SwitchTransformers\w*Router|NllbMoe\w*Router", "its experts have a capacity, and drop tokens"),
    (r"JetMoe\w*", "its layers have a router of attention and one of experts"),
    (r"DogeCDMoE", "it chooses places in a product of keys, not experts"),
)
#: Routers that choose by token ids alone: as the rollout engine does, whatever the precision.
BY_TOKEN = r"\w*HashRouter"
#: Parts of a model that generate no text.
_OTHER_PARTS = r"\b(visual|vision\w*|audio\w*|image\w*|mtp\w*|nextn\w*)\b"


class Router(NamedTuple):
    """A router, its name and the number of its layer."""

    layer: int
    name: str
    module: nn.Module


class Routers(NamedTuple):
    """The routers of a model, one a layer, and how many layers there are."""

    each: list[Router]
    layers: int

    def columns(self, ids: Tensor) -> list[Tensor]:
        """Of ids [tokens, L, k] or [batch, seq, L, k] each router's own, [tokens, k]. L is the number of all layers, or
        of those that have a router. Raises TypeError for a dtype and ValueError for a shape, with what is expected."""
        if ids.is_floating_point() or ids.is_complex() or str(ids.dtype) == "torch.bool":
            raise TypeError(f"ids must be integers, got {ids.dtype}")
        if ids.dim() not in (3, 4):
            raise ValueError(f"ids must be [tokens, layers, k] or [batch, seq, layers, k], got {[*ids.shape]}")
        if (given := ids.shape[-2]) not in (self.layers, len(self.each)):
            raise ValueError(
                f"ids are those of {given} layers, and the model has {self.layers}, of which {len(self.each)} have a "
                "router"
            )
        for router in self.each:
            if (k := top_k(router.module)) != ids.shape[-1]:
                raise ValueError(f"{router.name} chooses {k} experts, and ids have {ids.shape[-1]} of each token")
        ids = ids.flatten(0, -3)
        every = given == self.layers
        return [ids[:, router.layer if every else number] for number, router in enumerate(self.each)]


def routers_of(model: nn.Module) -> Routers:
    """The routers of a model, in the order of their layers. A layer is known by the first number in the names of its
    modules (`model.layers.3.mlp.gate`). Raises ValueError where there is none, where one cannot be replayed, and where
    it is not clear which layers are meant."""
    found: dict[str, list[Router]] = {}
    for name, module in _outermost(model):
        if (place := re.match(r"(.*?)\.?\b(\d+)\.", name)) is None:
            continue
        found.setdefault(place[1], []).append(Router(int(place[2]), name, module))
    stacks = {name: routers for name, routers in found.items() if not re.search(_OTHER_PARTS, name)} or found
    if not stacks:
        raise ValueError(f"{type(model).__name__} has no routers in numbered layers")
    if len(stacks) > 1:
        raise ValueError(f"there are routers in {', '.join(stacks)}: replay the part that the ids belong to")
    (stack, routers), *_ = stacks.items()
    routers.sort(key=lambda router: router.layer)
    for router in routers:
        _check(router)
    for one, other in zip(routers, routers[1:]):
        if one.layer == other.layer:
            raise ValueError(f"layer {one.layer} has two routers, {one.name} and {other.name}")
    children = (int(name) for name, _ in model.get_submodule(stack).named_children() if name.isdigit())
    return Routers(routers, max(children) + 1)


def _check(router: Router) -> None:
    kind = type(router.module).__name__
    for pattern, why in UNSERVED:
        if re.fullmatch(pattern, kind):
            raise ValueError(f"the experts of {router.name} ({kind}) cannot be replayed: {why}")
    if not isinstance(router.module, Replayable) and not _calls_topk(router.module):
        raise ValueError(f"the experts of {router.name} ({kind}) cannot be replayed: it calls no torch.topk")


def _outermost(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The routers of a model, without what is in one."""
    for name, child in model.named_children():
        if _is_router(child):
            yield prefix + name, child
        else:
            yield from _outermost(child, f"{prefix}{name}.")


def _is_router(module: nn.Module) -> bool:
    cls: Any = type(module)
    if (known := _class_is_router(cls)) is not None:
        return known
    if top_k(module) is None or experts(module) is None:
        return False
    return _is_named_router(cls) or hasattr(module, "top_k")


@functools.cache
def _class_is_router(cls: Any) -> bool | None:
    """Whether the modules of a class are routers; None where their numbers say so. Contexts are entered in every step:
    they ask each module."""
    if issubclass(cls, Replayable):
        return True
    kind = cls.__name__
    if re.fullmatch(BY_TOKEN, kind):
        return False
    if any(re.fullmatch(pattern, kind) for pattern, _ in UNSERVED):
        return _class_calls_topk(cls) or re.search(r"Router$", kind) is not None
    return None if _is_named_router(cls) or _class_calls_topk(cls) else False


@functools.cache
def _is_named_router(cls: Any) -> bool:
    return re.search(r"Router$|Gat(e|ing)(V\d)?$|MoEGate|MoEV1Gate", cls.__name__) is not None


def _calls_topk(module: nn.Module) -> bool:
    return _class_calls_topk(type(module))  # type: ignore[arg-type]  # a class can be hashed


@functools.cache
def _class_calls_topk(cls: Any) -> bool:
    """Whether a method of a class, or of what it derives from, calls torch.topk."""
    own = [base for base in cls.__mro__ if base not in (nn.Module, object)]
    methods = (inspect.unwrap(method) for base in own for method in vars(base).values() if callable(method))
    return any("topk" in method.__code__.co_names for method in methods if hasattr(method, "__code__"))
