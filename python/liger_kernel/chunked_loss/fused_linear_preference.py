"""The base of the losses on pairs of a chosen and a rejected sequence; their formulas are in
liger/functions/preference.h."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from liger_kernel._library import ops
from liger_kernel.chunked_loss.gradients import gradients_of_arguments, loss_with_gradients
from liger_kernel.operators.head import linear_log_prob


class LigerFusedLinearPreferenceBase(torch.autograd.Function):
    """alpha · nll + preference_loss_fn(log-probabilities of the sequences), without their logits.

    A loss is a subclass with a static `preference_loss_fn(chosen_logps [n], rejected_logps [n], full_target, beta,
    **loss_kwargs)`, which returns the loss or (loss, *aux); where there is a reference, it is given ref_chosen_logps
    and ref_rejected_logps. It is written in differentiable torch. Rows 0 ... n-1 are chosen, row i is preferred to row
    n + i.
    """

    @staticmethod
    def preference_loss_fn(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("a preference loss defines preference_loss_fn")

    @staticmethod
    def forward(
        cls: Any, ctx: Any, _input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None,
        chunk_size: int = 1, ignore_index: int = -100, alpha: float = 1.0, beta: float = 0.1,
        compute_nll_loss: bool = True, nll_target: Tensor | None = None, compiled: bool = True,
        use_ref_model: bool = False, ref_input: Tensor | None = None, ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None, average_log_prob: bool = True, **loss_kwargs: Any,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:  # fmt: skip
        """(loss, aux) for hidden states _input [2n, T, H], weight [V, H], target [2n, T] and bias [V] or None; no token
        is shifted.

        aux: the policy's chosen and rejected log-probabilities [n], the means of the chosen and the rejected logits,
        the nll, and then what preference_loss_fn adds. The nll is the mean over the chosen tokens of nll_target, by
        default target. Labels of ignore_index do not count. chunk_size and compiled change nothing: the head divides
        its work by itself.
        """
        nll_labels = None if nll_target is None else nll_target[: _pairs(target)]
        head, loss_of = _head_and_loss(
            _input, weight, target, bias, cls.preference_loss_fn, target, nll_target, nll_labels,
            (ref_input, ref_weight, ref_bias) if use_ref_model else None,
            ignore_index, alpha, beta, compute_nll_loss, average_log_prob, loss_kwargs,
        )  # fmt: skip
        return loss_with_gradients(ctx, head, loss_of, _input, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grad_output: Any) -> tuple[Tensor | None, ...]:
        return gradients_of_arguments(ctx, grad_output, bias=3)

    @staticmethod
    def chunk_forward(
        input_chunk: Tensor, weight: Tensor, target_chunk: Tensor, bias: Tensor | None = None, ignore_index: int = -100,
        compute_nll_loss: bool = True, chosen_nll_target_chunk: Tensor | None = None, average_log_prob: bool = True,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """(chosen_logps, rejected_logps, chosen_logits, rejected_logits, chosen_nll_sum) of some pairs, with their
        logits; differentiable."""
        logits = torch.nn.functional.linear(input_chunk, weight, bias)
        half = len(target_chunk) // 2
        gathered = lambda logits, labels: ops.selective_log_softmax(logits, labels, 1.0, ignore_index)[0]
        logps = ops.sequence_log_prob(gathered(logits, target_chunk), target_chunk, ignore_index, average_log_prob)
        nll_sum = logps.new_zeros(())
        if compute_nll_loss:
            labels = target_chunk[:half] if chosen_nll_target_chunk is None else chosen_nll_target_chunk
            nll_sum = -gathered(logits[:half], labels).sum()
        return *logps.split(half), *logits.split(half), nll_sum

    @staticmethod
    def _compute_loss(
        input_chunk: Tensor, weight: Tensor, target_chunk: Tensor, bias: Tensor | None = None,
        preference_loss_fn: Callable[..., Any] | None = None, full_target: Tensor | None = None,
        ignore_index: int = -100, alpha: float = 1.0, beta: float = 0.1, compute_nll_loss: bool = True,
        use_ref_model: bool = False, ref_input_chunk: Tensor | None = None, ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None, full_nll_target: Tensor | None = None,
        chosen_nll_target_chunk: Tensor | None = None, average_log_prob: bool = True, **loss_kwargs: Any,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:  # fmt: skip
        """(loss, aux) of some pairs, as parts of those of the batch full_target; differentiable, and without logits."""
        head, loss_of = _head_and_loss(
            input_chunk, weight, target_chunk, bias, preference_loss_fn, full_target, full_nll_target,
            chosen_nll_target_chunk, (ref_input_chunk, ref_weight, ref_bias) if use_ref_model else None,
            ignore_index, alpha, beta, compute_nll_loss, average_log_prob, loss_kwargs,
        )  # fmt: skip
        return loss_of(head(input_chunk, weight, bias))


def _pairs(target):
    if len(target) % 2:
        raise ValueError(f"target must hold as many rejected as chosen sequences, and has {len(target)} rows")
    return len(target) // 2


def _head_and_loss(
    hidden, weight, target, bias, loss_fn, full_target, full_nll_target, nll_labels, reference, ignore_index, alpha,
    beta, with_nll, average, loss_kwargs,
):  # fmt: skip
    """(head, loss_of) for some pairs. head gives the log-probabilities of the tokens, loss_of makes (loss, aux) of
    them. reference: its hidden states, weight and bias, or None."""
    half, pairs = _pairs(target), _pairs(full_target)
    nll_labels = nll_labels if with_nll else None

    def head(hidden, weight, bias):
        return _token_log_probs(hidden, weight, target, nll_labels, bias, ignore_index)

    def loss_of(logp):
        chosen, rejected = ops.sequence_log_prob(logp[: 2 * half], target, ignore_index, average).view(2, half)
        nll = chosen.new_zeros(())
        if with_nll:
            counted = full_target if full_nll_target is None else full_nll_target
            nll = _nll(logp, target, nll_labels, ignore_index, counted[:pairs])
        known = {}
        if reference:
            ref_hidden, ref_weight, ref_bias = reference
            ref = reference_log_probs(ref_hidden, ref_weight, target, ref_bias, ignore_index, average)
            known = dict(ref_chosen_logps=ref[:half], ref_rejected_logps=ref[half:])
        result = loss_fn(chosen, rejected, full_target, beta=beta, **loss_kwargs, **known)
        preference, *aux = result if isinstance(result, tuple) else (result,)
        logits = ops.logit_sums(hidden, weight, bias).view(2, half).sum(1) / (pairs * target.shape[1] * len(weight))
        return alpha * nll + preference, (chosen, rejected, *logits, nll, *aux)

    return head, loss_of


def _token_log_probs(hidden, weight, target, nll_labels, bias, ignore_index):
    """The head's log-probabilities of target [2n, T], or with nll_labels [n, T] those [3n, T] for ops.nll_log_probs."""
    if nll_labels is not None:
        hidden = torch.cat((hidden, hidden[: len(nll_labels)]))
        target = ops.labels_with_nll(target, nll_labels, ignore_index)
    return linear_log_prob(hidden, weight, target, bias, ignore_index=ignore_index)


def _nll(logp, target, nll_labels, ignore_index, counted):
    half = len(target) // 2
    if nll_labels is None:
        return ops.token_nll(logp[:half], target[:half], ignore_index, counted)
    return ops.token_nll(ops.nll_log_probs(logp, target, nll_labels, ignore_index), nll_labels, ignore_index, counted)


def reference_log_probs(
    hidden: Tensor | None, weight: Tensor | None, target: Tensor, bias: Tensor | None, ignore_index: int, average: bool
) -> Tensor:
    """The reference's log-probability of each sequence, without gradients."""
    if hidden is None or weight is None:
        raise TypeError("use_ref_model=True needs ref_input and ref_weight")
    with torch.no_grad():
        logp = linear_log_prob(hidden, weight, target, bias, ignore_index=ignore_index)
        return ops.sequence_log_prob(logp, target, ignore_index, average)
