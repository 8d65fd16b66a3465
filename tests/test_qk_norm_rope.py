"""The norm of q and k with their rotation gives the bits of the norm and the rotation, one after the other."""

import pytest
import torch
from liger_kernel._library import ops

#: (columns, rotated ones): with both columns of a pair in one thread of the CUDA kernel; in two; of widths that it
#: does not take.
WIDTHS = [(64, 64), (128, 128), (256, 256), (128, 64), (256, 64), (96, 96), (80, 40), (24, 12), (1040, 1040)]


def two_operators(q, k, a, b, cos, sin, eps, offset, casting, rotary):
    q, k = (ops.rms_norm(x.transpose(1, 2), w, eps, offset, casting).transpose(1, 2) for x, w in ((q, a), (k, b)))
    return ops.rope(q, k, cos, sin, False, False, None, rotary)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("dim", "rotary"), WIDTHS)
def test_the_bits_of_two_operators(dim, rotary, dtype):
    """Results and gradients; a k that is part of a wider projection, gradients in either layout, tables of both types,
    and one for each sample or for all."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(dim + rotary)
    batch, seq = 2, 5
    rows = lambda heads: torch.randn(batch, seq, heads, dim, device=device).to(dtype)
    q, k = rows(7), rows(4)[:, :, 1:3]
    gradients = rows(7).transpose(1, 2), rows(2).transpose(1, 2).contiguous()
    for offset, casting, weight, table, samples in (
        (0.0, 0, dtype, dtype, 1),
        (1.0, 1, torch.float32, torch.float32, batch),
        (0.0, -1, dtype, torch.float32, 1),
        (0.0, 0, None, dtype, batch),
    ):
        weights = [None if weight is None else (torch.rand(dim, device=device) + 0.5).to(weight) for _ in range(2)]
        angles = (torch.rand(samples, seq, rotary // 2, device=device) * 6).repeat(1, 1, 2)
        tables, found = (angles.cos().to(table), angles.sin().to(table)), []
        for op in (two_operators, ops.qk_norm_rope):
            leaves = [None if t is None else t.detach().requires_grad_() for t in (q, k, *weights)]
            y = op(*(t.transpose(1, 2) for t in leaves[:2]), *leaves[2:], *tables, 1e-5, offset, casting, rotary)
            torch.autograd.backward(y, gradients)
            found.append([*y, *(t.grad for t in leaves if t is not None)])
        for ours, expected in zip(*found, strict=True):
            assert torch.equal(ours, expected)
