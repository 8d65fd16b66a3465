"""GroupNorm."""

import torch
from torch import nn

from liger_kernel.ops import LigerGroupNormFunction


class LigerGroupNorm(nn.Module):
    """GroupNorm (Wu & He 2018, arXiv:1803.08494) of [N, num_channels, ...].

    The bias always exists; it starts at zero, or random with bias=True. Raises AssertionError for an init_fn other than
    "ones" and "zeros", groups that do not divide the channels, and inputs of another shape.
    """

    def __init__(self, num_channels, num_groups, eps=1e-6, bias=False, init_fn="ones"):
        super().__init__()
        if init_fn not in ("ones", "zeros"):
            raise AssertionError(f"init_fn is 'ones' or 'zeros', not {init_fn!r}")
        if num_groups <= 0 or num_channels % num_groups != 0:
            raise AssertionError(f"{num_groups} groups do not divide {num_channels} channels")
        self.num_channels, self.num_groups, self.eps, self.variance_epsilon = num_channels, num_groups, eps, eps
        self.weight = nn.Parameter(getattr(torch, init_fn)(num_channels))
        self.bias = nn.Parameter(torch.randn(num_channels) if bias else torch.zeros(num_channels))

    def forward(self, hidden_states):
        if hidden_states.dim() < 3:
            raise AssertionError(
                f"the input is [N, channels, ...], at least three dimensions, not {hidden_states.dim()}"
            )
        if hidden_states.shape[1] != self.num_channels:
            raise AssertionError(f"the input has {hidden_states.shape[1]} channels, not {self.num_channels}")
        return LigerGroupNormFunction.apply(
            hidden_states, self.weight, self.bias, self.num_channels, self.num_groups, self.variance_epsilon
        )

    def extra_repr(self):
        return f"{self.num_channels}, num_groups={self.num_groups}, eps={self.eps}"
