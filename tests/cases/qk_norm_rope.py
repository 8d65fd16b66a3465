import torch
from liger_kernel._library import ops
from liger_kernel.ops.rms_norm import casting_code
from liger_kernel.transformers.functional import liger_qk_norm_rope

from cases import Case, rms_norm, rope

EPS = 1e-5


def make(shape, options):
    q, k, cos, sin = rope.make(shape, options)
    if options.get("packed"):  # q and k as neighbouring heads of one projection
        q, k = torch.cat((q, k), 1).transpose(1, 2).contiguous().transpose(1, 2).split((q.shape[1], k.shape[1]), 1)
    if options.get("heads_first"):
        q, k = q.contiguous(), k.contiguous()
    weights = [torch.randn(shape[-1]) if options.get("weight", True) else None for _ in range(2)]
    return q, k, *weights, cos, sin


def given(options):
    return options.get("offset", 0.0), options.get("casting_mode", "llama")


def op(q, k, a, b, cos, sin, half_tables=False, rotary=None, **options):
    columns = (rotary or q.shape[-1]) if half_tables else None
    return liger_qk_norm_rope(q, k, a, b, cos, sin, EPS, *given(options), columns)


def schema(inputs, options):
    offset, mode = given(options)
    rotary = options.get("rotary", inputs[0].shape[-1]) if options.get("half_tables") else -1
    return ops.qk_norm_rope, (*inputs, EPS, offset, casting_code(mode), rotary)


def reference(q, k, a, b, cos, sin, half_tables=False, rotary=None, **options):
    """Hugging Face's norms, rounded, and then its rotation."""
    q, k = (rms_norm.reference(x, w, *given(options), eps=EPS) for x, w in ((q, a), (k, b)))
    return rope.reference(q, k, cos, sin, half_tables)


def two_operators(inputs, options):
    q, k, a, b, cos, sin = inputs
    offset, mode = given(options)

    def norm(x, w):
        return ops.rms_norm(x.transpose(1, 2), w, EPS, offset, casting_code(mode)).transpose(1, 2)

    return {"two operators": lambda: ops.rope(norm(q, a), norm(k, b), cos, sin, False)}


def error(exception, text, *, eps=EPS, casting=0, dtypes={}, **shapes):
    sizes = {"q": (1, 2, 3, 8), "k": (1, 2, 3, 8), "a": (8,), "b": (8,), "cos": (1, 3, 8), "sin": (1, 3, 8), **shapes}
    return (
        lambda d: ops.qk_norm_rope(
            *(torch.randn(size, device=d).to(dtypes.get(name, torch.float32)) for name, size in sizes.items()),
            eps, 0.0, casting,
        ),
        exception,
        text,
    )  # fmt: skip


def traffic(shape, options, e):
    batch, heads, seq, dim = shape
    one = e * batch * seq * dim * (heads + heads // options.get("groups", 2))
    return 2 * one, 3 * one


#: Qwen3-8B, 0.6B and 30B-A3B, and Qwen3.5 with a quarter of the columns rotated.
BENCH = [
    ((4, 32, 2048, 128), dict(groups=4)),
    ((4, 16, 2048, 128), dict(groups=2)),
    ((4, 32, 2048, 128), dict(groups=8)),
    ((4, 16, 2048, 256), dict(groups=8, rotary=64, offset=1.0, casting_mode="gemma")),
]
#: Of whole packs with both columns of a pair in a thread; with an odd number of packs; of other widths; of rows that
#: are too wide for the kernel.
SHAPES = [(2, 7, 3, 64), (2, 8, 4, 128), (1, 40, 3, 80), (2, 2, 5, 96), (1, 3, 4, 256), (2, 4, 3, 6), (1, 2, 2, 1040)]

CASES = [
    Case(
        name="qk_norm_rope",
        op=op,
        reference=reference,
        make=make,
        differentiable=(0, 1, 2, 3),
        terms_of_order_one=1,
        schema=schema,
        rivals=two_operators,
        fit=rope.fit,
        draw=lambda pick: dict(
            casting_mode=pick.choice(("llama", "gemma", "none")),
            offset=pick.choice((0.0, 1.0)),
            packed=pick.choice((True, False)),
        ),
        shapes=SHAPES,
        options=[
            {},
            dict(casting_mode="gemma", offset=1.0, tables="batch"),
            dict(casting_mode="none", tables=0),
            dict(weight=False, groups=1),
            dict(rotary=4),
            dict(half_tables=True, packed=True),
            dict(heads_first=True),
        ],
        many_rows=(70000, 1, 1, 8),
        bytes=traffic,
        bench=BENCH,
        bench_cpu=[((1, 32, 2048, 128), dict(groups=4))],
        errors=[
            error(RuntimeError, "must be .batch, heads, seq, dim.", q=(2, 3, 8)),
            error(RuntimeError, "differ in more than heads", k=(1, 2, 4, 8)),
            error(RuntimeError, "q_weight must be", a=(7,)),
            error(TypeError, "k_weight must be", dtypes={"b": torch.float16}),
            error(RuntimeError, "cos and sin must be", cos=(1, 4, 8), sin=(1, 4, 8)),
            error(ValueError, "casting is", casting=5),
        ],
    ),
    Case(
        name="qk_norm_rope_part",
        op=op,
        reference=reference,
        make=make,
        differentiable=(0, 1, 2, 3),
        terms_of_order_one=1,
        keep=(2, 3, 4, 5),  # weights and tables in float
        schema=schema,
        fit=lambda shape: rope.fit((*shape[:3], shape[3] + 7)),  # 64 columns, the most that options rotate
        draw=lambda pick: dict(casting_mode="gemma", offset=pick.choice((0.0, 1.0)), packed=pick.choice((True, False))),
        dtypes=(torch.bfloat16, torch.float16),
        shapes=[(2, 3, 3, 128), (1, 4, 2, 256)],
        options=[
            dict(rotary=64, casting_mode="gemma", offset=1.0),
            dict(rotary=32, casting_mode="gemma", tables="batch"),
            dict(rotary=20, casting_mode="gemma"),
        ],
    ),
]
