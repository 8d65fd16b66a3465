"""Attention of other forms; formulas in liger/ops/attention and liger/ops/activation/softmax.h.

Multi-token attention (Golovneva et al. 2025, arXiv:2504.00927) convolves attention weights over queries, keys and
heads.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.utils import _pair

from liger_kernel._library import ops
from liger_kernel.operators.activation import SOFTMAX, SPARSEMAX

_Size = int | tuple[int, int]


def liger_multi_token_attention(
    scores: Tensor, weight: Tensor, bias: Tensor | None = None, stride: _Size = 1, padding: _Size = 0,
    dilation: _Size = 1, groups: int = 1, sparse: bool = False,
) -> Tensor:  # fmt: skip
    """A causal softmax of scores [B, C, L, L], or with sparse a sparsemax, then conv2d with weight and bias, then 0
    for keys behind their query.

    weight [out, C / groups, k, k] and bias [out] as torch.nn.functional.conv2d takes them.
    """
    maps = ops.causal_softmax(scores, SPARSEMAX if sparse else SOFTMAX)
    return F.conv2d(maps, weight, bias, stride, padding, dilation, groups).tril()


class LigerMultiTokenAttentionFunction:
    apply = staticmethod(liger_multi_token_attention)


class LigerMultiTokenAttention(nn.Module):
    """liger_multi_token_attention with a weight and a bias of its own, which begin as those of torch.nn.Conv2d and as
    zeros."""

    bias: nn.Parameter | None

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: int, stride: _Size = 1, padding: _Size = 0,
        dilation: _Size = 1, groups: int = 1, bias: bool = True, sparse: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.in_channels, self.out_channels, self.kernel_size = in_channels, out_channels, _pair(kernel_size)
        self.stride, self.padding, self.dilation = _pair(stride), _pair(padding), _pair(dilation)
        self.groups, self.sparse = groups, sparse
        self.weight = nn.Parameter(torch.empty(out_channels, in_channels // groups, *self.kernel_size))
        self.register_parameter("bias", nn.Parameter(torch.empty(out_channels)) if bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, scores: Tensor) -> Tensor:
        return liger_multi_token_attention(
            scores, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups, self.sparse
        )
