import math

import torch
import torch.nn.functional as F
from liger_kernel._library import ops
from liger_kernel.transformers.functional import liger_delta_gates

from cases import Case


def make(shape, options):
    """A from 0.01 to 16, as models draw it, as its logarithm or negative; with `wide` a and b are slices of rows."""
    heads = shape[-1]
    rows = torch.randn(*shape[:-1], 2 * heads + 3)
    a, b = rows[..., :heads], rows[..., heads + 3 :]
    if not options.get("wide"):
        a, b = a.contiguous(), b.contiguous()
    A = 0.01 + 15.99 * torch.rand(heads)
    A = A.log() if options.get("log", True) else -A
    return (a, A, torch.randn(heads) if options.get("biased", True) else None, b if options.get("log", True) else None)


def limits(options):
    return options.get("low", 0.0), options.get("high", math.inf)


def op(a, A, dt_bias, b, **options):
    return liger_delta_gates(a, A, dt_bias, b, options.get("log", True), limits(options))


def reference(a, A, dt_bias, b, **options):
    """As Qwen3.5 and Mamba-2 compute them, in float32 or float64."""
    dtype = torch.promote_types(a.dtype, torch.float32)
    a, A = a.to(dtype), A.to(dtype)
    dt = F.softplus(a if dt_bias is None else a + dt_bias.to(dtype)).clamp(*limits(options))
    g = (-A.exp() if options.get("log", True) else A) * dt
    return g, dt if b is None else b.to(dtype).sigmoid()


def schema(inputs, options):
    return ops.delta_gates, (*inputs, options.get("log", True), *limits(options))


def errors():
    def call(text, exception=RuntimeError, a=(2, 5, 8), A=(8,), **more):
        def run(d):
            tensors = {name: value.to(d) if torch.is_tensor(value) else value for name, value in more.items()}
            return liger_delta_gates(torch.randn(a, device=d), torch.randn(A, device=d), **tensors)

        return run, exception, text

    return [
        call("A must be", A=(7,)),
        call("dt_bias must be", dt_bias=torch.ones(7)),
        call("b must be", b=torch.ones(2, 5, 7)),
        call("b must be", TypeError, b=torch.ones(2, 5, 8, dtype=torch.bfloat16)),
        call("is above high", ValueError, dt_limit=(2.0, 1.0)),
    ]


def draw(pick):
    log = pick.choice((True, False))
    return dict(
        log=log,
        biased=pick.choice((True, False)),
        wide=pick.choice((True, False)),
        low=pick.choice((0.0, 0.3)),
        high=pick.choice((1.0, math.inf)),
    )


# The gradient of a head's A sums terms of the size of A, which is up to 16, and they may cancel.
TERMS = 16 * 16

COMMON = dict(op=op, reference=reference, make=make, schema=schema, differentiable=(0, 1, 2, 3), draw=draw)

CASES = [
    Case(
        name="delta_gates",
        **COMMON,
        terms_of_order_one=TERMS,
        # One head; fewer than a vector; several runs of rows; more heads than a block, or a task, has.
        shapes=[(3, 5, 1), (2, 7, 12), (1, 300, 32), (37, 48), (5, 300)],
        options=[
            {},
            dict(wide=True),
            dict(biased=False),
            dict(log=False),
            dict(log=False, wide=True, low=0.3, high=1.0),
        ],
        many_rows=(70000, 3),
        # Qwen3.5 9B, Nemotron-H 8B.
        bench=[((1, 8192, 32), dict(wide=True)), ((1, 8192, 128), dict(wide=True, log=False))],
        bench_cpu=[((1, 8192, 32), {})],
        bytes=lambda shape, options, e: ((2 * e + 8) * math.prod(shape), (4 * e + 8) * math.prod(shape)),
        errors=errors(),
    ),
    Case(
        name="delta_gates_float_A",
        **COMMON,
        terms_of_order_one=TERMS,
        keep=(1, 2),
        dtypes=(torch.bfloat16, torch.float16),
        shapes=[(2, 5, 6), (2, 48, 37)],
        options=[{}, dict(log=False)],
    ),
]
