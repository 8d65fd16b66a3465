import math

import torch
from cases import Case
from liger_kernel._library import ops
from liger_kernel.transformers.functional import liger_attn_res

EPS = 1e-6


def make(shape, options):
    """Scores of order one."""
    width = shape[-1]
    return torch.randn(options.get("n", 4), *shape), torch.randn(width) / math.sqrt(width), torch.randn(width)


def reference(v, query, weight, n=4):
    work = torch.promote_types(v.dtype, torch.float32)
    v32, query, weight = v.to(work), query.to(work), weight.to(work)
    keys = v32 * torch.rsqrt(v32.square().mean(-1, keepdim=True) + EPS) * weight
    alpha = (keys * query).sum(-1, keepdim=True).softmax(0)
    return (alpha * v32).sum(0).to(v.dtype)


def op(v, query, weight, n=4):
    return liger_attn_res(v, query, weight, EPS)


def refused(*shapes):
    def call(device):
        ops.attention_residuals(*(torch.randn(shape, device=device) for shape in shapes), EPS)

    return call


def case(name, **fields):
    return Case(
        name=name,
        op=op,
        reference=reference,
        make=make,
        differentiable=(0, 1, 2),
        schema=lambda inputs, options: (ops.attention_residuals, (*inputs, EPS)),
        **fields,
    )


CASES = [
    case(
        "attention_residuals",
        terms_of_order_one=1,
        options=[{}, dict(n=1), dict(n=32)],
        shapes=[(3, 5, 1), (5, 7), (2, 2, 64), (70, 129), (9, 4096), (3, 4104), (5, 8200), (3, 9001), (2, 16500)],
        many_rows=(70000, 16),
        emulated=20_000,
        bench=[((16384, 4096), dict(n=8)), ((16384, 2048), dict(n=16))],
        bench_cpu=[((1024, 4096), dict(n=8))],
        bytes=lambda shape, options, e: tuple((k * options["n"] + 1) * e * math.prod(shape) for k in (1, 2)),
        errors=[
            (refused((33, 2, 8), (8,), (8,)), RuntimeError, "blocks must be"),
            (refused((8,), (8,), (8,)), RuntimeError, "blocks must be"),
            (refused((3, 2, 8), (7,), (8,)), RuntimeError, "query must be"),
        ],
    ),
    case(
        "attention_residuals_float",
        terms_of_order_one=1,
        keep=(1, 2),
        dtypes=(torch.bfloat16, torch.float16),
        shapes=[(4, 1, 1), (5, 7), (6, 33, 256), (3, 9)],
    ),
]
