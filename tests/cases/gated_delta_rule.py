import torch
from liger_kernel._library import ops
from liger_kernel.transformers.functional import liger_gated_delta_rule

from cases import Case
from cases.causal_conv1d import document_starts


def make(shape, options):
    """Two neighbouring keys are equal, some beta are 0; alike: keys point the same way, more or less."""
    rows, tokens, key_heads, group, K, V = shape
    heads = key_heads * group
    q, k = torch.randn(rows, tokens, key_heads, K), torch.randn(rows, tokens, key_heads, K)
    k += options.get("alike", 0.0) * torch.randn(1, 1, key_heads, K)
    k[:, 1:2] = k[:, :1]
    if options.get("eps", 1e-6) is None:  # keys longer than √2 may let the state grow without bound
        q, k = q / K**0.5, k / K**0.5 * 0.7
    v = torch.randn(rows, tokens, heads, V)
    g = -options.get("decay", 0.1) * torch.rand(rows, tokens, heads)
    beta = options.get("most", 1.0) * torch.rand(rows, tokens, heads)
    beta[:, 2:3] = 0
    documents = options.get("documents")
    starts = None if documents is None else document_starts(rows, tokens, documents)
    state = None
    if options.get("with_state"):
        count = rows if starts is None else int(begins(starts).sum())
        state = torch.randn(count, heads, K, V)
    skip = torch.randn(heads) if options.get("with_skip") and not options.get("delta", True) else None
    return q, k, v, g, beta, state, starts, skip


def begins(starts):
    """Which tokens begin a document: one without is a document by itself."""
    first = torch.arange(starts.shape[1], device=starts.device) == 0
    after_none = torch.cat([starts[:, :1] >= 0, starts[:, :-1] >= 0], 1).logical_not()
    return first | (starts < 0) | (starts == torch.arange(starts.shape[1], device=starts.device)) | after_none


def op(q, k, v, g, beta, state, starts, skip=None, eps=1e-6, delta=True, **_):
    more = dict(starts=starts, eps=eps, delta=delta, final_state=state is not None, skip=skip)
    o, last = liger_gated_delta_rule(q, k, v, g, beta, state, **more)
    return o if last is None else (o, last)


def by_document(q, k, v, g, beta, state, starts, along, delta, of_dtype, skip=None):
    """The results, in `of_dtype`, and the states of `along`, which runs over one document: it gives (o, S) of q, k, v,
    g and beta [heads, tokens, ...] and of the state before them."""
    rows, tokens, heads, V = v.shape
    K = q.shape[-1]
    q, k = (x.repeat_interleave(heads // x.shape[2], 2) for x in (q, k))
    # [rows, heads, tokens, ...]
    q, k, v, g, beta = (t.transpose(1, 2) for t in (q * K**-0.5, k, v, g, beta))
    new = begins(starts).tolist() if starts is not None else [[t == 0 for t in range(tokens)]] * rows
    outs, lasts = [], []
    for row in range(rows):
        edges = [t for t in range(tokens) if new[row][t]] + [tokens]
        of_row = []
        for first, end in zip(edges, edges[1:]):
            has_state = state is not None and len(lasts) < len(state)
            S = state[len(lasts)].to(v.dtype) if has_state else v.new_zeros(heads, K, V)
            o, S = along(*(t[row, :, first:end] for t in (q, k, v, g, beta)), S, delta)
            of_row.append(o)
            lasts.append(S)
        outs.append(torch.cat(of_row, 1))
    o = torch.stack(outs).transpose(1, 2)
    if skip is not None:
        o = o + skip[:, None] * v.transpose(1, 2)
    o = o.to(of_dtype)
    return o if state is None else (o, torch.stack(lasts[: len(state)]).to(state.dtype))


def reference(q, k, v, g, beta, state, starts, skip=None, eps=1e-6, delta=True, **_):
    """In float64 token by token, as Hugging Face's torch_recurrent_gated_delta_rule; else in chunks of 64 tokens, as
    its torch_chunk_gated_delta_rule, whose errors are what one may make."""
    dtype, of_dtype = torch.promote_types(v.dtype, torch.float32), v.dtype
    q, k, v, g, beta = (t.to(dtype) for t in (q, k, v, g, beta))
    if eps is not None:
        q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + eps) for x in (q, k))
    along = _recurrence if dtype == torch.float64 else _chunks
    skip = None if skip is None else skip.to(dtype)
    return by_document(q, k, v, g, beta, state, starts, along, delta, of_dtype, skip)


def _recurrence(q, k, v, g, beta, S, delta):
    rows = []
    for t in range(q.shape[1]):
        key = k[:, t, :, None]
        S = S * g[:, t, None, None].exp()
        S = S + key * (beta[:, t, None] * (v[:, t] - (key * S).sum(1) * delta))[:, None]
        rows.append((q[:, t, :, None] * S).sum(1))
    return torch.stack(rows, 1), S


def _chunks(q, k, v, g, beta, S, delta, size=64):
    rows = []
    for first in range(0, q.shape[1], size):
        q_, k_, v_, g_, b_ = (t[:, first : first + size] for t in (q, k, v, g, beta))
        b_, total = b_[..., None], g_.cumsum(1)[..., None]
        low = torch.ones(q_.shape[1], q_.shape[1], device=q.device).tril().bool()
        decay = (total - total.transpose(1, 2)).masked_fill(~low, -torch.inf).exp()
        x = v_ - total.exp() * k_ @ S * delta
        mixing = (b_ * (k_ @ k_.transpose(1, 2)) * decay).tril(-1) * delta
        n = torch.linalg.solve_triangular(torch.eye(len(low), device=q.device) + mixing, b_ * x, upper=False)
        rows.append(total.exp() * q_ @ S + (q_ @ k_.transpose(1, 2) * decay) @ n)
        last = total[:, -1:]
        S = last.exp() * S + ((last - total).exp() * k_).transpose(1, 2) @ n
    return torch.cat(rows, 1), S


def schema(inputs, options):
    eps = options.get("eps", 1e-6)
    *of_tokens, state, starts, skip = inputs
    K, with_state = inputs[0].shape[-1], state is not None
    return ops.gated_delta_rule, (
        *of_tokens,
        state,
        skip,
        starts,
        K**-0.5,
        -1.0 if eps is None else eps,
        options.get("delta", True),
        with_state,
    )


def rivals_of(*functions):
    """What runs on a GPU from these packages: module, name."""

    def rivals(inputs, options):
        q, k, v, g, beta, state, starts, _ = inputs
        if not q.is_cuda or q.dtype == torch.float32 or state is not None or (starts is not None and len(q) > 1):
            return {}
        found = {}
        ends = None
        if starts is not None:
            first = (starts[0] == torch.arange(starts.shape[1], device=starts.device)).nonzero().flatten()
            ends = torch.cat([first, first.new_tensor([starts.shape[1]])]).int()
        for package, name in functions:
            try:
                function = getattr(__import__(package, fromlist=["_"]), name)
            except (ImportError, AttributeError):
                continue
            more = dict(g=g, beta=beta, use_qk_l2norm_in_kernel=True, cu_seqlens=ends)
            rival = "FLA" if package.startswith("fla.") else "FlashQLA"
            found[rival] = lambda function=function, more=more: function(q, k, v, **more)[0]
        return found

    return rivals


def errors():
    def call(text, exception=RuntimeError, q=(2, 5, 1, 8), v=(2, 5, 2, 4), gate=(2, 5, 2), **more):
        def run(d):
            tensors = {name: value.to(d) if torch.is_tensor(value) else value for name, value in more.items()}
            of = {"g": -torch.rand(gate, device=d), "beta": torch.rand(gate, device=d)} | tensors
            return liger_gated_delta_rule(
                torch.randn(q, device=d), torch.randn(q, device=d), torch.randn(v, device=d), **of
            )

        return run, exception, text

    return [
        call("q must be .rows, tokens, key heads, width.", q=(5, 1, 8)),
        call("do not divide the heads", q=(2, 5, 3, 8)),
        call("v must be", v=(2, 4, 2, 4)),
        call("g must be", gate=(2, 5, 1)),
        call("g must be .* of float32", TypeError, g=torch.rand(2, 5, 2).bfloat16()),
        call("state must be", state=torch.zeros(2, 2, 8, 5)),
        call("starts must be", starts=torch.zeros(2, 4, dtype=torch.int32)),
        call("number of documents", starts=torch.zeros(2, 5, dtype=torch.int32), final_state=True),
        call("skip must be", delta=False, skip=torch.zeros(3)),
        call("skip is for linear attention", skip=torch.zeros(2)),
        call("skip is for linear attention", delta=False, skip=torch.zeros(2), g=-torch.rand(2, 5, 2, 8)),
        call("batch of 1", ValueError, cu_seqlens=torch.tensor([0, 5])),
    ]


def flops(shape, options):
    """Of the chunks' products; backward recomputes the states."""
    rows, tokens, key_heads, group, K, V = shape
    heads, C = key_heads * group, 64
    forward = heads * (6 * K * V + 4 * C * V + 2 * C * C / 3) + 4 * C * K * key_heads
    backward = heads * (16 * K * V + 10 * C * V) + 12 * C * K * key_heads
    return tuple(rows * tokens * n for n in (forward, backward))


CASES = [
    Case(
        name="gated_delta_rule",
        op=op,
        reference=reference,
        make=make,
        schema=schema,
        differentiable=(0, 1, 2, 3, 4, 5, 7),
        keep=(3, 5),
        draw=lambda pick: dict(
            decay=pick.choice((0.01, 0.1, 1.0, 20.0)),
            most=pick.choice((1.0, 2.0)),
            alike=pick.choice((0.0, 0.5, 2.0)),
            documents=pick.choice((None, "grow", "gaps", 1, 5, 70)),
            with_state=pick.random() < 0.5,
            eps=pick.choice((1e-6, 1e-6, None)),
            delta=pick.random() < 0.7,
            with_skip=pick.random() < 0.5,
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
            dict(with_state=True, decay=1.0),
            dict(with_state=True, documents=5, delta=False, eps=None),
            dict(documents="grow", delta=False, eps=None, with_skip=True),
        ],
        emulated=60_000,
        scales=(1, 1, 1, 1e-3),
        rivals=rivals_of(
            ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule"), ("flash_qla", "chunk_gated_delta_rule")
        ),
        # Qwen3.5 9B, 2B and 27B, OLMo Hybrid.
        bench=[
            ((1, 8192, 16, 2, 128, 128), {}),
            ((1, 8192, 16, 2, 128, 128), dict(documents=1024)),
            ((4, 2048, 16, 2, 128, 128), {}),
            ((4, 2048, 16, 1, 128, 128), {}),
            ((1, 8192, 16, 3, 128, 128), {}),
            ((1, 8192, 30, 1, 96, 192), {}),
        ],
        bench_cpu=[((2, 1024, 16, 2, 128, 128), {})],
        flops=flops,
        errors=errors(),
    )
]
