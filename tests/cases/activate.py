import torch
from liger_kernel._library import ops
from liger_kernel.transformers.functional import liger_relu_squared

from cases import Case
from cases.gated import ACTIVATIONS


def op(x, activation="relu_squared"):
    return liger_relu_squared(x) if activation == "relu_squared" else ops.activate(x, ACTIVATIONS[activation][0])


CASES = [
    Case(
        name="activate",
        op=op,
        reference=lambda x, activation="relu_squared": ACTIVATIONS[activation][1](x),
        make=lambda shape, options: (torch.randn(shape) * 2,),
        shapes=[(3, 5, 1), (5, 7), (7, 129), (3, 4104), (2, 40000)],
        many_rows=(70000, 8),
        options=[dict(activation=a) for a in ("relu_squared", *ACTIVATIONS)],
        schema=lambda inputs, options: (ops.activate, (*inputs, ACTIVATIONS[options["activation"]][0])),
        bench=[((16384, 14336), dict(activation="relu_squared"))],
        bench_cpu=[((4096, 4096), dict(activation="relu_squared"))],
        bytes=lambda shape, options, e: (2 * e * shape[0] * shape[1], 3 * e * shape[0] * shape[1]),
        rivals=lambda inputs, options: {"F.silu": lambda: torch.nn.functional.silu(inputs[0])},
        errors=[
            (lambda d: ops.activate(torch.randn(2, 8, device=d), 9), ValueError, "activate: activation is"),
            (
                lambda d: liger_relu_squared(torch.ones(2, device=d, dtype=torch.long)),
                TypeError,
                "must be a tensor of float32, float16 or bfloat16",
            ),
        ],
    )
]
