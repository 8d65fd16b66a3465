"""Linear layers, perhaps with adapters: y = x Wᵀ + bias + scale · (x Aᵀ) Bᵀ (Hu et al. 2021, arXiv:2106.09685)."""

import math
from functools import partial

import torch
import torch.nn.functional as F
from liger_kernel._library import ops
from torch.utils.checkpoint import checkpoint

from cases import Case
from cases.gated import ACTIVATIONS, CLAMPED, GATE, clamped


def layer(out, into, options, rank=None):
    """(weight, bias, a, b) of a linear layer, without what the options leave out."""
    rank = options.get("rank", 4) if rank is None else rank
    return (
        torch.randn(out, into) * into**-0.5,
        torch.randn(out) if options.get("biases") else None,
        torch.randn(rank, into) * into**-0.5 if rank else None,
        torch.randn(out, rank) * rank**-0.5 if rank else None,
    )


def applied(x, weight, bias, a, b, scale, seen=None):
    y = F.linear(x, weight, bias)
    return y if a is None else y + F.linear(F.linear(x if seen is None else seen, a), b) * scale


def linear_make(shape, options):
    tokens, into, out = shape
    dropped = options.get("dropout") and options.get("rank", 4)
    x = torch.randn(tokens, into)
    return x, *layer(out, into, options), torch.randn(tokens, into) if dropped else None


def linear_op(*inputs, scale=2.0, **_):
    return ops.linear(*inputs, None, scale)


def linear_reference(x, weight, bias, a, b, dropped, scale=2.0, **_):
    return applied(x, weight, bias, a, b, scale, dropped)


#: Projections of one input; k has no adapter where options say so.
SCALES = (2.0, 0.3, 1.0)
#: The scales of weights in 8 bits, of which there are none.
PLAIN = (None, None, None)


def qkv_make(shape, options):
    tokens, into, out = shape
    ranks = (None, 0 if options.get("frozen_k") else None, None)
    layers = [layer(n, into, options, rank) for n, rank in zip((out, out // 2, out // 2), ranks)]
    return torch.randn(tokens, into), *(t for each in layers for t in each)


def head_dim_of(inputs, options):
    """As wide as k, where of q there are two heads; else as the widest heads that all three have."""
    return math.gcd(inputs[1].shape[0], inputs[5].shape[0]) if options.get("heads") else 0


def qkv_op(*inputs, **options):
    return ops.qkv(*inputs, *PLAIN, *SCALES, head_dim_of(inputs, options))


def qkv_reference(x, *rest, **options):
    results = tuple(applied(x, *rest[4 * i : 4 * i + 4], SCALES[i]) for i in range(3))
    dim = head_dim_of((x, *rest), options)
    return tuple(y.unflatten(-1, (-1, dim)).transpose(-3, -2) for y in results) if dim else results


def qkv_error(text, head_dim, *shape):
    def call(d):
        w = torch.randn(6, 4, device=d)
        return ops.qkv(torch.randn(*shape, device=d), *(w, None, None, None) * 3, *PLAIN, *SCALES, head_dim)

    return call, RuntimeError, text


def mlp_make(shape, options):
    tokens, into, width = shape
    rank = options.get("rank", 4)
    ranks = (rank, 0 if options.get("frozen_up") else rank, min(rank, 1))
    layers = [layer(o, i, options, rank) for o, i, rank in zip((width, width, into), (into, into, width), ranks)]
    return torch.randn(tokens, into), *(t for each in layers for t in each)


def mlp_arguments(activation="silu", by_gate=1.0, by_down=1.0, chunk=0, recompute=False, **_):
    return *PLAIN, *SCALES, ACTIVATIONS[activation][0], by_gate, by_down, chunk, recompute


def mlp_op(*inputs, **options):
    return ops.gated_mlp(*inputs, *mlp_arguments(**options))


def mlp_reference(x, *rest, activation="silu", by_gate=1.0, by_down=1.0, **_):
    gate, up = (applied(x, *rest[4 * i : 4 * i + 4], SCALES[i]) for i in range(2))
    y = applied(ACTIVATIONS[activation][1](gate * by_gate) * up, *rest[8:12], SCALES[2])
    return y * by_down if by_down != 1 else y


def activated_linear_make(shape, options):
    tokens, width, out = shape
    return torch.randn(tokens, width), *layer(out, width, options)


def activated_linear_arguments(scale=2.0, activation="silu", **options):
    return None, scale, ACTIVATIONS[activation][0]


def activated_linear_op(*inputs, **options):
    return ops.activated_linear(*inputs, *activated_linear_arguments(**options))


def activated_linear_reference(x, *rest, scale=2.0, activation="silu", **options):
    return applied(ACTIVATIONS[activation][1](x), *rest, scale)


def gated_linear_make(shape, options):
    tokens, width, out = shape
    return torch.randn(tokens, 2 * width), *layer(out, width, options)


def gated_linear_arguments(scale=2.0, activation="silu", gate_multiplier=1.0, **options):
    clamps = {name: options[name] for name in GATE if name in options}  # of silu's gate
    number = ACTIVATIONS["silu" if clamps else activation][0]
    return None, scale, number, gate_multiplier, *{**GATE, **clamps}.values()


def gated_linear_op(*inputs, **options):
    return ops.gated_linear(*inputs, *gated_linear_arguments(**options))


def gated_linear_reference(x, *rest, scale=2.0, activation="silu", gate_multiplier=1.0, **options):
    gate, up = x.chunk(2, -1)
    gate, clamps = gate * gate_multiplier, {name: options[name] for name in GATE if name in options}
    return applied(clamped(gate, up, **clamps) if clamps else ACTIVATIONS[activation][1](gate) * up, *rest, scale)


def last_layer_error(op, width, text, exception=RuntimeError, dtype=None, options=(), **shapes):
    sizes = {"x": (2, width), "weight": (4, 6), "bias": (4,), "a": (3, 6), "b": (4, 3), **shapes}

    def call(d):
        x, *tensors = (torch.randn(size, device=d) for size in sizes.values())
        return op(x.to(dtype or torch.float32), *tensors, None, 1.0, *options)

    return call, exception, text


activated_linear_error = partial(last_layer_error, ops.activated_linear, 6)
gated_linear_error = partial(last_layer_error, ops.gated_linear, 12)


def mlp_rivals(inputs, options):
    """The same memory with separate operators: gradient checkpointing."""
    if not options.get("recompute"):
        return {}
    plain = partial(mlp_reference, **options)
    return {"checkpoint": lambda: checkpoint(plain, *inputs, use_reentrant=False, preserve_rng_state=False)}


def mlp_error(text, exception=RuntimeError, dtype=None, **shapes):
    sizes = {"x": (2, 4), "gate": (6, 4), "up": (6, 4), "down": (4, 6), **shapes}

    def call(d):
        x, *weights = (torch.randn(size, device=d) for size in sizes.values())
        layers = (t for weight in weights for t in (weight, None, None, None))
        return ops.gated_mlp(x.to(dtype or torch.float32), *layers, *PLAIN, *SCALES)

    return call, exception, text


def error(text, exception=RuntimeError, dtype=None, missing=(), **shapes):
    sizes = {"x": (2, 4), "weight": (6, 4), "bias": (6,), "a": (3, 4), "b": (6, 3), "dropped": (2, 4), **shapes}

    def call(d):
        tensors = [None if name in missing else torch.randn(size, device=d) for name, size in sizes.items()]
        return ops.linear(tensors[0].to(dtype or torch.float32), *tensors[1:], None, 1.0)

    return call, exception, text


def gemms(count):
    """The arithmetic of so many weights of a shape: that of the adapters is no part of it."""
    return lambda shape, options: tuple(2 * count * passes * shape[0] * shape[1] * shape[2] for passes in (1, 2))


def mlp_flops(shape, options):
    """gate, up and down; in backward two GEMMs for each of the three, and with recompute gate and up again."""
    product = 2 * shape[0] * shape[1] * shape[2]
    return 3 * product, (6 + 2 * bool(options.get("recompute"))) * product


SHAPES = [(1, 4, 6), (5, 7, 10), (40, 24, 64), (33, 64, 128)]

CASES = [
    Case(
        name="linear",
        op=linear_op,
        reference=linear_reference,
        make=linear_make,
        differentiable=tuple(range(6)),
        shapes=SHAPES,
        options=[{}, dict(biases=True), dict(dropout=True), dict(rank=1, scale=0.3), dict(rank=0, biases=True)],
        schema=lambda inputs, options: (ops.linear, (*inputs, None, options.get("scale", 2.0))),
        bench=[((8192, 4096, 14336), dict(rank=16))],
        bench_cpu=[((1024, 1024, 2816), dict(rank=16))],
        flops=gemms(1),
        errors=[
            error("weight must be", weight=(6, 5)),
            error("a must be", a=(3, 5)),
            error("b must be", b=(6, 2)),
            error("dropped must be", dropped=(2, 5)),
            error("a and b are given together", missing=("a",)),
            error("dropped is what an adapter sees", missing=("a", "b")),
            error("float64", TypeError, dtype=torch.float64),
        ],
    ),
    Case(
        name="qkv",
        op=qkv_op,
        reference=qkv_reference,
        make=qkv_make,
        differentiable=tuple(range(13)),
        shapes=SHAPES,
        options=[{}, dict(biases=True), dict(frozen_k=True, rank=3), dict(heads=True), dict(heads=True, rank=0)],
        schema=lambda inputs, options: (ops.qkv, (*inputs, *PLAIN, *SCALES, head_dim_of(inputs, options))),
        bench=[((8192, 4096, 4096), dict(rank=16))],
        bench_cpu=[((1024, 1024, 1024), dict(rank=16))],
        flops=gemms(2),
        errors=[
            qkv_error("head_dim 4 does not divide 6", 4, 2, 4),
            qkv_error("head_dim is the width of the heads", -1, 2, 4),
            qkv_error("head_dim is the width of the heads", 3, 4),
        ],
    ),
    Case(
        name="activated_linear",
        op=activated_linear_op,
        reference=activated_linear_reference,
        make=activated_linear_make,
        differentiable=tuple(range(5)),
        shapes=SHAPES,
        many_rows=(70000, 4, 6),
        options=[
            {},
            dict(biases=True, activation="gelu_tanh"),
            dict(rank=0, activation="relu_squared"),
            dict(rank=0, activation="gelu_erf", biases=True),
            dict(rank=1, scale=0.3, activation="relu_squared"),
        ],
        schema=lambda inputs, options: (ops.activated_linear, (*inputs, *activated_linear_arguments(**options))),
        bench=[((8192, 12288, 3072), dict(rank=0, activation="gelu_tanh"))],
        bench_cpu=[((1024, 4096, 1024), dict(rank=0, activation="gelu_tanh"))],
        flops=gemms(1),
        errors=[
            activated_linear_error("weight must be", weight=(4, 5)),
            activated_linear_error("a must be", a=(3, 5)),
            activated_linear_error("activation is the number of one of", ValueError, options=(4,)),
            activated_linear_error("float64", TypeError, dtype=torch.float64),
        ],
    ),
    Case(
        name="gated_linear",
        op=gated_linear_op,
        reference=gated_linear_reference,
        make=gated_linear_make,
        differentiable=tuple(range(5)),
        shapes=SHAPES,
        many_rows=(70000, 4, 6),
        options=[
            {},
            dict(biases=True, activation="gelu_tanh"),
            dict(rank=0, gate_multiplier=0.5),
            dict(rank=0, activation="gelu_erf", biases=True),
            dict(rank=1, scale=0.3, **CLAMPED),
            dict(rank=0, limit=1.0, alpha=1.702, up_offset=1.0),
        ],
        schema=lambda inputs, options: (ops.gated_linear, (*inputs, *gated_linear_arguments(**options))),
        bench=[((8192, 8192, 3072), dict(rank=0)), ((8192, 8192, 3072), dict(rank=16))],
        bench_cpu=[((1024, 2816, 1024), dict(rank=0))],
        flops=gemms(1),
        errors=[
            gated_linear_error("must be even", ValueError, x=(2, 11)),
            gated_linear_error("weight must be", weight=(4, 5)),
            gated_linear_error("a must be", a=(3, 5)),
            gated_linear_error("float64", TypeError, dtype=torch.float64),
        ],
    ),
    Case(
        name="gated_mlp",
        op=mlp_op,
        reference=mlp_reference,
        make=mlp_make,
        differentiable=tuple(range(13)),
        many_rows=(70000, 4, 6),
        shapes=SHAPES,
        options=[
            {},
            dict(biases=True, recompute=True),
            dict(frozen_up=True, activation="gelu_tanh"),
            dict(recompute=True, rank=3),
            dict(rank=0, recompute=True),
            dict(rank=0, recompute=True, biases=True, chunk=16, activation="gelu_tanh"),
            dict(rank=0, activation="gelu_erf"),
            dict(rank=0, activation="relu_squared", biases=True),
            dict(biases=True, by_gate=0.5, by_down=2.0, chunk=3),
            dict(recompute=True, by_down=0.5, chunk=7),
        ],
        schema=lambda inputs, options: (ops.gated_mlp, (*inputs, *mlp_arguments(**options))),
        bench=[
            ((8192, 4096, 14336), dict(rank=16)),
            ((8192, 4096, 14336), dict(rank=16, recompute=True)),
            ((8192, 4096, 14336), dict(rank=0, recompute=True)),
            ((32768, 4096, 14336), dict(rank=0, recompute=True, chunk=8192)),
        ],
        bench_cpu=[((1024, 1024, 2816), dict(rank=16)), ((1024, 1024, 2816), dict(rank=0, recompute=True))],
        rivals=mlp_rivals,
        flops=mlp_flops,
        errors=[
            mlp_error("up_weight must be", up=(5, 4)),
            mlp_error("down_weight must be", down=(4, 5)),
            mlp_error("gate_weight must be .* of float16", TypeError, torch.half),
        ],
    ),
]
