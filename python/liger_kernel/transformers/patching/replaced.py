"""The classes and functions that stand for those of a modeling module, made of parts."""

import functools
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from liger_kernel.operators.coverage import has_replaced_forward
from liger_kernel.transformers.patching import numeric
from liger_kernel.transformers.patching.families import Swap
from liger_kernel.transformers.patching.formulas import is_known, kinds_of, unfit
from liger_kernel.transformers.patching.place import (
    in_place_of,
    is_variant,
    or_original,
    own_attributes,
    replace_class,
    variant,
    with_globals,
)
from liger_kernel.transformers.patching.report import Report
from liger_kernel.transformers.patching.source import as_written
from liger_kernel.utils import warn_once


def is_one_operator(cls) -> bool:
    """Whether the forward of a class of modules is one operator where its submodules are what they seem to be."""
    return getattr(cls, "liger_whole", False)


def replacement(original, swap, target, whole=True):
    """What a name of a modeling module is bound to in place of `original`."""
    part = swap.load(target)
    if not isinstance(part, type):
        return in_place_of(part, as_written(original), swap.switch == "rope")
    if not isinstance(original, type):
        return part
    part = ReplacedModule(part, swap.activations, is_known(target, original), whole=whole)
    return original if is_variant(original, part) else variant(original, part)


@dataclass(frozen=True)
class ReplacedCall:
    """The part whose forward is the class's own, but that it calls `target` where it names the function `name`."""

    name: str
    swap: Swap
    target: str

    def __call__(self, base):
        original = inspect.unwrap(base.forward).__globals__[self.name]
        function = replacement(original, self.swap, self.target)
        return base.__name__, (base,), {"forward": with_globals(base.forward, {self.name: function})}


@dataclass(frozen=True)
class NewForward:
    """The part whose forward is what `make` makes for a class, or None. The class keeps its name, by which models know
    layers."""

    make: Callable[[Any], Callable[..., Any] | None]

    def __call__(self, base):
        return base.__name__, (base,), {"forward": self.make(base)}

    def put_on(
        self, owners: Iterable[Any], switch: str, by: Callable[[Any], str | None], report: Report,
        fits: Callable[[Any, Any], object] | None = None,
    ) -> None:  # fmt: skip
        """Give classes, or live modules, such a forward where there is one for their class.

        `by` is the report's word for a forward, None for one that is not of this part; `fits` may refuse a forward for
        an owner.
        """
        for owner in owners:
            of_class = isinstance(owner, type)
            cls: Any = owner if of_class else type(owner)
            forward = self.make(cls)
            if forward is not None and fits is not None and not fits(owner, forward):
                continue
            if forward is not None and of_class:
                report.edits.set(cls, "forward", forward)
            elif forward is not None and has_replaced_forward(owner):
                report.skip(switch, cls.__name__, "its forward was replaced on the instance")
                continue
            elif forward is not None:
                replace_class(owner, self, report.edits)
            if word := by(forward or cls.forward):
                report.note(switch, cls.__name__, word, None if of_class else 1)


@dataclass(frozen=True)
class ReplacedModule:
    """The part that computes as the class `part` does, and as the original where there are no kernels.

    A module of it is made as the original is. One that comes out with another activation than `activations` stays an
    original, and so does, unless `tried` says that it was, one whose forward turns out to compute something else.
    `kinds` are the classes of activations where there are no such names, because a module was tried. Without `whole` a
    gated MLP calls its submodules.
    """

    part: type
    activations: tuple[str, ...] = ()
    tried: bool = True
    kinds: frozenset = frozenset()
    whole: bool = True

    def __call__(self, base):
        @functools.wraps(base.__init__)
        def __init__(module, *args, **kwargs):
            base.__init__(module, *args, **kwargs)
            reason = unfit(module, self.part, self.activations)
            if not reason and not self.tried and not numeric.computes(self.part, module, base.forward):
                reason = "it computes something else on random input"
            if reason:
                module.__class__ = base
                warn_once(f"{base.__name__} is not replaced: {reason}")
            else:
                vars(module).update(own_attributes(module, self.part))

        kinds = kinds_of(self.activations) if self.activations else self.kinds
        forward = or_original(self.part, base.forward, kinds)
        body = {"__init__": __init__, "forward": forward}
        if is_one_operator(self.part) and not self.whole:
            body["liger_whole"] = False
        return self.part.__name__, (self.part, base), body
