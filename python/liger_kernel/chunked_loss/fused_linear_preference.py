"""The base of the losses on pairs of a chosen and a rejected sequence; their formulas are in
liger/ops/preference/preference.h."""

import torch

from liger_kernel._library import ops
from liger_kernel.chunked_loss.gradients import gradients_of_arguments, loss_with_gradients
from liger_kernel.operators.head import linear_log_prob
from liger_kernel.signatures import required, takes

#: What the head needs, and a reference model.
PAIRS = required("_input", "weight", "target") | dict(bias=None)
REFERENCE = dict(ref_input=None, ref_weight=None, ref_bias=None)


class LigerFusedLinearPreferenceBase(torch.autograd.Function):
    """alpha · nll + preference_loss_fn(log-probabilities of the sequences), without their logits.

    A loss is a subclass with a static `preference_loss_fn(chosen_logps [n], rejected_logps [n], full_target, beta,
    **loss_kwargs)`, which returns the loss or (loss, *aux); where there is a reference, it is given ref_chosen_logps
    and ref_rejected_logps. It is written in differentiable torch. Rows 0 ... n-1 are chosen, row i is preferred to row
    n + i.
    """

    @staticmethod
    def preference_loss_fn(*args, **kwargs):
        raise NotImplementedError("a preference loss defines preference_loss_fn")

    @staticmethod
    @takes(
        required("cls", "ctx")
        | PAIRS
        | dict(chunk_size=1, ignore_index=-100, alpha=1.0, beta=0.1, compute_nll_loss=True, nll_target=None)
        | dict(compiled=True, use_ref_model=False)
        | REFERENCE
        | dict(average_log_prob=True),
        extra="loss_kwargs",
    )
    def forward(cls, ctx, _input, weight, target, bias, nll_target, chunk_size, compiled, **options):
        """(loss, aux) for hidden states _input [2n, T, H], weight [V, H], target [2n, T] and bias [V] or None; no token
        is shifted.

        aux: the policy's chosen and rejected log-probabilities [n], the means of the chosen and the rejected logits,
        the nll, and then what preference_loss_fn adds. The nll is the mean over the chosen tokens of nll_target, by
        default target. Labels of ignore_index do not count. chunk_size and compiled change nothing: the head divides
        its work by itself.
        """
        nll_labels = None if nll_target is None else nll_target[: _pairs(target)]
        parts = _input, weight, target, bias
        head, loss_of = _head_and_loss(parts, cls.preference_loss_fn, target, nll_target, nll_labels, **options)
        return loss_with_gradients(ctx, head, loss_of, _input, weight, bias)

    @staticmethod
    def backward(ctx, *grad_output):
        return gradients_of_arguments(ctx, grad_output, bias=3)

    @staticmethod
    @takes(
        required("input_chunk", "weight", "target_chunk")
        | dict(bias=None, ignore_index=-100, compute_nll_loss=True, chosen_nll_target_chunk=None, average_log_prob=True)
    )
    def chunk_forward(input_chunk, weight, target_chunk, bias, ignore_index, average_log_prob, **nll):
        """(chosen_logps, rejected_logps, chosen_logits, rejected_logits, chosen_nll_sum) of some pairs, with their
        logits; differentiable."""
        logits = torch.nn.functional.linear(input_chunk, weight, bias)
        half = len(target_chunk) // 2
        gathered = lambda logits, labels: ops.selective_log_softmax(logits, labels, 1.0, ignore_index)[0]
        logps = ops.sequence_log_prob(gathered(logits, target_chunk), target_chunk, ignore_index, average_log_prob)
        nll_sum = logps.new_zeros(())
        if nll["compute_nll_loss"]:
            labels = nll["chosen_nll_target_chunk"]
            nll_sum = -gathered(logits[:half], target_chunk[:half] if labels is None else labels).sum()
        return *logps.split(half), *logits.split(half), nll_sum

    @staticmethod
    @takes(
        required("input_chunk", "weight", "target_chunk")
        | dict(bias=None, preference_loss_fn=None, full_target=None, ignore_index=-100, alpha=1.0, beta=0.1)
        | dict(compute_nll_loss=True, use_ref_model=False, ref_input_chunk=None, ref_weight=None, ref_bias=None)
        | dict(full_nll_target=None, chosen_nll_target_chunk=None, average_log_prob=True),
        extra="loss_kwargs",
    )
    def _compute_loss(input_chunk, weight, target_chunk, bias, ref_input_chunk, chosen_nll_target_chunk, **options):
        """(loss, aux) of some pairs, as parts of those of the batch full_target; differentiable, and without logits."""
        parts = input_chunk, weight, target_chunk, bias
        given = dict(ref_input=ref_input_chunk, nll_labels=chosen_nll_target_chunk)
        head, loss_of = _head_and_loss(parts, **given, **options)
        return loss_of(head(input_chunk, weight, bias))


def _pairs(target):
    if len(target) % 2:
        raise ValueError(f"target must hold as many rejected as chosen sequences, and has {len(target)} rows")
    return len(target) // 2


def _head_and_loss(parts, preference_loss_fn, full_target, full_nll_target, nll_labels, loss_kwargs, **options):
    """(head, loss_of) for parts: hidden, weight, target and bias. head gives the log-probabilities of the tokens,
    loss_of makes (loss, aux) of them."""
    hidden, weight, target, bias = parts
    half, pairs = _pairs(target), _pairs(full_target)
    ignore_index, average, with_nll = (options[n] for n in ("ignore_index", "average_log_prob", "compute_nll_loss"))
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
        if options["use_ref_model"]:
            ref_input, ref_weight, ref_bias = (options[name] for name in REFERENCE)
            ref = reference_log_probs(ref_input, ref_weight, target, ref_bias, ignore_index, average)
            known = dict(ref_chosen_logps=ref[:half], ref_rejected_logps=ref[half:])
        result = preference_loss_fn(chosen, rejected, full_target, beta=options["beta"], **loss_kwargs, **known)
        preference, *aux = result if isinstance(result, tuple) else (result,)
        logits = ops.logit_sums(hidden, weight, bias).view(2, half).sum(1) / (pairs * target.shape[1] * len(weight))
        return options["alpha"] * nll + preference, (chosen, rejected, *logits, nll, *aux)

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


def reference_log_probs(hidden, weight, target, bias, ignore_index, average):
    """The reference's log-probability of each sequence, without gradients."""
    if hidden is None or weight is None:
        raise TypeError("use_ref_model=True needs ref_input and ref_weight")
    with torch.no_grad():
        logp = linear_log_prob(hidden, weight, target, bias, ignore_index=ignore_index)
        return ops.sequence_log_prob(logp, target, ignore_index, average)
