"""Sparsemax (Martins & Astudillo 2016, arXiv:1602.02068); formula in liger/ops/research/sparsemax/sparsemax.h."""

from torch import Tensor, nn

from liger_kernel._library import ops
from liger_kernel.operators.activation import SPARSEMAX


class LigerSparsemaxFunction:
    @staticmethod
    def apply(x: Tensor, dim: int = -1) -> Tensor:
        """max(x − τ, 0) along dim, with the τ for which it sums to 1: the probabilities nearest to x. In x's dtype."""
        return ops.softmax(x.transpose(dim, -1), SPARSEMAX).transpose(dim, -1)


def liger_sparsemax(input: Tensor, dim: int = -1) -> Tensor:
    """Sparsemax along dim; see LigerSparsemaxFunction."""
    return LigerSparsemaxFunction.apply(input, dim)


class LigerSparsemax(nn.Module):
    """Sparsemax along dim; see LigerSparsemaxFunction."""

    def __init__(self, dim: int = -1) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        return LigerSparsemaxFunction.apply(x, self.dim)
