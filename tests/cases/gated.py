import torch
import torch.nn.functional as F
from liger_kernel._library import ops
from liger_kernel.operators import activation as activations
from liger_kernel.ops.swiglu import LigerFusedGateUpSiLUMulFunction, LigerSiLUMulFunction
from liger_kernel.transformers.functional import liger_geglu, liger_swiglu

from cases import Case

SILU = activations.SILU
#: The gates of GPT-OSS and of DeepSeek-V4, with limits that inputs of order one reach.
GPT_OSS, CLAMPED = dict(interleaved=True, limit=1.0, alpha=1.702, up_offset=1.0), dict(limit=1.0)
#: Their options in a schema, with the defaults.
GATE = dict(limit=0.0, alpha=1.0, up_offset=0.0)


def of_silu(options):
    """Options of a call; a gate that is clamped or whose columns interleave is silu's."""
    return {**options, "activation": "silu"} if {"interleaved", *GATE} & set(options) else options


PLAIN = {
    "silu": F.silu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_erf": F.gelu,
    "relu_squared": lambda x: F.relu(x).square(),
}
#: Of each of the library's activations its number and the plain one.
ACTIVATIONS = {name: (number, PLAIN[name]) for name, number in activations.ACTIVATIONS.items()}


def make(shape, options):
    return torch.randn(shape) * 2, torch.randn(shape)


def op(a, b, activation="silu", gate_multiplier=1.0, **clamps):
    if clamps:
        return ops.gated(a, b, SILU, gate_multiplier, **clamps)
    if gate_multiplier != 1 and activation == "silu":
        return LigerSiLUMulFunction.apply(a, b, gate_multiplier)
    named = {"silu": liger_swiglu, "gelu_tanh": liger_geglu}.get(activation)
    return (
        named(a, b) if named and gate_multiplier == 1 else ops.gated(a, b, ACTIVATIONS[activation][0], gate_multiplier)
    )


def reference(a, b, activation="silu", gate_multiplier=1.0, **clamps):
    if clamps:
        return clamped(a * gate_multiplier, b, **clamps)
    return ACTIVATIONS[activation][1](a * gate_multiplier) * b


def clamped(gate, up, limit=0.0, alpha=1.0, up_offset=0.0):
    """As GPT-OSS and DeepSeek-V4 have it."""
    if limit > 0:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + up_offset) * (gate * torch.sigmoid(gate * alpha))


def packed(y, **options):
    return ops.gated_packed(y, SILU, 1.0, **options) if options else LigerFusedGateUpSiLUMulFunction.apply(y)


def packed_reference(y, interleaved=False, **clamps):
    gate, up = (y[..., ::2], y[..., 1::2]) if interleaved else y.chunk(2, -1)
    return clamped(gate, up, **clamps) if clamps else F.silu(gate) * up


SHAPES = [(3, 5, 1), (5, 7), (2, 2, 64), (7, 129), (3, 4104)]
BENCH = [
    ((16384, 14336), dict(activation="silu")),
    ((16384, 14336), dict(activation="gelu_tanh")),
    ((2048, 4096), dict(activation="silu")),
]

CASES = [
    Case(
        name="gated",
        draw=lambda pick: dict(gate_multiplier=pick.choice((1.0, 0.5, -1.7))),
        op=op,
        reference=reference,
        make=make,
        shapes=SHAPES,
        differentiable=(0, 1),
        many_rows=(70000, 8),
        bench=BENCH,
        bench_cpu=[((4096, 4096), dict(activation="silu")), ((4096, 4096), dict(activation="gelu_tanh"))],
        options=[
            *(dict(activation=a) for a in ACTIVATIONS),
            *(dict(gate_multiplier=0.5), CLAMPED, dict(limit=1.0, alpha=1.702, up_offset=1.0, gate_multiplier=-0.5)),
        ],
        schema=lambda inputs, options: (
            ops.gated,
            (
                *inputs,
                ACTIVATIONS[of_silu(options).get("activation", "silu")][0],
                options.get("gate_multiplier", 1.0),
                *(options.get(name, default) for name, default in GATE.items()),
            ),
        ),
        bytes=lambda shape, options, e: (3 * e * shape[0] * shape[1], 5 * e * shape[0] * shape[1]),
        errors=[
            (
                lambda d: liger_swiglu(torch.randn(2, 8, device=d), torch.randn(2, 7, device=d)),
                RuntimeError,
                "gated: b must be",
            ),
            (
                lambda d: ops.gated(torch.randn(2, 8, device=d), torch.randn(2, 8, device=d), 9, 1.0),
                ValueError,
                "activation is",
            ),
            (
                lambda d: ops.gated(torch.randn(2, 8, device=d), torch.randn(2, 8, device=d), 1, 1.0, limit=2.0),
                ValueError,
                "are silu's",
            ),
        ],
    ),
    Case(
        name="gated_packed",
        fit=lambda shape: (*shape[:-1], 2 * shape[-1]),
        op=packed,
        reference=packed_reference,
        make=lambda shape, options: (torch.randn(shape) * 2,),
        shapes=[(3, 5, 2), (5, 14), (7, 258), (3, 4096)],
        many_rows=(70000, 8),
        options=[{}, GPT_OSS, CLAMPED],
        schema=lambda inputs, options: (
            ops.gated_packed,
            (*inputs, SILU, 1.0, options.get("interleaved", False), *({**GATE, **options}[name] for name in GATE)),
        ),
        bench=[((65536, 5760), GPT_OSS)],
        bench_cpu=[((4096, 5760), GPT_OSS)],
        bytes=lambda shape, options, e: tuple(n * e * shape[0] * shape[1] // 2 for n in (3, 5)),
        errors=[(lambda d: LigerFusedGateUpSiLUMulFunction.apply(torch.randn(2, 7, device=d)), ValueError, "even")],
    ),
]
