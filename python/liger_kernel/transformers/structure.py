"""Patching a causal language model that has no row, by what its modules look like and compute."""

import torch
from torch import nn

from liger_kernel.transformers import numeric
from liger_kernel.transformers.causal_lm import FusedLoss, hands_logits_over, has_own_loss, is_fused, original_forward
from liger_kernel.transformers.families import GEGLU, GEMMA2, LLAMA, PHI3_SWIGLU, SWIGLU, TOP2_SWIGLU, CausalLM, Swap
from liger_kernel.transformers.graft import become, has_replaced_forward, own_attributes
from liger_kernel.transformers.head import describe, prepare_head
from liger_kernel.transformers.patch import StandIn
from liger_kernel.transformers.report import Replacement, Report, Skip

_NORM = Swap("rms_norm", (*LLAMA.targets, *GEMMA2.targets))
_GATED = (SWIGLU, GEGLU, PHI3_SWIGLU, TOP2_SWIGLU)
_PROJECTIONS = ({"gate_proj", "up_proj", "down_proj"}, {"gate_up_proj", "down_proj"}, {"w1", "w2", "w3"})


def apply_liger_kernel_by_structure(
    model, rms_norm: bool = True, mlp: bool = True, fused_linear_cross_entropy: bool = True
) -> Report:
    """Patch a causal language model of any family, and return a Report.

    Nothing is replaced that computes something else on random input.

    Args:
        model: a transformers model with a language-model head.
        rms_norm: modules with one weight vector and an eps.
        mlp: modules with the projections of a gated feed-forward block and nothing else but an activation.
        fused_linear_cross_entropy: the loss in the head, of a model that hands the head's result to its loss function.
            The model is run on four tokens, with and without logits, and both losses are compared.

    Raises TypeError for something that is no torch.nn.Module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}, not a torch.nn.Module")
    report = Report(type(model).__name__)
    counts = {}
    for module in list(model.modules()):
        swaps = (_NORM,) if rms_norm and _is_norm(module) else _GATED if mlp and _is_gated(module) else ()
        if not swaps or "liger_part" in vars(type(module)) or has_replaced_forward(module):
            continue
        name = type(module).__name__
        target = next(
            ((swap, found) for swap in swaps if (found := numeric.same_values(swap, type(module), module))), None
        )
        if target is None:
            skip = Skip(
                swaps[0].switch if len(swaps) == 1 else "mlp", name, "it computes something else on random input"
            )
            if skip not in report.skipped:
                report.skipped.append(skip)
            continue
        part = target[0].load(target[1])
        become(module, StandIn(part), report.edits, **own_attributes(module, part))
        key = (target[0].switch, name, part.__name__)
        counts[key] = counts.get(key, 0) + 1
    report.replaced += [Replacement(*key, count) for key, count in counts.items()]
    if fused_linear_cross_entropy:
        reason = _fuse(model, report)
        if reason:
            report.skipped.append(Skip("fused_linear_cross_entropy", type(model).__name__, reason))
    return report


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
    if not hands_logits_over(original_forward(type(model))) or has_own_loss(model):
        return "its forward does not hand logits to transformers' loss of causal language models"
    if not prepare_head(head, report.edits):
        return f"{name} is {describe(head)}"
    mark = report.edits.mark()
    become(model, FusedLoss(CausalLM(name)), report.edits)
    if reason := _differs(model):
        report.edits.undo(mark)
        return reason
    report.replaced.append(Replacement("fused_linear_cross_entropy", type(model).__name__, "lce_forward", 1))
    return None


def _differs(model):
    training = model.training
    ids = torch.arange(1, 5, device=next(model.parameters()).device)[None]
    try:
        with torch.no_grad():
            model.eval()
            fused, plain = (model(input_ids=ids, labels=ids, skip_logits=skip).loss.float() for skip in (True, False))
    except Exception as error:  # whatever a model of unknown code raises
        return f"it could not be tried: {type(error).__name__}: {error}"
    finally:
        model.train(training)
    if not torch.isfinite(plain):
        return "its loss of four tokens is not finite"
    # A 16-bit model rounds its logits.
    tolerance = 2.0**-14 if next(model.parameters()).dtype == torch.float32 else 2.0**-6
    return None if abs(fused - plain) <= tolerance * abs(plain) else "its loss without logits is another"
