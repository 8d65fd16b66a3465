import torch
import torch.nn.functional as F
from liger_kernel._library import ops
from liger_kernel.ops.linear_log_prob import OUTPUTS, linear_log_prob

from cases import Case
from cases.cross_entropy import IGNORE, V, head_make
from cases.selective_log_softmax import reference as rows_reference


def make(shape, options):
    hidden, weight, bias, ids, _ = head_make(shape, options)
    if options.get("rank") == 3:
        hidden, ids = hidden[None], ids[None]
    return hidden, weight, bias, ids


def known(options):
    return {
        name: value
        for name, value in options.items()
        if name in ("temperature", "max_bytes", "entropy", "softcap", "logit_scale", "outputs", "batch_invariant")
    }


def op(hidden, weight, bias, ids, **options):
    return linear_log_prob(hidden, weight, ids, bias, **known(options))


def reference(
    hidden, weight, bias, ids, temperature=1.0, entropy=False, softcap=None, logit_scale=1.0, outputs=(), **_
):
    y = F.linear(hidden, weight, bias)
    if softcap:
        y = softcap * torch.tanh(y * logit_scale / softcap)
    elif logit_scale != 1:
        y = y.to(torch.promote_types(y.dtype, torch.float32)) * logit_scale
    logp, entropies = rows_reference(y, ids, temperature)
    z, valid = y.to(logp.dtype) / temperature, ids != IGNORE
    found = {
        "entropy": entropies,
        "log_sum_sq_probs": torch.where(valid, z.detach().log_softmax(-1).mul(2).logsumexp(-1), 0),
        "mean_logits": torch.where(valid, z.mean(-1), 0),
        "lse": torch.where(valid, z.logsumexp(-1), 0),
    }
    names = ("entropy",) if entropy else outputs
    return (logp, *(found[name] for name in names)) if names else logp


def schema(inputs, options):
    hidden, weight, bias, ids = inputs
    asked = ("entropy",) if options.get("entropy") else options.get("outputs", ())
    return ops.linear_log_prob, (
        hidden,
        weight,
        bias,
        ids,
        None,
        None,
        None,
        None,
        None,
        options.get("temperature", 1.0),
        options.get("softcap", 0.0),
        options.get("logit_scale", 1.0),
        IGNORE,
        *(name in asked for name in OUTPUTS),
        0,
        False,
        -1,
        options.get("max_bytes", 0),
        options.get("batch_invariant", False),
    )


def draw(pick):
    drawn = dict(
        entropy=True,
        with_bias=True,
        temperature=pick.choice((0.3, 2.5)),
        max_bytes=pick.choice((1, 5000)),
        rank=3,
        softcap=pick.choice((3.0, 30.0)),
        logit_scale=pick.choice((0.25, 2.0)),
        ignored=pick.choice((0.0, 0.9, 1.1)),
    )
    return {name: drawn[name] for name in pick.sample(sorted(drawn), pick.randrange(4))}


CASES = [
    Case(
        name="linear_log_prob",
        op=op,
        reference=reference,
        make=make,
        draw=draw,
        differentiable=(0, 1, 2),
        schema=schema,
        many_rows=(70000, 4, 8),
        shapes=[(1, 4, 3), (33, 16, 101), (40, 2, 120), (40, 64, 1000)],
        # Logits that wait for backward, and logits that are recomputed: of some tokens or, where there are more classes
        # than tokens, of some classes at a time.
        options=[
            {},
            dict(entropy=True),
            dict(max_bytes=40000, entropy=True),
            dict(temperature=0.7, with_bias=True),
            dict(ignored=0.0, rank=3),
            dict(ignored=1.1),
            dict(max_bytes=4000, with_bias=True),
            dict(max_bytes=40000, with_bias=True, batch_invariant=True),
            dict(softcap=3.0, logit_scale=2.0, temperature=0.7, entropy=True),
            dict(softcap=3.0, max_bytes=4000),
            dict(logit_scale=0.25),
            dict(softcap=5.0, temperature=2.0, outputs=("log_sum_sq_probs", "entropy", "mean_logits"), ignored=0.01),
            dict(outputs=("mean_logits",), max_bytes=4000),
            dict(outputs=("lse",), temperature=0.7),
            dict(softcap=3.0, logit_scale=0.5, outputs=("lse", "entropy"), max_bytes=4000, ignored=0.01),
            dict(batch_invariant=True),
        ],
        bench=[
            ((8192, 4096, 151936), dict(ignored=0.0)),
            ((8192, 4096, 151936), dict(ignored=0.0, max_bytes=1 << 28)),
            ((8192, 4096, V), dict(ignored=0.5, entropy=True)),
        ],
        bench_cpu=[((2048, 256, 32768), dict(ignored=0.0))],
        flops=lambda shape, options: (2 * shape[0] * shape[1] * shape[2], 4 * shape[0] * shape[1] * shape[2]),
        errors=[
            (
                lambda d: linear_log_prob(
                    torch.randn(2, 4, device=d), torch.randn(5, 3, device=d), torch.zeros(2, device=d, dtype=torch.long)
                ),
                RuntimeError,
                r"weight must be \[5, 4\]",
            ),
            (
                lambda d: linear_log_prob(
                    torch.randn(2, 4, device=d), torch.randn(5, 4, device=d), torch.zeros(3, device=d, dtype=torch.long)
                ),
                RuntimeError,
                r"ids must be \[2\]",
            ),
            (
                lambda d: linear_log_prob(
                    torch.randn(2, 4, device=d),
                    torch.randn(5, 4, device=d),
                    torch.zeros(2, device=d, dtype=torch.long),
                    temperature=0.0,
                ),
                ValueError,
                "temperature must be positive",
            ),
        ],
    )
]
