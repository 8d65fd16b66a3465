"""Rows made of sources: of a model type without a row, and of a row that says nothing else of its parts.

Every class, every rotary function and every routers' loss whose source is known (formulas.py) becomes an entry of the
row; what only its name tells becomes one too, so that the report names it as kept.
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
    GATED_RMS_NORM,
    GEGLU,
    GPT_OSS_EXPERTS,
    LAYER_NORM,
    LLAMA4_ROPE,
    RELU_SQUARED,
    RMS_NORM,
    ROPE,
    ROUTER,
    ROUTER_LOSS,
    SECTIONED_ROPE,
    SWIGLU,
    SWITCHES,
    VISION_ROPE,
    XIELU,
    CausalLM,
    Family,
    Swap,
)
from liger_kernel.transformers.patching.formulas import find
from liger_kernel.transformers.patching.source import as_written

_LAYER_NORM = LAYER_NORM["torch.nn.LayerNorm"]
_ROPES = tuple(swap for table in (ROPE, VISION_ROPE, SECTIONED_ROPE, LLAMA4_ROPE) for swap in table.values())
_NORMS = (RMS_NORM, GATED_RMS_NORM, _LAYER_NORM)
_OTHERS = (RELU_SQUARED | XIELU | ROUTER_LOSS).values()
_SWAPS = (*_NORMS, SWIGLU, GEGLU, EXACT_GEGLU, GPT_OSS_EXPERTS, ROUTER, *_OTHERS, *_ROPES)
# The name of a class or a function -> what would stand for it if its source were known.
_KINDS = (
    (re.compile(r"RMSNorm|RmsNorm|L2Norm"), RMS_NORM),
    (re.compile(r"LayerNorm(1P|PerHead)?$"), _LAYER_NORM),
    (re.compile(r"MLP\d?$|Mlp$|FFN$|FeedForward$|Experts$|NaiveMoe$"), SWIGLU),
    (re.compile(r"^apply_.*(rotary|rope).*"), ROPE["apply_rotary_pos_emb"]),
)
_TABLES = re.compile(r"Rotary|Rope")


def row_of(model: nn.Module) -> Family:
    """The row of a model whose type has none, with every switch."""
    kind = getattr(getattr(model, "config", None), "model_type", None) or type(model).__name__
    row = Family(kind, {}, modeling=original_class(model).__module__, parameters=(*SWITCHES, "model"), by_source=True)
    return completed(row, model)


def completed(row: Family, model: nn.Module | None = None) -> Family:
    """A row that is by source, with its swaps: for what a model holds, or for what the row's modeling module defines.

    A row without heads gets those of the model.
    """
    if model is None:
        homes = [row.namespace(), *(sys.modules[name] for name in row.also if name in sys.modules)]
        classes = {c for home in homes for c in vars(home).values() if isinstance(c, type) and issubclass(c, nn.Module)}
        classes = {cls for cls in classes if any(cls.__module__ == home.__name__ for home in homes)}
    else:
        classes = {original_class(module) for module in model.modules()}
    # In the order of their names: a set has another one in every process.
    ordered = sorted(classes, key=lambda cls: (cls.__module__, cls.__qualname__))
    found: dict[str, tuple[Swap, ...]] = {}
    for cls in ordered:
        entries = [(name, swaps_of(function, name)) for name, function in _functions(cls)]
        if not issubclass(cls, PreTrainedModel):
            entries.append(("torch.nn.LayerNorm" if cls is nn.LayerNorm else cls.__name__, swaps_of(cls, cls.__name__)))
        for name, swaps in entries:  # classes and functions of several modules may have one name
            found[name] = tuple(dict.fromkeys((*found.get(name, ()), *swaps)))
    chosen = {
        name: kept for name, each in found.items() if (kept := tuple(s for s in each if s.switch in row.switches))
    }
    if model is None:  # what a finished model has of others' classes
        others = LAYER_NORM | RELU_SQUARED | XIELU
        chosen |= {name: (swap,) for name, swap in others.items() if swap.switch in row.switches}
        return replace(row, swaps=chosen)
    also = tuple(sorted({cls.__module__ for cls in classes} - {row.module}))
    loss, why = heads_of(model) if not row.loss else (row.loss, None)
    return replace(row, swaps=chosen, also=also, loss=loss, without=row.without | (why or {}))


def original_class(module: nn.Module) -> type:
    """The class of a module as its own code has it, under what a patch has put before it."""
    return next(cls for cls in type(module).__mro__ if "liger_part" not in vars(cls) and not _is_ours(cls))


def _is_ours(cls):
    return cls.__module__.partition(".")[0] == "liger_kernel"


def swaps_of(original, name: str) -> tuple[Swap, ...]:
    """The swaps whose targets stand for the source of a class or a function; the one that its name tells, of none."""
    part = find(original)
    if part is not None:
        return tuple(swap for swap in _SWAPS if set(swap.targets) & set(part.targets))
    return next(((replace(swap, targets=swap.targets[:1]),) for names, swap in _KINDS if names.search(name)), ())


def _functions(cls):
    """(name, function) of the rotary functions, and of the routers' loss, that the forward of a class calls."""
    forward = inspect.unwrap(original_forward(cls))
    values = getattr(forward, "__globals__", {})
    for name in sorted(names_in(forward)):
        function = as_written(values.get(name))
        if inspect.isfunction(function) and (name in ROUTER_LOSS or _KINDS[-1][0].search(name)):
            yield name, function


def tables_fit(home: str, function) -> bool:
    """Whether the tables that a rotary function gets in a modeling module are laid out as the part that stands for it
    reads them: all classes of the module that make tables are known to make such."""
    part = find(function)
    if part is None or part.tables is None:
        return True
    makers = [cls for name, cls in vars(sys.modules[home]).items() if isinstance(cls, type) and _TABLES.search(name)]
    kinds = {find(cls) for cls in makers if issubclass(cls, nn.Module) and not issubclass(cls, PreTrainedModel)}
    return bool(kinds) and all(kind is not None and kind.makes == part.tables for kind in kinds)


def _asks_for_types(forward) -> bool:
    """Whether a forward may ask of what type its logits are; of logits_to_keep it may."""
    if not {"isinstance", "is_tensor"} & names_in(forward):
        return False
    try:
        source = inspect.getsource(inspect.unwrap(forward))
    except (OSError, TypeError):
        return True
    return bool(re.search(r"is_tensor|isinstance\((?!logits_to_keep, int\))", source))


def heads_of(model: nn.Module) -> tuple[dict[str, CausalLM], dict[str, str] | None]:
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
            reason = "its forward does not hand logits to transformers' loss of causal language models"
        elif _asks_for_types(forward):  # a promise of logits is no tensor
            reason = "its forward may ask whether its logits are a tensor"
        else:
            found[cls.__name__] = CausalLM(path)
    return found, None if found else {"fused_linear_cross_entropy": reason, "cross_entropy": reason}
