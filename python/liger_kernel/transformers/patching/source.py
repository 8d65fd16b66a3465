"""What a class or function of a modeling module computes, told by its source.

Parts stand for sources that a script has compared with them (formulas.py); other code keeps its forward.
"""

import functools
import hashlib
import inspect
import io
import textwrap
import tokenize
from typing import Any

from torch import nn


def fingerprint(part) -> str | None:
    """A hash of the source of a function or of a class's forward, and of what it calls of its class and module.

    Comments, docstrings, decorators and the annotations of parameters do not count. None where there is no source.
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
    found, texts, waiting = [], [], [function]
    while waiting:
        function = waiting.pop(0)
        if function in found:
            continue
        found.append(function)
        try:
            tokens = _tokens(inspect.getsource(function))
        except (OSError, TypeError, SyntaxError, tokenize.TokenError):
            return None
        # Without spaces and doubled braces: Python 3.12 divides strings that hold expressions into tokens.
        texts.append("".join("".join(tokens).split()).replace("{{", "{").replace("}}", "}"))
        for i, name in enumerate(tokens):
            called = None
            if i > 1 and tokens[i - 1] == "." and tokens[i - 2] == "self":
                called = getattr(owner, name, None)
            elif tokens[i - 1] != ".":
                called = function.__globals__.get(name)
            if inspect.isfunction(called) and called.__module__ == function.__module__:
                waiting.append(inspect.unwrap(called))
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]


_MARKS = {tokenize.INDENT: "[", tokenize.DEDENT: "]", tokenize.NEWLINE: ";"}
_SKIPPED = (tokenize.COMMENT, tokenize.NL, tokenize.ENDMARKER)


def _tokens(source: str) -> list[str]:
    """The tokens of a function from its name on, with marks for lines and blocks, without its annotations and its
    docstring."""
    lines = io.StringIO(textwrap.dedent(source)).readline
    tokens = [token for token in tokenize.generate_tokens(lines) if token.type not in _SKIPPED]
    texts = [_MARKS.get(token.type, token.string) for token in tokens]
    begins = [i + 1 for i, text in enumerate(texts) if text == "def" and texts[i - 1 : i] in ([], [";"])]
    if not begins:
        raise SyntaxError("a lambda's source is a part of a line")
    kept, depth, annotated, i = [], 0, False, begins[0]
    while depth or texts[i] != ":":
        depth += (texts[i] in ("(", "[", "{")) - (texts[i] in (")", "]", "}"))
        if depth == 1 and texts[i] in (",", "=") or depth == 0 and texts[i] == ")":
            annotated = False
        if depth == 1 and texts[i] == ":" or texts[i] == "->":
            annotated = True
        if not annotated:
            kept.append(texts[i])
        i += 1
    body = i + 3  # after the colon, the end of the line and the indentation
    if [token.type for token in tokens[body : body + 2]] == [tokenize.STRING, tokenize.NEWLINE]:
        body += 2
    return kept + texts[body:]
