"""GroupNorm, PolyNorm and DyT as modules and functions, against plain torch."""

import pytest
import torch
import torch.nn.functional as F
from liger_kernel import ops
from liger_kernel._library import ops as torch_ops
from liger_kernel.ops.dyt import liger_dyt_bwd, liger_dyt_fwd
from liger_kernel.transformers import dyt, group_norm, poly_norm

close = torch.testing.assert_close  # float: 1.3e-6 of the value, 1e-5


def test_modules():
    x = torch.randn(2, 4, 16)
    group = group_norm.LigerGroupNorm(4, 2)
    close(group(x), F.group_norm(x, 2, eps=1e-6))
    assert "num_groups=2" in repr(group)
    for call in (lambda: group_norm.LigerGroupNorm(4, 3), lambda: group(x[0]), lambda: group(x[:, :2])):
        with pytest.raises(AssertionError):
            call()
    tanh = dyt.LigerDyT(16)
    close(tanh(x), torch.tanh(0.5 * x))
    assert dyt.LigerDyT(16, beta=False).beta is None and tanh.alpha.shape == (1,)
    close(poly_norm.LigerPolyNorm()(x), sum(F.rms_norm(x**p, (16,), eps=1e-6) for p in (1, 2, 3)) / 3 + 1)


def test_helpers():
    """Forward and backward as functions, without autograd, against torch's gradients."""
    x, w, b, dy, channel = (torch.randn(s) for s in ((2, 4, 16), (16,), (16,), (2, 4, 16), (4,)))

    def gradients(f, *inputs):
        leaves = [t.clone().requires_grad_() for t in inputs]
        return torch.autograd.grad(f(*leaves), leaves, dy)

    y, same, mean, rstd, _ = ops.group_norm_forward(x, 4, 2, channel, channel, 1e-6)
    close(
        ops.group_norm_backward(dy, same, channel, channel, mean, rstd, 4, 2),
        gradients(lambda x, w, b: F.group_norm(x, 2, w, b, 1e-6), x, channel, channel),
    )
    y, rows, rstd, _, _ = ops.poly_norm_forward(x, torch.ones(3), torch.ones(()))
    close(
        ops.poly_norm_backward(dy, rows.view(x.shape), torch.ones(3), rstd)[0],
        gradients(lambda x: sum(F.rms_norm(x**p, (16,), eps=1e-6) for p in (1, 2, 3)), x)[0],
    )
    alpha = torch.tensor([0.7])
    close(
        liger_dyt_bwd(dy, x, alpha, w, b),
        gradients(lambda x, alpha, w, b: torch.tanh(alpha * x) * w + b, x, alpha, w, b),
    )
    close(liger_dyt_fwd(x, alpha, w, None), torch.tanh(alpha * x) * w)


def test_group_norm_far_from_zero(device):
    torch.manual_seed(0)
    x = (torch.randn(3, 4, 1601) + 1000).to(device)
    expected = F.group_norm(x.double(), 2, eps=1e-6)
    torch.testing.assert_close(
        torch_ops.group_norm(x, None, None, 2, 1e-6).double(), expected, rtol=1e-6, atol=1000 * 2**-22
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_tanh_of_small_numbers(dtype, device):
    """DyT's is as exact as a softcap's, which a cosine divides by its size: relative errors count."""
    x = torch.logspace(-7, 1, 256, device=device).to(dtype).view(1, -1)
    one, zero = torch.ones(256, device=device, dtype=dtype), torch.zeros(256, device=device, dtype=dtype)
    y, expected = torch_ops.dyt(x, one[:1], one, zero), x.double().tanh()
    # A rounding of the result, and what liger/core/cuda/math.cuh says of tanh.
    bound = torch.finfo(dtype).eps / 2 + (2.0**-22 if dtype == torch.float32 else 2.0**-15)
    subnormal = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    assert ((y.double() - expected).abs() <= bound * expected + subnormal).all()
