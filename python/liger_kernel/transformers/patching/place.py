"""The classes and functions that stand for those of a modeling module: how they are put in their place, can be taken
back, and run the original where they would differ."""

import functools
import inspect
import logging
import threading
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from liger_kernel._routing.choice import as_told
from liger_kernel._variant import _new, is_variant, variant  # noqa: F401  # pickles of older versions name it here
from liger_kernel.operators.coverage import ROPE_KERNELS, has_replaced_forward, kernels_cover, runs_activation
from liger_kernel.operators.router import Replayable
from liger_kernel.transformers.patching.families import Swap
from liger_kernel.transformers.patching.formulas import as_written
from liger_kernel.transformers.patching.part import kinds_of, part_of, unfit
from liger_kernel.utils import warn_once

logger = logging.getLogger(__name__)

_ABSENT = object()
_PARALLEL = ("transformers.distributed.", "liger_kernel.transformers.expert_parallel")


class Edits:
    """A list of assignments with `undo`: of attributes, and of entries of dicts."""

    def __init__(self):
        self._done = []

    def set(self, owner, name, value) -> bool:
        """Assign `owner.name = value`; False if it already is that value."""
        old = _current(owner, name)
        if old is value:
            return False
        _assign(owner, name, value)
        self._done.append((owner, name, old, value))
        return True

    def add(self, other: "Edits") -> None:
        """Take over another list's assignments, as the latest."""
        self._done += other._done
        other._done = []

    def mark(self) -> int:
        """What to give to `undo` to keep the assignments up to now."""
        return len(self._done)

    def undo(self, mark: int = 0) -> None:
        """Take every assignment (since `mark`) back, the latest first; what somebody else has reassigned stays."""
        while len(self._done) > mark:
            owner, name, old, value = self._done.pop()
            if _current(owner, name) is not value:
                logger.warning("%s of %s was changed after the patch and is left alone", name, type(owner).__name__)
            elif old is not _ABSENT:
                _assign(owner, name, old)
            elif isinstance(owner, dict):
                del owner[name]
            else:
                delattr(owner, name)


def _assign(owner, name, value):
    if isinstance(owner, dict):
        owner[name] = value
    else:
        setattr(owner, name, value)


def _current(owner, name):
    if isinstance(owner, types.CellType):
        return owner.cell_contents
    if isinstance(owner, dict):
        return owner.get(name, _ABSENT)
    return type(owner) if name == "__class__" else vars(owner).get(name, _ABSENT)


@functools.cache
def or_original(part: type[Any], original, activations: frozenset = frozenset()):
    """The forward of the class `part`, but `original` where the part would not compute the same.

    That is where the conditions of the class (part.py) say so, where more or fewer arguments come than it takes or one
    is None, and where the module holds an activation that is none of `activations`, unless that is empty, or one with
    hooks.
    """
    name = list(inspect.signature(original).parameters)[1]
    taken = list(inspect.signature(part.forward).parameters.values())[1:]
    most, least = len(taken), sum(parameter.default is parameter.empty for parameter in taken)
    conditions = part_of(part)  # type: ignore[arg-type]  # a class can be hashed
    kernels, keep, dtype = conditions.kernels, conditions.keep, conditions.dtype
    own = as_told(original) if issubclass(part, Replayable) else original
    takes_one = least <= 1 <= most

    @functools.wraps(part.forward)
    def call(self, *args, **kwargs):
        x = args[0] if args else kwargs.get(name)
        if takes_one and len(args) == 1 and not kwargs:  # as nearly all calls are
            fits = x is not None
        else:
            fits = least <= len(args) + len(kwargs) <= most and all(a is not None for a in (x, *args, *kwargs.values()))
        if not fits or not kernels_cover(x, kernels) or activations and not runs_activation(self, activations):
            return own(self, *args, **kwargs)
        if keep is not None and keep(self, True):
            return own(self, *args, **kwargs)
        if dtype is not None and (x := dtype(self, x)) is None:
            return own(self, *args, **kwargs)
        kwargs.pop(name, None)
        return part.forward(self, x, *args[1:], **kwargs)

    vars(call)["liger_original"] = original
    return call


def in_place_of(part, original, rotary: bool):
    """The function `part` instead of `original`, which may be a rotary embedding."""
    return (instead_of if rotary else function_or_original)(part, original)


@functools.cache
def function_or_original(part, original):
    """The function `part`, but `original` where it returns NotImplemented."""

    @functools.wraps(part)
    def call(*args, **kwargs):
        result = part(*args, **kwargs)
        return original(*args, **kwargs) if result is NotImplemented else result

    call.liger_original = original
    return call


class _Waiting(threading.local):
    norms: Any = None


#: The norms of q and k that wait for the rotation (rotations.py), in this thread.
waiting = _Waiting()


@functools.cache
def instead_of(part, original):
    """The rotary embedding `part` with the parameters of `original`; `original` where there are no kernels for its
    arguments, where its tables are not laid out as [batch, seq, columns], or [seq, columns] under unsqueeze_dim=0, and
    where q and k have other dimensions than four.
    """
    parameters = inspect.signature(original).parameters
    names, first = list(parameters), next(iter(parameters))
    second, plain = names[1], "unsqueeze_dim" not in parameters
    usual = names[:4] == list(inspect.signature(part).parameters)[:4] and names[2:4] == ["cos", "sin"]

    @functools.wraps(part)
    def call(*args, **kwargs):
        if usual and len(args) == 4 and not kwargs:  # as nearly all calls are
            q, k, cos, sin = args
            if not torch.compiler.is_compiling() and (norms := waiting.norms) is not None:
                waiting.norms = None
                return norms.rotate(call, q, k, cos, sin)
            if q.dtype is cos.dtype is k.dtype is sin.dtype and kernels_cover(q, ROPE_KERNELS):
                if plain or q.dim() == 4 and cos.dim() in (3, 4):
                    return part(q, k, cos, sin)
        given = {**dict(zip(names, args)), **kwargs}
        if not kernels_cover(given[first], ROPE_KERNELS):
            return original(*args, **kwargs)
        dtypes = {value.dtype for value in given.values() if _is_real(value)}
        if len(dtypes) > 1:
            # Most originals give what torch promotes to, some the first argument's dtype: the original says which.
            results = None if torch.compiler.is_compiling() else _result_dtypes(original, given)
            if results == {torch.float32}:
                given |= {name: given[name].float() for name in (first, second)}
            elif results != {given[first].dtype} or given[second].dtype != given[first].dtype:
                return original(*args, **kwargs)
        if not plain:
            place, dims = given.get("unsqueeze_dim", 1), (given[first].dim(), given["cos"].dim())
            if place == 0 and dims == (4, 2):
                given["unsqueeze_dim"] = 1
            elif place not in (1, 2) or dims not in ((4, 3), (4, 4)):
                return original(*args, **kwargs)
        return part(**given)

    vars(call).update(liger_original=original, liger_part=part)
    return call


def _is_real(value):
    return isinstance(value, torch.Tensor) and value.is_floating_point()


_results: dict = {}


def _result_dtypes(function, arguments):
    """The dtypes of a function's results for arguments of these dtypes, from a run without numbers; None where it
    fails."""
    key = function, tuple(value.dtype if _is_real(value) else None for value in arguments.values())
    if key not in _results:
        tensors = {name: value for name, value in arguments.items() if isinstance(value, torch.Tensor)}
        made = {name: torch.empty(t.shape, dtype=t.dtype, device="meta") for name, t in tensors.items()}
        try:
            with torch.no_grad():
                _results[key] = {result.dtype for result in function(**{**arguments, **made})}
        except Exception:  # what the original raises, it raises again where it runs
            _results[key] = None
    return _results[key]


def function_like(function, code=None, namespace=None, closure=None):
    """A copy of a function, with other code, globals or cells where given."""
    new = types.FunctionType(
        code or function.__code__, namespace or function.__globals__, function.__name__, function.__defaults__,
        function.__closure__ if closure is None else closure,
    )  # fmt: skip
    for name in ("__kwdefaults__", "__qualname__", "__doc__", "__module__", "__annotations__"):
        setattr(new, name, getattr(function, name))
    new.__dict__.update(function.__dict__)
    return new


def redecorated(function, make):
    """What decorators have made of a function, made of make(that function); None where that is None, or where a
    decorator does not hold what it wraps in a cell."""
    if (inner := getattr(function, "__wrapped__", None)) is None:
        return make(function)
    cells, copy, found = list(function.__closure__ or ()), redecorated(inner, make), False
    for i, cell in enumerate(cells):
        if cell.cell_contents is inner:
            cells[i], found = types.CellType(copy), True
    if copy is None or not found:
        return None
    new = function_like(function, closure=tuple(cells))
    new.__wrapped__ = copy
    return new


def names_in(function) -> set[str]:
    """The attributes and globals that the code of a function names, or that of what its decorators wrap."""
    return set(getattr(getattr(inspect.unwrap(function), "__code__", None), "co_names", ()))


def with_globals(function, names: dict):
    """A copy of `function`, or of what its decorators wrap, that has `names` among its globals; None if it has none."""

    def make(inner):
        # Without the module's name torch.compile takes the globals from here, not from the module.
        namespace = {name: value for name, value in inner.__globals__.items() if name != "__name__"} | names
        return function_like(inner, namespace=namespace)

    return redecorated(function, make)


@torch.compiler.disable
def replace_class(module, part, edits: Edits, **attributes) -> None:
    """Turn a live module into the subclass of its class in which `part` comes first, and set attributes on it.

    Unlike a method bound to the instance, a class survives copy.deepcopy, pickle and nn.DataParallel's replicas.
    """
    for name, value in attributes.items():
        edits.set(module, name, value)
    places = kept_forwards(module)
    new = variant(type(module), part)  # type: ignore[arg-type]  # a class can be hashed
    edits.set(module, "__class__", new)
    if "_old_forward" in vars(module):
        edits.set(module, "_old_forward", types.MethodType(new.forward, module))
    for owner, name in places:
        edits.set(owner, name, types.MethodType(new.forward, module))


def kept_forwards(module: Any) -> list[tuple]:
    """Where a forward that transformers' parallelism has put on the instance keeps the one that was there before, for
    replace_class to change: (owner, name of an attribute). Empty if there is no such forward, or if that is not the
    class's.

    Tensor parallelism keeps it in a cell of the new forward, expert parallelism in the objects that dispatch tokens.
    """
    forward: Any = vars(module).get("forward")
    if not (getattr(forward, "__module__", None) or "").startswith(_PARALLEL):
        return []
    of_class = type(module).forward
    found, owners = [], [(cell, "cell_contents") for cell in forward.__closure__ or ()]
    while owners:
        owner, name = owners.pop()
        value = getattr(owner, name)
        if isinstance(value, types.MethodType) and value.__self__ is module:
            if value.__func__ is not of_class:
                return []
            found.append((owner, name))
        elif value is not module and type(value).__module__.startswith(_PARALLEL):
            owners += [(value, name) for name in vars(value)]
    return found


def own_attributes(module, part, **preset) -> dict:
    """What the forward of the class `part` reads and a module of another class lacks."""
    attributes = part_of(part).attributes
    return {} if attributes is None else attributes(part, module, **preset)


def obstacle(module, cls, part, activations):
    """Why a module must keep its forward instead of that of the class `part`, or None."""
    if type(module).forward is not cls.forward:
        return f"{type(module).__name__} defines its own forward"
    if has_replaced_forward(module) and not kept_forwards(module):
        return "its forward was replaced on the instance"
    return unfit(module, part, activations)


def is_one_operator(cls) -> bool:
    """Whether the forward of a class of modules is one operator where its submodules are what they seem to be."""
    return getattr(cls, "liger_whole", False)


def replacement(original, swap, target, whole=True, trial=None):
    """What a name of a modeling module is bound to in place of `original`; see ReplacedModule."""
    part = swap.load(target)
    if not isinstance(part, type):
        return in_place_of(part, as_written(original), swap.switch == "rope")
    if not isinstance(original, type):
        return part
    part = ReplacedModule(part, swap.activations, trial, whole=whole)
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
class NewForward:
    """The part whose forward is what `make` makes for a class, or None. The class keeps its name, by which models know
    layers."""

    make: Callable[[Any], Callable[..., Any] | None]

    def __call__(self, base):
        return base.__name__, (base,), {"forward": self.make(base)}


@dataclass(frozen=True)
class ReplacedModule:
    """The part that computes as the class `part` does, and as the original where there are no kernels.

    A module of it is made as the original is. One that comes out with another activation than `activations` stays an
    original, and so does one of which `trial`, for a class of unknown source, says that its forward computes something
    else. `kinds` are the classes of activations where there are no such names, because a module was tried. Without
    `whole` a gated MLP calls its submodules.
    """

    part: type
    activations: tuple[str, ...] = ()
    trial: Callable[..., bool] | None = None
    kinds: frozenset = frozenset()
    whole: bool = True

    def __call__(self, base):
        @functools.wraps(base.__init__)
        def __init__(module, *args, **kwargs):
            base.__init__(module, *args, **kwargs)
            reason = unfit(module, self.part, self.activations)
            if not reason and self.trial is not None and not self.trial(self.part, module, base.forward):
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
        named = self.part
        if getattr(self.part, "liger_named_as_original", False):
            body["_get_name"] = lambda module: self.part.__name__  # in a printed model
            named = base
        return named.__name__, (self.part, base), body
