"""Changes to modules and classes that can be taken back."""

import functools
import logging
import types

import torch

logger = logging.getLogger(__name__)

_ABSENT = object()


class Edits:
    """A list of attribute assignments with `undo`."""

    def __init__(self):
        self._done = []

    def set(self, owner, name, value) -> bool:
        """Assign `owner.name = value`; False if it already is that value."""
        old = _current(owner, name)
        if old is value:
            return False
        setattr(owner, name, value)
        self._done.append((owner, name, old, value))
        return True

    def undo(self) -> None:
        """Take every assignment back, the latest first; what somebody else has reassigned since stays."""
        while self._done:
            owner, name, old, value = self._done.pop()
            if _current(owner, name) is not value:
                logger.warning("%s of %s was changed after the patch and is left alone", name, type(owner).__name__)
            elif old is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, old)


def _current(owner, name):
    return type(owner) if name == "__class__" else vars(owner).get(name, _ABSENT)


def has_replaced_forward(module) -> bool:
    """Whether somebody has put a forward on the instance; accelerate's hooks do, and call `_old_forward` from it."""
    return "forward" in module.__dict__ and "_old_forward" not in module.__dict__


@torch.compiler.disable
def become(module, part, edits: Edits, **attributes) -> None:
    """Turn a live module into the subclass of its class in which `part` comes first, and set attributes on it.

    Unlike a method bound to the instance, a class survives copy.deepcopy, pickle and nn.DataParallel's replicas.
    """
    for name, value in attributes.items():
        edits.set(module, name, value)
    new = variant(type(module), part)
    edits.set(module, "__class__", new)
    if "_old_forward" in vars(module):
        edits.set(module, "_old_forward", types.MethodType(new.forward, module))


@functools.cache
def variant(base: type, part) -> type:
    """The subclass of `base` in which `part` comes first: a class, or a function from `base` to a dict of methods."""
    if isinstance(part, type):
        name, bases, body = part.__name__, (part, base), {}
    else:
        name, bases, body = base.__name__, (base,), part(base)

    def __reduce_ex__(self, protocol):
        _, _, *state = object.__reduce_ex__(self, 2)
        return (_new, (base, part), *state)

    return type(name, bases, {**body, "__module__": base.__module__, "__reduce_ex__": __reduce_ex__})


def _new(base, part):
    cls = variant(base, part)
    return cls.__new__(cls)
