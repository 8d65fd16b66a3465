"""The module and the functions of xIELU, against plain torch; tests/cases/xielu.py has the operator."""

import torch
import torch.nn.functional as F
from liger_kernel.ops import LigerXIELUFunction
from liger_kernel.transformers import LigerXIELU, functional

close = torch.testing.assert_close  # float: 1.3e-6 of the value, 1e-5


def test_xielu():
    """As its function, whose numbers may be tensors; NaN stays, and eps is where the curve ends on the left of 0."""
    module, x = LigerXIELU(alpha_n_init=0.9, beta=0.25, eps=-0.5), torch.randn(3, 16)
    x[0, :4] = torch.tensor([float("nan"), 0.0, -0.25, -0.5])
    p, n = F.softplus(module.alpha_p), 0.25 + F.softplus(module.alpha_n)
    close(torch.cat((p, n)), torch.tensor([0.8, 0.9]))
    expected = torch.where(x > 0, p * x * x, n * (torch.expm1(x.clamp(max=-0.5)) - x)) + 0.25 * x
    close(module(x), expected, equal_nan=True)
    assert torch.equal(
        module(x)[1:], functional.liger_xielu(x, module.alpha_p, module.alpha_n, 0.25, module.eps)[1:]
    ) and set(module.state_dict()) == {"alpha_p", "alpha_n", "beta", "eps"}
    assert LigerXIELUFunction.apply(x.bfloat16(), module.alpha_p, module.alpha_n).dtype == torch.bfloat16
