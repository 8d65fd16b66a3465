"""What a class or function of a modeling module computes, told by its source.

Parts stand for sources that a script has compared with them (parts.py); other code keeps its forward.
"""

import ast
import functools
import hashlib
import inspect
import textwrap
from typing import Any

from torch import nn

# What does not change a result, and what newer versions of Python add to a tree.
_IGNORED = {"annotation", "returns", "decorator_list", "type_comment", "type_params", "kind", "ctx"}


def fingerprint(part) -> str | None:
    """A hash of the source of a function or of a class's forward, and of what it calls of its class and module.

    Comments, docstrings, annotations and decorators do not count. None where there is no source.
    """
    owner: Any = part if isinstance(part, type) else None
    function = part if owner is None else owner.forward
    return _fingerprint(inspect.unwrap(as_written(function)), owner)


def as_written(part):
    """The function that this package, or a tag of `kernels`, has put something in the place of; others as they are."""
    part = getattr(part, "liger_original", part)
    return tagged_function(type(part)) or part if isinstance(part, nn.Module) else part


def tagged_function(module_class):
    """The function that a tag of `kernels` has made a class of modules of, or None."""
    cells = [cell.cell_contents for cell in getattr(module_class.forward, "__closure__", None) or ()]
    return next((content for content in cells if inspect.isfunction(content)), None)


@functools.cache
def _fingerprint(function, owner):
    found, trees, waiting = [], [], [function]
    while waiting:
        function = waiting.pop(0)
        if function in found:
            continue
        found.append(function)
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
        except (OSError, TypeError, SyntaxError):
            return None
        trees.append(_dump(tree))
        for node in ast.walk(tree):
            called = None
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
                called = getattr(owner, node.attr, None)
            elif isinstance(node, ast.Name):
                called = function.__globals__.get(node.id)
            if inspect.isfunction(called) and called.__module__ == function.__module__:
                waiting.append(inspect.unwrap(called))
    return hashlib.sha256("\n".join(trees).encode()).hexdigest()[:16]


def _dump(node):
    if isinstance(node, list):
        return "[" + ",".join(map(_dump, node)) + "]"
    if not isinstance(node, ast.AST):
        return repr(node)
    parts = []
    for name, value in ast.iter_fields(node):
        if name == "body" and isinstance(node, ast.FunctionDef) and ast.get_docstring(node) is not None:
            value = value[1:]
        if name not in _IGNORED and value not in (None, []):
            parts.append(f"{name}={_dump(value)}")
    return f"{type(node).__name__}({','.join(parts)})"
