"""Generalised Jensen-Shannon divergence as a module."""

from torch import nn

from liger_kernel.ops import LigerJSDFunction


class LigerJSD(nn.Module):
    """The divergence of log_p from log_q, both logarithms [rows, cols]; see LigerJSDFunction."""

    def __init__(self, beta=0.5, ignore_index=-100):
        super().__init__()
        self.beta, self.ignore_index = beta, ignore_index

    def forward(self, log_q, log_p, shift_labels=None):
        return LigerJSDFunction.apply(log_q, log_p, shift_labels, self.beta, self.ignore_index)
