"""Attention of other forms; formulas in liger/ops/research/attention and liger/ops/activation/softmax.h.

Multi-token attention (Golovneva et al. 2025, arXiv:2504.00927) convolves attention weights over queries, keys and
heads. Neighborhood attention (Hassani et al. 2022, arXiv:2204.07143) attends to the keys around a query.
"""

import math
from typing import Any

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
    """liger_multi_token_attention with its own weight and bias, which begin as those of torch.nn.Conv2d and as
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


def liger_fused_neighborhood_attention(
    query: Tensor, key: Tensor, value: Tensor, kernel_size: int = 7, dilation: int = 1, scale: float | None = None
) -> Tensor:
    """Attention of each query i to the keys i + t · dilation, |t| <= kernel_size // 2, of its sequence.

    query, key, value [..., S, D] of one dtype, D of at most 1024; scale is 1/√D unless given. No more than kernel_size
    scores of a query exist at once.
    """
    factor = query.shape[-1] ** -0.5 if scale is None else float(scale)
    return ops.neighborhood_attention(query, key, value, int(kernel_size), int(dilation), factor)


class LigerFusedNeighborhoodAttentionFunction:
    apply = staticmethod(liger_fused_neighborhood_attention)


class LigerFusedNeighborhoodAttention(nn.Module):
    """Multi-head neighborhood attention of [B, S, hidden_size].

    dropout is applied before the output projection. Raises ValueError for sizes that do not fit, and
    NotImplementedError for a mask.
    """

    dropout: nn.Dropout | None

    def __init__(
        self, hidden_size: int, num_heads: int, kernel_size: int = 7, dilation: int = 1, bias: bool = True,
        dropout: float = 0.0, scale: float | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        if hidden_size % num_heads != 0:
            raise ValueError(f"hidden_size ({hidden_size}) must be divisible by num_heads ({num_heads})")
        if kernel_size <= 0:
            raise ValueError(f"kernel_size ({kernel_size}) must be positive")
        if kernel_size % 2 == 0:
            raise ValueError(f"kernel_size ({kernel_size}) must be odd")
        if dilation < 1:
            raise ValueError(f"dilation ({dilation}) must be positive")
        self.hidden_size, self.num_heads, self.head_dim = hidden_size, num_heads, hidden_size // num_heads
        self.kernel_size, self.dilation, self.dropout_p = kernel_size, dilation, dropout
        self.scale = self.head_dim**-0.5 if scale is None else scale
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (
            nn.Linear(hidden_size, hidden_size, bias=bias) for _ in range(4)
        )
        self.dropout = nn.Dropout(dropout) if dropout > 0.0 else None

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        if attention_mask is not None:
            raise NotImplementedError("Attention mask is not yet supported")
        q, k, v = (
            projection(hidden_states).unflatten(-1, (self.num_heads, self.head_dim)).transpose(-3, -2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        y = liger_fused_neighborhood_attention(q, k, v, self.kernel_size, self.dilation, self.scale)
        y = y.transpose(-3, -2).flatten(-2)
        return self.out_proj(y if self.dropout is None else self.dropout(y))

    def extra_repr(self) -> str:
        return (
            f"hidden_size={self.hidden_size}, num_heads={self.num_heads}, head_dim={self.head_dim}, "
            f"kernel_size={self.kernel_size}, dilation={self.dilation}, scale={self.scale}, dropout={self.dropout_p}"
        )


class LigerFusedNeighborhoodAttentionLayer(nn.Module):
    """x + dropout(attention(LayerNorm(x))); options as LigerFusedNeighborhoodAttention."""

    dropout: nn.Dropout | None

    def __init__(
        self, hidden_size: int, num_heads: int, kernel_size: int = 7, dilation: int = 1, bias: bool = True,
        dropout: float = 0.0, layer_norm_eps: float = 1e-5, scale: float | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.attention = LigerFusedNeighborhoodAttention(
            hidden_size, num_heads, kernel_size, dilation, bias, dropout, scale
        )
        self.layer_norm = nn.LayerNorm(hidden_size, eps=layer_norm_eps)
        self.dropout = nn.Dropout(dropout) if dropout > 0.0 else None

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        y = self.attention(self.layer_norm(hidden_states), attention_mask)
        return hidden_states + (y if self.dropout is None else self.dropout(y))


class LigerFusedNeighborhoodAttentionConfig:
    """The options of LigerFusedNeighborhoodAttentionLayer."""

    def __init__(
        self, hidden_size: int = 768, num_heads: int = 12, kernel_size: int = 7, dilation: int = 1, bias: bool = True,
        dropout: float = 0.0, layer_norm_eps: float = 1e-5, scale: float | None = None,
    ) -> None:  # fmt: skip
        self.hidden_size, self.num_heads, self.kernel_size = hidden_size, num_heads, kernel_size
        self.dilation, self.bias, self.dropout = dilation, bias, dropout
        self.layer_norm_eps, self.scale = layer_norm_eps, scale

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))
