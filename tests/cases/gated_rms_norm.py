import torch
from liger_kernel._library import ops
from liger_kernel.ops.rms_norm import casting_code
from liger_kernel.transformers.functional import liger_gated_rms_norm

from cases import Case
from cases.rms_norm import EPS, SHAPES

GATE_FIRST = dict(norm_before_gate=False, groups=2)


def make(shape, options):
    return torch.randn(shape), torch.randn(shape), torch.randn(shape[-1:])


def op(x, gate, w, activation="silu", norm_before_gate=True, groups=1, casting_mode="llama"):
    return liger_gated_rms_norm(x, gate, w, EPS, activation, norm_before_gate, groups, casting_mode)


def reference(x, gate, w, activation="silu", norm_before_gate=True, groups=1, casting_mode="llama"):
    """Hugging Face's: Qwen3-Next's, and Mamba-2's with the gate first, round before the weight, Kimi Linear's only the
    result."""
    work = torch.promote_types(x.dtype, torch.float32)
    act = {"silu": torch.nn.functional.silu, "sigmoid": torch.sigmoid}[activation](gate.to(work))
    u = x.to(work) if norm_before_gate else x.to(work) * act
    in_groups = u.unflatten(-1, (groups, -1))
    normed = in_groups * torch.rsqrt(in_groups.pow(2).mean(-1, keepdim=True) + EPS)
    normed = normed.flatten(-2)
    normed = w * (normed.to(x.dtype) if casting_mode == "llama" else normed)
    return (normed * act if norm_before_gate else normed).to(x.dtype)


def schema(inputs, options):
    given = {"activation": "silu", "norm_before_gate": True, "groups": 1, "casting_mode": "llama"} | options
    code = ("silu", "sigmoid").index(given["activation"])
    casting = casting_code(given["casting_mode"])
    return ops.gated_rms_norm, (*inputs, EPS, code, given["norm_before_gate"], given["groups"], casting)


def fit(shape):
    return (*shape[:-1], 2 * shape[-1])


def errors():
    def tensors(d, x=(2, 8), gate=(2, 8), w=8):
        return torch.randn(x, device=d), torch.randn(gate, device=d), torch.ones(w, device=d)

    return [
        (lambda d: liger_gated_rms_norm(*tensors(d, w=7)), AssertionError, "last dimension is 8"),
        (lambda d: liger_gated_rms_norm(*tensors(d, gate=(2, 7))), RuntimeError, "gate must be"),
        (lambda d: liger_gated_rms_norm(*tensors(d), groups=3), RuntimeError, "does not divide"),
        (lambda d: liger_gated_rms_norm(*tensors(d), activation="relu"), ValueError, "activation is one of"),
        (lambda d: liger_gated_rms_norm(*tensors(d), casting_mode="none"), ValueError, "casting is"),
        (lambda d: ops.gated_rms_norm(*tensors(d), EPS, 2, True, 1, 0), ValueError, "activation is"),
    ]


CASES = [
    Case(
        terms_of_order_one=1,
        name="gated_rms_norm",
        op=op,
        reference=reference,
        make=make,
        differentiable=(0, 1, 2),
        schema=schema,
        errors=errors(),
        fit=fit,
        draw=lambda pick: dict(
            activation=pick.choice(("silu", "sigmoid")),
            norm_before_gate=pick.choice((True, False)),
            casting_mode=pick.choice(("llama", "gemma")),
        ),
        shapes=[
            fit(shape) for shape in ((3, 5, 1), (40, 512), (5, 7), *SHAPES[2:9], (3, 12004), (2, 16500), (2, 33000))
        ],
        options=[
            {},
            GATE_FIRST,
            dict(activation="sigmoid", casting_mode="gemma"),
            dict(activation="sigmoid", norm_before_gate=False, casting_mode="gemma"),
        ],
        many_rows=(70000, 16),
        emulated=62_000,
        # Heads of Qwen3-Next; Nemotron-H, Granite 4 hybrid and Mamba-2 2.7B.
        bench=[
            ((524288, 128), {}),
            ((16384, 8192), dict(norm_before_gate=False, groups=8)),
            ((16384, 4096), dict(norm_before_gate=False)),
            ((16384, 5120), dict(norm_before_gate=False)),
        ],
        bench_cpu=[((131072, 128), {}), ((4096, 4096), dict(norm_before_gate=False))],
        bytes=lambda shape, options, e: (3 * e * shape[0] * shape[1], 5 * e * shape[0] * shape[1]),
    ),
    Case(
        terms_of_order_one=1,
        name="gated_rms_norm_float_weight",
        op=op,
        reference=reference,
        make=make,
        differentiable=(0, 1, 2),
        keep=(2,),
        schema=schema,
        fit=fit,
        dtypes=(torch.bfloat16, torch.float16),
        shapes=[(5, 14), (9, 128)],
        options=[{}, GATE_FIRST],
    ),
]
