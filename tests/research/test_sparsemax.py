"""Sparsemax where values stand apart, are infinite or large, and its functions."""

import math

import pytest
import torch
from liger_kernel import ops
from liger_kernel.ops import sparsemax as functions
from liger_kernel.transformers import LigerSparsemax
from liger_kernel.transformers.functional import liger_sparsemax

close = torch.testing.assert_close
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
def test_sparsemax_of_one_value(dtype, device):
    """What stands alone has probability 1 exactly, whatever its value."""
    x = torch.full((401, 9), -math.inf, device=device, dtype=dtype)
    x[:, 4] = torch.linspace(-7, 7, 401, device=device).to(dtype)
    assert torch.equal(liger_sparsemax(x), (x > -math.inf).to(dtype))


def test_nan_spreads(device):
    x = torch.rand(3, 40, device=device)
    x[1, 7] = math.nan
    assert liger_sparsemax(x).isnan().any(-1).tolist() == [False, True, False] and liger_sparsemax(x)[1].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_masked_logits(dtype, device):
    """-inf and the dtype's lowest number have probability 0; a row of -inf alone has none, which is NaN."""
    x = torch.randn(3, 300, device=device).to(dtype)
    x[0, ::2], x[1, :299], x[2, 1:] = -math.inf, torch.finfo(dtype).min, -math.inf
    y = liger_sparsemax(x)
    assert not y[0, ::2].any() and y[1:].float().tolist() == x[1:].float().softmax(-1).round().tolist()
    assert liger_sparsemax(torch.full((1, 5), -math.inf, device=device, dtype=dtype)).isnan().all()


def test_sparsemax_is_a_distribution(device):
    """Rows sum to 1 and only the support's gradients move, for ties, for one winner, and far from 0."""
    x = (
        torch.stack(
            [
                torch.zeros(1000),
                torch.arange(1000.0),
                torch.full((1000,), 3e4).add(torch.randn(1000)),
                torch.randn(1000) * 1e-3,
            ]
        )
        .to(device)
        .requires_grad_()
    )
    y = liger_sparsemax(x)
    close(y.sum(-1), torch.ones(4, device=device))
    close(y[0], torch.full((1000,), 1e-3, device=device))
    assert y[1].nonzero().tolist() == [[999]]
    y.backward(torch.randn_like(y))
    assert torch.equal(x.grad != 0, (y > 0) & (y < 1))
    close(x.grad.sum(-1), torch.zeros(4, device=device), rtol=0, atol=1e-4)


@pytest.mark.parametrize("largest", [1e5, 1e8, 1e16, 1e20, 1e30])
def test_sparsemax_of_large_values(largest, device):
    x = torch.tensor([[largest, largest, 1.0, -largest], [largest, 0.0, 0.0, 0.0]], device=device)
    assert torch.equal(liger_sparsemax(x).cpu(), torch.tensor([[0.5, 0.5, 0, 0], [1, 0, 0, 0]]))


def test_functions(device):
    x, dy = torch.randn(2, 3, 9, device=device), torch.randn(2, 3, 9, device=device)
    for dim in (0, 1, -1):
        leaf = x.clone().requires_grad_()
        plain = LigerSparsemax(dim)(leaf)
        plain.backward(dy)
        close(plain.sum(dim), torch.ones_like(plain.sum(dim)))
        y, rows = functions._sparsemax_forward(x, dim)
        assert rows.shape == (x.numel() // x.shape[dim], x.shape[dim])
        close((y, functions._sparsemax_backward(dy, rows, dim)), (plain.detach(), leaf.grad))
    assert functions.LigerSparsemaxFunction is ops.LigerSparsemaxFunction
