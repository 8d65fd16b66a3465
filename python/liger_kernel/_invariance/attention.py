"""Attention whose results for a document have the same bits wherever the document is.

`IMPLEMENTATION` is registered as an attention implementation of transformers, with its mask function, which returns a
table [documents, 3] of integers in the host's memory: where a document begins and ends among the tokens of the batch,
and the window, 0 for none. Tokens in no document are padding. Flash attention with boundaries has the same order of
sums in every document; elsewhere each document is computed by itself.
"""

import itertools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils

from liger_kernel.operators.attention import attention_with_sinks, obstacle
from liger_kernel.transformers.patching.attention import causal_of, eager_of, given_positions, tokens_first

IMPLEMENTATION = "liger_batch_invariant"


def documents_mask(batch_size: int, q_length: int | None = None, kv_length: int = 0, **others: Any) -> Tensor:
    """The table of documents (see above). Raises ValueError for padding that is not on the right, and
    NotImplementedError for a cache, for tracing, and for a mask that is not causal within documents."""
    places = others.get("cache_position")  # in place of q_length, in transformers 4.57 and 5.0
    queries = q_length if places is None else places.shape[0]
    if queries != kv_length:
        raise NotImplementedError(
            f"batch_invariant: attention of {queries} tokens to {kv_length}: a cache is refused, as decoding is"
        )
    if torch.compiler.is_compiling():
        raise NotImplementedError("batch_invariant: torch.compile is refused")
    function = others.get("mask_function", masking_utils.causal_mask_function)
    causal = causal_of(function)
    if causal is None:
        name = getattr(function, "__qualname__", function)
        raise NotImplementedError(f"batch_invariant: the mask {name} is refused: it is not causal within documents")
    documents, padding = causal.documents, others.get("attention_mask")
    if padding is None and documents is None and (positions := given_positions()) is not None:
        documents = masking_utils.find_packed_sequence_indices(positions.expand(batch_size, -1))
    if padding is not None:
        spans = _real(padding[:, -kv_length:], kv_length)
    elif documents is not None:
        spans = _numbered(documents.cpu())
    else:
        spans = [(row * kv_length, (row + 1) * kv_length) for row in range(batch_size)]
    return torch.tensor([(*span, causal.window or 0) for span in spans], dtype=torch.int64).view(-1, 3)


def _real(padding: Tensor, length: int) -> list[tuple[int, int]]:
    """The documents of rows that are padded on the right."""
    padding = padding.bool().cpu()
    if (padding[:, 1:] & ~padding[:, :-1]).any():
        raise ValueError("batch_invariant: padding before a token is refused: pad on the right, or pack")
    ends = padding.sum(1).tolist()
    return [(row * length, row * length + count) for row, count in enumerate(ends) if count]


def _numbered(documents: Tensor) -> list[tuple[int, int]]:
    """Those of tokens that are numbered [batch, tokens]; no document spans rows."""
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    starts = [*begins.flatten().nonzero().flatten().tolist(), documents.numel()]
    return list(zip(starts[:-1], starts[1:]))


class _Places(NamedTuple):
    """Where documents are, in the form that kernels take."""

    packed: Tensor | None  # cu_seq_lens_q, which comes before the table
    kept: Tensor | None  # the indices of tokens in a document; None for all
    lengths: list[int]
    boundaries: Tensor  # [documents + 1], int32, among those tokens
    window: int | None


def _places(mask: Tensor, packed: Tensor | None, tokens: int, device: torch.device) -> _Places:
    """Those of a table of documents. The table keeps them for the other layers of a step, which neither copy them to
    the device again nor wait for it."""
    found = getattr(mask, "liger_places", None)
    if found is None or found.packed is not packed or found.boundaries.device != device:
        table = mask.tolist()
        spans = [(begin, end) for begin, end, _ in table]
        if packed is not None:
            spans = [(begin, end) for begin, end in itertools.pairwise(packed.tolist()) if end > begin]
        lengths = [end - begin for begin, end in spans]
        kept = None
        if sum(lengths) < tokens:
            kept = torch.cat([torch.arange(*span) for span in spans] or [torch.arange(0)]).to(device)
        boundaries = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32).to(device)
        found = _Places(packed, kept, lengths, boundaries, table[0][2] or None if table else None)
        mask.liger_places = found  # type: ignore[attr-defined]
    return found


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """An attention implementation of transformers: ([batch, tokens, Hq, Dv], None), of query [batch, Hq, tokens, D],
    key [batch, Hk, tokens, D] and value [batch, Hk, tokens, Dv]; padding tokens get zeros. Raises NotImplementedError,
    with the module's class, for dropout, a cache, and a mask that documents_mask has not made."""
    name = type(module).__name__
    mask = attention_mask
    if mask is None or mask.dim() != 2 or mask.shape[-1] != 3 or mask.dtype != torch.int64:
        raise NotImplementedError(f"batch_invariant: {name} has a mask of its own, and is refused")
    if dropout or query.shape[2] != key.shape[2]:
        raise NotImplementedError(f"batch_invariant: {name} has {'dropout' if dropout else 'a cache'}, and is refused")
    batch, _, tokens, _ = query.shape
    places = _places(mask, kwargs.get("cu_seq_lens_q"), batch * tokens, query.device)
    kept, lengths, window = places.kept, places.lengths, places.window
    q, k, v = tokens_first(query, key, value)
    if kept is not None:
        q, k, v = (x.index_select(0, kept) for x in (q, k, v))
    sinks, softcap = kwargs.pop("s_aux", None), kwargs.pop("softcap", None)
    if obstacle(q, k, v) or softcap is not None:
        options = {**kwargs, **({} if sinks is None else {"s_aux": sinks})}
        options |= {} if softcap is None else {"softcap": softcap}
        out = _one_by_one(module, q, k, v, lengths, window, scaling, options)
    else:
        out = attention_with_sinks(q, k, v, sinks, places.boundaries, max(lengths, default=1), window, scaling)
    if kept is not None:
        out = out.new_zeros(batch * tokens, *out.shape[1:]).index_copy(0, kept, out)
    return out.view(batch, tokens, *out.shape[1:]), None


def _one_by_one(module, q, k, v, lengths, window, scaling, options):
    """The model's eager attention, of one document after the other, [tokens, Hq, Dv]."""
    eager = eager_of(module)
    parts = []
    for document in zip(*(x.split(lengths) for x in (q, k, v))):
        count = document[0].shape[0]
        places = torch.arange(count, device=q.device)
        seen = places <= places[:, None]
        if window is not None:
            seen = seen & (places > places[:, None] - window)
        mask = torch.zeros(count, count, dtype=q.dtype, device=q.device)
        mask = mask.masked_fill_(~seen, torch.finfo(q.dtype).min).view(1, 1, count, count)
        operands = (x.transpose(0, 1).unsqueeze(0).contiguous() for x in document)
        parts.append(eager(module, *operands, mask, dropout=0.0, scaling=scaling, **options)[0][0])
    return torch.cat(parts) if parts else q.new_zeros(0, q.shape[1], v.shape[2])


AttentionInterface.register(IMPLEMENTATION, attention)
AttentionMaskInterface.register(IMPLEMENTATION, documents_mask)
