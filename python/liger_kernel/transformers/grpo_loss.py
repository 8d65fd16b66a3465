"""Policy losses on logits, with Liger's name and order of arguments."""

import torch

from liger_kernel._library import ops
from liger_kernel.ops.grpo_loss import (  # the first three are imported from here by others
    GrpoLossFunction,
    _reduce_loss,
    fused_selective_log_softmax,
    grpo_loss_of_logits,
)


def triton_grpo_loss(
    logits,
    old_logp,
    ref_logp,
    completion_ids,
    advantages,
    completion_mask=None,
    temperature=0.9,
    beta=0.04,
    eps_low=0.2,
    eps_high=0.4,
    inplace=True,
    loss_type="dapo",
    max_completion_length=None,
    importance_sampling_level="token",
    reduce=False,
    sapo_temperature_pos=1.0,
    sapo_temperature_neg=1.05,
    vllm_is_ratio=None,
    delta=None,
    use_bias_correction_kl=False,
    num_items_in_batch=None,
    vespo_k_pos=2.0,
    vespo_lambda_pos=3.0,
    vespo_k_neg=3.0,
    vespo_lambda_neg=2.0,
):
    """(loss, kl or None, clipped) of tokens [B, L], 0 where completion_mask is; with reduce (loss, [mean kl, unless
    beta is 0, mean clipped]).

    Logits [B, L + 1, V]; see GrpoLossFunction, which raises for the rest. vespo's weights are made here.
    """
    loss, kl, clipped = grpo_loss_of_logits(
        logits,
        old_logp,
        ref_logp,
        completion_ids,
        advantages,
        completion_mask,
        temperature,
        vllm_is_ratio,
        None,
        reduce,
        num_items_in_batch,
        loss_type=loss_type,
        level=importance_sampling_level,
        epsilon_low=eps_low,
        epsilon_high=eps_high,
        delta=delta,
        beta=beta,
        unbiased_kl=use_bias_correction_kl,
        sapo_temperature_pos=sapo_temperature_pos,
        sapo_temperature_neg=sapo_temperature_neg,
        vespo_k_pos=vespo_k_pos,
        vespo_lambda_pos=vespo_lambda_pos,
        vespo_k_neg=vespo_k_neg,
        vespo_lambda_neg=vespo_lambda_neg,
        max_length=max_completion_length,
    )
    return (loss, [clipped] if kl is None else [kl, clipped]) if reduce else (loss, kl, clipped)


def _reduce_grpo_loss(per_token_loss, completion_mask, loss_type, max_completion_length, num_items_in_batch=None):
    """Losses of tokens [batch, length] as one number; no mask counts all. Raises ValueError for an unknown loss."""
    return _reduce_loss(per_token_loss, completion_mask, loss_type, max_completion_length, num_items_in_batch)


def _masked_mean(values, mask):
    """Σ values · mask / max(Σ mask, 1); no mask counts all."""
    return ops.masked_mean(values, torch.ones_like(values) if mask is None else mask)
