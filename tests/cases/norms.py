import torch
from liger_kernel._library import ops
from liger_kernel.ops.rms_norm import casting_code
from liger_kernel.transformers.functional import liger_fused_add_rms_norm, liger_layer_norm, liger_modulated_rms_norm

from cases import Case
from cases.rms_norm import EPS, SHAPES
from cases.rms_norm import reference as rms_reference

F = torch.nn.functional
CASTINGS = [{}, dict(casting_mode="gemma", offset=1.0), dict(casting_mode="none")]


def two_bytes(*passes):
    """(forward, backward) bytes for so many passes over the rows."""
    return lambda shape, options, e: tuple(n * e * shape[0] * shape[1] for n in passes)


def added(x, residual, w, offset=0.0, casting_mode="llama"):
    return liger_fused_add_rms_norm(x, residual, w, EPS, offset, casting_mode)


def added_reference(x, residual, w, offset=0.0, casting_mode="llama"):
    s = x + residual
    return rms_reference(s, w, offset, casting_mode), s


def modulated(x, w, scale, shift, offset=0.0, casting_mode="llama", a_token=1, **options):
    return liger_modulated_rms_norm(x, w, scale, shift, EPS, offset, casting_mode)


def modulated_reference(x, w, scale, shift, offset=0.0, casting_mode="llama", a_token=1, **options):
    n = rms_reference(x, w, offset, casting_mode)
    work = torch.promote_types(torch.promote_types(x.dtype, scale.dtype), torch.float32)
    rows = n.to(work).reshape(scale.numel() // x.shape[-1], -1, x.shape[-1])
    y = rows * (1 + scale.to(work).reshape(len(rows), 1, -1))
    if shift is not None:
        y = y + shift.to(work).reshape(len(rows), 1, -1)
    return y.reshape(x.shape).to(x.dtype)


def make_modulated(shape, options):
    of = {"token": shape, "sample": (shape[0], *[1] * (len(shape) - 2), shape[-1]), "all": shape[-1:]}[
        options.get("each", "sample")
    ]
    return (
        torch.randn(shape),
        torch.randn(shape[-1:]),
        torch.randn(of) / 2,
        torch.randn(of) if options.get("shifted", True) else None,
    )


def make_layer(shape, options):
    return torch.randn(shape) + 1, torch.randn(shape[-1:]), torch.randn(shape[-1:])


def layer_reference(x, w, b):
    return F.layer_norm(x, x.shape[-1:], w, b, EPS)


BENCH = [
    ((16384, 4096), {}),
    ((8192, 8192), {}),
    ((16384, 4095), {}),
    ((65536, 1023), {}),
    ((8192, 8191), {}),
    ((4096, 16384), {}),
]
CPU = [((4096, 4096), {})]


def rounding(pick):
    return dict(casting_mode=pick.choice(("llama", "gemma", "none")), offset=pick.choice((0.0, 1.0, -0.5)))


CASES = [
    Case(
        terms_of_order_one=1,
        name="fused_add_rms_norm",
        draw=rounding,
        op=added,
        reference=added_reference,
        differentiable=(0, 1, 2),
        options=CASTINGS,
        shapes=SHAPES,
        many_rows=(70000, 16),
        emulated=62_000,
        make=lambda shape, options: (torch.randn(shape), torch.randn(shape), torch.randn(shape[-1:])),
        bench=BENCH,
        bench_cpu=CPU,
        bytes=two_bytes(4, 4),
        schema=lambda inputs, options: (
            ops.fused_add_rms_norm,
            (*inputs, EPS, options.get("offset", 0.0), casting_code(options.get("casting_mode", "llama"))),
        ),
        errors=[
            (
                lambda d: liger_fused_add_rms_norm(torch.randn(2, 8, device=d), torch.randn(2, 7, device=d), None, EPS),
                RuntimeError,
                "residual must be",
            )
        ],
    ),
    Case(
        terms_of_order_one=1,
        name="modulated_rms_norm",
        draw=rounding,
        op=modulated,
        reference=modulated_reference,
        differentiable=(0, 1, 2, 3),
        make=make_modulated,
        options=[
            {},
            dict(each="token"),
            dict(each="all", casting_mode="gemma", offset=1.0),
            dict(each="token", shifted=False, casting_mode="none"),
        ],
        shapes=[
            (3, 5, 1),
            (5, 7),
            (2, 2, 64),
            (4, 35, 129),
            (9, 4096),
            (3, 4104),
            (1, 8200),
            (2, 16500),
            (2, 9, 2001),
            (2, 3, 9001),
            (1, 3, 20481),
        ],
        many_rows=(7, 10000, 16),
        emulated=62_000,
        bench=[((4, 4096, 4096), {}), ((4, 4096, 4096), dict(each="token"))],
        bench_cpu=[((4, 1024, 4096), {})],
        bytes=lambda shape, options, e: tuple(
            n * e * shape[0] * shape[1] * shape[2] for n in ((4, 6) if options.get("each") == "token" else (2, 3))
        ),
        schema=lambda inputs, options: (
            ops.modulated_rms_norm,
            (*inputs, EPS, options.get("offset", 0.0), casting_code(options.get("casting_mode", "llama"))),
        ),
        errors=[
            (
                lambda d: liger_modulated_rms_norm(torch.randn(6, 8, device=d), None, torch.randn(4, 8, device=d)),
                AssertionError,
                "do not divide",
            ),
            (
                lambda d: ops.modulated_rms_norm(
                    torch.randn(6, 8, device=d), None, torch.randn(4, 8, device=d), None, EPS, 0.0, 0
                ),
                RuntimeError,
                "must divide",
            ),
        ],
    ),
    Case(
        terms_of_order_one=1,
        name="modulated_rms_norm_float",
        op=modulated,
        reference=modulated_reference,
        differentiable=(0, 1, 2, 3),
        keep=(2, 3),
        make=make_modulated,
        dtypes=(torch.bfloat16, torch.float16),
        shapes=[(4, 1, 1), (5, 7), (6, 33, 256), (3, 9)],
        options=[{}, dict(each="token")],
        schema=lambda inputs, options: (ops.modulated_rms_norm, (*inputs, EPS, 0.0, 0)),
    ),
    Case(
        terms_of_order_one=1,
        name="layer_norm",
        op=lambda x, w, b: liger_layer_norm(x, w, b, EPS),
        reference=layer_reference,
        make=make_layer,
        differentiable=(0, 1, 2),
        shapes=[(2, 1), *SHAPES[1:]],
        many_rows=(70000, 16),
        emulated=62_000,
        bench=BENCH,
        bench_cpu=CPU,
        bytes=two_bytes(2, 3),
        schema=lambda inputs, options: (ops.layer_norm, (*inputs, EPS)),
        errors=[
            (
                lambda d: liger_layer_norm(torch.randn(2, 8, device=d), torch.ones(7, device=d), None, EPS),
                ValueError,
                "last dimension is 8",
            )
        ],
    ),
]
