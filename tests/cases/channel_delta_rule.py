"""The gated delta rule (ops.gated_delta_rule) with a gate for each channel of the keys: Kimi delta attention."""

import torch
from liger_kernel.transformers.functional import liger_gated_delta_rule

from cases import Case
from cases.gated_delta_rule import by_document, op, rivals_of, schema
from cases.gated_delta_rule import make as make_with_gates_of_heads


def make(shape, options):
    """As of gated_delta_rule. A gate of some is 0; with `shut` one is -inf, and so are all of a token."""
    q, k, v, g, beta, state, starts, _ = make_with_gates_of_heads(shape, options)
    rows, tokens, key_heads, group, K, V = shape
    g = -options.get("decay", 0.1) * torch.rand(rows, tokens, key_heads * group, K)
    if options.get("mixed"):  # from hardly any to all, beside each other
        g *= 100 ** torch.rand_like(g)
    g[:, 3:5, :, ::3] = 0
    if options.get("shut"):
        g[:, 1::7, :, 1::2] = -torch.inf
        g[:, 4::9] = -torch.inf
    return q, k, v, g, beta, state, starts, None


def reference(q, k, v, g, beta, state, starts, _skip=None, eps=1e-6, delta=True, **_):
    """In float64 token by token, as Hugging Face's recurrent_kimi_delta_attention; else in chunks of 64 tokens, as its
    chunk_kimi_delta_attention, whose errors are what one may make."""
    dtype, of_dtype = torch.promote_types(v.dtype, torch.float32), v.dtype
    q, k, v, g, beta = (t.to(dtype) for t in (q, k, v, g, beta))
    g = g.clamp_min(-1000)  # whose exponential is 0: differences of sums of -inf are no numbers
    if eps is not None:
        q, k = (x / ((x * x).sum(-1, keepdim=True) + eps).sqrt() for x in (q, k))
    along = _recurrence if dtype == torch.float64 else _chunks
    return by_document(q, k, v, g, beta, state, starts, along, delta, of_dtype)


def _recurrence(q, k, v, g, beta, S, delta):
    rows = []
    for t in range(q.shape[1]):
        key = k[:, t, :, None]
        S = S * g[:, t, :, None].exp()
        S = S + key * (beta[:, t, None] * (v[:, t] - (key * S).sum(1) * delta))[:, None]
        rows.append((q[:, t, :, None] * S).sum(1))
    return torch.stack(rows, 1), S


def _chunks(q, k, v, g, beta, S, delta, size=64):
    rows = []
    for first in range(0, q.shape[1], size):
        q_, k_, v_, g_, b_ = (t[:, first : first + size] for t in (q, k, v, g, beta))
        b_, total = b_[..., None], g_.cumsum(1)
        low = torch.ones(q_.shape[1], q_.shape[1], device=q.device).tril().bool()
        decay = (total[:, :, None] - total[:, None]).masked_fill(~low[..., None], -torch.inf).exp()
        x = v_ - (total.exp() * k_) @ S * delta
        mixing = (b_ * (k_[:, :, None] * k_[:, None] * decay).sum(-1)).tril(-1) * delta
        n = torch.linalg.solve_triangular(torch.eye(len(low), device=q.device) + mixing, b_ * x, upper=False)
        rows.append((total.exp() * q_) @ S + (q_[:, :, None] * k_[:, None] * decay).sum(-1) @ n)
        last = total[:, -1:]
        S = last.exp().transpose(1, 2) * S + ((last - total).exp() * k_).transpose(1, 2) @ n
    return torch.cat(rows, 1), S


def errors():
    def call(text, exception, g):
        def run(d):
            q, v = torch.randn(2, 5, 1, 8, device=d), torch.randn(2, 5, 2, 4, device=d)
            return liger_gated_delta_rule(q, q, v, g.to(d), torch.rand(2, 5, 2, device=d))

        return run, exception, text

    return [
        call("g must be", RuntimeError, -torch.rand(2, 5, 1, 8)),
        call("g must be", RuntimeError, -torch.rand(2, 5, 2, 7)),
        call("g must be", TypeError, -torch.rand(2, 5, 2, 8).double()),
    ]


def flops(shape, options):
    """As of gated_delta_rule with as many key heads as heads, whose matrices inside of a chunk cost no products of a
    tensor core."""
    rows, tokens, key_heads, group, K, V = shape
    heads, C = key_heads * group, 64
    return tuple(rows * tokens * heads * n for n in (6 * K * V + 4 * C * V, 16 * K * V + 10 * C * V))


CASES = [
    Case(
        name="channel_delta_rule",
        op=op,
        reference=reference,
        make=make,
        schema=schema,
        differentiable=(0, 1, 2, 3, 4, 5),
        keep=(3, 5),
        draw=lambda pick: dict(
            decay=pick.choice((0.01, 0.1, 1.0, 20.0)),
            mixed=pick.random() < 0.3,
            shut=pick.random() < 0.2,
            most=pick.choice((1.0, 2.0)),
            alike=pick.choice((0.0, 0.5, 2.0)),
            documents=pick.choice((None, "grow", "gaps", 1, 5, 70)),
            with_state=pick.random() < 0.5,
            eps=pick.choice((1e-6, 1e-6, None)),
            delta=pick.random() < 0.9,
        ),
        fit=lambda shape: (
            1 + shape[0] % 2,
            max(1, shape[-1] % 200),
            1 + shape[-1] % 2,
            1 + shape[0] % 3,
            1 + shape[-1] % 129,
            1 + (7 * shape[-1]) % 130,
        ),  # fmt: skip
        # One token; a group; several chunks, the last one not whole; widths that are no whole panels.
        shapes=[(1, 1, 1, 1, 8, 4), (1, 70, 1, 2, 16, 24), (2, 67, 2, 1, 40, 17), (1, 130, 1, 3, 64, 64)],
        options=[
            {},
            dict(documents="grow", with_state=True),
            dict(decay=20.0),
            dict(most=2.0, alike=2.0),
            dict(documents="gaps", eps=None),
            dict(with_state=True, decay=0.2, mixed=True),
            dict(with_state=True, documents=5, shut=True),
            dict(with_state=True, delta=False, eps=None),
        ],
        emulated=60_000,
        scales=(1, 1, 1, 1e-3),
        rivals=rivals_of(("fla.ops.kda", "chunk_kda")),
        # Kimi Linear: one document, and eight.
        bench=[((1, 8192, 32, 1, 128, 128), {}), ((1, 8192, 32, 1, 128, 128), dict(documents=1024))],
        # Of fewer heads: torch keeps gigabytes for each on a CPU, too.
        bench_cpu=[((2, 1024, 4, 1, 128, 128), {})],
        flops=flops,
        errors=errors(),
    )
]
