"""Forwards of decoder layers and of attention, with what they compute step by step computed by one operator.

A forward is found by what its source says, whatever its class is called, and all other lines of it stay as they are:

    hidden_states = residual + hidden_states                     residual, hidden_states = add_and_normalise(
    residual = hidden_states                                         self.post_attention_layernorm,
    hidden_states = self.post_attention_layernorm(hidden_states)     residual, hidden_states)

and likewise q_proj, k_proj and v_proj of one input, in three statements that follow one another. The functions that
stand in (liger_kernel/operators/together.py) call the modules where a call may do more than its class says.
"""

import ast
import functools
import inspect
import textwrap
import types
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from liger_kernel.operators import together
from liger_kernel.operators.coverage import has_replaced_forward
from liger_kernel.transformers.replace import Edits, function_like, redecorated, replace_class

ADD_AND_NORM, PROJECTIONS = "add and norm", "projections"
#: What is rewritten -> the operator that computes it, for reports.
OPERATORS = {ADD_AND_NORM: "fused_add_rms_norm", PROJECTIONS: "qkv"}
_FUNCTIONS = {f"liger_{name}": getattr(together, name) for name in ("add_and_normalise", "heads", "projections")}
_QKV = ("q_proj", "k_proj", "v_proj")


def rewritten(forward, kinds: frozenset[str]):
    """(a forward that computes the same, of `kinds` those that it has now); (None, none) where there is nothing to
    rewrite, or no source."""
    if hasattr(forward, "liger_rewritten"):
        return None, frozenset()
    inner = inspect.unwrap(forward)
    code, found = _rewritten_code(inner.__code__, kinds) if inspect.isfunction(inner) else (None, frozenset())
    if code is None:
        return None, frozenset()
    cells = dict(zip(inner.__code__.co_freevars, inner.__closure__ or ()))
    closure = tuple(cells.get(name) or types.CellType(_FUNCTIONS[name]) for name in code.co_freevars)
    if (new := redecorated(forward, lambda inner: function_like(inner, code, closure=closure))) is None:
        return None, frozenset()
    new.liger_original, new.liger_rewritten = forward, found
    return new, found


@functools.cache
def _rewritten_code(code, kinds):
    """(the code of a method with what is to be rewritten, what of `kinds` that is), or (None, none)."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(code)))
    except (OSError, TypeError, SyntaxError):
        return None, frozenset()
    (method,) = tree.body
    if not isinstance(method, ast.FunctionDef) or not method.args.args or _has_private_names(method):
        return None, frozenset()
    rewriter = _Rewriter(method.args.args[0].arg, kinds)
    rewriter.visit_blocks(method)
    if not rewriter.found:
        return None, frozenset()
    method.decorator_list = []
    free = (*code.co_freevars, *sorted(rewriter.functions))
    outer = ast.FunctionDef(
        name="outer", args=_no_arguments(), decorator_list=[],
        body=[ast.Assign([ast.Name(name, ast.Store())], ast.Constant(None)) for name in free] + [method],
    )  # fmt: skip
    ast.increment_lineno(method, code.co_firstlineno - 1)
    module = ast.fix_missing_locations(ast.Module([outer], []))
    compiled = compile(module, code.co_filename, "exec", dont_inherit=True)
    (outer_code,) = (c for c in compiled.co_consts if isinstance(c, types.CodeType))
    new = next(c for c in outer_code.co_consts if isinstance(c, types.CodeType) and c.co_name == code.co_name)
    if hasattr(code, "co_qualname"):
        new = new.replace(co_qualname=code.co_qualname)
    return new, frozenset(rewriter.found)


def _has_private_names(method):
    """Whether a method has names that its class's would be put before (`self.__x`), which the class does here no
    more."""
    names = (getattr(node, field, None) for node in ast.walk(method) for field in ("id", "attr", "arg", "name"))
    return any(isinstance(name, str) and name.startswith("__") and not name.endswith("__") for name in names)


def _no_arguments():
    return ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])


class _Rewriter:
    """Rewrites the statements of a method whose first parameter is `this`."""

    def __init__(self, this: str, kinds):
        self.this, self.kinds = this, kinds
        self.found: set[str] = set()
        self.functions: set[str] = set()

    def visit_blocks(self, node):
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list):
                setattr(node, name, self._block(block))

    def _block(self, statements):
        for statement in statements:
            self.visit_blocks(statement)
        new = []
        while statements:
            taken, by = (ADD_AND_NORM in self.kinds and self._add_and_norm(statements)) or (0, ())
            if not taken:
                taken, by = (PROJECTIONS in self.kinds and self._projections(statements)) or (1, statements[:1])
            new += by
            statements = statements[taken:]
        return new

    def _call(self, kind, function, arguments, targets, like):
        self.found.add(kind)
        self.functions.add(function)
        call = ast.Call(ast.Name(function, ast.Load()), arguments, [])
        names = ast.Tuple([ast.Name(name, ast.Store()) for name in targets], ast.Store())
        # The lines of a traceback are those of the last statement that it stands for.
        return ast.fix_missing_locations(ast.copy_location(ast.Assign([names], call), like))

    def _submodule(self, node):
        """The name of the attribute of the module that an expression is, or None."""
        return node.attr if isinstance(node, ast.Attribute) and _name(node.value) == self.this else None

    def _add_and_norm(self, statements):
        first = _assignment(statements, 0)
        if first is None or not isinstance(first[1], ast.BinOp) or not isinstance(first[1].op, ast.Add):
            return None
        total, kept, last = first[0], [first[0]], _assignment(statements, 1)
        if last is not None and _name(last[1]) == total:
            kept, last = [*kept, last[0]], _assignment(statements, 2)
        called = last and self._call_of_one(last[1])
        if not called or called[1] not in kept or "norm" not in called[0].attr:
            return None
        taken, result = len(kept) + 1, last[0]
        kept = [name for name in kept if name != result] or ["_"]
        call = self._call(
            ADD_AND_NORM, "liger_add_and_normalise", [called[0], first[1].left, first[1].right], (kept[-1], result),
            statements[taken - 1],
        )  # fmt: skip
        copies = [ast.Assign([ast.Name(n, ast.Store())], ast.Name(kept[-1], ast.Load())) for n in kept[:-1]]
        return taken, [call, *(ast.copy_location(copy, call) for copy in copies)]

    def _call_of_one(self, node):
        """(the submodule, the name that it is called with), of a call of a submodule with one name, or None."""
        if isinstance(node, ast.Call) and len(node.args) == 1 and not node.keywords and self._submodule(node.func):
            return (node.func, name) if (name := _name(node.args[0])) else None
        return None

    def _projections(self, statements):
        if len(statements) < 3 or not all(_assignment(statements, i) for i in range(3)):
            return None
        calls = []
        for statement, projection in zip(statements, _QKV):
            of_any = [n for n in ast.walk(statement) if self._submodule(n) in _QKV]
            of_it = [n for n in ast.walk(statement.value) if (c := self._call_of_one(n)) and c[0].attr == projection]
            if len(of_any) != 1 or len(of_it) != 1:
                return None
            calls.append(of_it[0])
        given, assigned = {_name(call.args[0]) for call in calls}, {_assignment(statements, i)[0] for i in range(3)}
        if len(given) > 1 or given & assigned:
            return None
        values = [statement.value for statement in statements[:3]]
        shapes = [_shape_of_heads(value, call) for value, call in zip(values, calls)]
        as_heads = shapes[0] is not None and shapes.count(shapes[0]) == 3
        results = [f"liger_{name}" for name in _QKV]
        modules = [call.func for call in calls]
        arguments = [calls[0].args[0], *([ast.Name(shapes[0], ast.Load())] if as_heads else []), *modules]
        function = "liger_heads" if as_heads else "liger_projections"
        together = self._call(PROJECTIONS, function, arguments, results, statements[0])
        for statement, call, result in zip(statements, calls, results):
            stands = ast.copy_location(ast.Name(result, ast.Load()), call)
            statement.value = stands if as_heads else _Replace(call, stands).visit(statement.value)
        return 3, [together, *statements[:3]]


class _Replace(ast.NodeTransformer):
    def __init__(self, old, new):
        self.old, self.new = old, new

    def visit(self, node):
        return self.new if node is self.old else self.generic_visit(node)


def _name(node):
    return node.id if isinstance(node, ast.Name) else None


def _assignment(statements, i):
    """(the name, the value) of a statement that assigns to one name, or None."""
    statement = statements[i] if i < len(statements) else None
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1 and (name := _name(statement.targets[0])):
        return name, statement.value
    return None


def _shape_of_heads(value, call):
    """The name `shape` where a value is call.view(shape).transpose(1, 2), or None."""
    match value:
        case ast.Call(
            func=ast.Attribute(
                value=ast.Call(func=ast.Attribute(value=inner, attr="view"), args=[ast.Name(id=shape)], keywords=[]),
                attr="transpose",
            ),
            args=[ast.Constant(value=1), ast.Constant(value=2)],
            keywords=[],
        ) if inner is call:
            return shape
    return None


@dataclass(frozen=True)
class RewrittenForward:
    """The part whose forward is the class's own, rewritten. Its class keeps its name, by which models know layers."""

    kinds: frozenset[str]

    def __call__(self, base):
        return base.__name__, (base,), {"forward": rewritten(base.forward, self.kinds)[0]}


def rewrite_classes(
    classes: Iterable[Any], kinds: frozenset[str], edits: Edits, has_rms_norm: Callable[[type], object]
):
    """Give classes of layers and of attention such forwards: ({(kind, name): how many}, [])."""
    done: Counter[tuple[str, str]] = Counter()
    found: frozenset[str]
    for part in classes:
        if not isinstance(part, type) or not issubclass(part, nn.Module) or issubclass(part, PreTrainedModel):
            continue
        cls: Any = part
        if "liger_part" in vars(cls) or "forward" not in vars(cls):
            continue
        if not (found := getattr(cls.forward, "liger_rewritten", frozenset())):
            found = rewritten(cls.forward, kinds)[1]
            if found and (found := found if has_rms_norm(cls) else found - {ADD_AND_NORM}):
                edits.set(cls, "forward", rewritten(cls.forward, found)[0])
        done.update((kind, cls.__name__) for kind in found)
    return done, []


def rewrite_modules(modules: Iterable[Any], kinds: frozenset[str], edits: Edits):
    """Give live layers and attention such forwards: ({(kind, name of the class): modules}, [(kind, name, why not)])."""
    done: Counter[tuple[str, str]] = Counter()
    kept: dict[tuple[str, str, str], None] = {}
    has_any = functools.cache(lambda cls: rewritten(cls.forward, kinds)[1])  # of the many modules of a class
    for module in modules:
        cls: Any = module.__class__
        found: frozenset[str]
        if not (found := getattr(cls.forward, "liger_rewritten", frozenset())):
            found = frozenset() if isinstance(module, PreTrainedModel) else has_any(cls)
            if ADD_AND_NORM in found and not any(together.is_rms_norm(child.__class__) for child in module.children()):
                found -= {ADD_AND_NORM}
            if found and has_replaced_forward(module):
                kept |= {(kind, cls.__name__, "its forward was replaced on the instance"): None for kind in found}
                continue
            if found:
                replace_class(module, RewrittenForward(found), edits)
        done.update((kind, cls.__name__) for kind in found)
    return done, list(kept)
