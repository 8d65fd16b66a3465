import math

import torch
from cases import Case
from liger_kernel._library import ops
from liger_kernel.transformers.functional import liger_mhc_coeffs, liger_mhc_post_res, liger_mhc_pre

EPS = 1e-6


def make_coefficients(shape, options):
    """A mix of order one."""
    *_, streams, width = shape
    columns = streams * (streams + 2)
    return (
        torch.randn(shape),
        torch.randn(streams * width, columns) / math.sqrt(streams * width),
        torch.randn(columns),
        *torch.randn(3).split(1),
    )


def coefficients(x, phi, b, *alphas, tmax=20, pre_eps=0.0, post_mult=2.0, sinkhorn_eps=EPS):
    return liger_mhc_coeffs(
        x, phi, b, *alphas, allow_fp32=True, tmax=tmax, pre_eps=pre_eps, post_mult=post_mult, sinkhorn_eps=sinkhorn_eps
    )


def coefficients_reference(x, phi, b, *alphas, tmax=20, pre_eps=0.0, post_mult=2.0, sinkhorn_eps=EPS):
    work = torch.promote_types(x.dtype, torch.float32)
    streams, rows = x.shape[-2], x.flatten(-2).to(work)
    mix = rows @ phi.to(work) * torch.rsqrt(rows.square().mean(-1, keepdim=True) + EPS)
    parts = zip(mix.split((streams, streams, streams**2), -1), b.split((streams, streams, streams**2)), alphas)
    pre, post, res = (part * alpha + bias for part, bias, alpha in parts)
    res = res.unflatten(-1, (streams, streams)).softmax(-1) + sinkhorn_eps
    res = res / (res.sum(-2, keepdim=True) + sinkhorn_eps)
    for _ in range(tmax - 1):
        res = res / (res.sum(-1, keepdim=True) + sinkhorn_eps)
        res = res / (res.sum(-2, keepdim=True) + sinkhorn_eps)
    return pre.sigmoid() + pre_eps, post.sigmoid() * post_mult, res


def make_pre(shape, options):
    return torch.randn(shape), torch.rand(shape[:-1])


def pre_reference(x, h):
    work = torch.promote_types(x.dtype, torch.float32)
    return (x.to(work) * h[..., None]).sum(-2).to(x.dtype)


def make_post(shape, options):
    *rows, streams, width = shape
    return (
        torch.randn(shape),
        torch.randn(*rows, width),
        torch.rand(*rows, streams),
        torch.rand(*rows, streams, streams),
    )


def post_reference(x, f, post, res):
    work = torch.promote_types(x.dtype, torch.float32)
    return (res @ x.to(work) + post[..., None] * f.to(work)[..., None, :]).to(x.dtype)


def moved(streams_read, streams_written):
    """Bytes, of so many rows of a token forward and backward."""
    return lambda shape, options, e: tuple(
        e * n * math.prod(shape) // shape[-2] for n in (streams_read(shape[-2]), streams_written(shape[-2]))
    )


def of_ones(op, *shapes):
    return lambda device: op(*(torch.ones(shape, device=device) for shape in shapes))


def no_steps(*tensors):
    return coefficients(*tensors, tmax=0)


def fit(shape):
    return (*shape[:-2], (shape[-2] - 1) % 16 + 1, shape[-1])


SHAPES = [(3, 1, 1), (5, 4, 7), (2, 3, 2, 64), (70, 4, 24), (6, 4, 513), (5, 8, 40), (3, 16, 24), (2, 5, 2051)]
BENCH = [((16384, 4, 4096), {})]

CASES = [
    Case(
        name="mhc_coefficients",
        terms_of_order_one=1,
        op=coefficients,
        reference=coefficients_reference,
        make=make_coefficients,
        differentiable=(0, 1, 2, 3, 4, 5),
        keep=(2, 3, 4, 5),
        options=[{}, dict(tmax=1), dict(tmax=3, pre_eps=0.1, post_mult=1.0, sinkhorn_eps=1e-3)],
        shapes=SHAPES,
        fit=fit,
        emulated=5_000,
        schema=lambda inputs, options: (ops.mhc_coefficients, tuple(inputs)),
        many_rows=(70000, 2, 8),
        flops=lambda shape, options: (0, 0),
        bench=BENCH,
        bench_cpu=[((1024, 4, 2048), {})],
        bytes=moved(lambda n: n, lambda n: 2 * n),
        errors=[
            (of_ones(liger_mhc_coeffs, (2, 2, 4), (8, 8), (8,), (1,), (1,), (1,)), AssertionError, "allow_fp32"),
            (of_ones(coefficients, (2, 2, 4), (8, 7), (8,), (1,), (1,), (1,)), AssertionError, "phi must be"),
            (of_ones(coefficients, (2, 2, 4), (8, 8), (7,), (1,), (1,), (1,)), AssertionError, "b must be"),
            (of_ones(ops.mhc_coefficients, (2, 17, 4), (68, 323), (323,), (), (), ()), RuntimeError, "1 to 16 streams"),
            (of_ones(no_steps, (2, 2, 4), (8, 8), (8,), (1,), (1,), (1,)), ValueError, "iterations must be at least 1"),
        ],
    ),
    Case(
        name="mhc_pre",
        op=liger_mhc_pre,
        reference=pre_reference,
        make=make_pre,
        differentiable=(0, 1),
        keep=(1,),
        shapes=SHAPES,
        fit=fit,
        schema=lambda inputs, options: (ops.mhc_pre, tuple(inputs)),
        many_rows=(70000, 2, 8),
        bench=BENCH,
        bench_cpu=[((1024, 4, 2048), {})],
        bytes=moved(lambda n: n + 1, lambda n: 2 * n + 1),
        errors=[
            (of_ones(ops.mhc_pre, (2, 17, 4), (2, 17)), RuntimeError, "1 to 16 streams"),
            (of_ones(ops.mhc_pre, (2, 3, 4), (2, 4)), RuntimeError, "pre must be"),
        ],
    ),
    Case(
        name="mhc_post_res",
        op=liger_mhc_post_res,
        reference=post_reference,
        make=make_post,
        differentiable=(0, 1, 2, 3),
        keep=(2, 3),
        shapes=SHAPES,
        fit=fit,
        schema=lambda inputs, options: (ops.mhc_post_res, tuple(inputs)),
        many_rows=(70000, 2, 8),
        bench=BENCH,
        bench_cpu=[((1024, 4, 2048), {})],
        bytes=moved(lambda n: 2 * n + 1, lambda n: 3 * n + 2),
        errors=[(of_ones(ops.mhc_post_res, (2, 3, 4), (2, 5), (2, 3), (2, 3, 3)), RuntimeError, "f must be")],
    ),
    Case(
        name="mhc_post_res_float",
        op=liger_mhc_post_res,
        reference=post_reference,
        make=make_post,
        differentiable=(0, 1, 2, 3),
        keep=(1, 2, 3),
        dtypes=(torch.bfloat16, torch.float16),
        shapes=[(3, 1, 1), (5, 4, 7), (6, 4, 136), (2, 3, 9)],
        fit=fit,
        schema=lambda inputs, options: (ops.mhc_post_res, tuple(inputs)),
    ),
]
