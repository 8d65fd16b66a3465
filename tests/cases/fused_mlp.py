from functools import partial

import torch
import torch.nn.functional as F
from liger_kernel._library import ops
from torch.utils.checkpoint import checkpoint

from cases import Case
from cases.gated import ACTIVATIONS


def make(shape, options):
    """x [tokens, hidden], three weights of an MLP `width` wide, and biases or None."""
    tokens, hidden, width = shape
    weights = [torch.randn(o, i) * i**-0.5 for o, i in ((width, hidden), (width, hidden), (hidden, width))]
    return (
        torch.randn(tokens, hidden),
        *weights,
        *([torch.randn(len(w)) for w in weights] if options.get("biases") else [None] * 3),
    )


def arguments(activation="silu", by_gate=1.0, by_down=1.0, chunk=0, biases=False):
    return ACTIVATIONS[activation][0], by_gate, by_down, chunk


def op(*inputs, **options):
    return ops.fused_mlp(*inputs, *arguments(**options))


def reference(x, gate, up, down, gate_bias, up_bias, down_bias, **options):
    _, by_gate, by_down, _ = arguments(**options)
    act = ACTIVATIONS[options.get("activation", "silu")][1]
    y = F.linear(act(F.linear(x, gate, gate_bias) * by_gate) * F.linear(x, up, up_bias), down, down_bias)
    return y * by_down if by_down != 1 else y


def rivals(inputs, options):
    """The same memory with separate operators: gradient checkpointing."""
    plain = {name: value for name, value in options.items() if name != "chunk"}
    return {
        "checkpoint": lambda: checkpoint(
            partial(reference, **plain), *inputs, use_reentrant=False, preserve_rng_state=False
        )
    }


def error(text, exception=RuntimeError, dtype=None, **shapes):
    sizes = {"x": (2, 4), "gate": (6, 4), "up": (6, 4), "down": (4, 6), **shapes}

    def call(d):
        tensors = [torch.randn(size, device=d) for size in sizes.values()]
        return ops.fused_mlp(tensors[0].to(dtype or torch.float32), *tensors[1:], None, None, None, 0, 1.0, 1.0, 0)

    return call, exception, text


CASES = [
    Case(
        name="fused_mlp",
        op=op,
        reference=reference,
        make=make,
        differentiable=tuple(range(7)),
        many_rows=(70000, 4, 6),
        shapes=[(1, 4, 6), (5, 7, 9), (40, 24, 65), (33, 64, 128)],
        options=[
            {},
            dict(biases=True),
            dict(chunk=7),
            dict(biases=True, chunk=16, activation="gelu_tanh"),
            dict(activation="gelu_erf"),
            dict(activation="relu_squared"),
            dict(by_gate=0.5, by_down=2.0, chunk=3),
        ],
        schema=lambda inputs, options: (ops.fused_mlp, (*inputs, *arguments(**options))),
        bench=[((8192, 4096, 14336), {}), ((32768, 4096, 14336), dict(chunk=8192))],
        bench_cpu=[((1024, 1024, 2816), {})],
        # gate, up and down; in backward gate and up again, and two GEMMs for each of the three
        rivals=rivals,
        flops=lambda shape, options: (6 * shape[0] * shape[1] * shape[2], 16 * shape[0] * shape[1] * shape[2]),
        errors=[
            error("up must be", up=(5, 4)),
            error("down must be", down=(4, 5)),
            error("gate must be .* of float16", TypeError, torch.half),
        ],
    )
]
