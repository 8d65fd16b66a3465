"""Group-relative policy optimisation (Shao et al. 2024, arXiv:2402.03300) and its relatives; formulas in
liger/ops/preference/policy.h."""

import torch

from liger_kernel._library import ops
from liger_kernel.chunked_loss.fused_linear_ppo import LigerFusedLinearPPOBase
from liger_kernel.ops.grpo_loss import NORMALIZED, _compute_dapo_normalizer, check_level, check_loss, policy_options


def k3_loss_fn(log_p, log_q):
    """e^(log_p − log_q) − (log_p − log_q) − 1."""
    return ops.k3(log_p, log_q)


def sapo_loss_fn(importance_ratio, temperature):
    """4 / temperature · σ(temperature · (importance_ratio − 1)); raises ValueError unless temperature is positive."""
    if not temperature > 0:
        raise ValueError(f"sapo's temperature must be positive, got {temperature}")
    return ops.soft_clip(
        importance_ratio, torch.as_tensor(temperature, dtype=importance_ratio.dtype, device=importance_ratio.device)
    )


def clip_coef_fn(coef, epsilon_low, epsilon_high, loss_type):
    """(the ratio as the loss clips it or None, where it is below, where it is above); cispo's bound is epsilon_high
    itself and not differentiable."""
    if loss_type == "cispo":
        return coef.clamp(max=epsilon_high).detach(), False, coef > epsilon_high
    if loss_type in ("sapo", "vespo"):
        return None, False, False
    return coef.clamp(1 - epsilon_low, 1 + epsilon_high), coef < 1 - epsilon_low, coef > 1 + epsilon_high


def get_gamma_weights(
    advantages,
    log_ratio_per_token,
    mask,
    importance_sampling_ratio=None,
    k_pos=2.0,
    lambda_pos=3.0,
    k_neg=3.0,
    lambda_neg=2.0,
):
    """vespo's weights [B, 1] of completions with advantages [B], log_ratio_per_token and mask [B, T], not
    differentiated; see vespo_weights."""
    return ops.vespo_weights(
        advantages, log_ratio_per_token, mask, importance_sampling_ratio, k_pos, lambda_pos, k_neg, lambda_neg
    )


class LigerFusedLinearGRPOFunction(LigerFusedLinearPPOBase):
    @staticmethod
    def _reads_masked(loss_type):
        return loss_type == "luspo"

    @staticmethod
    def ppo_loss_fn(
        per_token_logps,
        attention_mask,
        advantages,
        full_attention_mask,
        ref_per_token_logps=None,
        old_per_token_logps=None,
        epsilon_low=0.2,
        epsilon_high=0.2,
        beta=0.04,
        loss_type="dapo",
        max_completion_length=None,
        importance_sampling_level="token",
        sapo_temperature_pos=1.0,
        sapo_temperature_neg=1.05,
        vllm_is_ratio=None,
        delta=None,
        use_bias_correction_kl=False,
        vespo_k_pos=2.0,
        vespo_lambda_pos=3.0,
        vespo_k_neg=3.0,
        vespo_lambda_neg=2.0,
        num_items_in_batch=None,
        **kwargs,
    ):
        """(loss, [mean kl, unless beta is 0, mean clipped]); policy_loss of libliger."""
        check_loss(loss_type, importance_sampling_level, sapo_temperature_pos, sapo_temperature_neg)
        if loss_type == "dr_grpo" and max_completion_length is None:
            raise ValueError("loss_type='dr_grpo' needs max_completion_length")
        normalizer = (
            _compute_dapo_normalizer(full_attention_mask, num_items_in_batch) if loss_type in NORMALIZED else None
        )
        loss, kl, clipped = ops.policy_loss(
            per_token_logps,
            attention_mask,
            advantages,
            old_per_token_logps,
            ref_per_token_logps,
            vllm_is_ratio,
            None,
            normalizer,
            full_attention_mask,
            **policy_options(
                loss_type,
                importance_sampling_level,
                epsilon_low,
                epsilon_high,
                delta,
                beta,
                use_bias_correction_kl,
                *((sapo_temperature_pos, sapo_temperature_neg) if loss_type == "sapo" else (1.0, 1.0)),
                vespo_k_pos,
                vespo_lambda_pos,
                vespo_k_neg,
                vespo_lambda_neg,
                max_completion_length,
                masked_terms=loss_type == "luspo",
            ),
        )
        return loss, [kl, clipped] if beta else [clipped]

    @classmethod
    def forward(
        cls,
        ctx,
        _input,
        weight,
        selected_token_ids,
        attention_mask,
        advantages,
        bias=None,
        ref_per_token_logps=None,
        old_per_token_logps=None,
        ref_input=None,
        ref_weight=None,
        ref_bias=None,
        beta=0.04,
        epsilon_low=0.2,
        epsilon_high=0.2,
        loss_type="dapo",
        max_completion_length=None,
        importance_sampling_level="token",
        sapo_temperature_pos=1.0,
        sapo_temperature_neg=1.05,
        temperature=1.0,
        compiled=True,
        use_ref_model=True,
        chunk_size=1,
        vllm_is_ratio=None,
        delta=None,
        use_bias_correction_kl=False,
        vespo_k_pos=2.0,
        vespo_lambda_pos=3.0,
        vespo_k_neg=3.0,
        vespo_lambda_neg=2.0,
        num_items_in_batch=None,
    ):
        """(loss, (mean kl, unless beta is 0, mean clipped)); see LigerFusedLinearPPOBase.forward and policy_loss."""
        check_level(loss_type, importance_sampling_level)
        return LigerFusedLinearPPOBase.forward(  # by its name: torch.compile cannot trace super()
            cls,
            ctx,
            _input=_input,
            weight=weight,
            selected_token_ids=selected_token_ids,
            attention_mask=attention_mask,
            advantages=advantages,
            bias=bias,
            ref_per_token_logps=ref_per_token_logps,
            old_per_token_logps=old_per_token_logps,
            ref_input=ref_input,
            ref_weight=ref_weight,
            ref_bias=ref_bias,
            epsilon_low=epsilon_low,
            epsilon_high=epsilon_high,
            beta=beta,
            loss_type=loss_type,
            max_completion_length=max_completion_length,
            importance_sampling_level=importance_sampling_level,
            temperature=temperature,
            compiled=compiled,
            use_ref_model=use_ref_model,
            chunk_size=chunk_size,
            sapo_temperature_pos=sapo_temperature_pos,
            sapo_temperature_neg=sapo_temperature_neg,
            vllm_is_ratio=vllm_is_ratio,
            delta=delta,
            use_bias_correction_kl=use_bias_correction_kl,
            vespo_k_pos=vespo_k_pos,
            vespo_lambda_pos=vespo_lambda_pos,
            vespo_k_neg=vespo_k_neg,
            vespo_lambda_neg=vespo_lambda_neg,
            num_items_in_batch=num_items_in_batch,
        )

    @staticmethod
    def backward(ctx, grad_output, *grad_metrics):
        return *LigerFusedLinearPPOBase.backward(ctx, grad_output)[:6], *[None] * 25


class LigerFusedLinearGRPOLoss(torch.nn.Module):
    """The loss of completions under a policy's head, without its logits; see LigerFusedLinearGRPOFunction.

    Raises ValueError where a temperature of sapo, or delta, is not positive.
    """

    def __init__(
        self,
        beta=0.04,
        compiled=True,
        use_ref_model=True,
        chunk_size=1,
        epsilon_low=0.2,
        epsilon_high=0.2,
        loss_type="dapo",
        max_completion_length=None,
        importance_sampling_level="token",
        sapo_temperature_pos=1.0,
        sapo_temperature_neg=1.05,
        temperature=1.0,
        delta=None,
        use_bias_correction_kl=False,
        vespo_k_pos=2.0,
        vespo_lambda_pos=3.0,
        vespo_k_neg=3.0,
        vespo_lambda_neg=2.0,
    ):
        super().__init__()
        for name, value in (
            ("sapo_temperature_pos", sapo_temperature_pos),
            ("sapo_temperature_neg", sapo_temperature_neg),
            ("delta", delta),
        ):
            if value is not None and value <= 0:
                raise ValueError(f"{name} must be positive, got {value}")
        self.beta, self.compiled, self.use_ref_model, self.chunk_size = beta, compiled, use_ref_model, chunk_size
        self.epsilon_low, self.epsilon_high, self.delta = epsilon_low, epsilon_high, delta
        self.loss_type, self.max_completion_length, self.importance_sampling_level = (
            loss_type,
            max_completion_length,
            importance_sampling_level,
        )
        self.sapo_temperature_pos, self.sapo_temperature_neg, self.temperature = (
            sapo_temperature_pos,
            sapo_temperature_neg,
            temperature,
        )
        self.use_bias_correction_kl = use_bias_correction_kl
        self.vespo_k_pos, self.vespo_lambda_pos, self.vespo_k_neg, self.vespo_lambda_neg = (
            vespo_k_pos,
            vespo_lambda_pos,
            vespo_k_neg,
            vespo_lambda_neg,
        )

    def forward(
        self,
        _input,
        lin_weight,
        selected_token_ids,
        attention_mask,
        advantages,
        bias=None,
        ref_per_token_logps=None,
        old_per_token_logps=None,
        ref_input=None,
        ref_weight=None,
        ref_bias=None,
        vllm_is_ratio=None,
        num_items_in_batch=None,
    ):
        return LigerFusedLinearGRPOFunction.apply(
            _input,
            lin_weight,
            selected_token_ids,
            attention_mask,
            advantages,
            bias,
            ref_per_token_logps,
            old_per_token_logps,
            ref_input,
            ref_weight,
            ref_bias,
            self.beta,
            self.epsilon_low,
            self.epsilon_high,
            self.loss_type,
            self.max_completion_length,
            self.importance_sampling_level,
            self.sapo_temperature_pos,
            self.sapo_temperature_neg,
            self.temperature,
            self.compiled,
            self.use_ref_model,
            self.chunk_size,
            vllm_is_ratio,
            self.delta,
            self.use_bias_correction_kl,
            self.vespo_k_pos,
            self.vespo_lambda_pos,
            self.vespo_k_neg,
            self.vespo_lambda_neg,
            num_items_in_batch,
        )
