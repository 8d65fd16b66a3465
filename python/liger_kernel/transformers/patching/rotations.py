"""Attention that normalises each head of q and k and rotates it by one operator.

Attention keeps its own forward, which runs on a shallow copy of the module. There the norms of q and k hand their input
on and wait for the rotation, a function that this package has replaced, which then runs the norms and itself by one
operator. This is for forwards whose source has these steps and none between them that reads q or k.
"""

import functools
import inspect
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from liger_kernel.operators.coverage import NORM_KERNELS, ROPE_KERNELS, kernels_cover
from liger_kernel.operators.norm import weight_in
from liger_kernel.operators.residual import is_rms_norm, norm_options
from liger_kernel.operators.rope import liger_qk_norm_rope, liger_rotary_pos_emb
from liger_kernel.transformers.patching.layers import on_copy
from liger_kernel.transformers.patching.place import NewForward, waiting
from liger_kernel.transformers.patching.report import Report

KERNELS = (*NORM_KERNELS, *ROPE_KERNELS)


def is_rotation(function: Any) -> bool:
    """Whether a function of a modeling module is replaced by the rotation of a head's two halves."""
    return getattr(function, "liger_part", None) is liger_rotary_pos_emb


class Steps(NamedTuple):
    """The names of the norms of q and k, and of the rotation, in a forward."""

    q_norm: str
    k_norm: str
    rotation: str
    heads_last: bool  # whether the norms see [batch, seq, heads, dim], where the rotation sees [batch, heads, seq, dim]


_ROTATION = re.compile(r"(\w+), (\w+) = (\w+)\(\1, \2, (\w+), (\w+)\)")
_NORM = re.compile(r"(\w+) = self\.(\w+)\((.+?)\)(\.transpose\(1, 2\))?")


def _norm_of(name: str, lines: list[str]) -> tuple[str, bool] | None:
    """(norm, heads_last) of the last of some statements that has `name`, where it normalises it and nothing more."""
    last = next((line for line in reversed(lines) if re.search(rf"\b{name}\b", line)), "")
    found = _NORM.fullmatch(last)
    if found is None or found[1] != name:
        return None
    depth = 0
    for sign in found[3]:  # the norm's argument ends where its call does
        depth += (sign == "(") - (sign == ")")
        if depth < 0:
            return None
    heads_last = found[4] is not None
    return (found[2], heads_last) if depth == 0 and (heads_last or found[3] == name) else None


@functools.cache
def steps_of(code: Any) -> Steps | None:
    """The steps of a forward with such a code; None where it has others."""
    try:
        source = inspect.cleandoc(inspect.getsource(code))
    except (OSError, TypeError):
        return None
    lines = [line.rstrip() for line in re.sub(r"#[^\n]*", "", source).splitlines() if line.strip()]
    indents = [len(line) - len(line.lstrip()) for line in lines]
    outermost = min((n for n in indents if n), default=0)  # of the body's statements
    found = [(i, match) for i, line in enumerate(lines) if (match := _ROTATION.fullmatch(line.strip()))]
    if len(found) != 1 or indents[place := found[0][0]] != outermost:
        return None
    q, k, rotation = found[0][1].group(1, 2, 3)
    statements = [line.strip() if n == outermost else line for line, n in zip(lines[:place], indents, strict=False)]
    norms = [_norm_of(name, statements) for name in (q, k)]
    if q == k or norms[0] is None or norms[1] is None or norms[0][1] is not norms[1][1]:
        return None
    names = norms[0][0], norms[1][0]
    if any(len(re.findall(rf"\bself\.{name}\b", "\n".join(statements))) > 1 for name in names):
        return None  # it normalises something else, too
    return Steps(*names, rotation, norms[0][1])


class _Norms:
    """The norms of q and k during one call of attention's forward."""

    __slots__ = ("heads_last", "modules", "rotated", "waits")

    def __init__(self, modules: tuple[nn.Module, nn.Module], heads_last: bool) -> None:
        self.modules, self.heads_last, self.waits = modules, heads_last, [False, False]
        self.rotated = False  # afterwards norms are what they are: T5Gemma 2's normalises the encoder's keys

    def normalised(self, i: int, x: Tensor) -> Tensor:
        if not self.waits[i]:
            return x
        return self.modules[i](x.transpose(1, 2)).transpose(1, 2) if self.heads_last else self.modules[i](x)

    def rotate(self, rotation: Callable[..., Any], q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
        """rotation(q_norm(q), k_norm(k), cos, sin)."""
        self.rotated = True
        if all(self.waits) and q.dtype is k.dtype is cos.dtype is sin.dtype and q.dim() == 4 and cos.dim() == 3:
            q_norm, k_norm = self.modules
            options = norm_options(q_norm, q)
            if options is not None and options == norm_options(k_norm, k):
                return liger_qk_norm_rope(q, k, weight_in(q_norm), weight_in(k_norm), cos, sin, *options)
        return rotation(self.normalised(0, q), self.normalised(1, k), cos, sin)


class _Waiting:
    """One of the norms during such a call; its attributes are those of the module."""

    __slots__ = ("_i", "_norms")

    def __init__(self, norms: _Norms, i: int) -> None:
        self._norms, self._i = norms, i

    def __call__(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        norms, i = self._norms, self._i
        module = norms.modules[i]
        if norms.rotated or args or kwargs or x.__class__ is not Tensor or not kernels_cover(x, KERNELS):
            return module(x, *args, **kwargs)
        if norm_options(module, x) is None:
            return module(x)
        norms.waits[i], waiting.norms = True, norms
        return x

    def __getattr__(self, name: str) -> Any:
        return getattr(self._norms.modules[self._i], name)


@functools.cache
def _rotating(original: Any) -> Any:
    inner = inspect.unwrap(original)
    steps = None if hasattr(original, "liger_rotates") else steps_of(getattr(inner, "__code__", None))
    if steps is None:
        return None
    names = steps.q_norm, steps.k_norm

    def on_this_copy(submodules: dict[str, Any]) -> dict[str, Any] | None:
        modules = tuple(submodules.get(name) for name in names)
        if not all(is_rms_norm(type(m)) for m in modules) or not is_rotation(inner.__globals__.get(steps.rotation)):
            return None
        norms = _Norms(modules, steps.heads_last)  # type: ignore[arg-type]
        return {name: _Waiting(norms, i) for i, name in enumerate(names)}

    copied = on_copy(original, on_this_copy)

    @functools.wraps(original)
    def forward(self, *args, **kwargs):
        try:
            return copied(self, *args, **kwargs)
        finally:
            if not torch.compiler.is_compiling():
                waiting.norms = None

    vars(forward).update(liger_rotates=steps)
    return forward


def rotating_forward(cls: Any) -> Any:
    """A forward for modules of a class that normalises and rotates by one operator, with its Steps in `liger_rotates`;
    None where there is none."""
    return _rotating(cls.forward) if issubclass(cls, nn.Module) else None


#: The part whose forward that is.
rotating = NewForward(rotating_forward)


def fuse(owners: Iterable[Any], report: Report) -> None:
    """Give live attention, or classes of it, whose norms and rotation are replaced, such a forward."""
    norms = any(entry.switch == "rms_norm" for entry in report.replaced)

    def fits(owner, forward):
        steps = forward.liger_rotates
        if not is_rotation(inspect.unwrap(forward).__globals__.get(steps.rotation)):
            return False
        if isinstance(owner, type):  # whose modules are looked at when they run
            return norms
        return all(is_rms_norm(type(owner._modules.get(name))) for name in (steps.q_norm, steps.k_norm))

    by = lambda forward: "qk_norm_rope" if hasattr(forward, "liger_rotates") else None
    report.give_forwards(owners, rotating, "qk_norm", by, fits)
