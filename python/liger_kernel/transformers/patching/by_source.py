"""Rows made of sources: of the families of the table, and of a model type without a row.

Every class, every rotary function, every function of mixers and every routers' loss whose source is known (formulas.py)
becomes an entry of the row; what only its name tells becomes one too, so that the report names it as kept.
"""

import inspect
import re
import sys
from dataclasses import replace

from torch import nn
from transformers import PreTrainedModel

from liger_kernel.transformers.causal_lm import hands_logits_over, names_in, original_forward
from liger_kernel.transformers.patching.families import (
    EXACT_GEGLU,
    FORGET_GATE,
    GATED_RMS_NORM,
    GEGLU,
    GPT_OSS_EXPERTS,
    LAYER_NORM,
    LLAMA4_ROPE,
    MIXERS,
    RELU_SQUARED,
    RMS_NORM,
    ROPE,
    ROUTER,
    ROUTER_LOSS,
    SECTIONED_ROPE,
    SWIGLU,
    SWITCHES,
    UNGATED_EXPERTS,
    UNGATED_MLP,
    VISION_ROPE,
    XIELU,
    CausalLM,
    Family,
    Swap,
)
from liger_kernel.transformers.patching.formulas import as_written, find

_LAYER_NORM = LAYER_NORM["torch.nn.LayerNorm"]
_ROPES = tuple(swap for table in (ROPE, VISION_ROPE, SECTIONED_ROPE, LLAMA4_ROPE) for swap in table.values())
_NORMS = (RMS_NORM, GATED_RMS_NORM, _LAYER_NORM)
_OTHERS = (RELU_SQUARED | XIELU | ROUTER_LOSS | MIXERS).values()
_EXPERTS = GPT_OSS_EXPERTS, UNGATED_EXPERTS
_SWAPS = (*_NORMS, SWIGLU, GEGLU, EXACT_GEGLU, UNGATED_MLP, *_EXPERTS, ROUTER, FORGET_GATE, *_OTHERS, *_ROPES)
#: The order of the switches in a row, and in the report.
_ORDER = {switch: i for i, switch in enumerate(dict.fromkeys(swap.switch for swap in _SWAPS))}
# The name of a class or a function -> what would stand for it if its source were known.
_KINDS = (
    (re.compile(r"RMSNorm|RmsNorm|L2Norm"), RMS_NORM),
    (re.compile(r"LayerNorm(1P|PerHead)?$"), _LAYER_NORM),
    (re.compile(r"MLP\d?$|Mlp$|FFN$|FeedForward$|Experts$|NaiveMoe$"), SWIGLU),
    (re.compile(r"Top[kK]Router$"), ROUTER),
    (re.compile(r"ForgetGate$"), FORGET_GATE),
    *((re.compile(rf"^{name}$"), swap) for name, swap in MIXERS.items()),
    (re.compile(r"^(vision_)?apply_.*(rotary|rope)"), ROPE["apply_rotary_pos_emb"]),
)
_TABLES = re.compile(r"Rotary|Rope")


def row_of(model: nn.Module) -> Family:
    """The row of a model whose type has none, with every switch."""
    kind = getattr(getattr(model, "config", None), "model_type", None) or type(model).__name__
    home, every = original_class(model).__module__, (*SWITCHES, "model")
    return completed(Family(kind, modeling=home, parameters=every, tables="", whole=True, by_source=True), model)


def completed(row: Family, model: nn.Module | None = None) -> Family:
    """A row that is by source, with its swaps: for what a model holds, or for what the row's modeling module names.

    A row without heads gets those of the model.
    """
    namespace = {} if model is not None else vars(row.namespace())
    classes = _classes_in(namespace) if model is None else _classes_of(row, model)
    # Those that the module also holds in dicts: rebinding their names does not reach all that use them.
    tables = [table.values() for table in namespace.values() if isinstance(table, dict)]
    deferred = {value for values in tables for value in values if isinstance(value, type)}
    found: dict[str, dict[Swap, None]] = {}
    for name, original in _parts_of(classes):  # classes and functions of several modules may have one name
        if (model is None and name not in namespace) or (row.keeps and re.fullmatch(row.keeps, name)):
            continue
        for swap in swaps_of(original, name):
            found.setdefault(name, {})[replace(swap, deferred=True) if original in deferred else swap] = None
    if model is None:  # what a finished model has of others' classes
        found |= {name: {swap: None} for name, swap in (LAYER_NORM | RELU_SQUARED | XIELU).items()}
    wanted = row.switches.keys() - row.without.keys()
    chosen = {name: kept for name, each in found.items() if (kept := tuple(s for s in each if s.switch in wanted))}
    row = replace(row, swaps={name: chosen[name] for name in sorted(chosen, key=lambda n: _ORDER[chosen[n][0].switch])})
    if model is None:
        return row
    also = tuple(dict.fromkeys(cls.__module__ for cls in classes if cls.__module__ != row.module))
    loss, why = (row.loss, {}) if row.loss else heads_of(model)
    return replace(row, also=also, loss=loss, without=row.without | why)


def _classes_in(namespace):
    """The classes of modules that a modeling module has a name for, also such as it imports from other models."""
    found = [value for value in namespace.values() if isinstance(value, type) and issubclass(value, nn.Module)]
    return list(dict.fromkeys(original_of(cls) for cls in found if cls.__module__.startswith("transformers.models.")))


def _classes_of(row, model):
    """The classes of a model's modules: those that the row's modeling module has names for, and those of torch and
    transformers that all models share; of a row for the whole model, all."""
    found = dict.fromkeys(original_class(module) for module in model.modules())
    if row.whole:
        return list(found)
    # By name: a module that has been reloaded defines other classes.
    known = {_full_name(cls) for cls in (*_classes_in(vars(row.namespace())), nn.LayerNorm)} | {*RELU_SQUARED, *XIELU}
    return [cls for cls in dict.fromkeys(base for cls in found for base in cls.__mro__) if _full_name(cls) in known]


def _full_name(cls):
    return f"{cls.__module__}.{cls.__qualname__}"


def _parts_of(classes):
    """(name, class or function) of classes that are no models, and of the rotary functions, the functions of mixers and
    the routers' loss that forwards call."""
    for cls in classes:
        if not issubclass(cls, PreTrainedModel):
            yield "torch.nn.LayerNorm" if cls is nn.LayerNorm else cls.__name__, cls
        forward = inspect.unwrap(original_forward(cls))
        values = getattr(forward, "__globals__", {})
        for name in sorted(names_in(forward)):
            function = as_written(values.get(name))
            if inspect.isfunction(function) and (name in ROUTER_LOSS | MIXERS or _KINDS[-1][0].search(name)):
                yield name, function


def original_class(module: nn.Module) -> type:
    """The class of a module as its own code has it, under what a patch has put before it."""
    return original_of(type(module))


def original_of(cls: type) -> type:
    """The class that a patch has put others before."""
    return next(base for base in cls.__mro__ if "liger_part" not in vars(base) and not _is_ours(base))


def _is_ours(cls):
    return cls.__module__.partition(".")[0] == "liger_kernel"


def swaps_of(original, name: str) -> tuple[Swap, ...]:
    """The swaps whose targets stand for the source of a class or a function; the one that its name tells, of none."""
    formula = find(original)
    if formula is not None:
        return tuple(swap for swap in _SWAPS if set(swap.targets) & set(formula.targets))
    return next(((replace(swap, targets=swap.targets[:1]),) for names, swap in _KINDS if names.search(name)), ())


def tables_fit(home: str, function) -> bool:
    """Whether the tables that a rotary function gets in a modeling module are laid out as what stands for it reads
    them: all classes of the module that make tables are known to make such."""
    formula = find(function)
    if formula is None or formula.tables is None:
        return True
    makers = [cls for name, cls in vars(sys.modules[home]).items() if isinstance(cls, type) and _TABLES.search(name)]
    kinds = {find(cls) for cls in makers if issubclass(cls, nn.Module) and not issubclass(cls, PreTrainedModel)}
    return bool(kinds) and all(kind is not None and kind.makes == formula.tables for kind in kinds)


def _asks_for_types(forward) -> bool:
    """Whether a forward may ask of what type its logits are; of logits_to_keep it may."""
    if not {"isinstance", "is_tensor"} & names_in(forward):
        return False
    try:
        source = inspect.getsource(inspect.unwrap(forward))
    except (OSError, TypeError):
        return True
    return bool(re.search(r"is_tensor|isinstance\((?!logits_to_keep, int\))", source))


def heads_of(model: nn.Module) -> tuple[dict[str, CausalLM], dict[str, str]]:
    """The classes of a model, and of models in it, whose loss can be computed in their head, and where that is; what
    keeps all of them from it."""
    found, reason = {}, "it has no language-model head that torch.nn.Linear makes"
    for module in model.modules():
        if not isinstance(module, PreTrainedModel):
            continue
        try:
            head = module.get_output_embeddings()
        except (AttributeError, NotImplementedError):
            continue
        path = next((name for name, child in module.named_modules() if child is head), None)
        if head is None or not path:
            continue
        cls = original_class(module)
        forward = original_forward(cls)
        if not hands_logits_over(forward):
            reason = "its forward does not hand logits to one of transformers' losses of language models"
        elif _asks_for_types(forward):  # a promise of logits is no tensor
            reason = "its forward may ask whether its logits are a tensor"
        else:
            found[cls.__name__] = CausalLM(path)
    return found, {} if found else {"fused_linear_cross_entropy": reason, "cross_entropy": reason}
