"""Log-probabilities of given tokens under a language model's head, without the logits; see liger/ops.h."""

import torch

from liger_kernel._library import ops

#: What there is beside the log-probabilities, by the operator's bits, in the order of its results.
OUTPUTS = {"entropy": 1, "lse": 16, "mean_logits": 4, "log_sum_sq_probs": 2, "is_top1": 8, "argmax": 32}


def output_bits(names):
    """The operator's `outputs` for names of OUTPUTS. Raises KeyError for another."""
    return sum(OUTPUTS[name] for name in set(names))


def linear_log_prob(
    hidden,
    weight,
    ids,
    bias=None,
    temperature=1.0,
    ignore_index=-100,
    entropy=False,
    max_bytes=0,
    valid_count=None,
    softcap=None,
    logit_scale=1.0,
    outputs=(),
    top_k=0,
    lora=None,
    main_grad=None,
    batch_invariant=False,
):
    """log_softmax(z) at ids, float [...], for z = y · logit_scale / temperature, or softcap · tanh(y · logit_scale /
    softcap) / temperature, y = hidden weightᵀ + bias.

    With entropy=True the pair (logp, −Σ p ln p); with outputs, names of OUTPUTS, the tuple (logp, *those) in the order
    given: also "lse" ln Σ exp z, "mean_logits" the mean of z, "log_sum_sq_probs" ln Σ p², "is_top1" whether the id is
    the first of the largest z, "argmax" which class is. With top_k the tuple ends with the largest log-probabilities
    [..., top_k] and their classes. Label smoothing ε is (1 − ε) logp + ε (mean_logits − lse), a z-loss λ lse², a
    class's weight a factor of logp.

    hidden [..., H] of any strides, weight [V, H], ids [...] integers, bias [V]. 0 where the id is ignore_index: such
    tokens cost nothing. logp, entropy, lse and mean_logits are differentiable with respect to hidden, weight and bias,
    with any upstream gradient. Logits of up to max_bytes (0: set_memory_budget's, else 4 GiB on a GPU, 256 MiB on a
    CPU) wait for backward, others are made again; valid_count is the number of ids that are not ignored, where the host
    knows it; the weight's gradient is summed in float. Mixed dtypes compute in hidden's.

    lora: (a [rank, H], b [V, rank], scale), of which the weight is weight + scale · b a; a and b get gradients, and a
    frozen weight none. main_grad [V, H], float: backward adds the weight's gradient to it and leaves weight.grad alone,
    as Megatron has it. batch_invariant: a token's results have the same bits whatever else is in the batch.

    Another id raises IndexError on the CPU and is a device assertion on CUDA; an unknown output raises KeyError.
    """
    names = ("entropy",) if entropy else tuple(outputs)
    low_hidden = low_weight = None
    if lora is not None:
        a, low_weight, scale = lora
        low_hidden = torch.nn.functional.linear(hidden, a.to(hidden.dtype)) * scale
    logp, *rest = ops.linear_log_prob(
        hidden,
        weight,
        bias,
        ids,
        low_hidden,
        low_weight,
        main_grad,
        None,
        temperature=float(temperature),
        softcap=float(softcap or 0),
        logit_scale=float(logit_scale),
        ignore_index=ignore_index,
        outputs=output_bits(names),
        top_k=top_k,
        valid_count=-1 if valid_count is None else valid_count,
        max_bytes=max_bytes,
        batch_invariant=batch_invariant,
    )
    found = dict(zip(OUTPUTS, rest))
    top = tuple(rest[len(OUTPUTS) :]) if top_k else ()
    return (logp, *(found[name] for name in names), *top) if names or top else logp
