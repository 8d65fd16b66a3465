"""The modules of the norms with a gate, and their dtypes."""

import pytest
import torch
from liger_kernel.transformers.functional import liger_gated_rms_norm
from liger_kernel.transformers.gated_rms_norm import (
    LigerRMSNormGated,
    LigerRMSNormGatedForKimiLinear,
    LigerRMSNormGatedForMamba2,
)
from liger_kernel.transformers.patching.part import part_of
from torch.nn import functional as F

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def test_modules():
    torch.manual_seed(0)
    x, gate = torch.randn(3, 4, 16), torch.randn(3, 4, 16)
    normed = F.rms_norm(x, (16,), eps=1e-6)
    torch.testing.assert_close(LigerRMSNormGated(16)(x, gate), normed * F.silu(gate))
    torch.testing.assert_close(LigerRMSNormGatedForKimiLinear(16)(x, gate), normed * gate.sigmoid())
    mamba = LigerRMSNormGatedForMamba2(16, groups=2)
    torch.nn.init.normal_(mamba.weight)
    halves = F.rms_norm((x * F.silu(gate)).unflatten(-1, (2, 8)), (8,), eps=1e-6)
    torch.testing.assert_close(mamba(x, gate), halves.flatten(-2) * mamba.weight)
    assert "norm_before_gate=False, groups=2" in repr(mamba)
    keep = part_of(LigerRMSNormGatedForMamba2).keep
    assert keep(mamba, True) is None and "relu" in keep(LigerRMSNormGated(16, 1e-6, "relu"), True)


@pytest.mark.parametrize("x_dtype", FLOATS)
@pytest.mark.parametrize("gate_dtype", FLOATS)
@pytest.mark.parametrize("w_dtype", FLOATS)
def test_mixed_dtypes(x_dtype, gate_dtype, w_dtype):
    """The result has x's dtype, and every gradient that of its tensor."""
    torch.manual_seed(0)
    dtypes = (x_dtype, gate_dtype, w_dtype)
    tensors = [torch.randn(s).to(d).requires_grad_() for s, d in zip(((6, 32), (6, 32), (32,)), dtypes)]
    x, gate, w = (t.detach().double() for t in tensors)
    y = liger_gated_rms_norm(*tensors, 1e-5)
    tolerance = 4 * max(torch.finfo(dtype).eps for dtype in dtypes)
    expected = F.rms_norm(x, (32,), w, 1e-5) * F.silu(gate)
    torch.testing.assert_close(y.double(), expected, rtol=tolerance, atol=tolerance)
    y.sum().backward()
    assert y.dtype == x_dtype and tuple(t.grad.dtype for t in tensors) == dtypes
