"""The ids of rollout engines and trainers as tensors that replay takes."""

import base64
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

_LEFT, _RIGHT = "left", "right"


def _tensor(ids: Any) -> Tensor:
    """Of an array or a tensor; the memory is shared where it can be written."""
    if isinstance(ids, Tensor):
        return ids
    return torch.from_numpy(ids if ids.flags.writeable else ids.copy())


def from_requests(
    requests: Sequence[Any], lengths: Sequence[int] | Tensor, padded: int | None = None, side: str = _RIGHT
) -> Tensor:
    """One batch of the routed experts of several requests, as vLLM (`output.routed_experts`), SGLang and others have
    them: arrays or tensors [tokens, layers, k] of one integer type.

    Args:
        requests: those of each sequence. None stands for a sequence without any.
        lengths: the tokens of each sequence. Engines have no row for a token that they have sampled and not run, the
            last one: rows that are missing at the end are those of −1, without a choice.
        padded: the length of the batch's rows, for a result [batch, padded, layers, k]; None: sequences follow one
            another, [tokens, layers, k].
        side: where padding is, "right" or "left". Its rows are those of −1.

    Unsigned types become the next larger signed one. Raises ValueError for requests of different layers or k, for more
    rows than a sequence has tokens, and for a sequence that is longer than `padded`.
    """
    arrays = [None if ids is None else _tensor(ids) for ids in requests]
    sizes = [int(length) for length in lengths]
    shapes = {tuple(ids.shape[1:]) for ids in arrays if ids is not None}
    if len(shapes) != 1 or len(next(iter(shapes))) != 2:
        raise ValueError(f"requests must be [tokens, layers, k] of the same layers and k, got {sorted(shapes)}")
    if len(arrays) != len(sizes):
        raise ValueError(f"there are {len(arrays)} requests and {len(sizes)} lengths")
    if side not in (_LEFT, _RIGHT):
        raise ValueError(f"side must be 'left' or 'right', got {side!r}")
    kinds = {ids.dtype for ids in arrays if ids is not None}
    dtype = max(map(_signed, kinds), key=lambda kind: kind.itemsize)
    rows = []
    for number, (ids, size) in enumerate(zip(arrays, sizes)):
        ids = torch.empty(0, *next(iter(shapes)), dtype=dtype) if ids is None else ids.to(dtype)
        if len(ids) > size:
            raise ValueError(f"request {number} has {len(ids)} rows for {size} tokens")
        if padded is not None and size > padded:
            raise ValueError(f"sequence {number} has {size} tokens, more than the {padded} of the batch's rows")
        before = 0 if padded is None or side == _RIGHT else padded - size
        after = (size if padded is None else padded) - before - len(ids)
        rows.append(F.pad(ids, (0, 0, 0, 0, before, after), value=-1))
    return torch.cat(rows) if padded is None else torch.stack(rows)


def _signed(dtype: torch.dtype) -> torch.dtype:
    larger = {torch.uint8: torch.int16, torch.uint16: torch.int32, torch.uint32: torch.int64}
    return larger.get(dtype, dtype)


def from_sglang(text: str | bytes, layers: int, k: int) -> Tensor:
    """SGLang's `meta_info["routed_experts"]`, int32 in base64, of one request: [tokens, layers, k]. Raises ValueError
    where the numbers do not make whole tokens."""
    numbers = torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.int32)
    if numbers.numel() % (layers * k):
        raise ValueError(f"{numbers.numel()} ids are no whole tokens of {layers} layers with {k} experts each")
    return numbers.view(-1, layers, k)


def from_verl(ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
    """verl's `routed_experts` of a micro-batch: a nested tensor of [tokens, layers, k], or a padded one [batch, seq,
    layers, k]. Nested ones, and padded ones of which attention_mask [batch, seq] says what are tokens, become packed
    rows, [tokens, layers, k], as verl removes padding from its inputs; others stay as they are. Zeros where nothing was
    recorded need no change: such tokens choose by their own scores, unless k is 1, where zero is expert 0.
    """
    if ids.is_nested:
        return torch.cat([*ids.unbind()])
    return ids if attention_mask is None else ids[attention_mask.to(ids.device).bool()]
