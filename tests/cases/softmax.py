import math

import torch
from liger_kernel._library import ops
from liger_kernel.ops.softmax import SOFTMAX
from liger_kernel.transformers.functional import liger_softmax

from cases import Case


def make(shape, options):
    return (torch.randn(shape) * options.get("spread", 2.0),)


def softmax_reference(x):
    """torch's own, which keeps its result, as rounded, for backward."""
    return x.softmax(-1)


def causal(x):
    return ops.causal_softmax(x, SOFTMAX)


def masked(x):
    """x with a number so low that its exponential is 0 behind each row's place."""
    future = torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
    return x.masked_fill(future, -1e9 if x.dtype != torch.float16 else -6e4)


def causal_reference(x):
    return softmax_reference(masked(x))


def floor(shape, options, e):
    return 2 * e * shape[0] * shape[1], 3 * e * shape[0] * shape[1]


SHAPES = [(3, 5, 1), (5, 7), (2, 2, 64), (70, 129), (9, 4096), (3, 4104), (2, 33000), (2, 70001)]
CAUSAL_SHAPES = [
    *[(3, 1, 1), (5, 7), (2, 3, 9, 9), (7, 5), (2, 33, 64), (130, 129), (2, 5, 4104)],
    *[(64, 33000), (64, 70001)],  # of a row, as many numbers as its place are not 0
]
ERRORS = [
    (lambda d: liger_softmax(torch.ones((), device=d)), RuntimeError, "at least one dimension"),
    (
        lambda d: liger_softmax(torch.ones(2, 8, device=d, dtype=torch.long)),
        TypeError,
        "must be a tensor of float32, float16 or bfloat16",
    ),
    (lambda d: ops.softmax(torch.ones(2, 8, device=d), 5), ValueError, "kind is"),
]

CASES = [
    Case(
        name="softmax",
        op=liger_softmax,
        reference=softmax_reference,
        make=make,
        schema=lambda inputs, options: (ops.softmax, (*inputs, SOFTMAX)),
        shapes=SHAPES,
        many_rows=(70000, 8),
        errors=ERRORS,
        bytes=floor,
        bench=[((8192, 32768), {}), ((4096, 131072), {}), ((65536, 1024), {})],
        bench_cpu=[((1024, 32768), {})],
    ),
    Case(
        name="causal_softmax",
        op=causal,
        reference=causal_reference,
        make=make,
        schema=lambda inputs, options: (ops.causal_softmax, (*inputs, SOFTMAX)),
        shapes=CAUSAL_SHAPES,
        many_rows=(70000, 8),
        errors=[(lambda d: ops.causal_softmax(torch.ones(8, device=d), SOFTMAX), RuntimeError, "queries, keys")],
        bytes=lambda shape, options, e: tuple(n * e * math.prod(shape) // 2 for n in (3, 6)),
        bench=[((4, 16, 4096, 4096), {})],
        bench_cpu=[((1, 8, 1024, 1024), {})],
    ),
]
