"""What norms promise beside tests/test_ops.py: rows that are hard to sum, and modulations that many rows share."""

import pytest
import torch
from conftest import EMULATED
from liger_kernel.transformers.functional import liger_layer_norm, liger_modulated_rms_norm


@pytest.mark.parametrize("cols", [64, 1029, 4096, 9000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_layer_norm_far_from_zero(cols, dtype, device):
    """A mean far above the deviation, and first columns that are nothing like the row: the variance is not a difference
    of large numbers."""
    torch.manual_seed(0)
    x = torch.randn(10, cols)
    x[:2] += 1000
    x[2:4, :8] += 200
    x[4, 0], x[5, -1] = 3000, 3000
    x[6:] += torch.tensor([[3], [7], [9], [30]])
    if dtype != torch.float16:
        x[9] = 1e18 + 1e17 * torch.randn(cols)  # whose squares overflow, in long rows, but not their deviations'
    x = x.to(device, dtype)
    w, b = torch.randn(cols, device=device).to(dtype), torch.randn(cols, device=device).to(dtype)
    expected = torch.nn.functional.layer_norm(x.double(), (cols,), w.double(), b.double(), 1e-6)
    # A unit of the result's rounding, and for the mean a few of a float's beside 1000 or 3000.
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(liger_layer_norm(x, w, b, 1e-6).double(), expected, rtol=eps, atol=eps + 3000 * 2**-22)


@pytest.mark.parametrize("cols", [8192, 9001, 12296, 20480, 65536])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.full(when=lambda p: EMULATED and p["dtype"] == torch.float16)  # both are one template
def test_modulation_of_many_rows(cols, dtype, device):
    """So many rows that a block meets one modulation again and again, and the next one after it."""
    torch.manual_seed(0)
    rows = (
        13 if device == "cpu" else 850 if cols < 16384 else 450
    )  # three or more for each block, of which there are up to 4 emulated, and 264 or 132 on an H200
    x, scale, shift = (
        torch.randn(shape, device=device).to(dtype) for shape in ((2, rows, cols), (2, 1, cols), (2, 1, cols))
    )
    w = torch.randn(cols, device=device).to(dtype)
    n = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-6) * w.double() * (1 + scale.double())
    expected = n + shift.double()
    # Two roundings before the modulation and one behind it, half a unit each, and a hundredth for what they make of one
    # another.
    bound = 1.01 * torch.finfo(dtype).eps * (n.abs() + expected.abs() / 2) + torch.finfo(dtype).tiny
    assert ((liger_modulated_rms_norm(x, w, scale, shift, 1e-6).double() - expected).abs() <= bound).all()
