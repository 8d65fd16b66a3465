"""The engine that applies a row of the table of families to Hugging Face's classes or to one model."""

import functools
import importlib
import inspect
from dataclasses import dataclass, field

from torch import nn
from transformers import PreTrainedModel

from liger_kernel.operators.coverage import has_replaced_forward, kernels_cover
from liger_kernel.transformers.causal_lm import (
    FusedLoss,
    fused_forward,
    inner_obstacle,
    is_fused,
    names_in,
    names_of_loss,
    no_logits_of,
    original_forward,
    own_class_loss,
    own_loss,
    prepare_path,
    same_code,
    uses_standard_loss,
)
from liger_kernel.transformers.head import FSDPModule, describe, head_of, prepare_head
from liger_kernel.transformers.lora import follow_later, watch_adapters
from liger_kernel.transformers.model import loss_utils
from liger_kernel.transformers.patching import attention, layers, masks, mixers, numeric, ones, rotations
from liger_kernel.transformers.patching.by_source import completed, original_class, tables_fit
from liger_kernel.transformers.patching.families import FAMILIES, MODEL_TYPES, PARTS, CausalLM, Family, Swap
from liger_kernel.transformers.patching.formulas import as_written, find, is_known
from liger_kernel.transformers.patching.place import (
    Edits,
    ReplacedCall,
    ReplacedModule,
    is_one_operator,
    obstacle,
    own_attributes,
    replace_class,
    replacement,
    with_globals,
)
from liger_kernel.transformers.patching.report import Replacement, Report, Skip
from liger_kernel.transformers.rms_norm import LigerRMSNorm
from liger_kernel.utils import warn_once

_LOSSES = {"cross_entropy", "fused_linear_cross_entropy"}
_CLASS_LOSSES = staticmethod(loss_utils.causal_lm_loss), staticmethod(loss_utils.masked_lm_loss)
_MISSING = "the installed transformers has none"
UNKNOWN = "its source is none of those that the replacement was compared with"
TABLES = "it is not known how its tables are laid out"


def patch(
    family: str | Family, model: nn.Module | None = None, strict: bool = False, **switches: bool | None
) -> Report:
    """Replace the parts of a model family by the operators of this package.

    Without a model, names of the family's modeling module are rebound, for models that are created afterwards. With a
    model, only its modules are changed. A part whose source is not known keeps its forward; of a row that is not in
    FAMILIES, one that computes something else on random input.

    Args:
        family: a key of FAMILIES or a row of the caller's own.
        model: a model of that family, or a module that holds one.
        strict: raise RuntimeError, with everything undone, if something that was asked for had to be skipped.
        switches: the family's switches; None means off.

    Raises ValueError for an unknown family, TypeError for an unknown switch or a model of another family, and
    AssertionError if both `cross_entropy` and `fused_linear_cross_entropy` are turned on; one that is on by default
    gives way to the other.
    """
    row = family if isinstance(family, Family) else FAMILIES.get(family)
    if row is None:
        raise ValueError(f"unknown model family {family!r}; known are {', '.join(FAMILIES)}")
    on = _enabled(row, switches)
    if model is not None:
        _check_family(row, model)
    report = Report(row.name)
    try:
        if row.by_source and not row.swaps:  # row_of has those of a model
            row = completed(row, model)
        _Patcher(row, model, on, report, {name for name, value in switches.items() if value}).run()
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
    if "cross_entropy" in on and "fused_linear_cross_entropy" not in switches:
        on.discard("fused_linear_cross_entropy")
    if {"cross_entropy", "fused_linear_cross_entropy"} <= on:
        raise AssertionError(  # what callers of the API catch
            "cross_entropy and fused_linear_cross_entropy cannot both be True: choose fused_linear_cross_entropy, "
            "which does not materialise the logits, unless you need them during training"
        )
    return on


class WrongModel(TypeError, ValueError):
    """A model that a family's function cannot patch."""


def _check_family(row, model):
    if not isinstance(model, nn.Module):
        raise WrongModel(f"model is a {type(model).__name__}, not a torch.nn.Module")
    if any(_classes((row.module,), module) for module in model.modules()):
        return
    own = MODEL_TYPES.get(getattr(getattr(model, "config", None), "model_type", None))
    advice = f"use apply_liger_kernel_to_{own.name}" if own else "its type is not supported"
    raise WrongModel(f"apply_liger_kernel_to_{row.name} got a {type(model).__name__}: {advice}")


def _classes(names, module):
    """The classes of these modules that a module derives from, by name: names survive a reload of a modeling module."""
    return {cls.__name__: cls for cls in type(module).__mro__ if cls.__module__ in names}


@functools.cache
def _foreign(name):
    """The class whose full name this is."""
    home, _, name = name.rpartition(".")
    return getattr(importlib.import_module(home), name)


def _class_called(name, modules, module):
    """The class that a row calls `name`, where the module is of it."""
    if "." not in name:
        return _classes(modules, module).get(name)
    cls = _foreign(name)
    return (
        cls
        if type(module) is cls or vars(type(module)).get("liger_part") and type(module).__mro__[2:3] == (cls,)
        else None
    )


class _Patcher:
    def __init__(self, row, model, on, report, named=frozenset()):
        self.named = named
        self.row, self.model, self.on, self.report, self.edits = row, model, on, report, report.edits
        self.namespace = row.namespace() if model is None else None
        self.modules = [] if model is None else list(model.modules())
        self.swaps = {}  # those that are on
        for name, swap in row.pairs():
            if swap.switch in on:
                self.swaps.setdefault(name, []).append(swap)
        self.holds = row.composite or bool(row.holds)
        self.deferred = [name for name, swaps in self.swaps.items() if swaps[0].deferred or "." in name]

    def run(self):
        if reason := self._uncovered():
            for switch in self.row.switches:
                if switch in self.on:
                    self.report.skip(switch, self.row.name, reason)
            return self._warn_of_the_idle()
        for switch in self.on & self.row.without.keys():
            self.report.skip(switch, self.row.name, self.row.without[switch])
        for name, swaps in self.swaps.items():
            if self.model is None:
                self._rebind(swaps, name)
            elif isinstance(swaps[0].load(), type):
                self._convert(swaps, name)
            else:
                self._convert_callers(swaps, name)
        self._layers()
        if self.model is None:
            self._class_losses()
        else:
            self._model_losses()
        if "lora" in self.on:
            self._adapters()
        if self.row.holds or not self.row.whole:  # a type without a row has all switches
            self._name_the_idle()
            self._warn_of_the_idle()

    def _uncovered(self):
        parameters = () if self.model is None else self.model.parameters()
        # One-byte floats store quantised weights; such a model computes in another type.
        first = next((p for p in parameters if p.is_floating_point() and p.dtype.itemsize > 1), None)
        if first is None or kernels_cover(first):
            return None
        return f"there are no kernels for {first.dtype} on {first.device.type}"

    def _name_the_idle(self):
        """Report the switches that the caller turned on and that found nothing; models that a model holds may have what
        it has not."""
        told = {entry.switch for entry in (*self.report.replaced, *self.report.skipped)}
        names = {} if self.holds else dict(PARTS)
        names |= {swap.switch: name.rpartition(".")[2] for name, swap in reversed([*self.row.pairs()])}
        for switch in self.row.switches:
            if switch in self.on & self.named - told and switch in names:
                self.report.skip(switch, names[switch], _MISSING if self.model is None else "the model has none")

    def _warn_of_the_idle(self):
        """Say once of each switch that replaced nothing why not; a default without a counterpart is no news."""
        done = {entry.switch for entry in self.report.replaced}
        for entry in self.report.skipped:
            if entry.switch not in done and not (self.holds and entry.reason == UNKNOWN):
                where = "" if entry.name == self.row.name else f"{entry.name}: "
                warn_once(f"{entry.switch}=True has no effect on {self.row.name}: {where}{entry.reason}")

    def _targets(self, swaps, original, module=None):
        """(swap, target) of what stands for `original`: by its source, or in a caller's own row by its values."""
        known = [(swap, target) for swap in swaps for target in swap.targets if is_known(target, original)]
        if known or self.row.by_source:
            return known
        tried = [(swap, numeric.same_values(swap, as_written(original), module)) for swap in swaps]
        return [(swap, target) for swap, target in tried if target]

    def _tables_fit(self, home, original):
        """Whether a rotary function's tables are laid out as what stands for it reads them."""
        formula = find(original)
        return formula is None or formula.tables in (None, self.row.tables) or tables_fit(home, original)

    def _rebind(self, swaps, name):
        swap = swaps[0]
        if name in self.deferred and "." in name:
            for cls in self._loss_classes():
                self.report.note(swap.switch, f"{name.rpartition('.')[2]} of {cls.__name__}", swap.load().__name__)
            return
        original = getattr(self.namespace, name, None)
        if original is None:
            self.report.skip(swap.switch, name, _MISSING)
        elif not (targets := self._targets(swaps, original)):
            self.report.skip(swap.switch, name, UNKNOWN)
        elif not self._tables_fit(self.row.module, original):
            self.report.skip(swap.switch, name, TABLES)
        else:
            swap, target = targets[0]
            trial = None if is_known(target, original) else numeric.computes
            new = replacement(original, swap, target, "layers" in self.on, trial)
            self.report.rebind(self.namespace, name, new, swap.switch, name, swap.called(swap.load(target)))

    def _convert(self, swaps, name):
        short, parts = name.rpartition(".")[2], tuple(swap.load(target) for swap in swaps for target in swap.targets)
        for module in self.modules:
            cls = _class_called(name, self.row.modules, module)
            if cls is None:
                continue
            if isinstance(module, parts):
                self._note_again(module, swaps, short)
                continue
            targets = self._targets(swaps, cls, module)
            fits = [
                (swap, part := swap.load(target), obstacle(module, cls, part, swap.activations))
                for swap, target in targets or [(swaps[0], None)]
            ]
            swap, part, reason = next((fit for fit in fits if not fit[2]), fits[0])
            if not targets and (self.row.by_source or not reason):
                reason = UNKNOWN
            if reason:
                self.report.skip(swap.switch, name, reason)
                continue
            made = ReplacedModule(part, swap.activations, whole="layers" in self.on)
            self.report.convert(module, made, swap.switch, short, swap.called(part), **own_attributes(module, part))

    def _note_again(self, module, swaps, name):
        """Note what an earlier patch has made of a module."""
        swap = next(swap for swap in swaps if isinstance(module, tuple(map(swap.load, swap.targets))))
        by = module.liger_operator if swap.switch == "layers" else module._get_name()
        self.report.note(swap.switch, name, by, 1)

    def _convert_callers(self, swaps, name):
        """Give the modules whose forward calls a function of the family's module a forward that calls another."""
        swap = swaps[0]
        for module in self.modules:
            forward = inspect.unwrap(type(module).forward)
            classes = _classes(self.row.modules, module)
            if not classes or name not in names_in(forward) or name not in getattr(forward, "__globals__", ()):
                continue
            original = forward.__globals__[name]
            if hasattr(original, "liger_original"):
                self.report.note(swap.switch, name, original.__name__, 1)
                continue
            targets, reason = self._targets(swaps, original), None
            if not targets:
                reason = UNKNOWN
            elif not self._tables_fit(next(iter(classes.values())).__module__, original):
                reason = TABLES
            elif has_replaced_forward(module):
                reason = f"the forward of a {type(module).__name__} was replaced on the instance"
            elif with_globals(type(module).forward, {name: None}) is None:
                reason = f"the forward of {type(module).__name__} cannot be copied"
            if reason:
                self.report.skip(swap.switch, name, reason)
                continue
            swap, target = targets[0]
            self.report.convert(module, ReplacedCall(name, swap, target), swap.switch, name, swap.load(target).__name__)

    def _layers(self):
        """Fuse steps of layers, make masks without positions, hand documents to mixers, and choose attention."""
        owners = self.modules
        if self.model is None:  # what the modeling module defines, and does not import
            owners = [own for own in vars(self.namespace).values() if getattr(own, "__module__", 0) == self.row.module]
            owners = [own for own in owners if isinstance(own, type) and issubclass(own, nn.Module)]
            owners = [cls for cls in owners if "forward" in vars(cls) and "liger_part" not in vars(cls)]
        if "qk_norm" in self.on:
            rotations.fuse(owners, self.report)
        if "layers" in self.on:
            for name in self.swaps:
                if is_one_operator(cls := getattr(self.namespace, name, None)):
                    self.report.note("layers", name, cls.liger_operator)
            for module in self.modules:
                if is_one_operator(type(module)):
                    self.report.note("layers", original_class(module).__name__, module.liger_operator, 1)
            layers.fuse(owners, self.report)
        if "masks" in self.on:
            masks.count(owners, self.report)
            ones.use(self.model, self.report)
        if "mixers" in self.on:
            mixers.replace_rest(owners, self.namespace, self.report)
        if "attention" in self.on:
            attention.use_flash_attention(owners, self.report)

    def _loss_classes(self):
        return [cls for name in self.row.loss if (cls := getattr(self.namespace, name, None)) is not None]

    def _class_losses(self):
        for name, spec in self.row.loss.items():
            cls = getattr(self.namespace, name, None)
            if cls is None:
                for switch in () if self._loss_classes() else sorted(_LOSSES & self.on):
                    self.report.skip(switch, name, _MISSING)
                continue
            reason = no_logits_of(original_forward(cls), spec)
            if function := own_class_loss(cls):
                reason = names_of_loss(function)
            fused = "fused_linear_cross_entropy" in self.on and not reason
            for switch in sorted(_LOSSES & self.on):
                if reason:
                    self.report.skip(switch, name, reason)
                elif switch == "cross_entropy":
                    ours = _CLASS_LOSSES["ForMaskedLM" in name]  # transformers too goes by the name
                    self.report.rebind(cls, "_loss_function", ours, switch, name, ours.__func__.__name__)
                else:
                    if not is_fused(cls):
                        self.edits.set(cls, "forward", fused_forward(cls.forward, spec))
                    self.report.note(switch, name, "lce_forward")
            follows, sinks = "lora" in self.on and not fused, any(e.switch == "attention" for e in self.report.replaced)
            finish = AfterInit(self.row, spec if fused else None, tuple(self.deferred), follows, sinks)
            if finish.does_anything and getattr(cls.post_init, "liger_after_init", None) != finish:
                self.edits.set(cls, "post_init", finish.after(cls.post_init))

    def _model_losses(self):
        for switch in sorted(_LOSSES & self.on):
            convert = self._set_loss if switch == "cross_entropy" else self._fuse
            found = False
            for module in reversed(self.modules):  # a model before the one that holds it
                classes = _classes(self.row.modules, module)
                name = next((name for name in classes if name in self.row.loss), None)
                # The loss on logits is also that of a model which holds a language model and computes the loss itself.
                if name or (switch == "cross_entropy" and uses_standard_loss(module)):
                    found, kind = True, name or type(module).__name__
                    reason, by = convert(module, classes.get(name), self.row.loss.get(name))
                    if reason:
                        self.report.skip(switch, kind, reason)
                    else:
                        self.report.note(switch, kind, by, 1)
            if not found and self.row.loss:
                self.report.skip(switch, next(iter(self.row.loss)), f"the {type(self.model).__name__} holds none")

    def _adapters(self):
        """Fuse the adapters of the model; those that come later when it next runs."""
        owners = self._loss_classes()
        if self.model is not None:
            watch_adapters(self.model, self.report)
            if not (owners := [m for m in self.modules if isinstance(m, PreTrainedModel) and is_fused(type(m))]):
                follow_later(self.model)
                owners = [self.model]
        for owner in owners:
            self.edits.set(owner, "liger_lora", True)

    def _set_loss(self, owner, cls, spec):
        if function := own_loss(owner):
            return names_of_loss(function), None
        if not uses_standard_loss(owner):
            return "its forward makes no loss from logits", None
        ours = loss_utils.ours_of(owner)
        self.edits.set(owner, "_loss_function", ours)
        return None, ours.__name__

    def _fuse(self, owner, cls, spec):
        head = head_of(owner, spec)
        sharded = any(isinstance(module, FSDPModule) for module in self.modules)
        if not same_code(original_forward(type(owner)), original_forward(cls)):
            return f"{type(owner).__name__} defines its own forward", None
        if reason := no_logits_of(original_forward(cls), spec):
            return reason, None
        if function := own_loss(owner):
            return names_of_loss(function), None
        if not prepare_head(head, self.edits, sharded):
            return f"{spec.head} is {describe(head)}", None
        prepare_path(owner, spec, self.edits)
        if reason := inner_obstacle(owner, spec):
            return reason, None
        if not is_fused(type(owner)):
            replace_class(owner, FusedLoss(spec), self.edits)
        return None, "lce_forward"


@dataclass(frozen=True)
class AfterInit:
    """What is done to a model of patched classes when it is made: its head is prepared, and deferred swaps are made."""

    row: Family = field(hash=False)
    spec: CausalLM | None
    deferred: tuple[str, ...]
    follows: bool  # whether a hook looks for adapters, because the forward is the model's own
    sinks: bool  # whether its attention has sinks
    does_anything = property(lambda self: self.spec is not None or bool(self.deferred) or self.follows or self.sinks)

    def after(self, post_init):
        """`post_init`, and then this. torch.compile could not prepare the head while it traces."""

        @functools.wraps(post_init)
        def finish(model):
            post_init(model)
            if self.spec is not None:
                prepare_head(head_of(model, self.spec), Edits())
                prepare_path(model, self.spec, Edits())
            if self.follows:
                follow_later(model)
            if self.sinks:
                attention.use_flash_attention(model.modules(), Report(self.row.name))
            patcher = _Patcher(self.row, model, set(), Report(self.row.name))
            for name in self.deferred:
                patcher._convert([swap for key, swap in self.row.pairs() if key == name], name)

        finish.liger_after_init = self
        return finish
