"""Policy losses on logits, with Liger's name and order of arguments."""

import torch

from liger_kernel._library import ops
from liger_kernel.ops.grpo_loss import (  # GrpoLossFunction and the two functions are imported from here by others
    CORRECTION,
    LOGITS,
    OPERATOR_NAMES,
    SAPO,
    VESPO,
    WHOLE,
    GrpoLossFunction,
    _reduce_loss,
    fused_selective_log_softmax,
    grpo_loss_of_logits,
)
from liger_kernel.signatures import takes


@takes(
    LOGITS
    | dict(completion_mask=None, temperature=0.9, beta=0.04, eps_low=0.2, eps_high=0.4, inplace=True)
    | dict(loss_type="dapo", max_completion_length=None, importance_sampling_level="token", reduce=False)
    | SAPO
    | dict(vllm_is_ratio=None)
    | CORRECTION
    | WHOLE
    | VESPO,
    renamed=OPERATOR_NAMES,
)
def triton_grpo_loss(inplace, reduce, **given):
    """(loss, kl or None, clipped) of tokens [B, L], 0 where completion_mask is; with reduce (loss, [mean kl, unless
    beta is 0, mean clipped]).

    Logits [B, L + 1, V]; see GrpoLossFunction, which raises for the rest. vespo's weights are made here.
    """
    loss, kl, clipped = grpo_loss_of_logits(phi_seq=None, reduce=reduce, **given)
    return (loss, [clipped] if kl is None else [kl, clipped]) if reduce else (loss, kl, clipped)


def _reduce_grpo_loss(per_token_loss, completion_mask, loss_type, max_completion_length, num_items_in_batch=None):
    """Losses of tokens [batch, length] as one number; no mask counts all. Raises ValueError for an unknown loss."""
    return _reduce_loss(per_token_loss, completion_mask, loss_type, max_completion_length, num_items_in_batch)


def _masked_mean(values, mask):
    """Σ values · mask / max(Σ mask, 1); no mask counts all."""
    return ops.masked_mean(values, torch.ones_like(values) if mask is None else mask)
