import math

import torch
from cases import Case
from liger_kernel._library import ops
from liger_kernel.transformers.functional import liger_fused_neighborhood_attention


def make(shape, options):
    return tuple(torch.randn(shape) for _ in range(3))


def reference(q, k, v, kernel_size=7, dilation=1, scale=None):
    """With a mask of all pairs."""
    work = torch.promote_types(q.dtype, torch.float32)
    place = torch.arange(q.shape[-2], device=q.device)
    apart = place[:, None] - place
    outside = (apart.abs() > kernel_size // 2 * dilation) | (apart % dilation != 0)
    scores = q.to(work) @ k.to(work).mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    return (scores.masked_fill(outside, -math.inf).softmax(-1) @ v.to(work)).to(q.dtype)


def schema(inputs, options):
    size, dilation = options.get("kernel_size", 7), options.get("dilation", 1)
    return ops.neighborhood_attention, (*inputs, size, dilation, inputs[0].shape[-1] ** -0.5)


def refused(*shapes, kernel_size=7, dilation=1):
    return lambda device: liger_fused_neighborhood_attention(
        *(torch.ones(shape, device=device) for shape in shapes), kernel_size, dilation
    )


SHAPE = (2, 3, 8)

CASES = [
    Case(
        name="neighborhood_attention",
        op=liger_fused_neighborhood_attention,
        reference=reference,
        make=make,
        differentiable=(0, 1, 2),
        options=[{}, dict(kernel_size=3, dilation=2), dict(kernel_size=1), dict(kernel_size=5, dilation=4, scale=0.3)],
        shapes=[(1, 1, 1, 1), (2, 2, 5, 7), (3, 9, 16), (2, 2, 37, 64), (1, 2, 130, 33), (2, 1, 3, 8), (1, 20, 520)],
        fit=lambda shape: (*shape[:-1], min(shape[-1], 1024)),
        flops=lambda shape, options: (0, 0),
        emulated=6_000,
        schema=schema,
        bench=[((2, 32, 8192, 128), dict(kernel_size=127))],
        bench_cpu=[((1, 8, 2048, 128), dict(kernel_size=31))],
        bytes=lambda shape, options, e: tuple(n * e * math.prod(shape) for n in (4, 8)),
        errors=[
            (refused(SHAPE, SHAPE, (2, 4, 8)), RuntimeError, "v must be"),
            (refused((8,), (8,), (8,)), RuntimeError, "q must be"),
            (refused(*[(2, 3, 1025)] * 3), RuntimeError, "at most 1024"),
            (refused(SHAPE, SHAPE, SHAPE, kernel_size=0), ValueError, "kernel_size must be positive"),
            (refused(SHAPE, SHAPE, SHAPE, dilation=0), ValueError, "dilation must be positive"),
        ],
    )
]
