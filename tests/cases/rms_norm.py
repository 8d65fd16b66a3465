import torch
from liger_kernel._library import ops
from liger_kernel.ops.rms_norm import casting_code
from liger_kernel.transformers.functional import liger_rms_norm

from cases import Case

EPS = 1e-6
#: Edges of the kernels: below a warp, odd widths, a block, a cluster (beyond 8192 columns of 16 bits), beyond that.
SHAPES = [
    (3, 5, 1),
    (5, 7),
    (2, 2, 64),
    (70, 129),
    (9, 4096),
    (3, 4104),
    (12, 8200),
    (20, 2049),
    (3, 9001),
    (3, 20481),
    (2, 16500),
    (2, 66000),
]


def make(shape, options):
    return torch.randn(shape), (torch.randn(shape[-1:]) if options.get("weight", True) else None)


def op(x, w, offset=0.0, casting_mode="llama", weight=True):
    return liger_rms_norm(x, w, EPS, offset, casting_mode)


def reference(x, w, offset=0.0, casting_mode="llama", weight=True, eps=EPS):
    """Hugging Face's norms: Llama rounds before the weight, Gemma after it; "none" never leaves the dtype."""
    work = x if casting_mode == "none" else x.to(torch.promote_types(x.dtype, torch.float32))
    normed = work * torch.rsqrt(work.pow(2).mean(-1, keepdim=True) + eps)
    if casting_mode == "llama":
        normed = normed.to(x.dtype)
    if w is not None:
        normed = normed * (w.to(work.dtype if casting_mode != "llama" else w.dtype) + offset)
    return normed.to(x.dtype)


def rivals(inputs, options):
    x, w = inputs
    return (
        {"F.rms_norm": lambda: torch.nn.functional.rms_norm(x, x.shape[-1:], w, EPS)}
        if w is not None and w.dtype == x.dtype
        else {}
    )


def schema(inputs, options):
    return ops.rms_norm, (*inputs, EPS, options.get("offset", 0.0), casting_code(options.get("casting_mode", "llama")))


def width_errors():
    x = torch.randn(2, 8)
    return [
        (lambda d: liger_rms_norm(x.to(d), torch.ones(7, device=d), EPS), AssertionError, "last dimension is 8"),
        (lambda d: ops.rms_norm(x.to(d), torch.ones(7, device=d), EPS, 0.0, 0), RuntimeError, "weight must be"),
        (lambda d: ops.rms_norm(x.to(d), torch.ones(8, device=d).half(), EPS, 0.0, 0), TypeError, "weight must be"),
        (
            lambda d: ops.rms_norm(torch.ones(2, 8, dtype=torch.long, device=d), None, EPS, 0.0, 0),
            TypeError,
            "must be a tensor of float32, float16 or bfloat16",
        ),
        (lambda d: ops.rms_norm(torch.ones((), device=d), None, EPS, 0.0, 0), RuntimeError, "at least one dimension"),
        (lambda d: ops.rms_norm(x.to(d), None, EPS, 0.0, 5), ValueError, "casting is"),
        (lambda d: liger_rms_norm(x.to(d), None, EPS, casting_mode="other"), AssertionError, "casting_mode is one of"),
    ]


CASES = [
    Case(
        terms_of_order_one=1,
        name="rms_norm",
        op=op,
        reference=reference,
        make=make,
        differentiable=(0, 1),
        schema=schema,
        rivals=rivals,
        errors=width_errors(),
        shapes=[*SHAPES[:-2], (3, 20480), *SHAPES[-2:]],  # over a cluster in 16 bits too
        options=[{}, dict(casting_mode="gemma", offset=1.0), dict(casting_mode="none"), dict(weight=False)],
        many_rows=(70000, 16),
        emulated=62_000,
        bench=[
            ((16384, 4096), {}),
            ((8192, 8192), {}),
            ((32768, 2048), {}),
            ((16384, 4095), {}),
            ((65536, 1023), {}),
            ((8192, 8191), {}),
            ((4096, 16384), {}),
            ((1024, 65536), {}),
            ((256, 1024), {}),
            ((131072, 128), {}),
        ],
        bench_cpu=[((4096, 4096), {})],
        bytes=lambda shape, options, e: (2 * e * shape[0] * shape[1], 3 * e * shape[0] * shape[1]),
    ),
    Case(
        terms_of_order_one=1,
        name="rms_norm_float_weight",
        op=op,
        reference=reference,
        make=make,
        differentiable=(0, 1),
        keep=(1,),
        schema=schema,
        dtypes=(torch.bfloat16, torch.float16),
        shapes=[(5, 7), (33, 256)],
        options=[dict(casting_mode="gemma"), dict(casting_mode="gemma", offset=1.0)],
    ),
]
