"""Patching a causal language model that has no row, by what its modules look like and compute."""

import inspect

import torch
from torch import nn

from liger_kernel.operators.coverage import has_replaced_forward
from liger_kernel.transformers import numeric
from liger_kernel.transformers.causal_lm import (
    FusedLoss,
    hands_logits_over,
    is_fused,
    names_of_loss,
    original_forward,
    own_loss,
)
from liger_kernel.transformers.families import (
    GEGLU,
    GPT_OSS_EXPERTS,
    LAYER_NORM,
    RELU_SQUARED,
    RMS_NORM,
    SWIGLU,
    CausalLM,
)
from liger_kernel.transformers.head import describe, prepare_head
from liger_kernel.transformers.parts import find
from liger_kernel.transformers.patch import ReplacedModule, left_alone, obstacle
from liger_kernel.transformers.replace import own_attributes, replace_class
from liger_kernel.transformers.report import Replacement, Report, Skip

_LAYER_NORM, _RELU_SQUARED = LAYER_NORM["torch.nn.LayerNorm"], next(iter(RELU_SQUARED.values()))
# A parameter of the function -> what it turns on.
_SWAPS = {"rms_norm": (RMS_NORM,), "layer_norm": (_LAYER_NORM,), "mlp": (SWIGLU, GEGLU, GPT_OSS_EXPERTS, _RELU_SQUARED)}
_PROJECTIONS = ({"gate_proj", "up_proj", "down_proj"}, {"gate_up_proj", "down_proj"}, {"w1", "w2", "w3"})


def apply_liger_kernel_by_structure(
    model, rms_norm: bool = True, mlp: bool = True, fused_linear_cross_entropy: bool = True, layer_norm: bool = True
) -> Report:
    """Patch a causal language model of any family, and return a Report.

    A module whose source is known (parts.py) is replaced by what was compared with it. Of an unknown source nothing is
    replaced that computes something else on random input, or that the model calls in another way: it is run on four
    tokens. An error undoes everything.

    Args:
        model: a transformers model with a language-model head.
        rms_norm: RMSNorms; of unknown source, modules with one weight vector and an eps.
        mlp: gated feed-forward blocks, experts and squared ReLUs of known source; of unknown source, modules with the
            projections of a gated block and nothing else but an activation.
        fused_linear_cross_entropy: the loss in the head, of a model that hands the head's result to its loss function.
            The model is run with and without logits, and both losses are compared.
        layer_norm: torch's LayerNorms over one dimension, with a weight and a bias.

    Raises TypeError for something that is no torch.nn.Module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}, not a torch.nn.Module")
    report = Report(type(model).__name__)
    try:
        on = {"rms_norm": rms_norm, "layer_norm": layer_norm, "mlp": mlp}
        _replace_parts(model, report, {name: swaps for name, swaps in _SWAPS.items() if on[name]})
        if fused_linear_cross_entropy and (reason := _fuse(model, report)):
            report.skipped.append(Skip("fused_linear_cross_entropy", type(model).__name__, reason))
    except BaseException:
        report.undo()
        raise
    return report


def _replace_parts(model, report, on):
    found, unknown = {}, {}
    for module in list(model.modules()):
        if "liger_part" in vars(type(module)) or has_replaced_forward(module):
            continue
        for name, swaps in on.items():
            if known := _by_source(module, swaps):
                found[module] = name, known
            elif _looks_like(name, module):
                unknown[module] = name
    calls = _calls(model, unknown)
    found |= {module: (name, _by_trial(module, _SWAPS[name], calls.get(module))) for module, name in unknown.items()}
    counts = {}
    for module in model.modules():
        if module not in found:
            continue
        name, (swap, target, reason) = found[module]
        kind = type(module).__name__
        if reason:
            skip = Skip(name, kind, reason)
            if skip not in report.skipped:
                report.skipped.append(skip)
            continue
        part = swap.load(target)
        replace_class(module, ReplacedModule(part), report.edits, **own_attributes(module, part))
        key = (swap.switch, kind, part.__name__)
        counts[key] = counts.get(key, 0) + 1
    report.replaced += [Replacement(*key, count) for key, count in counts.items()]


def _by_source(module, swaps):
    """(swap, target, None) of the first swap that stands for the source of a module's class and for its activation, of
    another activation (swap, target, reason); None for an unknown source."""
    cls, part = type(module), find(type(module))
    known = part.targets if part else _LAYER_NORM.targets if cls is nn.LayerNorm else ()
    fits = [(swap, target) for swap in swaps for target in swap.targets if target in known]
    fits = [(swap, target) for swap, target in fits if not left_alone(module, swap.load(target))]
    reasons = [obstacle(module, cls, swap.load(target), swap.activations) for swap, target in fits]
    if not fits or (cls is nn.LayerNorm and reasons[0]):
        return None
    return next(((*fit, None) for fit, reason in zip(fits, reasons) if not reason), (*fits[0], reasons[0]))


def _looks_like(name, module):
    return _is_norm(module) if name == "rms_norm" else name == "mlp" and _is_gated(module)


def _by_trial(module, swaps, call):
    """(swap, target, None) of the first swap that computes what a module does, or (None, None, why none may)."""
    if call is not None:
        args, kwargs = call
        given = sum(value is not None for value in (*args, *kwargs.values()))
        if given != 1 or not args:
            return None, None, f"the model calls it with {given} arguments" if given != 1 else "it is called by keyword"
    for swap in swaps:
        if (target := numeric.same_values(swap, type(module), module)) and (
            call is None or numeric.same_result(swap.load(target), module, call[0][0])
        ):
            return swap, target, None
    return None, None, "it computes something else on random input"


def _calls(model, modules):
    """module -> the arguments of its first call, where the model runs on four tokens."""
    calls = {}

    def record(module, args, kwargs):
        calls.setdefault(module, (args, kwargs))

    hooks = [module.register_forward_pre_hook(record, with_kwargs=True) for module in modules]
    try:
        _run(model)
    except Exception:  # whatever a model of unknown code raises: it takes other inputs
        pass
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def _run(model, labels=False, **options):
    """The output of a model for four tokens, without dropout."""
    ids = torch.arange(1, 5, device=next(model.parameters()).device)[None]
    # A cache of attention's would be an error where no layer has attention.
    if "use_cache" in inspect.signature(model.forward).parameters:
        options["use_cache"] = False
    if labels:
        options["labels"] = ids
    training = [module for module in model.modules() if module.training]
    try:
        with torch.no_grad():
            model.eval()
            return model(input_ids=ids, **options)
    finally:
        for module in training:
            module.training = True


def _is_norm(module):
    parameters = dict(module.named_parameters())
    has_eps = any(isinstance(getattr(module, name, None), float) for name in ("variance_epsilon", "eps"))
    return (
        has_eps and list(parameters) == ["weight"] and parameters["weight"].dim() == 1 and not list(module.children())
    )


def _is_gated(module):
    names = {name for name, child in module.named_children() if any(True for _ in child.parameters())}
    return names in _PROJECTIONS and not dict(module.named_parameters(recurse=False))


def _fuse(model, report):
    """Give the model the forward without logits; what keeps it from that, or None."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    name = next((name for name, child in model.named_children() if child is head), None)
    if head is None or name is None:
        return "it has no head of its own"
    if is_fused(type(model)):
        return None
    if not hands_logits_over(original_forward(type(model))):
        return "its forward does not hand logits to transformers' loss of causal language models"
    if function := own_loss(model):
        return names_of_loss(function)
    if not prepare_head(head, report.edits):
        return f"{name} is {describe(head)}"
    mark = report.edits.mark()
    replace_class(model, FusedLoss(CausalLM(name)), report.edits)
    if reason := _differs(model):
        report.edits.undo(mark)
        return reason
    report.replaced.append(Replacement("fused_linear_cross_entropy", type(model).__name__, "lce_forward", 1))
    return None


def _differs(model):
    try:
        fused, plain = (_run(model, labels=True, skip_logits=skip).loss.float() for skip in (True, False))
    except Exception as error:  # whatever a model of unknown code raises
        return f"it could not be tried: {type(error).__name__}: {error}"
    if not torch.isfinite(plain):
        return "its loss of four tokens is not finite"
    # A 16-bit model rounds its logits.
    tolerance = 2.0**-14 if next(model.parameters()).dtype == torch.float32 else 2.0**-6
    return None if abs(fused - plain) <= tolerance * abs(plain) else "its loss without logits is another"
