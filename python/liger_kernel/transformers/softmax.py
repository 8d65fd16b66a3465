"""Softmax as a module."""

from torch import nn

from liger_kernel.ops import LigerSoftmaxFunction


class LigerSoftmax(nn.Module):
    """Softmax over the last dimension."""

    def __init__(self):
        super().__init__()

    def forward(self, x):
        return LigerSoftmaxFunction.apply(x)
