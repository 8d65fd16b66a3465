"""The base of the losses on completions that a policy has sampled; formulas in liger/functions/policy.h."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from liger_kernel.chunked_loss.gradients import gradients_of_arguments, loss_with_gradients
from liger_kernel.operators.common import IGNORE_INDEX
from liger_kernel.operators.head import linear_log_prob
from liger_kernel.operators.policy import _compute_dapo_normalizer, check_ratio


class TwoReferences(ValueError, Warning):
    """The API raises a bare Warning here, which its callers may catch."""


class LigerFusedLinearPPOBase(torch.autograd.Function):
    """ppo_loss_fn(log-probabilities of the tokens), without their logits.

    A loss is a subclass with a static `ppo_loss_fn(per_token_logps [B, T], attention_mask, advantages, ...)`, which
    takes the keywords of `_compute_loss_from_logps` and returns the loss and a list of metrics. It is written in
    differentiable torch. Where `_reads_masked(loss_type)` is False, the tokens that the mask leaves out cost nothing,
    and their log-probabilities are 0.
    """

    @staticmethod
    def ppo_loss_fn(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("a policy's loss defines ppo_loss_fn")

    @staticmethod
    def _check_options(loss_type: str, importance_sampling_level: str) -> None:
        """Raises where they do not go together."""

    @staticmethod
    def _reads_masked(loss_type: str) -> bool:
        return True

    _compute_dapo_normalizer = staticmethod(_compute_dapo_normalizer)

    @staticmethod
    def forward(
        cls: Any, ctx: Any, _input: Tensor, weight: Tensor, selected_token_ids: Tensor, attention_mask: Tensor,
        advantages: Tensor, bias: Tensor | None = None, ref_per_token_logps: Tensor | None = None,
        old_per_token_logps: Tensor | None = None, ref_input: Tensor | None = None, ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None, epsilon_low: float = 0.2, epsilon_high: float = 0.2, beta: float = 0.04,
        loss_type: str = "dapo", max_completion_length: int | None = None, importance_sampling_level: str = "token",
        temperature: float = 1.0, compiled: bool = True, use_ref_model: bool = False, chunk_size: int = 1,
        sapo_temperature_pos: float = 1.0, sapo_temperature_neg: float = 1.05, vllm_is_ratio: Tensor | None = None,
        delta: float | None = None, use_bias_correction_kl: bool = False, vespo_k_pos: float = 2.0,
        vespo_lambda_pos: float = 3.0, vespo_k_neg: float = 3.0, vespo_lambda_neg: float = 2.0,
        num_items_in_batch: Tensor | float | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:  # fmt: skip
        """(loss, metrics) for hidden states _input [B, T, H], weight [V, H], selected_token_ids and attention_mask [B,
        T], advantages [B], bias [V] or None.

        The log-probabilities of old_per_token_logps and ref_per_token_logps [B, T] are given, or the reference's are
        made from ref_input, ref_weight and ref_bias, where use_ref_model says that there is one. chunk_size and
        compiled change nothing: the head divides its work by itself.
        """
        cls._check_options(loss_type, importance_sampling_level)
        _check_batch(
            use_ref_model, ref_input, selected_token_ids, ref_per_token_logps, loss_type, max_completion_length,
            vllm_is_ratio,
        )  # fmt: skip
        ratio = vllm_is_ratio
        if ratio is not None and ratio.ndim == 1:
            ratio = ratio.unsqueeze(-1)
        ids = _readable(selected_token_ids, len(weight), attention_mask, cls._reads_masked(loss_type))

        def log_probs(hidden, weight, bias):
            return linear_log_prob(hidden, weight, ids, bias, temperature, IGNORE_INDEX)

        def loss_of(logps):
            ref = ref_per_token_logps if use_ref_model else None
            if use_ref_model and ref is None:
                with torch.no_grad():
                    ref = log_probs(ref_input, ref_weight, ref_bias)
            return LigerFusedLinearPPOBase._compute_loss_from_logps(
                logps, attention_mask, advantages, ref, old_per_token_logps, ratio, None, epsilon_low, epsilon_high,
                beta, loss_type, max_completion_length, importance_sampling_level, cls.ppo_loss_fn,
                sapo_temperature_pos, sapo_temperature_neg, delta, use_bias_correction_kl, vespo_k_pos,
                vespo_lambda_pos, vespo_k_neg, vespo_lambda_neg, num_items_in_batch,
            )  # fmt: skip

        return loss_with_gradients(ctx, log_probs, loss_of, _input, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad_output: Any, *grad_metrics: Any) -> tuple[Tensor | None, ...]:
        return gradients_of_arguments(ctx, (grad_output,), bias=5)

    @staticmethod
    def chunk_forward(
        input_chunk: Tensor, weight: Tensor, selected_token_ids: Tensor, bias: Tensor | None = None,
        temperature: float = 1.0,
    ) -> Tensor:  # fmt: skip
        """log_softmax((input_chunk weightᵀ + bias) / temperature) at selected_token_ids [b, T], float, differentiable;
        0 for negative ids, which are padding."""
        ids = _readable(selected_token_ids, len(weight))
        return linear_log_prob(input_chunk, weight, ids, bias, temperature, IGNORE_INDEX)

    @staticmethod
    def _compute_loss_from_logps(
        per_token_logps: Tensor, attention_mask_chunk: Tensor, advantages_chunk: Tensor,
        ref_per_token_logps_chunk: Tensor | None = None, old_per_token_logps_chunk: Tensor | None = None,
        vllm_is_ratio_chunk: Tensor | None = None, full_attention_mask: Tensor | None = None, epsilon_low: float = 0.2,
        epsilon_high: float = 0.2, beta: float = 0.04, loss_type: str = "dapo",
        max_completion_length: int | None = None, importance_sampling_level: str = "token",
        ppo_loss_fn: Callable[..., Any] | None = None, sapo_temperature_pos: float = 1.0,
        sapo_temperature_neg: float = 1.05, delta: float | None = None, use_bias_correction_kl: bool = False,
        vespo_k_pos: float = 2.0, vespo_lambda_pos: float = 3.0, vespo_k_neg: float = 3.0,
        vespo_lambda_neg: float = 2.0, num_items_in_batch: Tensor | float | None = None,
    ) -> Any:  # fmt: skip
        """(loss, metrics) of some completions, as parts of those of the batch full_attention_mask; differentiable."""
        if ppo_loss_fn is None:
            raise TypeError("ppo_loss_fn must be given")
        known = lambda logps: None if logps is None else logps.detach().float()
        return ppo_loss_fn(
            per_token_logps=per_token_logps, attention_mask=attention_mask_chunk, advantages=advantages_chunk,
            full_attention_mask=attention_mask_chunk if full_attention_mask is None else full_attention_mask,
            ref_per_token_logps=known(ref_per_token_logps_chunk), old_per_token_logps=known(old_per_token_logps_chunk),
            vllm_is_ratio=vllm_is_ratio_chunk, epsilon_low=epsilon_low, epsilon_high=epsilon_high, beta=beta,
            loss_type=loss_type, max_completion_length=max_completion_length,
            importance_sampling_level=importance_sampling_level, sapo_temperature_pos=sapo_temperature_pos,
            sapo_temperature_neg=sapo_temperature_neg, delta=delta, use_bias_correction_kl=use_bias_correction_kl,
            vespo_k_pos=vespo_k_pos, vespo_lambda_pos=vespo_lambda_pos, vespo_k_neg=vespo_k_neg,
            vespo_lambda_neg=vespo_lambda_neg, num_items_in_batch=num_items_in_batch,
        )  # fmt: skip


def _check_batch(use_ref_model, ref_input, ids, ref_per_token_logps, loss_type, max_completion_length, vllm_is_ratio):
    if use_ref_model and ref_per_token_logps is None and ref_input is None:
        raise AssertionError("use_ref_model needs ref_per_token_logps or ref_input")
    if ref_per_token_logps is not None and ref_input is not None:
        raise TwoReferences("both ref_per_token_logps and ref_input are given: which one is the reference?")
    if loss_type == "dr_grpo" and max_completion_length is None:
        raise AssertionError("loss_type='dr_grpo' needs max_completion_length")
    check_ratio(vllm_is_ratio, *ids.shape)


def _readable(ids, classes, mask=None, reads_masked=True):
    """ids with IGNORE_INDEX for padding: for negative ones, and for masked ones that are not read or are outside the
    vocabulary."""
    padding = ids < 0
    if mask is not None:
        padding = padding | ((mask == 0) & (ids >= classes) if reads_masked else mask == 0)
    return ids.masked_fill(padding, IGNORE_INDEX)
