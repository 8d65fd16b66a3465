"""Short causal convolutions; formulas in liger/ops/mixers/causal_conv1d.h."""

import math

import torch
from torch import Tensor, nn

from liger_kernel._library import ops
from liger_kernel._recompute import run
from liger_kernel.operators.common import beside, full_tensor
from liger_kernel.operators.documents import document_starts

#: The names of activations, and whether they are silu.
ACTIVATIONS = {None: False, "silu": True, "swish": True}


def liger_causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None,
    cu_seqlens: Tensor | None = None, seq_idx: Tensor | None = None, starts: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """y[t] = act(bias + Σ_i weight[:, W − 1 − i] · x[t − i]), 0 <= i < W, for each channel: a short causal convolution
    within documents.

    x [batch, channels, tokens]; weight [channels, W], W 1 to 8, and bias [channels] of any dtype that x may have; the
    result has x's dtype and its layout: x as a projection gives it, [batch, tokens, channels] seen as [batch, channels,
    tokens], is not copied, also as a slice of a wider one. Sums are float and rounded once. activation is "silu",
    "swish", which is the same, or None.

    Of documents that are packed into rows, each is convolved as if it stood alone. They are given by one of
    cu_seqlens [documents + 1], where they begin, and the end (batch must be 1); seq_idx [batch, tokens], the document's
    number, negative for tokens of none; starts [batch, tokens], int32, the index within the row of the first token of
    a token's document. The result of a token of no document is 0.

    Raises ValueError for another activation, and for cu_seqlens with a batch other than 1.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation is one of {list(ACTIVATIONS)}, not {activation!r}")
    if cu_seqlens is not None and x.shape[0] != 1:
        raise ValueError(f"cu_seqlens are of a batch of 1, and x has {x.shape[0]} rows")
    if starts is None:
        starts = document_starts(x.shape[-1], cu_seqlens, seq_idx)
    x = full_tensor(x, weight)
    return run(ops.causal_conv1d, x, beside(x, weight), beside(x, bias), starts, ACTIVATIONS[activation])


class LigerCausalConv1dFunction:
    apply = staticmethod(liger_causal_conv1d)


class LigerShortConvolution(nn.Module):
    """A short causal convolution of each channel of x [batch, tokens, channels] (Poli et al. 2023, arXiv:2302.10866);
    see liger_causal_conv1d.

    The weight is that of nn.Conv1d(channels, channels, width, groups=channels): [channels, 1, width].
    """

    def __init__(self, channels: int, width: int = 4, bias: bool = False, activation: str | None = "silu") -> None:
        super().__init__()
        bound = 1 / math.sqrt(width)
        self.weight = nn.Parameter(torch.empty(channels, 1, width).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.zeros(channels)) if bias else None
        self.activation = activation

    def forward(self, x: Tensor, cu_seqlens: Tensor | None = None, seq_idx: Tensor | None = None) -> Tensor:
        weight = self.weight.squeeze(1)
        y = liger_causal_conv1d(x.transpose(1, 2), weight, self.bias, self.activation, cu_seqlens, seq_idx)
        return y.transpose(1, 2)

    def extra_repr(self) -> str:
        channels, _, width = self.weight.shape
        return f"channels={channels}, width={width}, bias={self.bias is not None}, activation={self.activation}"
