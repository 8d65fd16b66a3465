import torch
from liger_kernel._library import ops
from liger_kernel.operators.delta_rule import gated_delta_rule

from cases import Case


def make(shape, options):
    """g is what decays between nothing and all, some beta are 0, some neighbouring keys are equal."""
    rows, tokens, key_heads, group, K, V = shape
    heads = key_heads * group
    q, k = torch.randn(rows, tokens, key_heads, K), torch.randn(rows, tokens, key_heads, K)
    k += options.get("alike", 0.0) * torch.randn(1, 1, key_heads, K)
    k[:, 1:2] = k[:, :1]
    if options.get("eps", 1e-6) is None:
        q, k = q * K**-0.5, k * K**-0.5
    v = torch.randn(rows, tokens, heads, V)
    g = -options.get("decay", 0.1) * torch.rand(rows, tokens, heads)
    beta = options.get("most", 1.0) * torch.rand(rows, tokens, heads)
    beta[:, 2:3] = 0
    state, starts = None, None
    if options.get("documents"):
        starts = torch.arange(tokens, dtype=torch.int32).expand(rows, tokens)
        edges = torch.tensor(options["documents"], dtype=torch.int32)
        starts = edges[torch.bucketize(starts, edges, right=True) - 1].contiguous()
    if options.get("with_state"):
        count = rows * len(options.get("documents", [0]))
        state = torch.randn(count, heads, K, V)
    return q, k, v, g, beta, state, starts


def op(q, k, v, g, beta, state, starts, **options):
    o, last = gated_delta_rule(
        q, k, v, g, beta, state, starts=starts, final_state=state is not None, eps=options.get("eps", 1e-6)
    )
    return o if last is None else (o, last)


def reference(q, k, v, g, beta, state, starts, **options):
    """Token by token."""
    dtype = torch.promote_types(v.dtype, torch.float32)
    rows, tokens, heads, V = v.shape
    K = q.shape[-1]
    q, k, rest = q.to(dtype), k.to(dtype), [t.to(dtype) for t in (v, g, beta)]
    if (eps := options.get("eps", 1e-6)) is not None:
        q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + eps) for x in (q, k))
    q, k = (x.repeat_interleave(heads // x.shape[2], 2) for x in (q, k))
    outs, lasts, document = [], [], 0
    for row in range(rows):
        begins = starts[row] == torch.arange(tokens, device=v.device) if starts is not None else None
        out = []
        for t in range(tokens):
            if t == 0 or (begins is not None and begins[t]):
                if t:
                    lasts.append(S)
                S = v.new_zeros(heads, K, V, dtype=dtype) if state is None else state[document].to(dtype)
                document += 1
            qt, kt, (vt, gt, bt) = q[row, t], k[row, t], (x[row, t] for x in rest)
            S = S * gt.exp()[:, None, None]
            S = S + kt[:, :, None] * (bt[:, None] * (vt - (kt[:, None] @ S)[:, 0]))[:, None]
            out.append((qt[:, None] @ S)[:, 0] * K**-0.5)
        lasts.append(S)
        outs.append(torch.stack(out))
    o = torch.stack(outs).to(v.dtype)
    return o if state is None else (o, torch.stack(lasts))


CASES = [
    Case(
        name="gated_delta_rule",
        op=op,
        reference=reference,
        make=make,
        differentiable=(0, 1, 2, 3, 4, 5),
        keep=(3, 5),
        shapes=[(1, 5, 1, 1, 8, 4), (2, 70, 2, 2, 16, 24), (1, 130, 1, 3, 64, 64), (1, 66, 2, 1, 96, 192)],
        options=[
            {},
            dict(decay=20.0),
            dict(most=2.0, alike=2.0),
            dict(documents=[0, 1, 4], with_state=True),
            dict(documents=[0, 3], eps=None),
            dict(with_state=True, decay=1.0),
        ],
    )
]
