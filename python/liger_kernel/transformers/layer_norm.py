"""LayerNorm."""

import torch
from torch import nn

from liger_kernel.ops import LigerLayerNormFunction
from liger_kernel.transformers.coverage import NORM_KERNELS
from liger_kernel.utils import in_float_under_autocast


class LigerLayerNorm(nn.Module):
    """(x − mean) / sqrt(variance + eps) · weight + bias over the last dimension (Ba et al. 2016, arXiv:1607.06450).

    The bias always exists; it starts at zero, or random with bias=True. Raises AssertionError for an init_fn other than
    "ones" and "zeros".
    """

    kernels = NORM_KERNELS

    def __init__(self, hidden_size, eps=1e-6, bias=False, init_fn="ones"):
        super().__init__()
        if init_fn not in ("ones", "zeros"):
            raise AssertionError(f"init_fn is 'ones' or 'zeros', not {init_fn!r}")
        self.hidden_size, self.eps, self.variance_epsilon = hidden_size, eps, eps
        self.weight = nn.Parameter(getattr(torch, init_fn)(hidden_size))
        self.bias = nn.Parameter(torch.randn(hidden_size) if bias else torch.zeros(hidden_size))

    def forward(self, hidden_states):
        return LigerLayerNormFunction.apply(hidden_states, self.weight, self.bias, self.variance_epsilon)

    @staticmethod
    def as_original(module, x):
        """x in the dtype of torch's result; None where torch has none for these dtypes."""
        if in_float_under_autocast(x.device):
            return x.float()
        dtypes = {module.weight.dtype, module.bias.dtype}
        return x if dtypes == {x.dtype} or (x.is_cpu and dtypes == {torch.float32}) else None

    @staticmethod
    def attributes_for(module):
        """What forward reads and a torch.nn.LayerNorm lacks."""
        return {"variance_epsilon": module.eps, "hidden_size": module.normalized_shape[0]}

    def extra_repr(self):
        return f"{self.hidden_size}, eps={self.eps}"
