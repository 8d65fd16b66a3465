"""The engine that applies a row of the table of families to Hugging Face's classes or to one model."""

import functools
import inspect
from dataclasses import dataclass, field

from torch import nn
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

from liger_kernel.transformers.causal_lm import (
    FSDPModule,
    FusedLoss,
    describe,
    fused_forward,
    has_own_loss,
    is_fused,
    original_forward,
    prepare_head,
    preparing_head,
)
from liger_kernel.transformers.families import FAMILIES, MODEL_TYPES, Family
from liger_kernel.transformers.graft import Edits, become, has_replaced_forward, is_variant, kernels_cover, or_original, variant, warn_once
from liger_kernel.transformers.model import loss_utils
from liger_kernel.transformers.rms_norm import LigerRMSNorm

_LOSSES = {"cross_entropy", "fused_linear_cross_entropy"}
_CLASS_LOSS = staticmethod(loss_utils.causal_lm_loss)
_MISSING = "the installed transformers has none"


@dataclass(frozen=True)
class Replacement:
    """What stands in for `name`; `count` is the number of modules, None for a class or a function."""

    switch: str
    name: str
    by: str
    count: int | None = None

    def __str__(self):
        where = "" if self.count is None else f" ({self.count} module{'s' * (self.count != 1)})"
        return f"{self.switch}: {self.name} -> {self.by}{where}"


@dataclass(frozen=True)
class Skip:
    """What was asked for and not done, and why."""

    switch: str
    name: str
    reason: str

    def __str__(self):
        return f"{self.switch}: {self.name} skipped: {self.reason}"


@dataclass
class Report:
    """What a patch did; `replaced` includes what an earlier patch had replaced already."""

    family: str
    replaced: list[Replacement] = field(default_factory=list)
    skipped: list[Skip] = field(default_factory=list)
    edits: Edits = field(default_factory=Edits, repr=False)

    def undo(self) -> None:
        """Restore everything that this patch has replaced."""
        self.edits.undo()

    def __str__(self):
        lines = [f"liger_kernel: {self.family}"]
        lines += [f"  {entry}" for entry in (*self.replaced, *self.skipped)]
        return "\n".join(lines)


def patch(family: str | Family, model: nn.Module | None = None, strict: bool = False, **switches) -> Report:
    """Replace the parts of a model family by the operators of this package.

    Without a model, names of the family's modeling module are rebound, for models that are created afterwards. With a
    model, only its modules are changed, and the module's functions (rope), which all its models share.

    Args:
        family: a key of FAMILIES or a row of the caller's own.
        model: a model of that family, or a module that holds one.
        strict: raise RuntimeError, with everything undone, if something that was asked for had to be skipped.
        switches: the family's switches; None means off.

    Raises ValueError for an unknown family, TypeError for an unknown switch or a model of another family, and
    AssertionError if both `cross_entropy` and `fused_linear_cross_entropy` are on.
    """
    row = family if isinstance(family, Family) else FAMILIES.get(family)
    if row is None:
        raise ValueError(f"unknown model family {family!r}; known are {', '.join(FAMILIES)}")
    on = _enabled(row, switches)
    if model is not None:
        _check_family(row, model)
    report = Report(row.name)
    try:
        _Patcher(row, model, on, report).run()
        if strict and report.skipped:
            raise RuntimeError(str(report))
    except BaseException:
        report.undo()
        raise
    return report


def _enabled(row, switches):
    unknown = [name for name in switches if name not in row.switches]
    if unknown:
        raise TypeError(
            f"unexpected keyword {', '.join(map(repr, unknown))} for {row.name}; "
            f"valid are {', '.join(row.switches)} and model"
        )
    on = {name for name, value in {**row.switches, **switches}.items() if value}
    assert not {"cross_entropy", "fused_linear_cross_entropy"} <= on, (
        "cross_entropy and fused_linear_cross_entropy cannot both be True: choose fused_linear_cross_entropy, which "
        "does not materialise the logits, unless you need them during training"
    )
    return on


def _check_family(row, model):
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}, not a torch.nn.Module")
    if any(_classes(row, module) for module in model.modules()):
        return
    own = MODEL_TYPES.get(getattr(getattr(model, "config", None), "model_type", None))
    advice = f"use apply_liger_kernel_to_{own.name}" if own else "its type is not supported"
    raise TypeError(f"apply_liger_kernel_to_{row.name} got a {type(model).__name__}: {advice}")


def _classes(row, module):
    """The family's classes that a module derives from, by name: names survive a reload of the modeling module."""
    return {cls.__name__: cls for cls in type(module).__mro__ if cls.__module__ == row.module}


class _Patcher:
    def __init__(self, row, model, on, report):
        self.row, self.model, self.on, self.report, self.edits = row, model, on, report, report.edits
        self.namespace = row.namespace()
        self.modules = [] if model is None else list(model.modules())

    def run(self):
        if reason := self._uncovered():
            for switch in self.row.switches:
                if switch in self.on:
                    self._skip(switch, self.row.name, reason)
            return
        for name, swap in self.row.swaps.items():
            if swap.switch in self.on:
                if self.model is None or not isinstance(swap.load(), type):
                    self._rebind(swap, name)
                else:
                    self._convert(swap, name)
        for name, spec in self.row.loss.items():
            for switch in sorted(_LOSSES & self.on):
                if self.model is None:
                    self._class_loss(switch, name, spec)
                else:
                    self._model_loss(switch, name, spec)

    def _uncovered(self):
        parameters = () if self.model is None else self.model.parameters()
        # One-byte floats store quantised weights; such a model computes in another type.
        first = next((p for p in parameters if p.is_floating_point() and p.dtype.itemsize > 1), None)
        if first is None or kernels_cover(first):
            return None
        return f"there are no kernels for {first.dtype} on {first.device.type}"

    def _done(self, switch, name, by, count=None):
        self.report.replaced.append(Replacement(switch, name, by, count))

    def _skip(self, switch, name, reason):
        entry = Skip(switch, name, reason)
        if entry not in self.report.skipped:
            self.report.skipped.append(entry)

    def _rebind(self, swap, name):
        if hasattr(self.namespace, name):
            self.edits.set(self.namespace, name, _replacement(getattr(self.namespace, name), swap))
            self._done(swap.switch, name, swap.load().__name__)
        else:
            self._skip(swap.switch, name, _MISSING)

    def _convert(self, swap, name):
        part = swap.load()
        done = skipped = 0
        for module in self.modules:
            cls = _classes(self.row, module).get(name)
            if isinstance(module, part):
                done += 1
            elif cls and (reason := _obstacle(module, cls, swap)):
                self._skip(swap.switch, name, reason)
                skipped += 1
            elif cls:
                become(module, StandIn(part, swap.activations), self.edits, **own_attributes(module, part))
                done += 1
        if done:
            self._done(swap.switch, name, part.__name__, done)
        elif not skipped:
            self._skip(swap.switch, name, "the model has none")

    def _class_loss(self, switch, name, spec):
        cls = getattr(self.namespace, name, None)
        if cls is None:
            self._skip(switch, name, _MISSING)
        elif switch == "cross_entropy":
            self.edits.set(cls, "_loss_function", _CLASS_LOSS)
            self._done(switch, name, "causal_lm_loss")
        else:
            if not is_fused(cls):
                self.edits.set(cls, "forward", fused_forward(cls.forward, spec))
                self.edits.set(cls, "post_init", preparing_head(cls.post_init, spec))
            self._done(switch, name, "lce_forward")

    def _model_loss(self, switch, name, spec):
        convert = self._set_loss if switch == "cross_entropy" else self._fuse
        found = False
        for module in self.modules:
            cls = _classes(self.row, module).get(name)
            # The loss on logits is also that of a model which holds a language model and computes the loss itself.
            if cls or (switch == "cross_entropy" and _hands_logits_over(module)):
                found, kind = True, name if cls else type(module).__name__
                reason, by = convert(module, cls, spec)
                if reason:
                    self._skip(switch, kind, reason)
                else:
                    self._done(switch, kind, by, 1)
        if not found:
            self._skip(switch, name, f"the {type(self.model).__name__} holds none")

    def _set_loss(self, owner, cls, spec):
        if LOSS_MAPPING.get(owner.loss_type) is not ForCausalLMLoss or has_own_loss(owner):
            return f"it computes its loss with {owner.loss_function.__name__}", None
        self.edits.set(owner, "_loss_function", loss_utils.causal_lm_loss)
        return None, "causal_lm_loss"

    def _fuse(self, owner, cls, spec):
        head = getattr(owner, spec.head, None)
        sharded = any(isinstance(module, FSDPModule) for module in self.modules)
        if original_forward(type(owner)) is not original_forward(cls):
            return f"{type(owner).__name__} has a forward of its own", None
        if has_own_loss(owner):
            return f"it computes its loss with {owner.loss_function.__name__}", None
        if not prepare_head(head, self.edits, sharded):
            return f"{spec.head} is {describe(head)}", None
        if not is_fused(type(owner)):
            become(owner, FusedLoss(spec), self.edits)
        return None, "lce_forward"


def _hands_logits_over(module):
    """Whether a module computes its loss from its logits by transformers' loss of causal language models."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return LOSS_MAPPING.get(getattr(module, "loss_type", None)) is ForCausalLMLoss and "loss_function" in getattr(code, "co_names", ())


def _obstacle(module, cls, swap):
    """Why a module must keep its forward, or None."""
    if type(module).forward is not cls.forward:
        return f"{type(module).__name__} has a forward of its own"
    if has_replaced_forward(module):
        return "its forward was replaced on the instance"
    return _other_activation(module, swap.activations)


def _other_activation(module, activations):
    from transformers.activations import ACT2FN

    activation = getattr(module, "act_fn", None) or getattr(module, "activation_fn", None)
    if activations and type(activation) not in {type(ACT2FN[name]) for name in activations}:
        return f"its activation is {type(activation).__name__}, not {activations[0]}"
    return None


def _replacement(original, swap):
    """What a name of a modeling module is bound to in place of `original`."""
    part = swap.load()
    if not isinstance(part, type):
        return or_original(part, getattr(original, "liger_original", original))
    if not isinstance(original, type):
        return part
    part = StandIn(part, swap.activations)
    return original if is_variant(original, part) else variant(original, part)


@dataclass(frozen=True)
class StandIn:
    """The part that computes as the class `part` does, and as the original where there are no kernels.

    A module of it is made as the original is. One that comes out with another activation than `activations` stays an
    original.
    """

    part: type
    activations: tuple[str, ...] = ()

    def __call__(self, base):
        @functools.wraps(base.__init__)
        def __init__(module, *args, **kwargs):
            base.__init__(module, *args, **kwargs)
            if reason := _other_activation(module, self.activations):
                module.__class__ = base
                warn_once(f"{base.__name__} is not replaced: {reason}")
            else:
                vars(module).update(own_attributes(module, self.part))

        forward = or_original(self.part.forward, base.forward, place=1)
        return self.part.__name__, (self.part, base), {"__init__": __init__, "forward": forward}


def own_attributes(module, part, **preset) -> dict:
    """What the forward of a norm `part` reads and `module` lacks: its own eps, and the rest from `preset` or the part's defaults."""
    if not issubclass(part, LigerRMSNorm):
        return {}
    defaults = {name: parameter.default for name, parameter in inspect.signature(part).parameters.items()} | preset
    eps = (getattr(module, name, None) for name in ("variance_epsilon", "eps"))
    found = next((value for value in eps if value is not None), defaults["eps"])
    return {"variance_epsilon": found, **{name: defaults.get(name) for name in ("offset", "casting_mode", "in_place", "row_mode")}}
