"""Where the documents of packed rows begin, in the one form that operators take: `starts` [batch, tokens], int32, the
index within the row of the first token of each token's document.

A token whose number is negative is in no document. Every function works on the tensors' device and never waits for it.
"""

import torch
from torch import Tensor


def starts_of_lengths(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """starts [1, tokens] of cu_seqlens [documents + 1], integers that increase from 0: where documents begin, and the
    end. Tokens after the end are a document of their own."""
    place = torch.arange(tokens, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    document = torch.searchsorted(cu_seqlens, place, right=True) - 1
    return cu_seqlens[document].to(torch.int32).unsqueeze(0)


def starts_of_indices(seq_idx: Tensor) -> Tensor:
    """starts of seq_idx [batch, tokens], integers: neighbours with the same number are of one document; with a negative
    one, of none."""
    return _starts(seq_idx, seq_idx[:, :-1]).masked_fill_(seq_idx < 0, -1)


def starts_of_positions(position_ids: Tensor) -> Tensor:
    """starts of position_ids [batch, tokens], integers: a document begins where a position is not the one before it
    plus 1."""
    return _starts(position_ids, position_ids[:, :-1] + 1)


def document_starts(
    tokens: int, cu_seqlens: Tensor | None = None, seq_idx: Tensor | None = None, position_ids: Tensor | None = None
) -> Tensor | None:
    """starts by the first of the three that is given; None where none is."""
    if cu_seqlens is not None:
        return starts_of_lengths(cu_seqlens, tokens)
    if seq_idx is not None:
        return starts_of_indices(seq_idx)
    return None if position_ids is None else starts_of_positions(position_ids)


def _starts(numbers, expected):
    """starts where a document begins at the first token of each row, and where a number is not the expected one."""
    place = torch.arange(numbers.shape[1], device=numbers.device, dtype=torch.int32).expand_as(numbers).contiguous()
    place[:, 1:] *= numbers[:, 1:] != expected
    return torch.cummax(place, 1).values
