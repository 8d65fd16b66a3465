"""Attention with sinks on flash attention, for models of transformers that know eager attention alone for them.

`IMPLEMENTATION` is registered as an attention implementation of transformers, with its mask function. In a forward over
whole sequences the mask function returns the boundaries of documents [documents + 1] (int32) in place of a dense mask,
or the padding mask [batch, tokens]; every other mask, and a cache that holds more than the queries, is dense, and the
model's eager attention runs with it.
"""

import contextlib
import functools
import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils, modeling_flash_attention_utils

from liger_kernel.operators.attention import attention_with_sinks, obstacle, rows
from liger_kernel.transformers.causal_lm import names_in, original_forward
from liger_kernel.transformers.patching.report import Report

IMPLEMENTATION = "liger_attention_sinks"
_OTHER_MASK = re.compile(r"[(,]\s*attention_mask=(?!attention_mask\b|None\b)\w")
_PASSED_ON = re.compile(r"(?<![\w.\[])attention_mask\s*(?=[,)])|(?<=[\s(,])attention_mask\s*=(?!=)")
# GPT-OSS does not hand its positions to transformers' mask functions, which find documents by them.
_positions: ContextVar[Tensor | None] = ContextVar("liger_positions", default=None)
_counted: ContextVar[bool] = ContextVar("liger_counted", default=False)


@contextlib.contextmanager
def _holding(variable: ContextVar[Any], value: Any) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def in_forward(positions: Tensor | None) -> contextlib.AbstractContextManager[None]:
    """The context of a model's forward that was given these positions, or counts its own."""
    if torch.compiler.is_compiling():  # which does not follow context variables
        return contextlib.nullcontext()
    return _holding(_counted, True) if positions is None else _holding(_positions, positions)


def is_packed_sequence(position_ids: Tensor | None, batch_size: int) -> bool:
    """For transformers' flash attention, which looks in each layer whether positions begin again, and waits for the
    answer: those that a model has counted itself do not."""
    return False if _counted.get() else _is_packed_sequence(position_ids, batch_size)


_is_packed_sequence = modeling_flash_attention_utils._is_packed_sequence


def is_tracing() -> bool:
    """Whether the values of tensors cannot be read."""
    return torch.compiler.is_compiling() or (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())


class Causal(NamedTuple):
    """A mask that is causal within documents: the number of each token's document [batch, tokens], None for one
    document per row, and how many keys a token sees, its own included, None for all."""

    documents: Tensor | None = None
    window: int | None = None


def causal_of(function: Any) -> Causal | None:
    """What a mask function of transformers masks; None where that is something else."""
    if function is masking_utils.causal_mask_function:
        return Causal()
    made_by, _, name = getattr(function, "__qualname__", "").partition(".<locals>.")
    if getattr(function, "__module__", None) != masking_utils.__name__ or not name:
        return None
    values = inspect.getclosurevars(function).nonlocals
    if made_by == "and_masks":
        parts = [causal_of(part) for part in values["mask_functions"]]
        if any(part is None for part in parts):
            return None
        documents = [part.documents for part in parts if part is not None and part.documents is not None]
        windows = [part.window for part in parts if part is not None and part.window is not None]
        return Causal(documents[0] if documents else None, min(windows, default=None)) if len(documents) < 2 else None
    if made_by == "packed_sequence_mask_function":
        return Causal(values["packed_sequence_mask"])
    if made_by == "remap_positions_for_packed_sequence":  # positions that count up within each document
        return causal_of(values["mask_function"])
    return Causal(window=values["sliding_window"]) if made_by == "sliding_window_overlay" else None


def given_positions() -> Tensor | None:
    """The positions that the running model's forward was given."""
    return _positions.get()


def boundaries_of(documents: Tensor) -> Tensor:
    """The boundaries of documents that are numbered [batch, tokens]; no document spans rows."""
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    starts = begins.flatten().nonzero().flatten()
    return torch.nn.functional.pad(starts, (0, 1), value=documents.numel()).int()


def sinks_mask(batch_size: int, q_length: int | None = None, kv_length: int = 0, **others: Any) -> Tensor:
    """The mask for `sinks_attention`: boundaries, a padding mask or a dense mask (see above)."""

    def dense() -> Tensor:
        sizes = {"kv_length": kv_length, **({} if q_length is None else {"q_length": q_length})}
        return masking_utils.eager_mask(batch_size=batch_size, **sizes, **others)

    places = others.get("cache_position")  # in place of q_length, in transformers 4.57 and 5.0
    queries = q_length if places is None else places.shape[0]
    offsets = others.get("q_offset", 0), others.get("kv_offset", 0)
    if queries != kv_length or any(not isinstance(offset, int) or offset for offset in offsets):
        return dense()
    function = others.get("mask_function", masking_utils.causal_mask_function)
    if torch.compiler.is_compiling() and function is not masking_utils.causal_mask_function:
        return dense()  # torch's compiler does not follow closures
    padding = others.get("attention_mask")
    causal = causal_of(function)
    if causal is None or (padding is not None and (causal.documents is not None or padding.shape[-1] != kv_length)):
        return dense()
    documents = causal.documents
    if padding is None and documents is None and (positions := _positions.get()) is not None:
        documents = masking_utils.find_packed_sequence_indices(positions.expand(batch_size, -1))
    if padding is None and documents is None:
        return rows(batch_size, kv_length, others.get("device", getattr(places, "device", None)))
    if is_tracing():
        return dense()
    return padding if documents is None else boundaries_of(documents)


def dense_mask(mask: Tensor, query: Tensor, window: int | None, causal: bool = True) -> Tensor:
    """The mask that eager attention adds [batch, 1, tokens, tokens], of boundaries or of a padding mask."""
    batch, _, tokens, _ = query.shape
    places = torch.arange(tokens, device=query.device)
    after = places - places[:, None]  # by how many tokens a key follows a query
    seen = after <= 0 if causal else torch.ones_like(after, dtype=torch.bool)
    if window is not None:
        seen = seen & (after.abs() < window)
    if mask.dim() == 2:
        seen = seen & mask[:, None, None].bool()
    else:
        every = torch.arange(batch * tokens, device=query.device)
        numbers = torch.bucketize(every, mask, right=True).view(batch, 1, 1, tokens)
        seen = seen & (numbers == numbers.transpose(-1, -2))
    zero = torch.zeros((), dtype=query.dtype, device=query.device)
    return torch.where(seen, zero, torch.finfo(query.dtype).min)


def eager_of(module: torch.nn.Module) -> Callable[..., Any]:
    """The eager attention of a module's model."""
    forward = inspect.unwrap(original_forward(type(module)))
    return forward.__globals__["eager_attention_forward"]


def tokens_first(*operands: Tensor) -> list[Tensor]:
    """[batch · tokens, heads, D] of query, key and value [batch, heads, tokens, D], in autocast's dtype where it is on:
    there eager attention's products are, and scaled_dot_product_attention is."""
    device = operands[0].device.type
    if torch.is_autocast_enabled(device):
        operands = tuple(x.to(torch.get_autocast_dtype(device)) for x in operands)
    return [x.transpose(1, 2).flatten(0, 1) for x in operands]


def sinks_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """An attention implementation of transformers: ([batch, tokens, Hq, D], None), of query [batch, Hq, tokens, D], key
    and value [batch, Hk, tokens, D], and sinks s_aux [Hq]. Padding tokens get zeros.

    The model's eager attention runs with a dense mask, with dropout, where attention weights are requested, and where
    `attention_with_sinks` does not take the tensors.
    """
    q, k, v = tokens_first(query, key, value)
    if (
        attention_mask is None
        or attention_mask.dim() > 2
        or dropout
        or kwargs.get("output_attentions")
        or obstacle(q, k, v)
    ):
        if attention_mask is not None and attention_mask.dim() <= 2:
            attention_mask = dense_mask(attention_mask, query, sliding_window)
        others = {"sliding_window": sliding_window, "s_aux": s_aux, **kwargs}
        return eager_of(module)(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **others)
    batch, heads, tokens, width = query.shape
    boundaries, kept = None, None  # None: each row is a document
    if (packed := kwargs.get("cu_seq_lens_q")) is not None:
        boundaries = packed.int()
    elif attention_mask.dim() == 1:
        # No document spans rows: as many as rows are whole rows. With a window, boundaries are needed for those, too.
        whole = attention_mask.numel() == batch + 1 and (sliding_window is None or sliding_window >= tokens)
        boundaries = None if whole else attention_mask
    elif attention_mask.dim() == 2:
        real = attention_mask.flatten().nonzero().flatten()
        if real.numel() < batch * tokens:
            kept = real
            q, k, v = (x.index_select(0, kept) for x in (q, k, v))
            boundaries = torch.nn.functional.pad(attention_mask.sum(-1).cumsum(0), (1, 0)).int()
    out = attention_with_sinks(q, k, v, s_aux, boundaries, tokens, sliding_window, scaling)
    if kept is not None:
        out = out.new_zeros(batch * tokens, heads, width).index_copy(0, kept, out)
    return out.view(batch, tokens, heads, width), None


AttentionInterface.register(IMPLEMENTATION, sinks_attention)
AttentionMaskInterface.register(IMPLEMENTATION, sinks_mask)


def _takes_mask(function: Any) -> bool:
    code = getattr(function, "__code__", None)
    return code is not None and "attention_mask" in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


def _body(forward: Any) -> str | None:
    """The source of a forward without its signature and comments; None where there is no source."""
    try:
        source = inspect.getsource(forward)
    except (OSError, TypeError):
        return None
    source = re.sub(r'""".*?"""|#[^\n]*', "", source, flags=re.DOTALL)
    signature = re.search(r"\)\s*(->[^\n]*)?:\s*\n", source)
    return source[signature.end() :] if signature else source


@functools.cache
def passes_on(cls: type) -> bool:
    """Whether modules of a class do nothing with `attention_mask` but to give it to others."""
    forward = inspect.unwrap(original_forward(cls))
    if not _takes_mask(forward):
        return True
    body = _body(forward)
    sdpa = "scaled_dot_product_attention" in names_in(forward)  # with a mask that it knows
    return body is not None and not sdpa and not re.search(r"\battention_mask\b", _PASSED_ON.sub("", body))


@functools.cache
def passes_to_modules(cls: type) -> bool:
    """As passes_on, and no method of the class takes the mask either, as one that computes positions from it does."""
    names = names_in(inspect.unwrap(original_forward(cls)))
    methods = (inspect.getattr_static(cls, name, None) for name in names)
    return passes_on(cls) and not any(map(_takes_mask, methods))


@functools.cache
def makes_masks(cls: type) -> bool:
    """Whether modules of a class call attention with another mask than the one that they get. Where that one is None,
    such attention is not causal. Doge's do."""
    forward = inspect.unwrap(original_forward(cls)) if hasattr(cls, "forward") else None
    if not _takes_mask(forward) or "ALL_ATTENTION_FUNCTIONS" not in names_in(forward):
        return False
    body = _body(forward)
    return body is None or _OTHER_MASK.search(body) is not None


def has_sinks(cls: Any) -> bool:
    """Whether modules of a class call transformers' attention interface with a sink per head and a window, with nothing
    else that `sinks_attention` would have to know, and with the mask that they are given. DeepSeek-V4's lengthen it for
    compressed keys.
    """
    forward = inspect.unwrap(original_forward(cls)) if hasattr(cls, "forward") else None
    constants = getattr(getattr(forward, "__code__", None), "co_consts", ())
    keywords = {name for names in constants if isinstance(names, tuple) for name in names}
    return {"s_aux", "sliding_window"} <= keywords and "indices" not in keywords and passes_on(cls)


def _reason_to_keep(module: Any) -> str | None:
    if not getattr(module, "is_causal", True):
        return "it is not causal"
    if getattr(module, "attention_dropout", 0):
        return "it drops attention weights"
    width = getattr(module, "head_dim", 0)
    if getattr(module, "v_head_dim", width) != width:
        return "its values are of another width than its keys"
    if width > 256:
        return "its heads have more than 256 columns"
    implementation = module.config._attn_implementation
    return None if implementation in (None, "eager", IMPLEMENTATION) else f"it runs {implementation}"


def use_flash_attention(owners: Iterable[Any], report: Report) -> None:
    """Choose `IMPLEMENTATION` for live modules with sinks, and note classes of them, for whose models it is chosen when
    they are made."""
    for owner in owners:
        cls = owner if isinstance(owner, type) else type(owner)
        if not has_sinks(cls):
            continue
        if owner is cls:
            report.note("attention", cls.__name__, "attention_with_sinks")
        elif hasattr(owner, "config"):
            if reason := _reason_to_keep(owner):
                report.skip("attention", cls.__name__, reason)
            else:
                report.edits.set(owner.config, "_attn_implementation_internal", IMPLEMENTATION)
                report.note("attention", cls.__name__, "attention_with_sinks", 1)
