import torch
from cases import Case
from cases.norms import BENCH, CPU, two_bytes
from cases.rms_norm import EPS, SHAPES
from liger_kernel._library import ops
from liger_kernel.transformers.functional import liger_dyt, liger_group_norm, liger_poly_norm


def dyt_reference(x, alpha, w, b):
    work = torch.promote_types(x.dtype, torch.float32)
    y = torch.tanh(alpha.to(work) * x.to(work)) * w.to(work)
    return (y if b is None else y + b.to(work)).to(x.dtype)


def poly_reference(x, w, b):
    work = torch.promote_types(x.dtype, torch.float32)
    x, w = x.to(work), w.to(work)
    powers = (x**3, x**2, x)
    return (
        sum(w[i] * u * torch.rsqrt(u.square().mean(-1, keepdim=True) + EPS) for i, u in enumerate(powers)) + b.to(work)
    ).to(b.dtype)


def make_group(shape, options):
    return torch.randn(shape) + 1, torch.randn(shape[1]), torch.randn(shape[1])


def group_reference(x, w, b, groups=2):
    return torch.group_norm(x, groups, w, b, EPS)  # F.group_norm refuses groups of one number


CASES = [
    Case(
        terms_of_order_one=1,
        name="poly_norm",
        op=lambda x, w, b: liger_poly_norm(x, w, b, EPS),
        reference=poly_reference,
        differentiable=(0, 1, 2),
        shapes=SHAPES,
        many_rows=(70000, 16),
        emulated=30_000,
        make=lambda shape, options: (torch.randn(shape), torch.randn(3), torch.randn(1)),
        bench=BENCH[:2],
        bench_cpu=CPU,
        bytes=two_bytes(2, 3),
        schema=lambda inputs, options: (ops.poly_norm, (*inputs, EPS)),
        errors=[
            (
                lambda d: liger_poly_norm(
                    torch.randn(2, 8, device=d), torch.ones(2, device=d), torch.ones((), device=d), EPS
                ),
                AssertionError,
                "3 elements",
            )
        ],
    ),
    Case(
        terms_of_order_one=1,
        name="group_norm",
        fit=lambda shape: (shape[0], 2 * shape[1], *shape[2:]),
        op=lambda x, w, b, groups=2: liger_group_norm(x, w, b, x.shape[1], groups, EPS),
        reference=group_reference,
        differentiable=(0, 1, 2),
        shapes=[(2, 2, 1), (5, 6, 7), (3, 4, 5, 4), (7, 6, 24), (2, 8, 513), (3, 4, 1600), (3, 4, 4100), (1, 8, 5120)],
        many_rows=(35000, 2, 4),
        make=make_group,
        options=[{}, dict(groups=1)],
        bench=[((16, 320, 4096), dict(groups=32)), ((64, 512, 256), dict(groups=32))],
        bench_cpu=[((4, 320, 4096), dict(groups=32))],
        bytes=lambda shape, options, e: tuple(n * e * shape[0] * shape[1] * shape[2] for n in (2, 3)),
        schema=lambda inputs, options: (ops.group_norm, (*inputs, options.get("groups", 2), EPS)),
        errors=[
            (
                lambda d: ops.group_norm(torch.randn(2, 5, 3, device=d), None, None, 2, EPS),
                RuntimeError,
                "does not divide",
            )
        ],
    ),
    Case(
        terms_of_order_one=1,
        name="dyt",
        op=liger_dyt,
        reference=dyt_reference,
        differentiable=(0, 1, 2, 3),
        shapes=SHAPES,
        many_rows=(70000, 16),
        emulated=62_000,
        bench=BENCH[:2],
        bench_cpu=CPU,
        make=lambda shape, options: (
            torch.randn(shape),
            torch.full((1,), 0.7),
            torch.randn(shape[-1:]),
            torch.randn(shape[-1:]),
        ),
        bytes=two_bytes(2, 3),
        schema=lambda inputs, options: (ops.dyt, tuple(inputs)),
        errors=[
            (
                lambda d: liger_dyt(
                    torch.randn(2, 8, device=d), torch.ones(2, device=d), torch.ones(8, device=d), None
                ),
                RuntimeError,
                "alpha must be one number",
            )
        ],
    ),
]
