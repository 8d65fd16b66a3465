"""Forwards of attention that normalise each head of q and k and rotate it by one operator.

Such a forward is the module's own, with two of its steps moved: where q and k, after a norm over each head, are
rotated by a function that this package has replaced, the norms are taken out and the call of the rotation is that of
`normalise_and_rotate`, which gets the norms too. The statements between may not read q or k.
"""

import ast
import functools
import inspect
import textwrap
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from liger_kernel.operators.coverage import NORM_KERNELS, ROPE_KERNELS, kernels_cover
from liger_kernel.operators.norm import weight_in
from liger_kernel.operators.residual import is_rms_norm, norm_options
from liger_kernel.operators.rope import liger_qk_norm_rope, liger_rotary_pos_emb
from liger_kernel.transformers.patching.place import NewForward, function_like, redecorated
from liger_kernel.transformers.patching.report import Report

KERNELS = (*NORM_KERNELS, *ROPE_KERNELS)
_HELPER = "liger_normalise_and_rotate"


def is_rotation(function: Any) -> bool:
    """Whether a function of a modeling module is replaced by the rotation of a head's two halves."""
    return getattr(function, "liger_part", None) is liger_rotary_pos_emb


def normalise_and_rotate(
    q_norm: nn.Module, k_norm: nn.Module, rotation: Callable[..., Any], heads_last: bool,
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """rotation(q_norm(q), k_norm(k), cos, sin) for q and k [batch, heads, seq, dim]: by one operator where the norms
    and the rotation are this package's and would run as their classes say, in any dtype that it has for them all.
    heads_last: the norms see [batch, seq, heads, dim] where they are called."""
    if (
        (q.__class__ is Tensor or torch.compiler.is_compiling())
        and is_rotation(rotation)
        and q.dtype is k.dtype is cos.dtype is sin.dtype
        and q.dim() == 4
        and cos.dim() == 3
        and (options := norm_options(q_norm, q)) is not None
        and options == norm_options(k_norm, k)
        and kernels_cover(q, KERNELS)
    ):
        eps, offset, casting = options
        return liger_qk_norm_rope(q, k, weight_in(q_norm), weight_in(k_norm), cos, sin, eps, offset, casting)
    if heads_last:
        q, k = q_norm(q.transpose(1, 2)).transpose(1, 2), k_norm(k.transpose(1, 2)).transpose(1, 2)
    else:
        q, k = q_norm(q), k_norm(k)
    return rotation(q, k, cos, sin)


def _called(node: ast.AST, method: str | None = None) -> tuple[ast.expr, list[ast.expr]] | None:
    """(function, or the object of which a method of this name is called, arguments) of a call without keywords."""
    if not isinstance(node, ast.Call) or node.keywords:
        return None
    function = node.func
    if method is not None:
        if not isinstance(function, ast.Attribute) or function.attr != method:
            return None
        function = function.value
    return function, node.args


def _names(node: ast.AST) -> set[str]:
    return {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}


def _norm_of(node: ast.AST) -> tuple[str, ast.expr] | None:
    """(name, argument) of self.name(argument)."""
    call = _called(node)
    if call is None or len(call[1]) != 1 or not isinstance(call[0], ast.Attribute):
        return None
    function = call[0]
    is_own = isinstance(function.value, ast.Name) and function.value.id == "self"
    return (function.attr, call[1][0]) if is_own else None


def _names_of_rotation(statement: ast.stmt) -> list[str] | None:
    """[rotation, q, k, cos, sin] of the statement `q, k = rotation(q, k, cos, sin)`."""
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        return None
    target, call = statement.targets[0], _called(statement.value)
    if call is None or not isinstance(target, ast.Tuple) or not isinstance(call[0], ast.Name) or len(call[1]) != 4:
        return None
    names = [node.id for node in (call[0], *call[1]) if isinstance(node, ast.Name)]
    given = [node.id for node in target.elts if isinstance(node, ast.Name)]
    return names if len(names) == 5 and given == names[1:3] and len(set(names)) == 5 else None


def _take_out(body: list[ast.stmt], before: int, name: str) -> tuple[int, ast.stmt | None, str, bool] | None:
    """The statement that normalises `name`, the last one before a place that has it: (place, what is left of it or
    None, the norm, whether it sees heads last)."""
    place = next((i for i in reversed(range(before)) if name in _names(body[i])), None)
    if place is None:
        return None
    statement = body[place]
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        return None
    target, value = statement.targets[0], statement.value
    if not isinstance(target, ast.Name) or target.id != name:
        return None
    if (norm := _norm_of(value)) is not None:  # name = self.norm(name)
        alone = isinstance(norm[1], ast.Name) and norm[1].id == name
        return (place, None, norm[0], False) if alone else None
    call = _called(value, "transpose")  # name = self.norm(…).transpose(1, 2)
    if call is None or [getattr(a, "value", None) for a in call[1]] != [1, 2] or (norm := _norm_of(call[0])) is None:
        return None
    value.func.value = norm[1]  # type: ignore[attr-defined]
    return place, statement, norm[0], True


@functools.cache
def _rewritten(code: types.CodeType) -> tuple[types.CodeType, tuple[str, str, str]] | None:
    """The code of a forward with the norms moved into the rotation, and the names of both norms and the rotation; None
    where it has no such steps."""
    if code.co_freevars:
        return None
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(code)))
    except (OSError, TypeError, SyntaxError):
        return None
    function = tree.body[0]
    if not isinstance(function, ast.FunctionDef):
        return None
    body = function.body
    found = [(i, names) for i, statement in enumerate(body) if (names := _names_of_rotation(statement)) is not None]
    if len(found) != 1:
        return None
    place, (rotation, q, k, cos, sin) = found[0]
    taken = [_take_out(body, place, name) for name in (q, k)]
    if taken[0] is None or taken[1] is None or taken[0][3] is not taken[1][3]:
        return None
    norms = taken[0][2], taken[1][2]
    call = f"{q}, {k} = {_HELPER}(self.{norms[0]}, self.{norms[1]}, {rotation}, {taken[0][3]}, {q}, {k}, {cos}, {sin})"
    new = ast.parse(call).body[0]
    for node in ast.walk(new):
        ast.copy_location(node, body[place])
    body[place] = new
    dropped = {each[0] for each in taken if each is not None and each[1] is None}
    function.body = [statement for i, statement in enumerate(body) if i not in dropped]
    # Errors name the lines of the file. Defaults and annotations are the function's, not its code's.
    function.decorator_list = []
    ast.increment_lineno(tree, code.co_firstlineno - 1)
    module = ast.parse(f"def maker({_HELPER}): pass")
    module.body[0].body = [function]  # type: ignore[attr-defined]
    compiled = compile(module, code.co_filename, "exec")
    made = _code_in(_code_in(compiled, "maker"), code.co_name)
    if hasattr(code, "co_qualname"):
        made = made.replace(co_qualname=code.co_qualname)  # type: ignore[call-arg]  # since Python 3.11
    return made, (*norms, rotation)


def _code_in(code: types.CodeType, name: str) -> types.CodeType:
    return next(c for c in code.co_consts if isinstance(c, types.CodeType) and c.co_name == name)


def rotating_forward(cls: Any) -> Any:
    """A forward for modules of a class that normalises and rotates by one operator, with the names of both norms and
    the rotation in `liger_rotates`; None where there is none."""
    return _rotating_forward(cls.forward) if issubclass(cls, nn.Module) else None


@functools.cache
def _rotating_forward(forward):
    inner = inspect.unwrap(forward)
    names = None

    def make(function):
        nonlocal names
        if not isinstance(function, types.FunctionType) or (found := _rewritten(function.__code__)) is None:
            return None
        code, names = found
        return function_like(function, code, closure=(types.CellType(normalise_and_rotate),))

    if hasattr(inner, "liger_rotates") or (new := redecorated(forward, make)) is None:
        return None
    for function in {new, inspect.unwrap(new)}:
        function.liger_rotates = names
    return new


#: The part whose forward that is.
rotating = NewForward(rotating_forward)


def fuse(owners: Iterable[Any], report: Report) -> None:
    """Give live attention, or classes of it, whose norms and rotation are replaced, such a forward."""
    norms = any(entry.switch == "rms_norm" for entry in report.replaced)

    def fits(owner, forward):
        *names, rotation = forward.liger_rotates
        if not is_rotation(inspect.unwrap(forward).__globals__.get(rotation)):
            return False
        if isinstance(owner, type):  # whose modules are looked at when they run
            return norms
        return all(is_rms_norm(type(owner._modules.get(name))) for name in names)

    by = lambda forward: "qk_norm_rope" if hasattr(inspect.unwrap(forward), "liger_rotates") else None
    report.give_forwards(owners, rotating, "qk_norm", by, fits)
