"""`apply_liger_kernel_to_<family>` and the other patching functions, made from the table of families."""

import importlib
import inspect
import logging
import os

import transformers
from packaging import version
from torch import nn
from transformers import PreTrainedModel

from liger_kernel._quantise import is_adapted, quantise
from liger_kernel.graphs import capture_model
from liger_kernel.memory import plan_later
from liger_kernel.transformers.patching.by_source import row_of
from liger_kernel.transformers.patching.families import FAMILIES, MODEL_TYPES, SWITCHES, missing, nearest, unsupported
from liger_kernel.utils import warn_once

transformer_version = version.parse(transformers.__version__)
MIN_SUPPORTED_TRANSFORMERS_VERSION = version.parse("4.52.0")
IS_TRANSFORMERS_V5_OR_LATER = transformer_version >= version.parse("5.0.0")

if transformer_version < MIN_SUPPORTED_TRANSFORMERS_VERSION:
    raise ImportError(
        f"liger_kernel patches models of transformers >= {MIN_SUPPORTED_TRANSFORMERS_VERSION}; "
        f"{transformers.__version__} is installed. Run `pip install -U transformers`."
    )


from liger_kernel.transformers.patching.apply import Report, patch

logger = logging.getLogger(__name__)

# The keywords of _apply_liger_kernel_to_instance that are no switches of a family.
_OPTIONS = ("memory_budget", "cuda_graphs", "base", "by_source")
# The switches that the API has not.
_OURS = ("router", "layers", "masks", "attention", "lora")
# What others import from here: liger_kernel.compat.trainers has it.
_OF_OTHERS = frozenset(
    "_bind_method_to_module _patch_geglu_module _patch_layer_norm_module _patch_rms_norm_module _patch_swiglu_module "
    "PEFT_AVAILABLE LigerBlockSparseTop2MLP LigerCrossEntropyLoss LigerExperts LigerGEGLUMLP LigerGEGLUMLPForGemma4 "
    "LigerLayerNorm LigerPhi3SwiGLUMLP LigerReLUSquared LigerRMSNorm LigerRMSNormForMuseGlimmer "
    "LigerRMSNormForMuseGlimmerTextCentered LigerSwiGLUMLP LigerSwiGLUMLPForMuseGlimmer liger_cross_entropy "
    "liger_multimodal_rotary_pos_emb liger_rotary_pos_emb liger_rotary_pos_emb_gpt_oss "
    "liger_rotary_pos_emb_vision".split()
)


def _apply_function(row):
    """The function `apply_liger_kernel_to_<row.name>`."""
    kind, switches = inspect.Parameter.POSITIONAL_OR_KEYWORD, row.switches
    names = [name for name in row.parameters or (*switches, "model") if name not in ("kwargs", *_OURS)]
    parameters = [
        inspect.Parameter(name, kind, default=None, annotation=PreTrainedModel)
        if name == "model"
        else inspect.Parameter(name, kind, default=switches[name], annotation=bool)
        for name in names
    ]
    parameters += [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=switches[name], annotation=bool)
        for name in _OURS
        if name in switches
    ]
    takes_others = "kwargs" in row.parameters
    if takes_others:
        parameters.append(inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD))

    def apply(*args, **kwargs):
        if args and isinstance(args[0], nn.Module):
            args, kwargs = args[1:], {**kwargs, "model": args[0]}
        if len(args) > len(names):
            raise TypeError(f"{apply.__name__} takes at most {len(names)} arguments, got {len(args)}")
        given = dict(zip((name for name in names if args and (name != "model" or "model" not in kwargs)), args))
        if twice := given.keys() & kwargs.keys():
            raise TypeError(f"{apply.__name__} got {', '.join(sorted(twice))} twice")
        given |= kwargs
        others = {name: given.pop(name) for name in list(given) if takes_others and name not in (*switches, "model")}
        report = patch(row, **given)
        try:
            _patch_held(
                row,
                report,
                {**{name: given.get(name, default) for name, default in switches.items()}, **others},
                given.get("model"),
            )
        except BaseException:
            report.undo()
            raise
        return report

    lines = [f"        {name}: {SWITCHES[name]}; {default} by default." for name, default in row.switches.items()]
    if takes_others:
        lines.append("        kwargs: switches for the models that it holds.")
    apply.__doc__ = "\n".join(
        [
            f"Patch the {row.name} models of transformers, or the one given as `model`, and return a Report.",
            "",
            "    Args:",
            *lines,
            "        model: patch this model only; it may also come first. Without it, models made later are patched.",
            "",
            "    Raises TypeError for an unknown keyword or a model of another family, AssertionError if both",
            "    cross_entropy and fused_linear_cross_entropy are on, and ImportError if the installed transformers",
            "    has no such family.",
            "    ",
        ]
    )
    apply.__name__ = apply.__qualname__ = f"apply_liger_kernel_to_{row.name}"
    apply.__signature__ = inspect.Signature(parameters, return_annotation=Report)
    return apply


def _patch_held(row, report, switches, model):
    """Patch the models that a composite one holds, each by its own type's function, but for their losses."""
    switches = {**switches, "cross_entropy": False, "fused_linear_cross_entropy": False}
    if model is None:
        for name in row.holds:
            report.add(
                _functions[name](**{key: value for key, value in switches.items() if key in FAMILIES[name].switches})
            )
        return
    if not row.composite:
        return
    held = [m for m in model.modules() if isinstance(m, PreTrainedModel) and type(m).__module__ not in row.modules]
    outermost = [m for m in held if not any(m is not other and m in set(other.modules()) for other in held)]
    for part in outermost:
        kind = getattr(part.config, "model_type", None)
        apply = MODEL_TYPE_TO_APPLY_LIGER_FN.get(kind)
        if apply is None:
            off = {name: False for name, value in switches.items() if not value and name in SWITCHES}
            report.add(_apply_by_source(part, off))
            continue
        known = inspect.signature(apply).parameters
        kept = {name: value for name, value in switches.items() if name in known}
        dropped = sorted(name for name in switches.keys() - kept.keys() if switches[name] and name not in row.switches)
        if dropped:
            logger.warning("%s takes %s, not %s", kind, ", ".join(known), ", ".join(dropped))
        inner = apply(model=part, **kept)
        if inner is not None:
            report.add(inner)


_functions = {row.name: _apply_function(row) for row in FAMILIES.values()}
globals().update({function.__name__: function for function in _functions.values()})

MODEL_TYPE_TO_APPLY_LIGER_FN = {model_type: _functions[row.name] for model_type, row in MODEL_TYPES.items()}


def switches_of(apply) -> set[str]:
    """The keywords that a patching function takes, but `model`; a composite model's include those of its models."""
    parameters = inspect.signature(apply).parameters.values()
    named = {p.name for p in parameters if p.kind is not p.VAR_KEYWORD} - {"model"}
    return named | set(SWITCHES) if len(named) + 1 < len(parameters) else named


def _check_options(model_type, names):
    """Raises TypeError for a keyword that is no option of any family, nor of the function of this one."""
    apply = MODEL_TYPE_TO_APPLY_LIGER_FN.get(model_type)
    known = {**SWITCHES, **dict.fromkeys((*_OPTIONS, *(switches_of(apply) if apply else ())))}
    for name in sorted(set(names) - {*known}):
        raise TypeError(f"unknown option {name!r}{nearest(name, known) or ': known are ' + ', '.join(known)}")


def _apply(model_type, found, kwargs):
    _check_options(model_type, kwargs)
    apply, by_source = MODEL_TYPE_TO_APPLY_LIGER_FN.get(model_type), kwargs.pop("by_source", True)
    if apply is None and not (found and by_source and isinstance(found["model"], PreTrainedModel)):
        model = f"a {type(found['model']).__name__}" if found else "a model"
        warn_once(unsupported(f"{model} of type {model_type!r}", model_type))
        return None
    known = switches_of(apply) if apply else SWITCHES
    kept = {name: value for name, value in kwargs.items() if name in known}
    for name in sorted(name for name in kwargs.keys() - kept.keys() if kwargs[name]):
        warn_once(f"{name}=True has no effect on {model_type}: the family has no such switch")
    logger.info("applying Liger kernels to model type %r with %s", model_type, kept)
    return apply(**found, **kept) if apply else _apply_by_source(found["model"], kept)


def _apply_by_source(model, switches):
    """Replace what is known by its source in a model whose type has no row."""
    report = patch(row_of(model), model, **switches)
    kind = report.family
    warn_once(f"no row for the model type {kind!r}: a {type(model).__name__} is patched by source. {report.line()}")
    return report


def _apply_liger_kernel(model_type: str, **kwargs) -> Report | None:
    """Patch the classes of a model type, for models created afterwards; an unknown type stays as it is, with a warning.

    Args:
        model_type: `config.model_type`.
        kwargs: switches; those that the family does not have are dropped, with a warning if they are on.

    Raises TypeError for a keyword that no family has.
    """
    return _apply(model_type, {}, kwargs)


def _apply_liger_kernel_to_instance(
    model: PreTrainedModel,
    *,
    memory_budget: int | str | None = None,
    cuda_graphs: bool = False,
    base: str | None = None,
    **kwargs,
) -> Report | None:
    """Patch one model. Of a type that has no row everything is replaced whose source is known, and the rest keeps its
    forward; the Report and one log line name both.

    Args:
        model: the model, with a `config.model_type`.
        memory_budget: liger_kernel.memory.plan_later plans for it.
        cuda_graphs: liger_kernel.graphs.capture_model captures the model.
        base: "int8" or "fp8": liger_kernel.quantise puts the frozen layers of a model with adapters into eight bits.
        kwargs: switches; those that the family does not have are dropped, with a warning if they are on. A type without
            a row has all of them. With by_source=False it stays as it is, with a warning.

    Raises TypeError for a keyword that no family has, and ValueError for a budget that is none, for an unknown base and
    for one of a model without adapters, of which nothing would be left to train.
    """
    if base is not None and not is_adapted(model):
        raise ValueError(f"base={base!r} freezes the linear layers: give the model adapters first (get_peft_model)")
    report = _patch_instance(model, memory_budget, cuda_graphs, base, kwargs)
    # A trainer shows no report; of its processes, the first says what it has.
    if report is not None and report.family in FAMILIES and os.environ.get("RANK", "0") == "0":
        done, every = len(report.replaced), len(report.replaced) + len(report.skipped)
        warn_once(
            f"liger_kernel: replaced {done} of {every} kinds of parts in a {type(model).__name__}; "
            "print(liger_kernel.report(model)) lists them"
        )
    return report


def _patch_instance(
    model: nn.Module, memory_budget: int | str | None, cuda_graphs: bool, base: str | None, switches: dict
):
    """What `_apply_liger_kernel_to_instance` does, and leaves the Report on the model, for liger_kernel.report."""
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    _check_options(model_type, switches)
    quantised = None if base is None else quantise(model, base)
    if memory_budget is not None:
        plan_later(model, memory_budget)
    before = Report.kept_on(model)
    report = _apply(model_type, {"model": model}, dict(switches))
    if report is not None and before is not report:
        report.keep_on(model)
        for entry in before.replaced if before is not None else ():
            if entry.switch == "base":
                report.note("base", entry.name, entry.by, entry.count)
    for row in quantised.layers if report is not None and quantised is not None else ():
        report.note("base", row.name, f"{base}, error {row.error:.1%}", row.count)
    if cuda_graphs:
        capture_model(model)
    return report


def __getattr__(name):
    # Before the lookup, which imports: inspect.getmodule asks for __file__.
    if name.endswith("_lce_forward") and (family := name.removesuffix("_lce_forward")) in FAMILIES:
        return importlib.import_module(f"liger_kernel.transformers.model.{family}").lce_forward
    if name in _OF_OTHERS:
        return getattr(importlib.import_module("liger_kernel.compat.trainers"), name)
    raise missing(__name__, name)
