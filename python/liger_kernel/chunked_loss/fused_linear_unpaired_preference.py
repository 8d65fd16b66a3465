"""The base of the losses on single sequences that are liked or not; their formulas are in
liger/ops/preference/preference.h."""

import torch

from liger_kernel._library import ops
from liger_kernel.chunked_loss.fused_linear_preference import REFERENCE, reference_log_probs
from liger_kernel.chunked_loss.gradients import gradients_of_arguments, loss_with_gradients
from liger_kernel.operators.head import linear_log_prob
from liger_kernel.signatures import required, takes

#: What the head needs, and which sequences are liked.
SEQUENCES = required("_input", "weight", "target", "preference_labels") | dict(bias=None)


class LigerFusedLinearUnpairedPreferenceBase(torch.autograd.Function):
    """preference_loss_fn(log-probabilities of the sequences), without their logits.

    A loss is a subclass with a static `preference_loss_fn(log_probs [B], preference_labels [B], full_target,
    **loss_kwargs)`, which returns the loss or (loss, *aux); where there is a reference, it is given ref_log_prob_chunk.
    It is written in differentiable torch.
    """

    @staticmethod
    def preference_loss_fn(*args, **kwargs):
        raise NotImplementedError("a preference loss defines preference_loss_fn")

    @staticmethod
    @takes(
        required("cls", "ctx")
        | SEQUENCES
        | dict(chunk_size=1, ignore_index=-100, compiled=True, use_ref_model=False)
        | REFERENCE
        | dict(average_log_prob=False),
        extra="loss_kwargs",
    )
    def forward(cls, ctx, _input, weight, target, preference_labels, bias, chunk_size, compiled, **options):
        """(loss, aux) for hidden states _input [B, T, H], weight [V, H], target [B, T], preference_labels [B] of bool,
        True where the sequence is liked, and bias [V] or None; no token is shifted.

        aux: the sums over the liked and over the other sequences, of log-probabilities, and of all logits, and then
        what preference_loss_fn adds. Labels of ignore_index do not count. chunk_size and compiled change nothing: the
        head divides its work by itself.
        """
        if preference_labels is None:
            raise AssertionError("preference_labels must say of each sequence whether it is liked")

        parts = _input, weight, target, preference_labels, bias
        head, loss_of = _head_and_loss(parts, cls.preference_loss_fn, target, **options)
        return loss_with_gradients(ctx, head, loss_of, _input, weight, bias)

    @staticmethod
    def backward(ctx, *grad_output):
        return gradients_of_arguments(ctx, grad_output, bias=4)

    @staticmethod
    def chunk_forward(
        input_chunk, weight, target_chunk, preference_labels_chunk, bias=None, ignore_index=-100, average_log_prob=False
    ):
        """(log_probs, chosen_logps_sum, rejected_logps_sum, chosen_logits_sum, rejected_logits_sum) of some sequences;
        log_probs are differentiable."""
        logp = linear_log_prob(input_chunk, weight, target_chunk, bias, ignore_index=ignore_index)
        log_probs = ops.sequence_log_prob(logp, target_chunk, ignore_index, average_log_prob)
        return log_probs, *_sums(log_probs, input_chunk, weight, bias, preference_labels_chunk)

    @staticmethod
    @takes(
        required("input_chunk", "weight", "target_chunk", "preference_labels_chunk")
        | dict(bias=None, preference_loss_fn=None, full_target=None, ignore_index=-100)
        | dict(use_ref_model=False, ref_input_chunk=None, ref_weight=None, ref_bias=None, average_log_prob=False),
        extra="loss_kwargs",
    )
    def _compute_loss(input_chunk, weight, target_chunk, preference_labels_chunk, bias, ref_input_chunk, **options):
        """(loss, aux) of some sequences, as parts of those of the batch full_target; differentiable, and without
        logits."""
        parts = input_chunk, weight, target_chunk, preference_labels_chunk, bias
        head, loss_of = _head_and_loss(parts, ref_input=ref_input_chunk, **options)
        return loss_of(head(input_chunk, weight, bias))


def _sums(log_probs, hidden, weight, bias, liked):
    return *ops.class_sums(log_probs, liked), *ops.class_sums(ops.logit_sums(hidden, weight, bias), liked)


def _head_and_loss(parts, preference_loss_fn, full_target, loss_kwargs, use_ref_model, **options):
    """(head, loss_of) for parts: hidden, weight, target, liked and bias. head gives the log-probabilities of the
    tokens, loss_of makes (loss, aux) of them."""
    hidden, weight, target, liked, bias = parts
    ignore_index, average = options["ignore_index"], options["average_log_prob"]

    def head(hidden, weight, bias):
        return linear_log_prob(hidden, weight, target, bias, ignore_index=ignore_index)

    def loss_of(logp):
        log_probs, known = ops.sequence_log_prob(logp, target, ignore_index, average), {}
        if use_ref_model:
            ref_input, ref_weight, ref_bias = (options[name] for name in REFERENCE)
            ref = reference_log_probs(ref_input, ref_weight, target, ref_bias, ignore_index, average)
            known = dict(ref_log_prob_chunk=ref)
        result = preference_loss_fn(log_probs, liked, full_target, **loss_kwargs, **known)
        loss, *aux = result if isinstance(result, tuple) else (result,)
        return loss, (*_sums(log_probs, hidden, weight, bias, liked), *aux)

    return head, loss_of
