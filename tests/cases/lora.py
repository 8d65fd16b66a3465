"""Linear layers with adapters: y = x Wᵀ + bias + scale · (x Aᵀ) Bᵀ (Hu et al. 2021, arXiv:2106.09685)."""

import math

import torch
import torch.nn.functional as F
from liger_kernel._library import ops

from cases import Case
from cases.gated import ACTIVATIONS


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
    return ops.lora_linear(*inputs, scale)


def linear_reference(x, weight, bias, a, b, dropped, scale=2.0, **_):
    return applied(x, weight, bias, a, b, scale, dropped)


#: Projections of one input; k has no adapter where options say so.
SCALES = (2.0, 0.3, 1.0)


def qkv_make(shape, options):
    tokens, into, out = shape
    ranks = (None, 0 if options.get("frozen_k") else None, None)
    layers = [layer(n, into, options, rank) for n, rank in zip((out, out // 2, out // 2), ranks)]
    return torch.randn(tokens, into), *(t for each in layers for t in each)


def head_dim_of(inputs, options):
    """As wide as k, where of q there are two heads; else as the widest heads that all three have."""
    return math.gcd(inputs[1].shape[0], inputs[5].shape[0]) if options.get("heads") else 0


def qkv_op(*inputs, **options):
    return ops.lora_qkv(*inputs, *SCALES, head_dim_of(inputs, options))


def qkv_reference(x, *rest, **options):
    results = tuple(applied(x, *rest[4 * i : 4 * i + 4], SCALES[i]) for i in range(3))
    dim = head_dim_of((x, *rest), options)
    return tuple(y.unflatten(-1, (-1, dim)).transpose(-3, -2) for y in results) if dim else results


def qkv_error(text, head_dim, *shape):
    def call(d):
        w = torch.randn(6, 4, device=d)
        return ops.lora_qkv(torch.randn(*shape, device=d), *(w, None, None, None) * 3, *SCALES, head_dim)

    return call, RuntimeError, text


def mlp_make(shape, options):
    tokens, into, width = shape
    ranks = (None, 0 if options.get("frozen_up") else None, 1)
    layers = [layer(o, i, options, rank) for o, i, rank in zip((width, width, into), (into, into, width), ranks)]
    return torch.randn(tokens, into), *(t for each in layers for t in each)


def mlp_arguments(activation="silu", recompute=False, **_):
    return *SCALES, ACTIVATIONS[activation][0], recompute


def mlp_op(*inputs, **options):
    return ops.lora_mlp(*inputs, *mlp_arguments(**options))


def mlp_reference(x, *rest, activation="silu", **_):
    gate, up = (applied(x, *rest[4 * i : 4 * i + 4], SCALES[i]) for i in range(2))
    return applied(ACTIVATIONS[activation][1](gate) * up, *rest[8:12], SCALES[2])


def error(text, exception=RuntimeError, dtype=None, missing=(), **shapes):
    sizes = {"x": (2, 4), "weight": (6, 4), "bias": (6,), "a": (3, 4), "b": (6, 3), "dropped": (2, 4), **shapes}

    def call(d):
        tensors = [None if name in missing else torch.randn(size, device=d) for name, size in sizes.items()]
        return ops.lora_linear(tensors[0].to(dtype or torch.float32), *tensors[1:], 1.0)

    return call, exception, text


def gemms(count):
    """The arithmetic of so many weights of a shape: that of the adapters is no part of it."""
    return lambda shape, options: tuple(2 * count * passes * shape[0] * shape[1] * shape[2] for passes in (1, 2))


SHAPES = [(1, 4, 6), (5, 7, 10), (40, 24, 64), (33, 64, 128)]

CASES = [
    Case(
        name="lora_linear",
        op=linear_op,
        reference=linear_reference,
        make=linear_make,
        differentiable=tuple(range(6)),
        shapes=SHAPES,
        options=[{}, dict(biases=True), dict(dropout=True), dict(rank=1, scale=0.3), dict(rank=0, biases=True)],
        schema=lambda inputs, options: (ops.lora_linear, (*inputs, options.get("scale", 2.0))),
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
        name="lora_qkv",
        op=qkv_op,
        reference=qkv_reference,
        make=qkv_make,
        differentiable=tuple(range(13)),
        shapes=SHAPES,
        options=[{}, dict(biases=True), dict(frozen_k=True, rank=3), dict(heads=True), dict(heads=True, rank=0)],
        schema=lambda inputs, options: (ops.lora_qkv, (*inputs, *SCALES, head_dim_of(inputs, options))),
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
        name="lora_mlp",
        op=mlp_op,
        reference=mlp_reference,
        make=mlp_make,
        differentiable=tuple(range(13)),
        shapes=SHAPES,
        options=[
            {},
            dict(biases=True, recompute=True),
            dict(frozen_up=True, activation="gelu_tanh"),
            dict(recompute=True, rank=3),
        ],
        schema=lambda inputs, options: (ops.lora_mlp, (*inputs, *mlp_arguments(**options))),
        bench=[((8192, 4096, 14336), dict(rank=16)), ((8192, 4096, 14336), dict(rank=16, recompute=True))],
        bench_cpu=[((1024, 1024, 2816), dict(rank=16))],
        flops=gemms(3),
    ),
]
