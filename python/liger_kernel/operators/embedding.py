"""Embedding tables. The API calls them experimental; here they are not."""

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
