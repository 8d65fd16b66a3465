"""Packed and padded rows under sdpa, on torch's flash attention for documents.

Where positions begin again within a row, or some rows are padded, transformers writes out a mask [batch, 1, tokens,
tokens], and sdpa's kernels compute all pairs of tokens with it. A patched model gives its layers the boundaries of
documents instead, which the function that stands in for transformers' "sdpa" knows:

    mask [sides, window, documents + 1, longest]    int32, a view of the boundaries [documents + 1]. The other sizes
                                                    need no memory: 1 where attention is causal and 2 where it is not, 1
                                                    where there is no window, and an upper bound of the tokens of a
                                                    document

As transformers' own masks, it has four dimensions: a model that is given it for its padding mask takes it as it is.
Encoders' windows, which transformers writes out for whole rows too, are such a mask on a GPU.

The places of documents are found once for each mask, for which the host waits as it does in transformers. A model that
is compiled or captured keeps the written-out mask of packed and padded rows, and one with a module that does more with
its mask than to pass it on keeps all.
"""

import functools
import inspect
import re
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel, masking_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from liger_kernel.operators.attention import attention_with_sinks, obstacle, rows
from liger_kernel.operators.common import autocast_dtype
from liger_kernel.transformers.patching.attention import boundaries_of, dense_mask, is_tracing, passes_on, tokens_first
from liger_kernel.transformers.patching.report import Report

_CONVOLUTION = torch.nn.modules.conv._ConvNd
_takes: "weakref.WeakKeyDictionary[torch.nn.Module, bool]" = weakref.WeakKeyDictionary()


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
    """transformers' sdpa_attention_forward, which also takes the masks of this module.

    Returns ([batch, tokens, Hq, D], None) of query [batch, Hq, tokens, D], key and value [batch, Hk, tokens, D]. The
    mask is written out with dropout and for tensors that `attention_with_sinks` does not take.
    """
    if attention_mask is None or attention_mask.dtype != torch.int32:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    batch, _, tokens, _ = query.shape
    sides, window, _, longest = attention_mask.shape
    window, causal = None if window == 1 else window, sides == 1
    boundaries = attention_mask[0, 0, :, 0]
    q, k, v = tokens_first(query, key, value)
    if dropout or obstacle(q, k, v) or any(kwargs.get(name) is not None for name in ("position_bias", "softcap")):
        mask = dense_mask(boundaries, query, window, causal)
        return sdpa_attention_forward(module, query, key, value, mask, dropout=dropout, scaling=scaling, **kwargs)
    out = attention_with_sinks(q, k, v, None, boundaries.contiguous(), longest, window, scaling, causal)
    return out.view(batch, tokens, *out.shape[1:]), None


#: Places of documents: their boundaries, and an upper bound of their tokens.
Places = tuple[Tensor, int]
WHOLE: Places = (torch.empty(0), 0)  # where each row is one document
#: On a CPU each document is a call: a mask for rows that are shorter is faster (a tenth at 64 tokens, as fast at 256).
SHORTEST_ON_CPU = 256


def places(x: Tensor, padding: Tensor | None, positions: Tensor | None) -> Places | None:
    """The documents of a batch x [batch, tokens, ...] with such an attention mask [batch, tokens], or else with such
    positions [batch or 1, tokens].

    Padding after a row's tokens is a document whose results nobody reads. None where the mask must be written out: of
    another shape, with gaps, and with padding before tokens, whose last result predicts the first token; and for short
    rows on a CPU.
    """
    batch, length = x.shape[:2]
    if x.is_cpu and length < SHORTEST_ON_CPU:
        return None
    if padding is not None:
        return _of_padding(padding.to(x.device), length) if padding.shape == (batch, length) else None
    if positions is None:
        return WHOLE
    if positions.dim() != 2:
        return None
    documents = masking_utils.find_packed_sequence_indices(positions.expand(batch, -1))
    boundaries = None if documents is None else boundaries_of(documents)
    if boundaries is None or len(boundaries) == batch + 1:  # transformers 4.57 numbers the documents of any rows
        return WHOLE
    return boundaries, int(boundaries.diff().max())


def _of_padding(padding: Tensor, length: int) -> Places | None:
    real = padding.bool()
    counts, tokens = real.sum(1), torch.arange(length, device=real.device)
    rows = torch.arange(0, real.numel() + 1, length, device=real.device)
    boundaries = torch.cat([torch.stack([rows[:-1], rows[:-1] + counts], 1).flatten(), rows[-1:]])
    follows = (real == (tokens < counts[:, None])).all().to(counts.dtype)
    padding_follows, least, longest = torch.stack([follows, counts.min(), boundaries.diff().max()]).tolist()  # one wait
    if least == length:
        return WHOLE
    return (boundaries.int(), longest) if padding_follows else None


def mask(boundaries: Tensor, longest: int, window: int | None, causal: bool = True) -> Tensor:
    """The mask of such documents. A window holds two tokens or more."""
    needed = 1 if window is None or window >= longest else window
    return boundaries.view(1, 1, -1, 1).expand(1 if causal else 2, needed, -1, longest)


def whole(x: Tensor, window: int) -> Tensor:
    """The mask of an encoder's whole rows x [batch, tokens, ...] with a window."""
    batch, length = x.shape[:2]
    return mask(rows(batch, length, x.device), length, window, causal=False)


def is_chosen() -> bool:
    """Whether `attention` is transformers' "sdpa"."""
    return AttentionInterface()["sdpa"] is attention


vars(is_chosen)["_dynamo_marked_constant"] = True  # as in coverage.py


def reason_to_keep(classes: Iterable[Any], encodes: bool) -> str | None:
    """Why a model with modules of such classes keeps its masks; None where all hand them on to the function above.
    `encodes`: tokens see those after them; then a convolution would carry the results of padding to the tokens before
    it."""
    if not all(map(passes_on, classes)):
        return "a module reads its mask"
    convolves = encodes and any(issubclass(cls, _CONVOLUTION) for cls in classes)
    return "a convolution mixes tokens with padding" if convolves else None


def takes(model: torch.nn.Module, encodes: bool) -> bool:
    """Whether all modules of a model hand its masks on to the function above."""
    if is_tracing() or not is_chosen():
        return False
    found = _takes.get(model)
    if found is None:
        classes: set[Any] = {type(module) for module in model.modules() if module is not model}
        found = _takes[model] = reason_to_keep(classes, encodes) is None
    return found


def hands_on(home: Any) -> bool:
    """Whether all layers of a modeling module pass their masks on: what `takes` says, for models that are compiled."""
    layers = (c for c in vars(home).values() if isinstance(c, type) and c.__module__ == home.__name__)
    return all(passes_on(c) for c in layers if issubclass(c, torch.nn.Module) and not issubclass(c, PreTrainedModel))


def encoder_takes(config: Any, x: Tensor) -> bool:
    """Whether `attention` runs flash attention for the layers of an encoder with embeddings x: without dropout, in
    float16 and bfloat16 on a GPU."""
    if any(getattr(config, name, 0) for name in ("attention_dropout", "attention_probs_dropout_prob")):
        return False
    return x.is_cpu or (x.is_cuda and (autocast_dtype(x) or x.dtype) in (torch.float16, torch.bfloat16))


def use(report: Report) -> None:
    """Let `attention` stand in for transformers' function."""
    if AttentionInterface()["sdpa"] is sdpa_attention_forward:
        report.edits.set(AttentionInterface._global_mapping, "sdpa", attention)
