"""The base of the losses on single sequences that are liked or not; their formulas are in
liger/functions/preference.h."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from liger_kernel._library import ops
from liger_kernel.chunked_loss.fused_linear_preference import reference_log_probs
from liger_kernel.chunked_loss.gradients import gradients_of_arguments, loss_with_gradients
from liger_kernel.operators.head import linear_log_prob


class LigerFusedLinearUnpairedPreferenceBase(torch.autograd.Function):
    """preference_loss_fn(log-probabilities of the sequences), without their logits.

    A loss is a subclass with a static `preference_loss_fn(log_probs [B], preference_labels [B], full_target,
    **loss_kwargs)`, which returns the loss or (loss, *aux); where there is a reference, it is given ref_log_prob_chunk.
    It is written in differentiable torch.
    """

    @staticmethod
    def preference_loss_fn(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("a preference loss defines preference_loss_fn")

    @staticmethod
    def forward(
        cls: Any, ctx: Any, _input: Tensor, weight: Tensor, target: Tensor, preference_labels: Tensor,
        bias: Tensor | None = None, chunk_size: int = 1, ignore_index: int = -100, compiled: bool = True,
        use_ref_model: bool = False, ref_input: Tensor | None = None, ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None, average_log_prob: bool = False, **loss_kwargs: Any,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:  # fmt: skip
        """(loss, aux) for hidden states _input [B, T, H], weight [V, H], target [B, T], preference_labels [B] of bool,
        True where the sequence is liked, and bias [V] or None; no token is shifted.

        aux: the sums over the liked and over the other sequences, of log-probabilities, and of all logits, and then
        what preference_loss_fn adds. Labels of ignore_index do not count. chunk_size and compiled change nothing: the
        head divides its work by itself.
        """
        if preference_labels is None:
            raise AssertionError("preference_labels must say of each sequence whether it is liked")
        head, loss_of = _head_and_loss(
            _input, weight, target, preference_labels, bias, cls.preference_loss_fn, target,
            (ref_input, ref_weight, ref_bias) if use_ref_model else None, ignore_index, average_log_prob, loss_kwargs,
        )  # fmt: skip
        return loss_with_gradients(ctx, head, loss_of, _input, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grad_output: Any) -> tuple[Tensor | None, ...]:
        return gradients_of_arguments(ctx, grad_output, bias=4)

    @staticmethod
    def chunk_forward(
        input_chunk: Tensor, weight: Tensor, target_chunk: Tensor, preference_labels_chunk: Tensor,
        bias: Tensor | None = None, ignore_index: int = -100, average_log_prob: bool = False,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """(log_probs, chosen_logps_sum, rejected_logps_sum, chosen_logits_sum, rejected_logits_sum) of some sequences;
        log_probs are differentiable."""
        logp = linear_log_prob(input_chunk, weight, target_chunk, bias, ignore_index=ignore_index)
        log_probs = ops.sequence_log_prob(logp, target_chunk, ignore_index, average_log_prob)
        return log_probs, *_sums(log_probs, input_chunk, weight, bias, preference_labels_chunk)

    @staticmethod
    def _compute_loss(
        input_chunk: Tensor, weight: Tensor, target_chunk: Tensor, preference_labels_chunk: Tensor,
        bias: Tensor | None = None, preference_loss_fn: Callable[..., Any] | None = None,
        full_target: Tensor | None = None, ignore_index: int = -100, use_ref_model: bool = False,
        ref_input_chunk: Tensor | None = None, ref_weight: Tensor | None = None, ref_bias: Tensor | None = None,
        average_log_prob: bool = False, **loss_kwargs: Any,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:  # fmt: skip
        """(loss, aux) of some sequences, as parts of those of the batch full_target; differentiable, and without
        logits."""
        reference = (ref_input_chunk, ref_weight, ref_bias) if use_ref_model else None
        head, loss_of = _head_and_loss(
            input_chunk, weight, target_chunk, preference_labels_chunk, bias, preference_loss_fn, full_target,
            reference, ignore_index, average_log_prob, loss_kwargs,
        )  # fmt: skip
        return loss_of(head(input_chunk, weight, bias))


def _sums(log_probs, hidden, weight, bias, liked):
    return *ops.class_sums(log_probs, liked), *ops.class_sums(ops.logit_sums(hidden, weight, bias), liked)


def _head_and_loss(
    hidden, weight, target, liked, bias, loss_fn, full_target, reference, ignore_index, average, loss_kwargs
):
    """(head, loss_of) for some sequences. head gives the log-probabilities of the tokens, loss_of makes (loss, aux) of
    them. reference: its hidden states, weight and bias, or None."""

    def head(hidden, weight, bias):
        return linear_log_prob(hidden, weight, target, bias, ignore_index=ignore_index)

    def loss_of(logp):
        log_probs, known = ops.sequence_log_prob(logp, target, ignore_index, average), {}
        if reference:
            ref_hidden, ref_weight, ref_bias = reference
            ref = reference_log_probs(ref_hidden, ref_weight, target, ref_bias, ignore_index, average)
            known = dict(ref_log_prob_chunk=ref)
        result = loss_fn(log_probs, liked, full_target, **loss_kwargs, **known)
        loss, *aux = result if isinstance(result, tuple) else (result,)
        return loss, (*_sums(log_probs, hidden, weight, bias, liked), *aux)

    return head, loss_of
