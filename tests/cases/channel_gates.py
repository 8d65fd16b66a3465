import math

import torch
import torch.nn.functional as F
from liger_kernel._library import ops
from liger_kernel.transformers.functional import liger_channel_gates

from cases import Case


def make(shape, options):
    """a of `heads` heads, a slice of rows with `wide`; exp(A_log) from 1 to 16, as models draw it."""
    heads, columns = options.get("heads", 1), shape[-1]
    a = torch.randn(*shape[:-1], columns + 8 * options.get("wide", False))[..., :columns]
    A_log = (1 + 15 * torch.rand(heads)).log()
    return (a, A_log, torch.randn(columns) if options.get("biased", True) else None)


def dtype_of(a, options):
    return a.dtype if options.get("rounded") else None


def op(a, A_log, dt_bias, **options):
    return liger_channel_gates(a, A_log, dt_bias, options.get("low"), dtype_of(a, options))


def reference(a, A_log, dt_bias, **options):
    """As Kimi Linear, GLM-5-Next and Bailing hybrid compute them, in float32 or float64."""
    dtype = torch.promote_types(a.dtype, torch.float32)
    x = a.to(dtype) if dt_bias is None else a.to(dtype) + dt_bias.to(dtype)
    x, rate = x.unflatten(-1, (len(A_log), -1)), A_log.to(dtype).exp()[:, None]
    g = -rate * F.softplus(x) if options.get("low") is None else options["low"] * torch.sigmoid(rate * x)
    return g.to(a.dtype) if options.get("rounded") else g


def schema(inputs, options):
    return ops.channel_gates, (*inputs, options.get("low"), dtype_of(inputs[0], options))


def errors():
    def call(text, exception=RuntimeError, a=(2, 5, 12), A_log=(4,), dtype=None, **more):
        def run(d):
            tensors = {name: value.to(d) if torch.is_tensor(value) else value for name, value in more.items()}
            return liger_channel_gates(torch.randn(a, device=d), torch.randn(A_log, device=d), **tensors, dtype=dtype)

        return run, exception, text

    return [
        call("heads must divide the 12 columns", A_log=(5,)),
        call("heads must divide", A_log=(0,)),
        call("dt_bias must be", dt_bias=torch.ones(4)),
        call("low must be below 0", ValueError, low=0.0),
        call("low must be below 0", ValueError, low=math.nan),
        call("dtype must be float32 or that of a", TypeError, dtype=torch.bfloat16),
    ]


def fit(shape):
    """Four heads."""
    return (*shape[:-1], 4 * shape[-1])


def draw(pick):
    return dict(
        heads=pick.choice((1, 2, 4)),
        low=pick.choice((None, -5.0)),
        biased=pick.choice((True, False)),
        wide=pick.choice((True, False)),
        rounded=pick.choice((True, False)),
    )


# The gradient of a head's A_log sums terms of the size of its rate, up to 16, and they may cancel; a bounded gate's are
# as large as that.
TERMS = 16 * 16

COMMON = dict(op=op, reference=reference, make=make, schema=schema, differentiable=(0, 1, 2), fit=fit, draw=draw)

CASES = [
    Case(
        name="channel_gates",
        **COMMON,
        terms_of_order_one=TERMS,
        # One channel; heads that no pack and no vector fits; several runs of rows; a head of more packs than a block
        # has threads.
        shapes=[(3, 5, 4), (2, 7, 12), (1, 300, 64), (37, 96), (3, 4240)],
        options=[
            dict(heads=4),
            {},
            dict(heads=4, low=-5.0),
            dict(heads=2, wide=True, rounded=True),
            dict(heads=2, wide=True, rounded=True, low=-5.0, biased=False),
        ],
        many_rows=(70000, 4),
        # Kimi Linear 48B, Bailing hybrid.
        bench=[((1, 8192, 4096), dict(heads=32)), ((1, 8192, 4096), dict(heads=32, low=-5.0, rounded=True))],
        bench_cpu=[((1, 1024, 1024), dict(heads=8))],
        bytes=lambda shape, options, e: tuple(
            n * math.prod(shape) for n in ((2 * e, 3 * e) if options.get("rounded") else (e + 4, 2 * e + 4))
        ),
        errors=errors(),
    ),
    Case(
        name="channel_gates_float_A",
        **COMMON,
        terms_of_order_one=TERMS,
        keep=(1, 2),
        dtypes=(torch.bfloat16, torch.float16),
        shapes=[(2, 5, 12), (2, 48, 64)],
        options=[dict(heads=4), dict(heads=4, low=-5.0, rounded=True)],
    ),
]
