"""Names that a module has, and whose module is imported when somebody asks for one: those of research and compat."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def lookup(module: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """The __getattr__ of a module, for {the module that has the names: the names, between spaces}."""
    places = {name: place for place, listed in names.items() for name in listed.split()}

    def find(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return getattr(importlib.import_module(places[name]), name)

    return find
