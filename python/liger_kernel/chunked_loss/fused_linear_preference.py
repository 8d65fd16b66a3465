"""The base of the losses on pairs of a chosen and a rejected sequence; their formulas are in
liger/ops/preference/preference.h."""

import torch

from liger_kernel._library import ops
from liger_kernel.chunked_loss.gradients import loss_with_gradients, scaled_gradients
from liger_kernel.ops.linear_log_prob import linear_log_prob


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
    def forward(
        cls,
        ctx,
        _input,
        weight,
        target,
        bias=None,
        chunk_size=1,
        ignore_index=-100,
        alpha=1.0,
        beta=0.1,
        compute_nll_loss=True,
        nll_target=None,
        compiled=True,
        use_ref_model=False,
        ref_input=None,
        ref_weight=None,
        ref_bias=None,
        average_log_prob=True,
        **loss_kwargs,
    ):
        """(loss, aux) for hidden states _input [2n, T, H], weight [V, H], target [2n, T] and bias [V] or None; no token
        is shifted.

        aux: the policy's chosen and rejected log-probabilities [n], the means of the chosen and the rejected logits,
        the nll, and then what preference_loss_fn adds. The nll is the mean over the chosen tokens of nll_target, by
        default target. Labels of ignore_index do not count. chunk_size and compiled change nothing: the head divides
        its work by itself.
        """

        pairs = _pairs(target)
        nll_labels = nll_target[:pairs] if compute_nll_loss and nll_target is not None else None

        def head(_input, weight, bias):
            return _token_log_probs(_input, weight, target, nll_labels, bias, ignore_index)

        def loss_of(logp):
            return _loss_of_tokens(
                logp,
                _input,
                weight,
                target,
                bias,
                cls.preference_loss_fn,
                target,
                ignore_index,
                alpha,
                beta,
                compute_nll_loss,
                use_ref_model,
                ref_input,
                ref_weight,
                ref_bias,
                nll_target,
                nll_labels,
                average_log_prob,
                loss_kwargs,
            )

        return loss_with_gradients(ctx, head, loss_of, _input, weight, bias)

    @staticmethod
    def backward(ctx, *grad_output):
        grad_input, grad_weight, grad_bias = scaled_gradients(ctx, grad_output)
        return grad_input, grad_weight, None, grad_bias, None, None, None, None

    @staticmethod
    def chunk_forward(
        input_chunk,
        weight,
        target_chunk,
        bias=None,
        ignore_index=-100,
        compute_nll_loss=True,
        chosen_nll_target_chunk=None,
        average_log_prob=True,
    ):
        """(chosen_logps, rejected_logps, chosen_logits, rejected_logits, chosen_nll_sum) of some pairs, with their
        logits; differentiable."""
        logits = torch.nn.functional.linear(input_chunk, weight, bias)
        half = len(target_chunk) // 2
        logps = ops.sequence_log_prob(
            _gathered(logits, target_chunk, ignore_index), target_chunk, ignore_index, average_log_prob
        )
        nll = logps.new_zeros(())
        if compute_nll_loss:
            labels = target_chunk[:half] if chosen_nll_target_chunk is None else chosen_nll_target_chunk
            nll = -_gathered(logits[:half], labels, ignore_index).sum()
        return logps[:half], logps[half:], logits[:half], logits[half:], nll

    @staticmethod
    def _compute_loss(
        input_chunk,
        weight,
        target_chunk,
        bias=None,
        preference_loss_fn=None,
        full_target=None,
        ignore_index=-100,
        alpha=1.0,
        beta=0.1,
        compute_nll_loss=True,
        use_ref_model=False,
        ref_input_chunk=None,
        ref_weight=None,
        ref_bias=None,
        full_nll_target=None,
        chosen_nll_target_chunk=None,
        average_log_prob=True,
        **loss_kwargs,
    ):
        """(loss, aux) of some pairs, as parts of those of the batch full_target; differentiable, and without logits."""
        nll_labels = chosen_nll_target_chunk if compute_nll_loss else None
        logp = _token_log_probs(input_chunk, weight, target_chunk, nll_labels, bias, ignore_index)
        return _loss_of_tokens(
            logp,
            input_chunk,
            weight,
            target_chunk,
            bias,
            preference_loss_fn,
            full_target,
            ignore_index,
            alpha,
            beta,
            compute_nll_loss,
            use_ref_model,
            ref_input_chunk,
            ref_weight,
            ref_bias,
            full_nll_target,
            nll_labels,
            average_log_prob,
            loss_kwargs,
        )


def _pairs(target):
    if len(target) % 2:
        raise ValueError(f"target must hold as many rejected as chosen sequences, and has {len(target)} rows")
    return len(target) // 2


def _gathered(logits, labels, ignore_index):
    return ops.selective_log_softmax(logits, labels, 1.0, ignore_index)[0]


def _token_log_probs(hidden, weight, target, nll_labels, bias, ignore_index):
    """The head's log-probabilities of target [2n, T], or with nll_labels [n, T] those [3n, T] for ops.nll_log_probs."""
    if nll_labels is not None:
        hidden = torch.cat((hidden, hidden[: len(nll_labels)]))
        target = ops.labels_with_nll(target, nll_labels, ignore_index)
    return linear_log_prob(hidden, weight, target, bias, ignore_index=ignore_index)


def _loss_of_tokens(
    logp,
    hidden,
    weight,
    target,
    bias,
    preference_loss_fn,
    full_target,
    ignore_index,
    alpha,
    beta,
    compute_nll_loss,
    use_ref_model,
    ref_hidden,
    ref_weight,
    ref_bias,
    full_nll_target,
    nll_labels,
    average_log_prob,
    loss_kwargs,
):
    half, pairs = _pairs(target), _pairs(full_target)
    chosen, rejected = ops.sequence_log_prob(logp[: 2 * half], target, ignore_index, average_log_prob).split(half)
    nll = chosen.new_zeros(())
    if compute_nll_loss:
        labels, chosen_logp = target[:half], logp[:half]
        if nll_labels is not None:
            labels, chosen_logp = nll_labels, ops.nll_log_probs(logp, target, nll_labels, ignore_index)
        counted = full_target if full_nll_target is None else full_nll_target
        nll = ops.token_nll(chosen_logp, labels, ignore_index, counted[:pairs])
    if use_ref_model:
        reference = reference_log_probs(ref_hidden, ref_weight, target, ref_bias, ignore_index, average_log_prob)
        loss_kwargs = loss_kwargs | dict(ref_chosen_logps=reference[:half], ref_rejected_logps=reference[half:])
    result = preference_loss_fn(chosen, rejected, full_target, beta=beta, **loss_kwargs)
    preference, *aux = result if isinstance(result, tuple) else (result,)
    logits = ops.logit_sums(hidden, weight, bias).view(2, half).sum(1) / (pairs * target.shape[1] * len(weight))
    return alpha * nll + preference, (chosen, rejected, *logits, nll, *aux)


def reference_log_probs(hidden, weight, target, bias, ignore_index, average):
    """The reference's log-probability of each sequence, without gradients."""
    if hidden is None or weight is None:
        raise TypeError("use_ref_model=True needs ref_input and ref_weight")
    with torch.no_grad():
        return ops.sequence_log_prob(
            linear_log_prob(hidden, weight, target, bias, ignore_index=ignore_index), target, ignore_index, average
        )
