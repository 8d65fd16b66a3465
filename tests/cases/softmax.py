import math

import torch
from liger_kernel._library import ops
from liger_kernel.ops.softmax import SOFTMAX, SPARSEMAX
from liger_kernel.transformers.functional import liger_softmax, liger_sparsemax

from cases import Case


def make(shape, options):
    return (torch.randn(shape) * options.get("spread", 2.0),)


def softmax_reference(x):
    """torch's own, which keeps its result, as rounded, for backward."""
    return x.softmax(-1)


def sparsemax_reference(x, dim=-1, spread=None):
    """By sorting, as the paper has it (algorithm 1); autograd differentiates τ."""
    z = x.to(torch.promote_types(x.dtype, torch.float32)).transpose(dim, -1)
    ordered = z.sort(-1, descending=True).values
    sums = ordered.cumsum(-1)
    size = (ordered * torch.arange(1, z.shape[-1] + 1, device=z.device) > sums - 1).sum(-1, keepdim=True)
    tau = (sums.gather(-1, size - 1) - 1) / size
    return (z - tau).relu().transpose(dim, -1).to(x.dtype)


def sparsemax(x, dim=-1, spread=None):
    return liger_sparsemax(x, dim)


def causal(x, sparse=False, spread=None):
    return ops.causal_softmax(x, SPARSEMAX if sparse else SOFTMAX)


def causal_reference(x, sparse=False, spread=None):
    future = torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
    scores = x.masked_fill(future, -1e9 if x.dtype != torch.float16 else -6e4)
    return sparsemax_reference(scores) if sparse else softmax_reference(scores)


def floor(shape, options, e):
    return 2 * e * shape[0] * shape[1], 3 * e * shape[0] * shape[1]


SHAPES = [(3, 5, 1), (5, 7), (2, 2, 64), (70, 129), (9, 4096), (3, 4104), (2, 33000), (2, 70001)]
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
        # The spread makes few or nearly all of a row's values members of the support.
        name="sparsemax",
        op=sparsemax,
        reference=sparsemax_reference,
        make=make,
        options=[{}, dict(spread=0.01), dict(spread=1e-4), dict(dim=0)],
        schema=lambda inputs, options: (ops.softmax, (*inputs, SPARSEMAX)),
        shapes=SHAPES,
        many_rows=(70000, 8),
        bytes=floor,
        bench=[((4096, 4096), {})],
        bench_cpu=[((4096, 4096), {})],
        errors=[(lambda d: liger_sparsemax(torch.ones(2, 8, device=d), 2), IndexError, "Dimension out of range")],
    ),
    Case(
        name="causal_softmax",
        op=causal,
        reference=causal_reference,
        make=make,
        options=[{}, dict(sparse=True), dict(sparse=True, spread=0.01)],
        schema=lambda inputs, options: (ops.causal_softmax, (*inputs, SOFTMAX)),
        shapes=[
            *[(3, 1, 1), (5, 7), (2, 3, 9, 9), (7, 5), (2, 33, 64), (130, 129), (2, 5, 4104)],
            *[(64, 33000), (64, 70001)],  # of a row, as many numbers as its place are not 0
        ],
        many_rows=(70000, 8),
        errors=[(lambda d: ops.causal_softmax(torch.ones(8, device=d), SOFTMAX), RuntimeError, "queries, keys")],
        bytes=lambda shape, options, e: tuple(n * e * math.prod(shape) // 2 for n in (3, 6)),
        bench=[((4, 16, 4096, 4096), {})],
        bench_cpu=[((1, 8, 1024, 1024), {})],
    ),
]
