"""`use_kernels=True` of transformers, on the layers of liger_kernel.hub.

transformers tags norms and rotary embeddings, and `kernels` binds to each tagged module the forward of the layer that
is registered for its tag. One layer for all of a tag would round a tenth of the norms in another place and rotate some
models the wrong way. So while `model.set_use_kernels` runs, and no longer, the classes of that model for whose source
there is a formula (formulas.py) with a layer carry a tag of ours instead, and so do gated MLPs, norms and causal
language models that have none, of families with a row. What has no layer keeps its tag, and what transformers does with
it.
"""

import contextlib
import functools
import inspect
import types
import weakref
from dataclasses import dataclass

import torch
from packaging.version import parse

from liger_kernel.hub import layers
from liger_kernel.transformers.causal_lm import fused_forward, hands_logits_over, is_fused, names_of_loss, own_loss
from liger_kernel.transformers.head import head_of, prepare_head
from liger_kernel.transformers.patching.families import FAMILIES, CausalLM
from liger_kernel.transformers.patching.formulas import find, tagged_function
from liger_kernel.transformers.patching.place import Edits, function_like
from liger_kernel.transformers.patching.report import Report

_CLASSIC = "apply_liger_kernel_to_<family>() and use_liger_kernel=True need no `kernels`"
#: The versions of `kernels` below this one know no condition: they would bind a layer to every module of a class.
_WITHOUT_CONDITIONS = parse("0.17")
_NORMS, _ROTARY = ("RMSNorm", "RMSNormZeroCentered"), "rotary_pos_emb"
_MIXERS = (
    *("causal_conv1d_fn", "chunk_gated_delta_rule", "chunk_kda"),
    *("mamba_chunk_scan_combined", "mamba_split_conv1d_scan_combined"),
)
_DEVICES = ("cpu", "cuda")
_SWITCHES = {
    **dict.fromkeys(layers.NORMS, "rms_norm"),
    **dict.fromkeys(layers.ROTARIES, "rope"),
    **dict.fromkeys(layers.MIXERS, "mixers"),
    layers.LigerGatedMLP: "mlp",
}


def use_as_hub_kernels(
    rms_norm: bool = True, rope: bool = True, mlp: bool = True, fused_linear_cross_entropy: bool = True,
    mixers: bool = True,
) -> "HubKernels":  # fmt: skip
    """Make this package's operators what `use_kernels=True` of transformers runs, on CPUs and on CUDA; its `undo()`
    takes that back.

    Afterwards `from_pretrained(..., use_kernels=True)`, `model.set_use_kernels(True)` and TRL's
    `model_init_kwargs={"use_kernels": True}` replace, in training and in inference:

    Args:
        rms_norm: the RMSNorms and
        rope: the rotary embeddings that transformers tags, and the norms of families that have a row here.
        mlp: the gated MLPs of families that have a row.
        fused_linear_cross_entropy: the loss of their causal language models, which returns no logits in training.
        mixers: short convolutions, delta rules and Mamba-2's scan of hybrid models, in any model.

    A second call changes the switches of the first. Printing the result lists, model by model, what was replaced.

    Raises ImportError where the installed transformers cannot use the installed `kernels`, and says which version it
    wants.
    """
    from transformers.modeling_utils import PreTrainedModel

    if reason := obstacle(PreTrainedModel):
        raise ImportError(reason)
    switches = {
        "rms_norm": rms_norm,
        "rope": rope,
        "mlp": mlp,
        "fused_linear_cross_entropy": fused_linear_cross_entropy,
        "mixers": mixers,
    }
    active = getattr(PreTrainedModel.set_use_kernels, "liger_hub_kernels", None) or HubKernels()
    active.on = {name for name, value in switches.items() if value}
    active.install(PreTrainedModel)
    return active


def obstacle(model_class) -> str | None:
    """Why `use_kernels=True` cannot run on this package, given PreTrainedModel; None where it can."""
    import transformers
    from transformers.utils import import_utils

    version = f"transformers {transformers.__version__}"
    lowest, highest = (getattr(import_utils, f"KERNELS_{end}_VERSION", "0") for end in ("MIN", "MAX"))
    if not hasattr(model_class, "set_use_kernels") or parse(highest) <= _WITHOUT_CONDITIONS:
        return f"use_as_hub_kernels needs transformers>=5.18, and {version} is installed; {_CLASSIC}"
    if not import_utils.is_kernels_available():
        wanted = f"kernels>={lowest},<{highest}"
        return (
            f"use_as_hub_kernels: {version} works with {wanted}, and {_installed('kernels')}. "
            f"Run `pip install '{wanted}'`; {_CLASSIC}"
        )
    from transformers.integrations import hub_kernels

    if not hub_kernels._kernels_enabled:
        return f"use_as_hub_kernels: the environment variable USE_HUB_KERNELS has switched use_kernels off; {_CLASSIC}"
    return None


def _installed(name):
    from importlib import metadata

    try:
        return f"{name} {metadata.version(name)} is installed"
    except metadata.PackageNotFoundError:
        return f"no {name} is installed"


@dataclass(frozen=True)
class _Repository:
    """What `kernels` asks for a layer."""

    layer: type

    def load(self):
        return self.layer

    def __str__(self):
        return f"{self.layer.__name__} of liger_kernel.hub"


def _layer_of(original):
    """The layer that stands for a class or a function, or None."""
    formula = find(original)
    return getattr(layers, formula.layer) if formula and formula.layer else None


class LigerCausalLM(layers.HubLayer):
    """The fused loss of a causal language model; a class of models has a layer of its own, with its signature."""


@functools.cache
def _causal_lm(cls, spec):
    fused = fused_forward(cls.forward, spec)

    def forward(self, *args, **kwargs):
        return fused(self, *args, **kwargs)

    forward.__signature__ = inspect.signature(cls.forward)
    forward.__doc__ = cls.forward.__doc__
    forward.liger_original = cls.forward
    _ours.add(forward)
    return type(LigerCausalLM.__name__, (LigerCausalLM,), {"forward": forward, "__module__": __name__})


@functools.cache
def _with_signature_of(cls, layer):
    """A layer of any arguments as one that takes those of a class's forward."""
    forward = function_like(layer.forward)
    forward.__signature__ = inspect.signature(cls.forward)
    _ours.add(forward)
    return type(layer.__name__, (layer,), {"forward": forward, "__module__": __name__})


#: The forwards that are bound to modules.
_ours = {layer.forward for layer in _SWITCHES}


def _is_ours(bound) -> bool:
    return getattr(bound, "__func__", None) in _ours


def _replaceable(module) -> bool:
    """Whether the module runs the forward of its class or one of ours, and not one that somebody has put in its
    place."""
    bound = vars(module).get("_old_forward", vars(module).get("forward"))
    return bound is None or _is_ours(bound) or getattr(bound, "__func__", None) is type(module).forward


def _replaceable_mlp(module) -> bool:
    return layers.gate_of(module) is not None and _replaceable(module)


def _never(module) -> bool:
    return False


def _registered(cls, plan):
    """The name and the layer that `kernels` gets for a class."""
    name = f"liger_kernel.{plan.layer.__name__}"
    if plan.spec:
        return f"{name}.{cls.__module__}.{cls.__qualname__}", _causal_lm(cls, plan.spec)
    if plan.layer in layers.MIXERS:
        return f"{name}.{tagged_function(cls).__module__}", _with_signature_of(cls, plan.layer)
    return name, plan.layer


def _unbind(module) -> None:
    own = vars(module)
    if _is_ours(own.get("forward")):
        del own["forward"]
    if _is_ours(own.get("_old_forward")):
        own["_old_forward"] = types.MethodType(type(module).forward, module)


@contextlib.contextmanager
def _hooks_kept(model):
    """`kernels` binds forwards over those with accelerate's hooks: afterwards they are inside the hooks."""
    hooked = [(module, vars(module)["forward"]) for module in model.modules() if "_old_forward" in vars(module)]
    try:
        yield
    finally:
        for module, outer in hooked:
            if vars(module)["forward"] is not outer:
                module._old_forward, module.forward = module.forward, outer


def _covers(model, kernel_config) -> bool:
    config = kernel_config or model.kernel_config
    inherits = config is None or not config.use_local_kernel and getattr(config, "inherit_mapping", True)
    return inherits and model.device.type in _DEVICES and torch.version.hip is None


@dataclass(frozen=True)
class _Plan:
    """What is done with a class: the layer that replaces its forward, or why there is none, and the condition for a
    module of it."""

    switch: str
    layer: type | None = None
    condition: types.FunctionType | None = None
    spec: CausalLM | None = None


class HubKernels:
    """What use_as_hub_kernels has changed; printed, it is a list of what runs on which layer, for each model in memory
    that uses kernels."""

    def __init__(self):
        self.on = frozenset()
        self._edits = Edits()
        self._models: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # in their order; of no values

    def install(self, model_class) -> None:
        """Let `set_use_kernels` of every model pass by here."""
        original = model_class.set_use_kernels
        if getattr(original, "liger_hub_kernels", None) is self:
            return

        @functools.wraps(original)
        def set_use_kernels(model, use_kernels, kernel_config=None, mode=None):
            if not use_kernels or not _covers(model, kernel_config):
                return original(model, use_kernels, kernel_config, mode)
            with self._tagged(model, kernel_config), _hooks_kept(model):
                return original(model, use_kernels, kernel_config, mode)

        vars(set_use_kernels)["liger_hub_kernels"] = self
        self._edits.set(model_class, "set_use_kernels", set_use_kernels)

    @property
    def reports(self) -> list[Report]:
        """A report for each model in memory whose kernels were set."""
        return [report for model in self._models if (report := Report.kept_on(model)) is not None]

    def __str__(self):
        return (
            "\n".join(map(str, self.reports)) or "liger_kernel: no model has set use_kernels since use_as_hub_kernels()"
        )

    def undo(self) -> None:
        """Give transformers its `set_use_kernels` back, and the models in memory their forwards."""
        self._edits.undo()
        for model in list(self._models):
            for _, owner in _owners(model):
                _unbind(owner)
            if (report := Report.kept_on(model)) is not None:
                report.undo()
        self._models.clear()

    @contextlib.contextmanager
    def _tagged(self, model, kernel_config):
        """The classes of a model carry the tags of the layers that stand for them, and the layers are registered."""
        from kernels import Mode, register_kernel_mapping

        config = kernel_config or model.kernel_config
        taken = {name for name in (config.kernel_mapping if config else ()) if isinstance(name, str)}
        earlier = Report.kept_on(model)
        report = Report(type(model).__name__, edits=earlier.edits if earlier else Edits())
        report.keep_on(model)
        self._models[model] = None
        plans = {}
        for label, owner in _owners(model):
            cls = type(owner)
            if cls not in plans:
                plans[cls] = self._plan(cls, taken)
            if plan := plans[cls]:
                self._note(plan, label, owner, report)

        tags, modes = Edits(), (Mode.TRAINING | Mode.TORCH_COMPILE, Mode.INFERENCE | Mode.TORCH_COMPILE)
        own = {cls: (getattr(cls, "kernel_layer_name", None), getattr(cls, "kernel_condition", None)) for cls in plans}
        ours = {cls for cls, plan in plans.items() if plan and plan.layer}
        try:
            for cls, (name, condition) in own.items():
                if cls in ours:
                    name, layer = _registered(cls, plans[cls])
                    register_kernel_mapping(
                        {name: {device: dict.fromkeys(modes, _Repository(layer)) for device in _DEVICES}}
                    )
                    condition = plans[cls].condition or condition
                elif ours.isdisjoint(cls.__mro__):
                    continue
                elif name is None:  # a class without a tag does not inherit one of ours
                    name, condition = "liger_kernel", _never
                tags.set(cls, "kernel_layer_name", name)
                tags.set(cls, "kernel_condition", condition)
            yield
        finally:
            tags.undo()

    def _plan(self, cls, taken):
        tag = getattr(cls, "kernel_layer_name", None)
        if tag in taken:
            return None
        if tag == _ROTARY:
            plan = _Plan("rope", _layer_of(tagged_function(cls)))
        elif tag in _MIXERS:
            plan = _Plan("mixers", _layer_of(tagged_function(cls)))
        elif tag in _NORMS:
            plan = _Plan("rms_norm", _layer_of(cls))
        elif tag is not None or cls.__module__ not in _modules_with_rows():
            return None
        elif spec := _heads().get((cls.__module__, cls.__name__)):
            if is_fused(cls) or not hands_logits_over(cls.forward):
                return None
            plan = _Plan("fused_linear_cross_entropy", LigerCausalLM, _replaceable, spec)
        else:
            layer = _layer_of(cls)
            if layer not in _SWITCHES:
                return None
            plan = _Plan(_SWITCHES[layer], layer, _replaceable_mlp if layer is layers.LigerGatedMLP else _replaceable)
        return plan if plan.switch in self.on else None

    def _note(self, plan, label, owner, report):
        reason = None if plan.layer else "its source is none of those that a layer was compared with"
        if plan.condition and not plan.condition(owner):
            reason = (
                "somebody has replaced its forward"
                if not _replaceable(owner)
                else "there is no layer for its activation"
            )
        elif plan.spec and (function := own_loss(owner)):
            reason = names_of_loss(function)
        if reason:
            return report.skip(plan.switch, label, reason)
        if plan.spec:  # now, because torch.compile could not do it while tracing
            prepare_head(head_of(owner, plan.spec), report.edits)
        report.note(plan.switch, label, plan.layer.__name__, 1)


def _owners(model):
    """(name, owner of a forward) of every module, and of every tagged function, once."""
    seen = set()
    for module in model.modules():
        yield type(module).__name__, module
        for name, function in getattr(module, "_kernel_funcs", {}).items():
            if id(function) not in seen:
                seen.add(id(function))
                yield name, function


@functools.cache
def _heads():
    """(module, class) of the causal language models with a row -> where their head is."""
    return {(row.module, name): spec for row in FAMILIES.values() for name, spec in row.loss.items()}


@functools.cache
def _modules_with_rows():
    return frozenset(row.module for row in FAMILIES.values())
