"""Changes to modules and classes that can be taken back, and what else runs when a module is called."""

import functools
import importlib
import inspect
import logging
import sys
import types

import torch
from torch._subclasses import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.nn.modules import module as nn_module

from liger_kernel._library import ops
from liger_kernel.transformers.layer_norm import LigerLayerNorm
from liger_kernel.transformers.rms_norm import LigerRMSNorm

logger = logging.getLogger(__name__)


@functools.cache
def warn_once(message) -> None:
    logger.warning(message)


_ABSENT = object()
# The last two stand for the others where torch.export traces.
_DENSE = (torch.Tensor, torch.nn.Parameter, FakeTensor, FunctionalTensor)


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
            elif old is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, old)


def _current(owner, name):
    return type(owner) if name == "__class__" else vars(owner).get(name, _ABSENT)


_AFTER = ("_forward_hooks", "_backward_hooks", "_backward_pre_hooks")
_HOOKS = ("_forward_pre_hooks", *_AFTER)
_GLOBAL = {name: getattr(nn_module, "_global" + name) for name in _HOOKS}

# Whose hooks hand on what a forward returns, whatever it is: they gather weights, or watch.
_HANDING_ON = ("torch.distributed.fsdp.", "torch.distributed._composable.", "torch.utils.", "accelerate.", "deepspeed.")


def is_bare(module) -> bool:
    """Whether a call of `module` runs the forward of its class and nothing else.

    It does not where the instance has a forward of its own (accelerate's offloading) or a compiled one, and where the
    module, or all modules, have hooks. A parametrisation changes the class, which is the caller's to compare.
    """
    own = module.__dict__
    if "forward" in own or own.get("_compiled_call_impl"):
        return False
    for name in _HOOKS:
        if own[name] or _GLOBAL[name]:
            return False
    return True


def result_changed_by(module, but=()):
    """What may change the result of a call of `module` or that result's gradient, or None: it must see a usual result.

    Code of the modules whose names begin with one of `but` is left out.
    """
    if has_replaced_forward(module):
        own = module.__dict__["forward"]
        # One of this package, which kernels has put there, hands on what is asked for.
        if getattr(own, "liger_original", None) is not type(module).forward and not _is_of(own, but):
            return own
    found = [hook for hooks in (module.__dict__, _GLOBAL) for name in _AFTER for hook in hooks[name].values()]
    steps = [module._hf_hook] if "_old_forward" in module.__dict__ else []
    for step in steps:
        steps += getattr(step, "hooks", ())
        found.append(step.post_forward)
    return next((hook for hook in found if not _hands_on(hook) and not _is_of(hook, but)), None)


def _hands_on(hook) -> bool:
    return _is_of(hook, _HANDING_ON)


def _is_of(hook, modules) -> bool:
    # A partial object's own module is functools.
    return (getattr(getattr(hook, "func", hook), "__module__", None) or "").startswith(tuple(modules))


def has_replaced_forward(module) -> bool:
    """Whether somebody has put a forward on the instance; accelerate's hooks do, and call `_old_forward` from it."""
    own = module.__dict__
    if "_old_forward" in own:
        return (
            not _hands_on(own["forward"]) or getattr(own["_old_forward"], "__func__", None) is not type(module).forward
        )
    return "forward" in own


_DTYPES = frozenset((torch.float32, torch.float16, torch.bfloat16))


_covered = set()


@torch.compiler.assume_constant_result
def _has_kernels(device, kernels):
    key = device, kernels
    if key not in _covered and ops.has_kernels(device, list(kernels)):  # a backend may still be plugged in
        _covered.add(key)
    return key in _covered


def kernels_cover(tensor, kernels: tuple[str, ...] = ()) -> bool:
    """Whether the library has all of these kernels, or any if none is named, for the tensor's dtype and device."""
    return tensor.dtype in _DTYPES and (tensor.is_meta or _has_kernels(tensor.device, kernels))


#: What runs forward and backward of a gated activation, a rotary embedding, and the loss in a head, beside GEMMs.
GATED_KERNELS, ROPE_KERNELS = ("gated_forward", "gated_backward"), ("rope",)
HEAD_KERNELS = ("cross_entropy_norm", "cross_entropy", "add_partials", "scale_rows", "stream_capturing")


def is_dense(weight, kernels: tuple[str, ...] = ()) -> bool:
    """Whether a weight is a tensor as torch has them, also while torch.export traces: no shard, nothing quantised; and
    there are these kernels for it."""
    return type(weight) in _DENSE and kernels_cover(weight, kernels)


@functools.cache
def or_original(part: type, original):
    """The forward of the class `part`, but `original` where the part would not compute the same.

    That is where there are none of `part.kernels` for the first argument, where more arguments come than the part
    takes, where `part.kept_by` gives a reason, and where `part.as_original`, which gives the first argument the dtype
    of the original's result, has none.
    """
    name, kernels = list(inspect.signature(original).parameters)[1], getattr(part, "kernels", ())
    most = len(inspect.signature(part.forward).parameters) - 1
    kept_by, as_original = (getattr(part, attribute, None) for attribute in ("kept_by", "as_original"))

    @functools.wraps(part.forward)
    def call(self, *args, **kwargs):
        x = args[0] if args else kwargs.get(name)
        if x is None or len(args) + len(kwargs) > most or not kernels_cover(x, kernels):
            return original(self, *args, **kwargs)
        if kept_by is not None and kept_by(self):
            return original(self, *args, **kwargs)
        if as_original is not None and (x := as_original(self, x)) is None:
            return original(self, *args, **kwargs)
        return part.forward(self, x, *args[1:], **{key: value for key, value in kwargs.items() if key != name})

    call.liger_original = original
    return call


@functools.cache
def instead_of(part, original):
    """The rotary embedding `part` with the parameters of `original`; `original` where there are no kernels for its
    arguments, where its tables are not laid out as [batch, seq, columns], or [seq, columns] under unsqueeze_dim=0, and
    where q and k have other dimensions than four.
    """
    parameters = inspect.signature(original).parameters
    names, first = list(parameters), next(iter(parameters))
    second, plain = names[1], "unsqueeze_dim" not in parameters

    @functools.wraps(part)
    def call(*args, **kwargs):
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

    call.liger_original = original
    return call


def _is_real(value):
    return isinstance(value, torch.Tensor) and value.is_floating_point()


_results = {}


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


def with_globals(function, names: dict):
    """A copy of `function`, or of what its decorators wrap, that has `names` among its globals; None if it has none."""
    inner, cells = getattr(function, "__wrapped__", None), list(function.__closure__ or ())
    if inner is None:
        # Without the module's name torch.compile takes the globals from here, not from the module.
        namespace = {name: value for name, value in function.__globals__.items() if name != "__name__"} | names
    else:
        namespace, copy, found = function.__globals__, with_globals(inner, names), False
        for i, cell in enumerate(cells):
            if cell.cell_contents is inner:
                cells[i], found = types.CellType(copy), True
        if copy is None or not found:
            return None
    new = types.FunctionType(
        function.__code__, namespace, function.__name__, function.__defaults__, tuple(cells) or None
    )
    new.__kwdefaults__, new.__qualname__, new.__doc__, new.__module__ = (
        function.__kwdefaults__,
        function.__qualname__,
        function.__doc__,
        function.__module__,
    )
    new.__annotations__ = function.__annotations__
    new.__dict__.update(function.__dict__)
    if inner is not None:
        new.__wrapped__ = copy
    return new


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


def own_attributes(module, part, **preset) -> dict:
    """What the forward of a norm `part` reads and `module` lacks: its eps, and the rest from `preset` or by default."""
    if issubclass(part, LigerLayerNorm):
        return {"variance_epsilon": module.eps, "hidden_size": module.normalized_shape[0]}
    if not issubclass(part, LigerRMSNorm):
        return {}
    defaults = {name: parameter.default for name, parameter in inspect.signature(part).parameters.items()} | preset
    eps = (getattr(module, name, None) for name in ("variance_epsilon", "eps"))
    found = next((value for value in eps if value is not None), defaults["eps"])
    return {
        "variance_epsilon": found,
        **{name: defaults.get(name) for name in ("offset", "casting_mode", "in_place", "row_mode")},
    }


@functools.cache
def variant(base: type, part) -> type:
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


def _address(base):
    """The class, or where it stands if pickle would find the variant that its name means now."""
    named = getattr(sys.modules.get(base.__module__), base.__name__, None)
    rebound = isinstance(named, type) and named is not base and base in named.__bases__ and "liger_part" in vars(named)
    return (base.__module__, base.__name__) if rebound else base


def _new(base, part):
    if isinstance(base, tuple):
        base = getattr(importlib.import_module(base[0]), base[1])
    cls = base if is_variant(base, part) else variant(base, part)
    return cls.__new__(cls)
