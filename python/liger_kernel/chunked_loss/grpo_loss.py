"""Group-relative policy optimisation (Shao et al. 2024, arXiv:2402.03300) and its relatives; formulas in
liger/functions/policy.h."""

from typing import Any

import torch
from torch import Tensor

from liger_kernel._library import ops
from liger_kernel.chunked_loss.fused_linear_ppo import LigerFusedLinearPPOBase
from liger_kernel.chunked_loss.gradients import breaks_graph
from liger_kernel.operators import policy


def k3_loss_fn(log_p: Tensor, log_q: Tensor) -> Tensor:
    """e^(log_p − log_q) − (log_p − log_q) − 1."""
    return ops.k3(log_p, log_q)


def sapo_loss_fn(importance_ratio: Tensor, temperature: float) -> Tensor:
    """4 / temperature · σ(temperature · (importance_ratio − 1)); raises ValueError unless temperature is positive."""
    if not temperature > 0:
        raise ValueError(f"sapo's temperature must be positive, got {temperature}")
    return ops.soft_clip(
        importance_ratio, torch.as_tensor(temperature, dtype=importance_ratio.dtype, device=importance_ratio.device)
    )


def clip_coef_fn(coef: Tensor, epsilon_low: float, epsilon_high: float, loss_type: str) -> tuple[Any, Any, Any]:
    """(the ratio as the loss clips it or None, where it is below, where it is above); cispo's bound is epsilon_high
    itself and not differentiable."""
    if loss_type == "cispo":
        return coef.clamp(max=epsilon_high).detach(), False, coef > epsilon_high
    if loss_type in ("sapo", "vespo"):
        return None, False, False
    return coef.clamp(1 - epsilon_low, 1 + epsilon_high), coef < 1 - epsilon_low, coef > 1 + epsilon_high


def get_gamma_weights(
    advantages: Tensor, log_ratio_per_token: Tensor, mask: Tensor, importance_sampling_ratio: Tensor | None = None,
    k_pos: float = 2.0, lambda_pos: float = 3.0, k_neg: float = 3.0, lambda_neg: float = 2.0,
) -> Tensor:  # fmt: skip
    """vespo's weights [B, 1] of completions with advantages [B], log_ratio_per_token and mask [B, T], not
    differentiated; see vespo_weights."""
    return ops.vespo_weights(
        advantages, log_ratio_per_token, mask, importance_sampling_ratio, k_pos, lambda_pos, k_neg, lambda_neg
    )


class LigerFusedLinearGRPOFunction(LigerFusedLinearPPOBase):
    """Group-relative policy optimisation and its relatives, of which loss_type names one: (loss, (mean kl, unless beta
    is 0, mean clipped)) (Shao et al. 2024, arXiv:2402.03300)."""

    @staticmethod
    def ppo_loss_fn(
        per_token_logps: Tensor, attention_mask: Tensor, advantages: Tensor, full_attention_mask: Tensor,
        ref_per_token_logps: Tensor | None = None, old_per_token_logps: Tensor | None = None, epsilon_low: float = 0.2,
        epsilon_high: float = 0.2, beta: float = 0.04, loss_type: str = "dapo",
        max_completion_length: int | None = None, importance_sampling_level: str = "token",
        sapo_temperature_pos: float = 1.0, sapo_temperature_neg: float = 1.05, vllm_is_ratio: Tensor | None = None,
        delta: float | None = None, use_bias_correction_kl: bool = False, vespo_k_pos: float = 2.0,
        vespo_lambda_pos: float = 3.0, vespo_k_neg: float = 3.0, vespo_lambda_neg: float = 2.0,
        num_items_in_batch: Tensor | float | None = None, **kwargs: Any,
    ) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
        """(loss, [mean kl, unless beta is 0, mean clipped]); policy_loss of libliger."""
        policy.check_loss(loss_type, importance_sampling_level, sapo_temperature_pos, sapo_temperature_neg)
        if loss_type == "dr_grpo" and max_completion_length is None:
            raise ValueError("loss_type='dr_grpo' needs max_completion_length")
        if loss_type != "sapo":
            sapo_temperature_pos, sapo_temperature_neg = 1.0, 1.05  # callers by position leave anything there
        normalizer = None
        if loss_type in policy.NORMALIZED:
            normalizer = policy._compute_dapo_normalizer(full_attention_mask, num_items_in_batch)
        options = policy.policy_options(
            loss_type, importance_sampling_level, epsilon_low, epsilon_high, delta, beta, use_bias_correction_kl,
            sapo_temperature_pos, sapo_temperature_neg, vespo_k_pos, vespo_lambda_pos, vespo_k_neg, vespo_lambda_neg,
            max_completion_length, masked_terms=loss_type == "luspo",
        )  # fmt: skip
        loss, kl, clipped = ops.policy_loss(
            per_token_logps, attention_mask, advantages, old_per_token_logps, ref_per_token_logps, vllm_is_ratio, None,
            normalizer, full_attention_mask, **options,
        )  # fmt: skip
        return loss, [kl, clipped] if beta else [clipped]

    @staticmethod
    def _check_options(loss_type: str, importance_sampling_level: str) -> None:
        policy.check_level(loss_type, importance_sampling_level)

    @staticmethod
    def _reads_masked(loss_type: str) -> bool:
        return loss_type == "luspo"

    @classmethod
    @breaks_graph
    def forward(
        cls, ctx: Any, _input: Tensor, weight: Tensor, selected_token_ids: Tensor, attention_mask: Tensor,
        advantages: Tensor, bias: Tensor | None = None, ref_per_token_logps: Tensor | None = None,
        old_per_token_logps: Tensor | None = None, ref_input: Tensor | None = None, ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None, beta: float = 0.04, epsilon_low: float = 0.2, epsilon_high: float = 0.2,
        loss_type: str = "dapo", max_completion_length: int | None = None, importance_sampling_level: str = "token",
        sapo_temperature_pos: float = 1.0, sapo_temperature_neg: float = 1.05, temperature: float = 1.0,
        compiled: bool = True, use_ref_model: bool = True, chunk_size: int = 1, vllm_is_ratio: Tensor | None = None,
        delta: float | None = None, use_bias_correction_kl: bool = False, vespo_k_pos: float = 2.0,
        vespo_lambda_pos: float = 3.0, vespo_k_neg: float = 3.0, vespo_lambda_neg: float = 2.0,
        num_items_in_batch: Tensor | float | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:  # fmt: skip
        return LigerFusedLinearPPOBase.forward(
            cls, ctx, _input, weight, selected_token_ids, attention_mask, advantages, bias, ref_per_token_logps,
            old_per_token_logps, ref_input, ref_weight, ref_bias, epsilon_low, epsilon_high, beta, loss_type,
            max_completion_length, importance_sampling_level, temperature, compiled, use_ref_model, chunk_size,
            sapo_temperature_pos, sapo_temperature_neg, vllm_is_ratio, delta, use_bias_correction_kl, vespo_k_pos,
            vespo_lambda_pos, vespo_k_neg, vespo_lambda_neg, num_items_in_batch,
        )  # fmt: skip


class LigerFusedLinearGRPOLoss(torch.nn.Module):
    """The loss of completions under a policy's head, without its logits; see LigerFusedLinearGRPOFunction.

    Raises ValueError where a temperature of sapo, or delta, is not positive.
    """

    function = LigerFusedLinearGRPOFunction

    def __init__(
        self, beta: float = 0.04, compiled: bool = True, use_ref_model: bool = True, chunk_size: int = 1,
        epsilon_low: float = 0.2, epsilon_high: float = 0.2, loss_type: str = "dapo",
        max_completion_length: int | None = None, importance_sampling_level: str = "token",
        sapo_temperature_pos: float = 1.0, sapo_temperature_neg: float = 1.05, temperature: float = 1.0,
        delta: float | None = None, use_bias_correction_kl: bool = False, vespo_k_pos: float = 2.0,
        vespo_lambda_pos: float = 3.0, vespo_k_neg: float = 3.0, vespo_lambda_neg: float = 2.0,
    ) -> None:  # fmt: skip
        super().__init__()
        positive = dict(
            sapo_temperature_pos=sapo_temperature_pos, sapo_temperature_neg=sapo_temperature_neg, delta=delta
        )
        for name, value in positive.items():
            if value is not None and value <= 0:
                raise ValueError(f"{name} must be positive, got {value}")
        self.beta, self.compiled, self.use_ref_model, self.chunk_size = beta, compiled, use_ref_model, chunk_size
        self.epsilon_low, self.epsilon_high, self.loss_type = epsilon_low, epsilon_high, loss_type
        self.max_completion_length = max_completion_length
        self.importance_sampling_level = importance_sampling_level
        self.sapo_temperature_pos, self.sapo_temperature_neg = sapo_temperature_pos, sapo_temperature_neg
        self.temperature, self.delta, self.use_bias_correction_kl = temperature, delta, use_bias_correction_kl
        self.vespo_k_pos, self.vespo_lambda_pos = vespo_k_pos, vespo_lambda_pos
        self.vespo_k_neg, self.vespo_lambda_neg = vespo_k_neg, vespo_lambda_neg

    def forward(
        self, _input: Tensor, lin_weight: Tensor, selected_token_ids: Tensor, attention_mask: Tensor,
        advantages: Tensor, bias: Tensor | None = None, ref_per_token_logps: Tensor | None = None,
        old_per_token_logps: Tensor | None = None, ref_input: Tensor | None = None, ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None, vllm_is_ratio: Tensor | None = None,
        num_items_in_batch: Tensor | float | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:  # fmt: skip
        return self.function.apply(
            _input, lin_weight, selected_token_ids, attention_mask, advantages, bias, ref_per_token_logps,
            old_per_token_logps, ref_input, ref_weight, ref_bias, self.beta, self.epsilon_low, self.epsilon_high,
            self.loss_type, self.max_completion_length, self.importance_sampling_level, self.sapo_temperature_pos,
            self.sapo_temperature_neg, self.temperature, self.compiled, self.use_ref_model, self.chunk_size,
            vllm_is_ratio, self.delta, self.use_bias_correction_kl, self.vespo_k_pos, self.vespo_lambda_pos,
            self.vespo_k_neg, self.vespo_lambda_neg, num_items_in_batch,
        )  # fmt: skip
