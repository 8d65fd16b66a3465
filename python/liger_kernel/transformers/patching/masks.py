"""Forwards of transformers' models that do not search for packed sequences where there are none.

Without an attention mask, transformers looks in the positions of every batch for the beginnings of packed sequences
(`find_packed_sequence_indices` of masking_utils, in 4.57 to 5.24), also in those that the model has just counted
itself. The host waits for the answer once per forward. A compiled or captured forward cannot wait: it writes the mask
out, and attention computes all of it.

A model that is called without positions counts them, and there is nothing to find. It gets a forward that makes masks
without them. Positions that are given are searched as before. Under sdpa neither documents nor padding nor the windows
of encoders are written out as a mask (packed.py).
"""

import functools
import inspect
import sys
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, masking_utils, modeling_flash_attention_utils

from liger_kernel.operators.attention import rows
from liger_kernel.transformers.causal_lm import names_in
from liger_kernel.transformers.patching import packed
from liger_kernel.transformers.patching.attention import (
    IMPLEMENTATION,
    given_positions,
    in_forward,
    is_packed_sequence,
    is_tracing,
    makes_masks,
)
from liger_kernel.transformers.patching.ones import CACHES, is_counting, takes_none
from liger_kernel.transformers.patching.place import NewForward, with_globals
from liger_kernel.transformers.patching.report import Report

#: The functions of masking_utils that search, which take positions by name.
SEARCHING = (
    "create_causal_mask",
    "create_sliding_window_causal_mask",
    "create_chunked_causal_mask",
    "create_masks_for_generate",
)
#: Those of encoders, whose tokens see the ones after them: they do not search.
ENCODING = ("create_bidirectional_mask", "create_bidirectional_sliding_window_mask")
#: The report's word for the forward of an encoder.
ENCODER = "padding and windows without masks"


def _is_plain(attention_mask: Any = None, past_key_values: Any = None, **others: Any) -> bool:
    """Whether nothing is masked but what the function's name says, and there are as many keys as queries. transformers
    does not look while a CUDA graph is captured nor, before 5.18, while it is compiled."""
    sizes = ("config", "input_embeds", "inputs_embeds", "cache_position", "position_ids")
    more = any(value is not None for name, value in others.items() if name not in sizes)
    return attention_mask is None and past_key_values is None and not more


def _embeddings(arguments: dict[str, Any]) -> Any:
    """Those of a mask function, which transformers 5.0 calls otherwise."""
    return arguments["inputs_embeds" if "inputs_embeds" in arguments else "input_embeds"]


def _without_positions(home: Any, name: str) -> Callable[..., Any]:
    """The function that a modeling module calls `name` now, given no positions; with arguments that it gets by place,
    as in Gemma 4 of 5.6 and in Granite's hybrids of 5.0, as it is."""

    def create(*args: Any, **kwargs: Any) -> Any:
        function = getattr(home, name)
        # What somebody else has put in its place may mask anything.
        known = masking_utils.create_causal_mask, masking_utils.create_sliding_window_causal_mask
        causal = len(args) == 0 and function in known  # torch 2.11's compiler knows no `not` of a tuple
        if causal and _is_plain(**kwargs):
            implementation = kwargs["config"]._attn_implementation
            if implementation == "sdpa" and function is masking_utils.create_causal_mask:
                return None
            if implementation == IMPLEMENTATION:
                embeddings = _embeddings(kwargs)
                return rows(embeddings.shape[0], embeddings.shape[1], embeddings.device)
        if "position_ids" in kwargs:
            kwargs["position_ids"] = None
        return function(*args, **kwargs)

    return create


class Sees(NamedTuple):
    """Which keys a token sees: so many before it, its own included, None for all; as many after it unless `causal`."""

    window: int | None
    causal: bool


def _sees(function: Any, arguments: dict[str, Any], encodes: bool) -> Sees | None:
    """What a mask function of transformers lets tokens see, which `encodes` makes an encoder's; None where that is
    something else."""
    window = getattr(arguments.get("config"), "sliding_window", None) or 0
    if function is masking_utils.create_causal_mask:
        return Sees(None, not encodes)
    if function is masking_utils.create_sliding_window_causal_mask:
        return Sees(window, not encodes) if window > 1 else None
    whole, windowed = (getattr(masking_utils, name, None) for name in ENCODING)  # older versions lack some
    if function is whole:
        return Sees(None, False)
    return Sees(window + 1, False) if function is windowed and window else None


def _of_whole_rows(config: Any, x: Tensor, window: int | None) -> Any:
    """The mask of an encoder's rows x [batch, tokens, ...] without padding; NotImplemented where transformers makes
    it."""
    if window is None or window >= x.shape[1]:
        return None
    runs = x.is_cuda and packed.is_chosen() and packed.encoder_takes(config, x)
    return packed.whole(x, window) if runs else NotImplemented


def _without_windows(home: Any, name: str) -> Callable[..., Any]:
    """The function of an encoder that a modeling module calls `name` now, but under sdpa whole rows have no mask, nor
    their windows on a GPU. transformers before 5.18 writes all masks out while it is compiled or captured; that of
    tokens that all see each other has no element per key, and sdpa then keeps all scores."""

    def create(*args: Any, **kwargs: Any) -> Any:
        function = getattr(home, name)
        sees = None if args else _sees(function, kwargs, False)
        if sees is not None and _is_plain(**kwargs) and kwargs["config"]._attn_implementation == "sdpa":
            mask = _of_whole_rows(kwargs["config"], _embeddings(kwargs), sees.window)
            if mask is not NotImplemented:
                return mask
        return function(*args, **kwargs)

    return create


def _is_encoder(home: Any, arguments: dict[str, Any]) -> bool:
    """Whether a configuration has made an encoder of a model that is causal otherwise: EmbeddingGemma. The function
    that its masks get beside the causal one, `or_mask_function`, then lets a token see those after it."""
    flag = getattr(arguments.get("config"), "use_bidirectional_attention", None) is True
    return flag and getattr(home, "__name__", "") == "transformers.models.gemma3.modeling_gemma3"


def _without_empty_cache(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments without a cache that holds nothing yet, as a forward makes one where `use_cache` is left on."""
    empty = lambda cache: type(cache) is DynamicCache and cache.get_seq_length() == 0
    return {name: None if name in CACHES and empty(value) else value for name, value in arguments.items()}


def _with_documents(home: Any, name: str) -> Callable[..., Any]:
    """The function that a modeling module calls `name` now, but under sdpa, where rows are packed or padded, the places
    of documents; for an encoder neither the masks of whole rows."""
    searches = name in SEARCHING
    otherwise = _without_positions(home, name) if searches else _without_windows(home, name)

    def create(*args: Any, **kwargs: Any) -> Any:
        function, padding = getattr(home, name), kwargs.get("attention_mask")
        given, encodes = searches and given_positions() is not None, _is_encoder(home, kwargs)
        sees = None if args or (encodes and given) else _sees(function, kwargs, encodes)
        asked = {**kwargs, "attention_mask": None} | ({"or_mask_function": None} if encodes else {})
        # Without gradients tokens may be generated from a row's end, which is padding; and transformers looks for
        # packed documents only where there is no cache.
        if encodes or (padding is not None and torch.is_grad_enabled()):
            asked = _without_empty_cache(asked)
        if sees is not None and _is_plain(**asked) and kwargs["config"]._attn_implementation == "sdpa":
            embeddings = _embeddings(kwargs)
            runs = sees.causal or packed.encoder_takes(kwargs["config"], embeddings)
            positions = kwargs.get("position_ids") if given else None
            places = packed.places(embeddings, padding, positions) if runs else None
            if places is packed.WHOLE:  # every token is seen, which one look has told
                kwargs["attention_mask"], given = None, False
                mask = NotImplemented if sees.causal else _of_whole_rows(kwargs["config"], embeddings, sees.window)
                if mask is not NotImplemented:
                    return mask
            elif places is not None:
                return packed.mask(*places, *sees)
        return (function if given else otherwise)(*args, **kwargs)

    return create


@functools.cache
def _forward(original):
    inner = inspect.unwrap(original)
    home = sys.modules.get(getattr(inner, "__module__", ""))
    called = lambda names: [name for name in names if name in names_in(inner) and hasattr(home, name)]
    searching, encoding = called(SEARCHING), called(ENCODING)
    parameters = list(inspect.signature(original).parameters)
    if not (searching or encoding) or "position_ids" not in parameters:
        return None
    counted = {name: _without_positions(home, name) for name in searching}
    counting = tracing = with_globals(original, counted)
    if encoding and packed.hands_on(home):
        tracing = with_globals(original, counted | {name: _without_windows(home, name) for name in encoding})
    placing = with_globals(original, {name: _with_documents(home, name) for name in searching + encoding})
    if counting is None:
        return None
    place = parameters.index("position_ids") - 1

    @functools.wraps(original)
    def forward(self, *args, **kwargs):
        given = args[place] if len(args) > place else kwargs.get("position_ids")
        with in_forward(given):
            if packed.takes(self, bool(encoding)):
                chosen = placing
            elif given is None or not searching:
                chosen = tracing if is_tracing() else counting
            else:
                chosen = original
            return chosen(self, *args, **kwargs)

    by = "masks without positions" if searching else ENCODER
    vars(forward).update(liger_counts=original, liger_takes_none=takes_none, liger_masks=by)
    return forward


def counting_forward(cls: Any) -> Callable[..., Any] | None:
    """The forward for models of a class that makes their masks without positions where none are given; None where the
    class's own makes no masks, or is such a forward, or the class is an encoder that does not know sdpa."""
    if is_counting(cls) or not issubclass(cls, PreTrainedModel):
        return None
    forward = _forward(cls.forward)
    return None if getattr(forward, "liger_masks", None) == ENCODER and not cls._supports_sdpa else forward


def count(owners: Iterable[Any], report: Report) -> None:
    """Give live models, or classes of models, such forwards."""
    owners = [*owners]
    # The softmax of a question's answer is over all tokens of a row.
    answers = any(type(owner).__name__.endswith("ForQuestionAnswering") for owner in owners)
    chooses = "an answer is chosen among all tokens, with padding" if answers else None

    def fits(owner: Any, forward: Any) -> bool:
        classes: set[Any] = set() if isinstance(owner, type) else {type(module) for module in owner.modules()}
        reason = "its attention builds its own mask" if any(map(makes_masks, classes)) else chooses
        if reason is None and forward.liger_masks == ENCODER:
            reason = packed.reason_to_keep(classes - {type(owner)}, True)
        if reason:
            report.skip("masks", type(owner).__name__, reason)
        return reason is None

    report.edits.set(modeling_flash_attention_utils, "_is_packed_sequence", is_packed_sequence)
    packed.use(report)
    report.give_forwards(owners, counting, "masks", lambda forward: getattr(forward, "liger_masks", None), fits)


#: The part whose forward that is.
counting = NewForward(counting_forward)
