"""Squared ReLU as a module."""

from torch import nn

from liger_kernel.ops import LigerReLUSquaredFunction


class LigerReLUSquared(nn.Module):
    """max(x, 0)², element by element."""

    def __init__(self):
        super().__init__()

    def forward(self, x):
        return LigerReLUSquaredFunction.apply(x)
