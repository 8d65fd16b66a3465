"""What bench.py times of products of 8-bit numbers, which are not exact and therefore no case of the tests."""

import torch
import torch.nn.functional as F
from cases import Case
from liger_kernel._library import ops
from liger_kernel.operators.eight_bit import quantise_rows


def make(shape, options):
    """x and a weight in 16 bits, and the weight's bytes and scales."""
    tokens, into, out = shape
    weight = torch.randn(out, into) * into**-0.5
    return torch.randn(tokens, into), weight, *quantise_rows(weight, options["format"])


def product(x, weight, bytes, scale, **_):
    """x weightᵀ of a weight in eight bits: on Hopper the rows of x are rounded first, in a separate pass."""
    return ops.linear(x, bytes, None, None, None, None, scale, 1.0)


def alone(inputs, options):
    """torch's own products, of x that is in eight bits already: of E4M3 with scales of rows, as fast as the tensor
    cores sum; of integers without scales, in 32 bits."""
    x, _, bytes, scale = inputs
    rows, row_scale = quantise_rows(x.detach(), options["format"])
    if options["format"] == "int8":
        return {"_int_mm": lambda: torch._int_mm(rows, bytes.t())}
    floats = [t.view(torch.float8_e4m3fn) for t in (rows, bytes)]
    scales = row_scale[:, None], scale[None, :]
    return {
        "_scaled_mm": lambda: torch._scaled_mm(
            floats[0], floats[1].t(), *scales, out_dtype=x.dtype, use_fast_accum=True
        )
    }


#: Gate and up of Llama 8B and 1B.
WIDTHS = ((8192, 4096, 14336), (8192, 2048, 8192))

PRODUCTS = {
    "scaled_matmul": Case(
        "scaled_matmul",
        product,
        lambda x, weight, *_, **__: F.linear(x, weight),
        make,
        shapes=[(16, 64, 48), (5, 32, 16)],
        options=[{"format": "int8"}],
        differentiable=(),
        keep=(3,),
        bench=[(shape, {"format": format}) for format in ("int8", "fp8") for shape in WIDTHS],
        bench_cpu=[((1024, 1024, 1024), {"format": "int8"})],
        rivals=alone,
    )
}
