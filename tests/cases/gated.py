import torch
import torch.nn.functional as F
from liger_kernel._library import ops
from liger_kernel.operators import activation as activations
from liger_kernel.ops.swiglu import LigerFusedGateUpSiLUMulFunction, LigerSiLUMulFunction
from liger_kernel.transformers.functional import liger_geglu, liger_swiglu

from cases import Case

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


def op(a, b, activation="silu", gate_multiplier=1.0):
    if gate_multiplier != 1 and activation == "silu":
        return LigerSiLUMulFunction.apply(a, b, gate_multiplier)
    named = {"silu": liger_swiglu, "gelu_tanh": liger_geglu}.get(activation)
    return (
        named(a, b) if named and gate_multiplier == 1 else ops.gated(a, b, ACTIVATIONS[activation][0], gate_multiplier)
    )


def reference(a, b, activation="silu", gate_multiplier=1.0):
    return ACTIVATIONS[activation][1](a * gate_multiplier) * b


def packed_reference(y):
    gate, up = y.chunk(2, -1)
    return F.silu(gate) * up


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
        options=[dict(activation=a) for a in ACTIVATIONS] + [dict(gate_multiplier=0.5)],
        schema=lambda inputs, options: (
            ops.gated,
            (*inputs, ACTIVATIONS[options.get("activation", "silu")][0], options.get("gate_multiplier", 1.0)),
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
        ],
    ),
    Case(
        name="gated_packed",
        fit=lambda shape: (*shape[:-1], 2 * shape[-1]),
        op=LigerFusedGateUpSiLUMulFunction.apply,
        reference=packed_reference,
        make=lambda shape, options: (torch.randn(shape),),
        shapes=[(3, 5, 2), (5, 14), (7, 258), (3, 4096)],
        many_rows=(70000, 8),
        schema=lambda inputs, options: (ops.gated_packed, (*inputs, 0, 1.0)),
        errors=[(lambda d: LigerFusedGateUpSiLUMulFunction.apply(torch.randn(2, 7, device=d)), ValueError, "even")],
    ),
]
