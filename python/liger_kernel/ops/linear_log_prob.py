"""Log-probabilities of given tokens under a language model's head, without the logits; see liger/ops.h."""

from liger_kernel._library import ops


def linear_log_prob(hidden, weight, ids, bias=None, temperature=1.0, ignore_index=-100, entropy=False, max_bytes=0, valid_count=None):
    """log_softmax((hidden weightᵀ + bias) / temperature) at ids, float [...]; with entropy=True the pair (logp, −Σ p ln p).

    hidden [..., H] of any strides, weight [V, H], ids [...] integers, bias [V]. 0 where the id is ignore_index: such tokens cost nothing. Differentiable with
    respect to hidden, weight and bias, with any upstream gradient. Logits of up to max_bytes (0: 4 GiB on a GPU, 256 MiB on a CPU) wait for backward, others
    are made again; valid_count is the number of ids that are not ignored, where the host knows it; the weight's gradient is summed in float. Mixed dtypes compute in hidden's. Another id raises IndexError on the CPU and is a device assertion
    on CUDA.
    """
    logp, entropies = ops.linear_log_prob(hidden, weight, bias, ids, float(temperature), ignore_index, entropy, -1 if valid_count is None else valid_count, max_bytes)
    return (logp, entropies) if entropy else logp
