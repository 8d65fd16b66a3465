"""Classes that are made of a module's class and a part, and survive copy.deepcopy and pickle."""

import functools
import importlib
import sys
from typing import Any


@functools.cache
def variant(base: type, part) -> Any:
    """The subclass of `base` that `part` makes: a class that comes first, or a function from `base` to (name, bases,
    body)."""
    name, bases, body = (part.__name__, (part, base), {}) if isinstance(part, type) else part(base)

    def __reduce_ex__(self, protocol):
        _, _, *state = object.__reduce_ex__(self, 2)
        return (_new, (_address(base), part), *state)

    body = {**body, "__module__": base.__module__, "__reduce_ex__": __reduce_ex__, "liger_part": part}
    return type(name, bases, body)


def is_variant(cls, part) -> bool:
    """Whether `variant` has made the class, of that part."""
    return vars(cls).get("liger_part") == part


def made_of(cls: type) -> type:
    """What a variant has been made of, or variants of it have; another class itself."""
    while "liger_part" in vars(cls):
        cls = cls.__bases__[-1]
    return cls


def _address(base):
    """The class; where it stands, if pickle would find a variant by its name; of a variant, what it is made of."""
    if "liger_part" in vars(base):
        return _address(base.__bases__[-1]), vars(base)["liger_part"]
    named = getattr(sys.modules.get(base.__module__), base.__name__, None)
    rebound = isinstance(named, type) and named is not base and base in named.__bases__ and "liger_part" in vars(named)
    return (base.__module__, base.__name__) if rebound else base


def _new(base, part):
    cls = _variant_at(base, part)
    return cls.__new__(cls)


def _variant_at(address, part):
    if not isinstance(address, tuple):
        base = address
    elif isinstance(address[0], str):
        base = getattr(importlib.import_module(address[0]), address[1])
    else:
        base = _variant_at(*address)
    return base if is_variant(base, part) else variant(base, part)
