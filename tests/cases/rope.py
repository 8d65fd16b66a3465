import torch
from liger_kernel._library import ops
from liger_kernel.transformers.functional import liger_qwen2vl_mrope, liger_rope_packed

from cases import Case


def make(shape, options):
    batch, heads, seq, dim = shape
    rotary = options.get("rotary", dim)
    tables = options.get("tables", 1)
    # As projections give them: [batch, seq, heads, dim] seen as [batch, heads, seq, dim].
    q, k = (torch.randn(batch, seq, h, dim).transpose(1, 2) for h in (heads, max(1, heads // options.get("groups", 2))))
    angles = torch.rand(batch if tables == "batch" else 1, seq, rotary // 2) * 6
    if not options.get("half_tables"):
        angles = torch.cat((angles, angles), -1)
    return q, k, *((angles.cos(), angles.sin()) if tables else (angles.cos()[0], angles.sin()[0]))


def schema(inputs, options):
    rotary_dim = options.get("rotary", inputs[0].shape[-1]) if options.get("half_tables") else -1
    return ops.rope, (*inputs, options.get("inverse", False), False, [], rotary_dim)


def op(*inputs, **options):
    rope, arguments = schema(inputs, options)
    return rope(*arguments)


def reference(q, k, cos, sin, half_tables=False, inverse=False, **_):
    """Hugging Face's apply_rotary_pos_emb, on the leading columns that cos and sin cover, or twice as many."""
    cos, sin = (t.unsqueeze(-3).to(q.dtype) for t in (cos, -sin if inverse else sin))
    if half_tables:
        cos, sin = torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)
    d = cos.shape[-1]

    def rotate(x):
        left, rest = x[..., :d], x[..., d:]
        half = torch.cat((-left[..., d // 2 :], left[..., : d // 2]), -1)
        return torch.cat((left * cos + half * sin, rest), -1)

    return rotate(q), rotate(k)


def interleaved_make(shape, options):
    batch, heads, seq, dim = shape
    q, k, _, _ = make(shape, options)
    angles = (
        torch.rand(*((batch,) if options.get("tables") == "batch" else ()), seq, options.get("rotary", dim) // 2) * 6
    )
    parts = torch.view_as_real(torch.polar(torch.ones_like(angles), angles))  # as models hold them: complex, in float
    return q, k, parts[..., 0], parts[..., 1]


def interleaved_op(q, k, cos, sin, **_):
    return ops.rope(q, k, cos, sin, False, True)


def interleaved_reference(q, k, cos, sin, **_):
    """Llama 4's product of complex numbers, on the leading columns that cos and sin cover."""
    d = 2 * cos.shape[-1]

    def turn(x):
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        pairs, c, s = wide[..., :d].unflatten(-1, (-1, 2)), cos.unsqueeze(-3), sin.unsqueeze(-3)
        return torch.cat(
            (
                torch.stack((pairs[..., 0] * c - pairs[..., 1] * s, pairs[..., 0] * s + pairs[..., 1] * c), -1).flatten(
                    -2
                ),
                wide[..., d:],
            ),
            -1,
        ).to(x.dtype)

    return turn(q), turn(k)


def sections(options, dim):
    t = options.get("time", dim // 8)
    h = (dim // 2 - t) // 2
    return [t, h, dim // 2 - t - h]


def mrope_make(shape, options):
    q, k, _, _ = make(shape, options)
    batch, _, seq, dim = shape
    angles = torch.rand(3, batch, seq, dim // 2) * 6
    angles = torch.cat((angles, angles), -1)
    return q, k, angles.cos(), angles.sin()


def mrope_op(q, k, cos, sin, **options):
    return liger_qwen2vl_mrope(q, k, cos, sin, sections(options, q.shape[-1]))


def mrope_reference(q, k, cos, sin, **options):
    """Hugging Face's apply_multimodal_rotary_pos_emb."""
    twice = sections(options, q.shape[-1]) * 2
    cos, sin = (torch.cat([part[i % 3] for i, part in enumerate(t.split(twice, -1))], -1) for t in (cos, sin))
    return reference(q, k, cos, sin)


def packed_make(shape, options):
    batch, heads, seq, dim = shape
    _, _, cos, sin = make(shape, {**options, "rotary": dim // options.get("part", 1)})
    return torch.randn(batch, seq, 2 * heads * dim), cos, sin


def packed_heads(qkv, cos, part=1, **_):
    """(heads, k_heads) of a projection of packed_make: half of the heads are q's."""
    heads = qkv.shape[-1] // (2 * part * cos.shape[-1])
    return heads, heads // 2


def packed_op(qkv, cos, sin, **options):
    return liger_rope_packed(qkv, cos, sin, *packed_heads(qkv, cos, **options))


def packed_reference(qkv, cos, sin, **options):
    heads, k_heads = packed_heads(qkv, cos, **options)
    q, k, v = qkv.unflatten(-1, (heads + 2 * k_heads, -1)).transpose(1, 2).split((heads, k_heads, k_heads), 1)
    return torch.cat((*reference(q, k, cos, sin), v), 1).transpose(1, 2).flatten(-2)


def error(text, **shapes):
    sizes = {"q": (1, 2, 3, 8), "k": (1, 2, 3, 8), "cos": (1, 3, 8), "sin": (1, 3, 8), **shapes}
    return (lambda d: ops.rope(*(torch.randn(sizes[name], device=d) for name in sizes), False), RuntimeError, text)


def fit(shape):
    batch, heads, seq, dim = shape
    return batch, 2 * heads, seq, 8 * dim


def traffic(shape, options, e):
    batch, heads, seq, dim = shape
    one = 2 * e * batch * seq * dim * (heads + heads // options.get("groups", 2))
    return one, one


CASES = [
    Case(
        name="rope",
        op=op,
        reference=reference,
        make=make,
        differentiable=(0, 1),
        linear=True,
        fit=fit,
        shapes=[(2, 4, 3, 8), (1, 2, 5, 6), (2, 3, 7, 64), (2, 8, 4, 128)],
        options=[
            {},
            dict(tables="batch"),
            dict(tables=0),
            dict(groups=1),
            dict(rotary=4),
            dict(half_tables=True),
            dict(rotary=4, half_tables=True, inverse=True),
        ],
        many_rows=(70000, 1, 1, 4),
        schema=schema,
        bytes=traffic,
        bench=[((4, 32, 4096, 128), dict(groups=4)), ((1, 32, 512, 128), dict(groups=4))],
        bench_cpu=[((1, 32, 2048, 128), dict(groups=4))],
        errors=[
            error("must be .batch, heads, seq, dim.", q=(2, 3, 8)),
            error("differ in more than heads", k=(1, 2, 4, 8)),
            error("sin must be", sin=(1, 3, 6)),
            error("cos and sin must be", cos=(1, 4, 8), sin=(1, 4, 8)),
            error("even number of the 8 of a head, got 10", cos=(1, 3, 10), sin=(1, 3, 10)),
            (
                lambda d: ops.rope(
                    *(torch.randn(*shape, device=d) for shape in ((1, 2, 3, 8),) * 2 + ((3, 3),) * 2),
                    False,
                    False,
                    [],
                    8,
                ),
                RuntimeError,
                "all or half of the 8 columns that are rotated, got 3",
            ),
        ],
    ),
    Case(
        name="rope_interleaved",
        op=interleaved_op,
        reference=interleaved_reference,
        make=interleaved_make,
        differentiable=(0, 1),
        linear=True,
        keep=(2, 3),
        shapes=[(2, 4, 3, 8), (1, 2, 5, 6), (2, 3, 7, 64), (2, 8, 4, 128)],
        options=[{}, dict(tables="batch"), dict(groups=1), dict(rotary=4)],
        fit=fit,
        schema=lambda inputs, options: (ops.rope, (*inputs, False, True)),
        bytes=traffic,
        bench=[((4, 32, 4096, 128), dict(groups=4))],
        bench_cpu=[((1, 32, 2048, 128), dict(groups=4))],
        errors=[
            (
                lambda d: interleaved_op(*(torch.randn(*s, device=d) for s in ((1, 2, 3, 8),) * 2 + ((3, 5),) * 2)),
                RuntimeError,
                "even number of the 8 of a head, got 10",
            )
        ],
    ),
    Case(
        name="rope_sections",
        fit=fit,
        op=mrope_op,
        reference=mrope_reference,
        make=mrope_make,
        differentiable=(0, 1),
        linear=True,
        shapes=[(2, 4, 3, 8), (1, 2, 5, 6), (2, 3, 7, 64), (2, 8, 4, 128)],
        options=[{}, dict(time=2), dict(groups=1)],
        bytes=traffic,
        schema=lambda inputs, options: (ops.rope, (*inputs, False, False, sections(options, inputs[0].shape[-1]))),
        bench=[((4, 32, 4096, 128), dict(groups=4, time=16))],
        bench_cpu=[((1, 32, 2048, 128), dict(groups=4))],
        errors=[
            (
                lambda d: liger_qwen2vl_mrope(
                    *(torch.randn(*s, device=d) for s in ((1, 2, 3, 8),) * 2 + ((3, 1, 3, 8),) * 2), [1, 1, 1]
                ),
                ValueError,
                "sections must be",
            )
        ],
    ),
    Case(
        name="rope_packed",
        fit=lambda shape: (shape[0], 4 * shape[1], shape[2], 4 * shape[3]),
        op=packed_op,
        reference=packed_reference,
        make=packed_make,
        linear=True,
        bytes=lambda shape, options, e: (4 * e * torch.Size(shape).numel(),) * 2,
        shapes=[(2, 4, 3, 8), (1, 2, 5, 12), (2, 2, 7, 64), (2, 8, 4, 128)],
        options=[{}, dict(tables="batch"), dict(part=2)],
        schema=lambda inputs, options: (ops.rope_packed, (*inputs, *packed_heads(*inputs[:2], **options), False)),
        bench=[((4, 32, 4096, 128), {})],
        bench_cpu=[((1, 32, 2048, 128), {})],
        errors=[
            (
                lambda d: liger_rope_packed(
                    torch.randn(1, 3, 31, device=d), torch.randn(3, 8, device=d), torch.randn(3, 8, device=d), 2, 1
                ),
                RuntimeError,
                "qkv must be",
            )
        ],
    ),
]
