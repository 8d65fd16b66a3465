"""Forwards of gated delta nets that compute both gates by one operator.

transformers writes them as two statements, in all its versions and models:

    beta = <b>.sigmoid()
    g = -self.A_log.float().exp() * F.softplus(<a>.float() + self.dt_bias)

A forward whose source has both, and nothing between them but OLMo Hybrid's factor of beta, is compiled again with one
call in their place, of the same expressions in the same order. All else, the decorators included, is the model's own,
and so are the globals, so that what a patch puts into the modeling module is seen.
"""

import ast
import functools
import inspect
import linecache
import textwrap
from collections.abc import Callable, Iterable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from liger_kernel.operators.coverage import DELTA_GATES_KERNELS
from liger_kernel.operators.gated_delta_rule import liger_delta_gates
from liger_kernel.transformers.patching.mixer_functions import cover
from liger_kernel.transformers.patching.place import NewForward, function_like, redecorated
from liger_kernel.transformers.patching.report import Report

_BETA = "{}.sigmoid()"
_G = "-self.A_log.float().exp() * F.softplus({}.float() + self.dt_bias)"
_BETWEEN = "if self.allow_neg_eigval:\n    beta = beta * 2.0"
_CALL = "g, beta = _liger_gates(self, {}, {})"


def liger_gates(module: nn.Module, b: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    """(g, beta) of a gated delta net, float32; as transformers computes them where there is no kernel."""
    A_log, dt_bias = module.A_log, module.dt_bias
    if a.dtype == b.dtype and cover(DELTA_GATES_KERNELS, a, b, A_log, dt_bias):
        return liger_delta_gates(a, A_log, dt_bias, b)
    return -A_log.float().exp() * F.softplus(a.float() + dt_bias), b.sigmoid()


def _assigned(statement: ast.stmt, name: str, form: str) -> str | None:
    """What stands in the gap of `form` where the statement assigns it to `name`."""
    if not isinstance(statement, ast.Assign) or [ast.unparse(target) for target in statement.targets] != [name]:
        return None
    before, after = form.split("{}")
    value = ast.unparse(statement.value)
    if not value.startswith(before) or not value.endswith(after):
        return None
    return value[len(before) : len(value) - len(after)]


def _with_one_call(body: list[ast.stmt]) -> list[ast.stmt] | None:
    """A function's statements with the call in place of both; None where they are not there once."""
    betas = [i for i, statement in enumerate(body) if _assigned(statement, "beta", _BETA)]
    gs = [i for i, statement in enumerate(body) if _assigned(statement, "g", _G)]
    if len(betas) != 1 or len(gs) != 1:
        return None
    first, last = betas[0], gs[0]
    between = body[first + 1 : last]
    if last <= first or [ast.unparse(statement) for statement in between] not in ([], [_BETWEEN]):
        return None
    b, a = _assigned(body[first], "beta", _BETA), _assigned(body[last], "g", _G)
    return [*body[:first], *ast.parse(_CALL.format(b, a)).body, *between, *body[last + 1 :]]


def _with_gates(function: Any) -> Callable[..., Any] | None:
    """A function of other code; None where its source has not these statements."""
    code = getattr(function, "__code__", None)
    # Before the source is read, which takes milliseconds.
    if code is None or code.co_freevars or not {"A_log", "dt_bias", "softplus"} <= set(code.co_names):
        return None
    try:
        written: Any = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except (OSError, TypeError, SyntaxError):
        return None
    body = _with_one_call(written.body) if isinstance(written, ast.FunctionDef) else None
    if body is None:
        return None
    maker = ast.parse("def make(_liger_gates):\n    def forward(): ...\n    return forward")
    new: Any = maker.body[0].body[0]  # type: ignore[attr-defined]
    new.args, new.body = written.args, body
    source = ast.unparse(ast.fix_missing_locations(maker))
    name = f"<{function.__module__}.{function.__qualname__} with delta_gates>"
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)  # which tracebacks read
    made: dict[str, Any] = {}
    exec(compile(source, name, "exec", dont_inherit=True), {**function.__globals__}, made)
    forward = made["make"](liger_gates)
    return function_like(function, code=forward.__code__, closure=forward.__closure__)


@functools.cache
def _forward(original: Any) -> Callable[..., Any] | None:
    forward = redecorated(original, _with_gates)
    if forward is not None:
        vars(forward)["liger_gates"] = True
    return forward


def gates_forward(cls: Any) -> Callable[..., Any] | None:
    """The forward for mixers of a class that computes both gates at once; None where its source is another one."""
    forward = getattr(cls, "forward", None)
    return None if forward is None or hasattr(forward, "liger_gates") else _forward(forward)


#: The part whose forward that is.
gating = NewForward(gates_forward)


def give_gates(owners: Iterable[Any], report: Report) -> None:
    """Give live mixers, or classes of mixers, such forwards."""
    report.give_forwards(owners, gating, "mixers", lambda f: "delta_gates" if hasattr(f, "liger_gates") else None)
