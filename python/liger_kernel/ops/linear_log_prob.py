"""Log-probabilities of given tokens under a language model's head, without the logits; see liger/ops.h."""

from liger_kernel._library import ops

#: What there is beside the log-probabilities, by the operator's bits.
OUTPUTS = {"entropy": 1, "log_sum_sq_probs": 2, "mean_logits": 4, "is_top1": 8}


def linear_log_prob(hidden, weight, ids, bias=None, temperature=1.0, ignore_index=-100, entropy=False, max_bytes=0, valid_count=None, softcap=None, logit_scale=1.0,
                    outputs=()):
    """log_softmax(z) at ids, float [...], for z = y · logit_scale / temperature, or softcap · tanh(y · logit_scale / softcap) / temperature, y = hidden weightᵀ + bias.

    With entropy=True the pair (logp, −Σ p ln p); with outputs, names of OUTPUTS, the tuple (logp, *those) in the order given: also ln Σ p², the mean of z, and whether
    the id is the first of the largest z.

    hidden [..., H] of any strides, weight [V, H], ids [...] integers, bias [V]. 0 where the id is ignore_index: such tokens cost nothing. logp and entropy are
    differentiable with respect to hidden, weight and bias, with any upstream gradient. Logits of up to max_bytes (0: 4 GiB on a GPU, 256 MiB on a CPU) wait for
    backward, others are made again; valid_count is the number of ids that are not ignored, where the host knows it; the weight's gradient is summed in float. Mixed
    dtypes compute in hidden's. Another id raises IndexError on the CPU and is a device assertion on CUDA; an unknown output raises KeyError.
    """
    names = ("entropy",) if entropy else tuple(outputs)
    bits = sum(OUTPUTS[name] for name in set(names))
    logp, *rest = ops.linear_log_prob(hidden, weight, bias, ids, float(temperature), float(softcap or 0), float(logit_scale), ignore_index, bits,
                                      -1 if valid_count is None else valid_count, max_bytes)
    found = dict(zip(OUTPUTS, rest))
    return (logp, *(found[name] for name in names)) if names else logp
