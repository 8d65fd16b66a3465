"""Squared ReLU as a module."""

from torch import nn

from liger_kernel.ops import LigerReLUSquaredFunction
from liger_kernel.transformers.coverage import ACTIVATION_KERNELS
from liger_kernel.utils import in_float_under_autocast


class LigerReLUSquared(nn.Module):
    """max(x, 0)², element by element."""

    kernels = ACTIVATION_KERNELS

    def __init__(self):
        super().__init__()

    def forward(self, x):
        return LigerReLUSquaredFunction.apply(x)

    @staticmethod
    def as_original(module, x):
        """x in the dtype of the original's result."""
        return x.float() if in_float_under_autocast(x.device) else x
