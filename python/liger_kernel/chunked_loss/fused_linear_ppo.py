"""The base of the losses on completions that a policy has sampled; formulas in liger/ops/preference/policy.h."""

import torch

from liger_kernel.chunked_loss.gradients import loss_with_gradients, scaled_gradients
from liger_kernel.ops.divergence import IGNORE_INDEX
from liger_kernel.ops.grpo_loss import _compute_dapo_normalizer, check_ratio
from liger_kernel.ops.linear_log_prob import linear_log_prob


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
    def ppo_loss_fn(*args, **kwargs):
        raise NotImplementedError("a policy's loss defines ppo_loss_fn")

    @staticmethod
    def _reads_masked(loss_type):
        return True

    _compute_dapo_normalizer = staticmethod(_compute_dapo_normalizer)

    @staticmethod
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
        epsilon_low=0.2,
        epsilon_high=0.2,
        beta=0.04,
        loss_type="dapo",
        max_completion_length=None,
        importance_sampling_level="token",
        temperature=1.0,
        compiled=True,
        use_ref_model=False,
        chunk_size=1,
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
    ):
        """(loss, metrics) for hidden states _input [B, T, H], weight [V, H], selected_token_ids and attention_mask [B,
        T], advantages [B], bias [V] or None.

        The log-probabilities of old_per_token_logps and ref_per_token_logps [B, T] are given, or the reference's are
        made from ref_input, ref_weight and ref_bias, where use_ref_model says that there is one. chunk_size and
        compiled change nothing: the head divides its work by itself.
        """
        if use_ref_model and ref_per_token_logps is None and ref_input is None:
            raise AssertionError("use_ref_model needs ref_per_token_logps or ref_input")
        if ref_per_token_logps is not None and ref_input is not None:
            raise TwoReferences("both ref_per_token_logps and ref_input are given: which one is the reference?")
        if loss_type == "dr_grpo" and max_completion_length is None:
            raise AssertionError("loss_type='dr_grpo' needs max_completion_length")
        check_ratio(vllm_is_ratio, *selected_token_ids.shape)
        if vllm_is_ratio is not None and vllm_is_ratio.ndim == 1:
            vllm_is_ratio = vllm_is_ratio.unsqueeze(-1)
        ids = _readable(selected_token_ids, len(weight), attention_mask, cls._reads_masked(loss_type))

        def log_probs(hidden, weight, bias):
            return linear_log_prob(hidden, weight, ids, bias, temperature, IGNORE_INDEX)

        def loss_of(logps):
            reference = ref_per_token_logps if use_ref_model else None
            if use_ref_model and reference is None:
                with torch.no_grad():
                    reference = log_probs(ref_input, ref_weight, ref_bias)
            return LigerFusedLinearPPOBase._compute_loss_from_logps(
                logps,
                attention_mask,
                advantages,
                reference,
                old_per_token_logps,
                vllm_is_ratio,
                attention_mask,
                epsilon_low,
                epsilon_high,
                beta,
                loss_type,
                max_completion_length,
                importance_sampling_level,
                cls.ppo_loss_fn,
                sapo_temperature_pos,
                sapo_temperature_neg,
                delta,
                use_bias_correction_kl,
                vespo_k_pos,
                vespo_lambda_pos,
                vespo_k_neg,
                vespo_lambda_neg,
                num_items_in_batch,
            )

        return loss_with_gradients(ctx, log_probs, loss_of, _input, weight, bias)

    @staticmethod
    def backward(ctx, grad_output, *grad_metrics):
        grad_input, grad_weight, grad_bias = scaled_gradients(ctx, (grad_output,))
        return grad_input, grad_weight, None, None, None, grad_bias, *[None] * 25

    @staticmethod
    def chunk_forward(input_chunk, weight, selected_token_ids, bias=None, temperature=1.0):
        """log_softmax((input_chunk weightᵀ + bias) / temperature) at selected_token_ids [b, T], float, differentiable;
        0 for negative ids, which are padding."""
        return linear_log_prob(
            input_chunk, weight, _readable(selected_token_ids, len(weight)), bias, temperature, IGNORE_INDEX
        )

    @staticmethod
    def _compute_loss_from_logps(
        per_token_logps,
        attention_mask_chunk,
        advantages_chunk,
        ref_per_token_logps_chunk=None,
        old_per_token_logps_chunk=None,
        vllm_is_ratio_chunk=None,
        full_attention_mask=None,
        epsilon_low=0.2,
        epsilon_high=0.2,
        beta=0.04,
        loss_type="dapo",
        max_completion_length=None,
        importance_sampling_level="token",
        ppo_loss_fn=None,
        sapo_temperature_pos=1.0,
        sapo_temperature_neg=1.05,
        delta=None,
        use_bias_correction_kl=False,
        vespo_k_pos=2.0,
        vespo_lambda_pos=3.0,
        vespo_k_neg=3.0,
        vespo_lambda_neg=2.0,
        num_items_in_batch=None,
    ):
        """(loss, metrics) of some completions, as parts of those of the batch full_attention_mask; differentiable."""
        as_float = lambda t: None if t is None else t.detach().float()
        return ppo_loss_fn(
            per_token_logps=per_token_logps,
            attention_mask=attention_mask_chunk,
            advantages=advantages_chunk,
            full_attention_mask=attention_mask_chunk if full_attention_mask is None else full_attention_mask,
            ref_per_token_logps=as_float(ref_per_token_logps_chunk),
            old_per_token_logps=as_float(old_per_token_logps_chunk),
            epsilon_low=epsilon_low,
            epsilon_high=epsilon_high,
            beta=beta,
            loss_type=loss_type,
            max_completion_length=max_completion_length,
            importance_sampling_level=importance_sampling_level,
            sapo_temperature_pos=sapo_temperature_pos,
            sapo_temperature_neg=sapo_temperature_neg,
            vllm_is_ratio=vllm_is_ratio_chunk,
            delta=delta,
            use_bias_correction_kl=use_bias_correction_kl,
            vespo_k_pos=vespo_k_pos,
            vespo_lambda_pos=vespo_lambda_pos,
            vespo_k_neg=vespo_k_neg,
            vespo_lambda_neg=vespo_lambda_neg,
            num_items_in_batch=num_items_in_batch,
        )


def _readable(ids, classes, mask=None, reads_masked=True):
    """ids with IGNORE_INDEX for padding: for negative ones, and for masked ones that are not read or are outside the
    vocabulary."""
    padding = ids < 0
    if mask is not None:
        padding = padding | ((mask == 0) & (ids >= classes) if reads_masked else mask == 0)
    return ids.masked_fill(padding, IGNORE_INDEX)
