"""PolyNorm."""

import torch
from torch import nn

from liger_kernel.ops import LigerPolyNormFunction


class LigerPolyNorm(nn.Module):
    """weight[0] · N(x³) + weight[1] · N(x²) + weight[2] · N(x) + bias, N(u) = u / rms(u) (Zhuo et al. 2024,
    arXiv:2411.03884)."""

    def __init__(self, eps=1e-6, in_place=True):
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), 1 / 3))
        self.bias = nn.Parameter(torch.tensor(1.0))
        self.variance_epsilon, self.in_place = eps, in_place

    def forward(self, hidden_states):
        return LigerPolyNormFunction.apply(hidden_states, self.weight, self.bias, self.variance_epsilon, self.in_place)

    def extra_repr(self):
        return f"eps={self.variance_epsilon}, in_place={self.in_place}"
