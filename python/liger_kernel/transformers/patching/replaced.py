"""The classes and functions that stand for those of a modeling module, made of parts."""

import functools
import inspect
from dataclasses import dataclass

from liger_kernel.transformers.patching import numeric
from liger_kernel.transformers.patching.families import Swap
from liger_kernel.transformers.patching.formulas import is_known, kinds_of, unfit
from liger_kernel.transformers.patching.place import (
    in_place_of,
    is_variant,
    or_original,
    own_attributes,
    variant,
    with_globals,
)
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
