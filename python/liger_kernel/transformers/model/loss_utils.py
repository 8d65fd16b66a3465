"""The losses that patched models call.

Both losses, and the operators under them, are looked up through their modules at every call, so that replacing
`loss_utils.LigerForCausalLMLoss` or `functional.liger_fused_linear_cross_entropy` has effect.
"""

import torch
from transformers import PreTrainedModel
from transformers.loss import loss_utils as standard

from liger_kernel.operators.coverage import HEAD_KERNELS, kernels_cover
from liger_kernel.transformers import functional
from liger_kernel.transformers.functional import CrossEntropyOutput

# The options of functional.liger_fused_linear_cross_entropy that a caller of the model may set. A fixed list: somebody
# may have replaced that function by one of (*args, **kwargs).
OPTIONS = (
    "input",
    "weight",
    "target",
    "bias",
    "ce_weight",
    "lse_square_scale",
    "label_smoothing",
    "reduction",
    "softcap",
    "return_z_loss",
    "accum_dtype",
    "use_token_scaling",
    "valid_count",
)


_OWN = functional.liger_fused_linear_cross_entropy


def _as_written(function, module):
    """A function of a module's file; None where somebody has put another one in its place."""
    code = getattr(function, "__code__", None)
    return function if code is not None and code.co_filename == module.__file__ else None


#: The functions that transformers' losses of language models call.
_FIXED = _as_written(standard.fixed_cross_entropy, standard)
_CROSS_ENTROPY = _as_written(torch.nn.functional.cross_entropy, torch.nn.functional)


def replaced_function():
    """What somebody has put in the place of a function that transformers' loss calls, or None; this package's cross
    entropy is as good as torch's."""
    if standard.fixed_cross_entropy is not _FIXED:
        return standard.fixed_cross_entropy
    function = torch.nn.functional.cross_entropy
    return None if function is _CROSS_ENTROPY or function is functional.liger_cross_entropy else function


def shift(labels: torch.Tensor, ignore_index: int = -100) -> torch.Tensor:
    """The labels moved one token ahead, `ignore_index` last."""
    return torch.nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:].contiguous()


def unpack_cross_entropy_result(result):
    """(loss, z_loss, token_accuracy, predicted_tokens) of a CrossEntropyOutput, a tuple of up to four, or a tensor."""
    if isinstance(result, CrossEntropyOutput):
        return result.loss, result.z_loss, result.token_accuracy, result.predicted_tokens
    values = result if isinstance(result, tuple) else (result,)
    return (*values, *[None] * (4 - len(values)))


def _divisor(num_items_in_batch, device):
    """The number on the device; filled there, because copying it would wait for the device."""
    if isinstance(num_items_in_batch, torch.Tensor):
        return num_items_in_batch.to(device)
    return torch.full((), num_items_in_batch, dtype=torch.float32, device=device)


def _per_item(loss, num_items_in_batch):
    if num_items_in_batch is None:
        return loss
    if isinstance(num_items_in_batch, torch.Tensor):
        num_items_in_batch = num_items_in_batch.to(loss.device)
    return loss / num_items_in_batch


def fixed_fused_linear_cross_entropy(
    hidden_states,
    lm_head_weight,
    target,
    num_items_in_batch=None,
    ignore_index=-100,
    final_logit_softcapping=None,
    accum_dtype=None,
    return_token_accuracy=False,
    return_predicted_tokens=False,
    **kwargs,
):
    """Cross entropy of `hidden_states @ lm_head_weight.T`: the mean, or the sum over `num_items_in_batch` if given.

    Keywords that are no options of the operator are ignored. Returns the loss, or a CrossEntropyOutput if the accuracy
    or the predictions are asked for. Raises TypeError for an option that is an argument here already.
    """
    operator = functional.liger_fused_linear_cross_entropy
    divided = operator is _OWN and num_items_in_batch is not None
    options = {name: kwargs[name] for name in OPTIONS if name in kwargs}
    if divided:  # inside the operator, where it costs no pass over the gradients
        options["normalizer"] = _divisor(num_items_in_batch, hidden_states.device)
    result = operator(
        hidden_states,
        lm_head_weight,
        target,
        ignore_index=ignore_index,
        reduction="mean" if num_items_in_batch is None else "sum",
        softcap=final_logit_softcapping,
        accum_dtype=accum_dtype,
        return_token_accuracy=return_token_accuracy,
        return_predicted_tokens=return_predicted_tokens,
        **options,
    )
    loss, _, token_accuracy, predicted_tokens = unpack_cross_entropy_result(result)
    if not divided:
        loss = _per_item(loss, num_items_in_batch)
    if return_token_accuracy or return_predicted_tokens:
        return CrossEntropyOutput(loss=loss, token_accuracy=token_accuracy, predicted_tokens=predicted_tokens)
    return loss


def LigerForCausalLMLoss(
    hidden_states,
    lm_head_weight,
    labels,
    hidden_size: int,
    num_items_in_batch=None,
    ignore_index: int = -100,
    shift_labels=None,
    final_logit_softcapping=None,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
    **kwargs,
):
    """The loss of a causal language model from its last hidden states, without its logits.

    Args:
        hidden_states: [..., hidden_size].
        lm_head_weight: [vocabulary, hidden_size].
        labels: not shifted; ignored if `shift_labels` is given.
        hidden_size: the width of the head's input.
        num_items_in_batch: divide the sum of the losses by this, instead of taking their mean.
        ignore_index: the label of tokens without a loss.
        shift_labels: labels that are shifted already.
        final_logit_softcapping: logits are `cap * tanh(logits / cap)`.
        return_token_accuracy, return_predicted_tokens: return a CrossEntropyOutput with them.
        kwargs: options of liger_fused_linear_cross_entropy; others are ignored.
    """
    if shift_labels is None:
        shift_labels = shift(labels, ignore_index)
    return fixed_fused_linear_cross_entropy(
        hidden_states.reshape(-1, hidden_size),
        lm_head_weight,
        shift_labels.reshape(-1).to(hidden_states.device),
        num_items_in_batch,
        ignore_index,
        final_logit_softcapping,
        return_token_accuracy=return_token_accuracy,
        return_predicted_tokens=return_predicted_tokens,
        **kwargs,
    )


def causal_lm_loss(
    logits, labels, vocab_size: int, num_items_in_batch=None, ignore_index: int = -100, shift_labels=None, **kwargs
):
    """transformers' loss of causal language models, computed by the cross entropy of this package.

    Args:
        logits: [..., vocab_size], of any float type; the loss is a float32 scalar.
        labels, num_items_in_batch, ignore_index, shift_labels: as in LigerForCausalLMLoss.
        kwargs: ignored.

    Where there are no kernels, or somebody has replaced the function that transformers' loss calls, that loss runs.
    """
    if not kernels_cover(logits, HEAD_KERNELS) or replaced_function() is not None:
        return standard.ForCausalLMLoss(logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels)
    if shift_labels is None:
        shift_labels = shift(labels, ignore_index)
    loss = functional.liger_cross_entropy(
        logits.float().reshape(-1, vocab_size),
        shift_labels.reshape(-1).to(logits.device),
        ignore_index=ignore_index,
        reduction="mean" if num_items_in_batch is None else "sum",
    )
    return _per_item(loss, num_items_in_batch)


def masked_lm_loss(logits, labels, vocab_size: int, num_items_in_batch=None, ignore_index: int = -100, **kwargs):
    """transformers' loss of masked language models: causal_lm_loss with labels that are not shifted."""
    return causal_lm_loss(logits, None, vocab_size, num_items_in_batch, ignore_index, shift_labels=labels)


#: What computes each of transformers' losses of language models here, and that loss where nobody has replaced it.
_LOSSES = tuple(
    (ours, _as_written(standard.LOSS_MAPPING[kind], standard))
    for kind, ours in (("ForCausalLM", causal_lm_loss), ("ForMaskedLM", masked_lm_loss))
)


def ours_for(function):
    """What computes one of transformers' losses of language models here, also where that is what is given; None for any
    other function."""
    if function is None:  # also what stands for a loss that somebody has replaced
        return None
    return next((pair[0] for pair in _LOSSES if any(function is known for known in pair)), None)


def ours_of(model):
    """The same for a model's loss function; a model that has no such attribute is a causal language model.

    So is one whose type of loss transformers does not know, as a BertForPreTraining. Its property would say so in a
    warning, which nobody has asked for and which breaks a compiler's graph.
    """
    if getattr(model, "loss_type", None) not in standard.LOSS_MAPPING:
        inherited = getattr(type(model), "loss_function", None) is PreTrainedModel.loss_function
        if inherited and not hasattr(model, "_loss_function"):
            return ours_for(standard.LOSS_MAPPING["ForCausalLM"])
    return ours_for(getattr(model, "loss_function", causal_lm_loss))
