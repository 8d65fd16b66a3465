"""Rows of a table by their numbers."""

from liger_kernel._library import ops


class LigerEmbeddingFunction:
    @staticmethod
    def apply(embeddings, indices, padding_idx=-1):
        """Rows indices of embeddings [num, dim]: [*indices, dim] in the table's dtype; the row padding_idx gets no
        gradient.

        indices int64 or int32. An index outside [0, num) raises IndexError on the CPU and is a device assertion on
        CUDA.
        """
        return ops.embedding(embeddings, indices, padding_idx)
