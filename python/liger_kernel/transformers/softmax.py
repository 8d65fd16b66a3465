"""Softmax as a module."""

from torch import nn

from liger_kernel.ops import LigerSoftmaxFunction


class LigerSoftmax(nn.Module):
    """Softmax over the last dimension."""

    def forward(self, x):
        return LigerSoftmaxFunction.apply(x)
