"""The base of the losses on single sequences that are liked or not; their formulas are in liger/ops/preference/preference.h."""

import torch

from liger_kernel._library import ops
from liger_kernel.chunked_loss.gradients import FusedLossFunction, loss_with_gradients, scaled_gradients
from liger_kernel.ops.linear_log_prob import linear_log_prob


class LigerFusedLinearUnpairedPreferenceBase(FusedLossFunction):
    """preference_loss_fn(log-probabilities of the sequences), without their logits.

    A loss is a subclass with a static `preference_loss_fn(log_probs [B], preference_labels [B], full_target, **loss_kwargs)`, which returns the loss
    or (loss, *aux); where there is a reference, it is given ref_log_prob_chunk. It is written in differentiable torch.
    """

    @staticmethod
    def preference_loss_fn(*args, **kwargs):
        raise NotImplementedError("a preference loss defines preference_loss_fn")

    @staticmethod
    def forward(cls, ctx, _input, weight, target, preference_labels, bias=None, chunk_size=1, ignore_index=-100, compiled=True, use_ref_model=False,
                ref_input=None, ref_weight=None, ref_bias=None, average_log_prob=False, **loss_kwargs):
        """(loss, aux) for hidden states _input [B, T, H], weight [V, H], target [B, T], preference_labels [B] of bool, True where the sequence is liked,
        and bias [V] or None; no token is shifted.

        aux: the sums over the liked and over the other sequences, of log-probabilities, and of all logits, and then what preference_loss_fn adds.
        Labels of ignore_index do not count. chunk_size and compiled change nothing: the head divides its work by itself.
        """

        def loss_of(_input, weight, bias):
            return LigerFusedLinearUnpairedPreferenceBase._compute_loss(
                _input, weight, target, preference_labels, bias, preference_loss_fn=cls.preference_loss_fn, full_target=target, ignore_index=ignore_index,
                use_ref_model=use_ref_model, ref_input_chunk=ref_input, ref_weight=ref_weight, ref_bias=ref_bias, average_log_prob=average_log_prob,
                **loss_kwargs)

        return loss_with_gradients(ctx, loss_of, _input, weight, bias)

    @staticmethod
    def backward(ctx, *grad_output):
        grad_input, grad_weight, grad_bias = scaled_gradients(ctx, grad_output)
        return grad_input, grad_weight, None, None, grad_bias

    @staticmethod
    def chunk_forward(input_chunk, weight, target_chunk, preference_labels_chunk, bias=None, ignore_index=-100, average_log_prob=False):
        """(log_probs, chosen_logps_sum, rejected_logps_sum, chosen_logits_sum, rejected_logits_sum) of some sequences; log_probs are differentiable."""
        logp = linear_log_prob(input_chunk, weight, target_chunk, bias, ignore_index=ignore_index)
        log_probs = ops.sequence_log_prob(logp, target_chunk, ignore_index, average_log_prob)
        logits = ops.logit_sums(input_chunk, weight, bias)
        return log_probs, *ops.class_sums(log_probs, preference_labels_chunk), *ops.class_sums(logits, preference_labels_chunk)

    @staticmethod
    def _compute_loss(input_chunk, weight, target_chunk, preference_labels_chunk, bias=None, preference_loss_fn=None, full_target=None, ignore_index=-100,
                      use_ref_model=False, ref_input_chunk=None, ref_weight=None, ref_bias=None, average_log_prob=False, **loss_kwargs):
        """(loss, aux) of some sequences, as parts of those of the batch full_target; differentiable, and without logits."""
        assert preference_labels_chunk is not None, "preference_labels must say of each sequence whether it is liked"
        log_probs, *sums = LigerFusedLinearUnpairedPreferenceBase.chunk_forward(
            input_chunk, weight, target_chunk, preference_labels_chunk, bias, ignore_index, average_log_prob)
        if use_ref_model:
            if ref_input_chunk is None or ref_weight is None:
                raise TypeError("use_ref_model=True needs ref_input and ref_weight")
            with torch.no_grad():
                logp = linear_log_prob(ref_input_chunk, ref_weight, target_chunk, ref_bias, ignore_index=ignore_index)
                loss_kwargs["ref_log_prob_chunk"] = ops.sequence_log_prob(logp, target_chunk, ignore_index, average_log_prob)
        result = preference_loss_fn(log_probs, preference_labels_chunk, full_target, **loss_kwargs)
        loss, *aux = result if isinstance(result, tuple) else (result,)
        return loss, (*sums, *aux)
