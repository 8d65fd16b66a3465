"""Sparsemax as a module."""

from torch import nn

from liger_kernel.ops import LigerSparsemaxFunction


class LigerSparsemax(nn.Module):
    """Sparsemax along dim; see LigerSparsemaxFunction."""

    def __init__(self, dim=-1):
        super().__init__()
        self.dim = dim

    def forward(self, x):
        return LigerSparsemaxFunction.apply(x, self.dim)
