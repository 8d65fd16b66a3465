"""Patching a causal language model that has no row, by what its modules look like and compute."""

import inspect

import torch
from torch import nn

from liger_kernel.operators.coverage import has_replaced_forward, kinds_in
from liger_kernel.transformers.patching import numeric
from liger_kernel.transformers.patching.apply import UNKNOWN, patch
from liger_kernel.transformers.patching.by_source import row_of
from liger_kernel.transformers.patching.families import GEGLU, RMS_NORM, SWIGLU
from liger_kernel.transformers.patching.formulas import find
from liger_kernel.transformers.patching.place import ReplacedModule, own_attributes
from liger_kernel.transformers.patching.report import Report, Skip

_SWAPS = {"rms_norm": (RMS_NORM,), "mlp": (SWIGLU, GEGLU)}
_PROJECTIONS = ({"gate_proj", "up_proj", "down_proj"}, {"gate_up_proj", "down_proj"}, {"w1", "w2", "w3"})


def apply_liger_kernel_by_structure(
    model,
    rms_norm: bool = True,
    mlp: bool = True,
    fused_linear_cross_entropy: bool = True,
    layer_norm: bool = True,
    rope: bool = True,
    layers: bool = True,
    masks: bool = True,
    attention: bool = True,
) -> Report:
    """Patch a causal language model of any family, and return a Report.

    A module whose source is known (formulas.py) is replaced by what was compared with it. Of an unknown source nothing
    is replaced that computes something else on random input, or that the model calls in another way: it is run on four
    tokens. An error undoes everything.

    Args:
        model: a transformers model with a language-model head.
        rms_norm: RMSNorms; of unknown source, modules with one weight vector and an eps.
        mlp: gated feed-forward blocks, experts, routers and squared ReLUs of known source; of unknown source, modules
            with the projections of a gated block and nothing else but an activation.
        fused_linear_cross_entropy: the loss in the head, of a model that hands the head's result to its loss function.
            The model is run with and without logits, and both losses are compared.
        layer_norm: torch's LayerNorms over one dimension, and others of known source.
        rope: rotary embeddings of known source whose tables are made by code of known source.
        layers: several steps of a layer as one operator.
        masks: attention masks without a search for packed sequences where no position_ids are given.
        attention: attention with sinks, on flash attention where the model has eager attention for it.

    Raises TypeError for something that is no torch.nn.Module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}, not a torch.nn.Module")
    parts = {"rms_norm": rms_norm, "layer_norm": layer_norm, "rope": rope}
    parts |= dict.fromkeys(("swiglu", "geglu", "relu_squared", "xielu", "router"), mlp)
    parts |= {"layers": layers, "masks": masks, "attention": attention}
    off = dict.fromkeys((*parts, "lora"), False)
    report = patch(row := row_of(model), model, **parts, fused_linear_cross_entropy=False, lora=False)
    try:
        _try_unknown(model, report, {name for name, on in (("rms_norm", rms_norm), ("mlp", mlp)) if on}, layers)
        if fused_linear_cross_entropy:
            loss = patch(row, model, **off)
            if loss.replaced and (reason := _differs(model)):
                loss.undo()
                loss = Report(row.name, skipped=[Skip("fused_linear_cross_entropy", type(model).__name__, reason)])
            report.add(loss)
    except BaseException:
        report.undo()
        raise
    return report


def _try_unknown(model, report, on, layers):
    """Replace modules of unknown source where a trial says that something computes the same."""
    unknown = {}
    for module in model.modules():
        name = next((name for name in on if _looks_like(name, module)), None)
        own = "liger_part" not in vars(type(module)) and not has_replaced_forward(module)
        if name and own and find(type(module)) is None:
            unknown[module] = name
    tried = {type(module).__name__ for module in unknown}
    report.skipped = [skip for skip in report.skipped if skip.name not in tried or skip.reason != UNKNOWN]
    calls = _calls(model, unknown)
    for module, name in unknown.items():
        swap, target, reason = _by_trial(module, _SWAPS[name], calls.get(module))
        kind = type(module).__name__
        if reason:
            report.skip(name, kind, reason)
            continue
        part = swap.load(target)
        kinds = kinds_in(module) if name == "mlp" else frozenset()
        made = ReplacedModule(part, kinds=kinds, whole=layers)
        report.convert(module, made, swap.switch, kind, part.__name__, **own_attributes(module, part))


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
