"""Embedding tables, and matrix products with weights in {-1, 0, 1, 2}, four to a byte; formula of these in
liger/ops/matmul/int2_matmul.h. The API calls both experimental; here they are not."""

import torch
from torch import Tensor, nn

from liger_kernel._library import ops


class LigerEmbeddingFunction:
    @staticmethod
    def apply(embeddings: Tensor, indices: Tensor, padding_idx: int = -1) -> Tensor:
        """Rows indices of embeddings [num, dim]: [*indices, dim] in the table's dtype; the row padding_idx gets no
        gradient.

        indices int64 or int32. An index outside [0, num) raises IndexError on the CPU and is a device assertion on
        CUDA.
        """
        return ops.embedding(embeddings, indices, padding_idx)


class LigerEmbedding(nn.Module):
    """As torch.nn.Embedding: a table of num_embeddings rows, of which padding_idx begins as zeros and gets no gradient.

    Raises AssertionError for a padding_idx outside the table.
    """

    def __init__(self, num_embeddings: int, embedding_dim: int, padding_idx: int | None = None) -> None:
        super().__init__()
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            raise AssertionError(f"padding_idx must be within num_embeddings, {num_embeddings}, got {padding_idx}")
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.padding_idx = padding_idx if padding_idx is None or padding_idx >= 0 else num_embeddings + padding_idx
        self.weight = nn.Parameter(torch.randn(num_embeddings, embedding_dim))
        if padding_idx is not None:
            with torch.no_grad():
                self.weight[self.padding_idx].zero_()

    def forward(self, indices: Tensor) -> Tensor:
        return ops.embedding(self.weight, indices, -1 if self.padding_idx is None else self.padding_idx)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, padding_idx={self.padding_idx}"


def _two_bits(bits):
    if bits != 2:
        raise ValueError(f"weights have 2 bits, not {bits}")


def pack_weights(intweights: Tensor, bits: int = 2) -> Tensor:
    """Integer weights [rows, ...] in {-1, 0, 1, 2} as uint8 [ceil(rows / 4), ...]; missing rows count as -1. The
    argument is not changed."""
    _two_bits(bits)
    return ops.int2_pack(intweights)


def unpack_weights(packed: Tensor, bits: int = 2) -> Tensor:
    """The weights of uint8 packed [rows / 4, ...], as int32 [rows, ...]."""
    _two_bits(bits)
    return ops.int2_unpack(packed)


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """The exact product of int8 a [M, K] and packed weights b [K/4, N], as int32 [M, N]; it has no gradient.

    Raises AssertionError where K differs from four times b's rows or a is not contiguous; b may have any strides.
    """
    if a.shape[1] != 4 * b.shape[0]:
        raise AssertionError(f"a has {a.shape[1]} columns, b holds {4 * b.shape[0]} rows")
    if not a.is_contiguous():
        raise AssertionError("a must be contiguous")
    return ops.int2_matmul(a, b)
