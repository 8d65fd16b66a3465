"""Forwards of transformers' models that do not search for packed sequences where there are none.

Without an attention mask, transformers looks in the positions of every batch for the beginnings of packed sequences
(`find_packed_sequence_indices` of masking_utils, in 4.57 to 5.24), also in those that the model has just counted
itself. The host waits for the answer once per forward. A compiled or captured forward cannot wait: it writes the mask
out, and attention computes all of it.

A model that is called without positions counts them, and there is nothing to find. It gets a forward that makes masks
without them. Positions that are given are searched as before.
"""

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

from liger_kernel.transformers.causal_lm import names_in
from liger_kernel.transformers.patching.place import with_globals

#: The functions of masking_utils that search, which take positions by name.
_SEARCHING = (
    "create_causal_mask",
    "create_sliding_window_causal_mask",
    "create_chunked_causal_mask",
    "create_masks_for_generate",
)


def _without_positions(home: Any, name: str) -> Callable[..., Any]:
    """The function that a modeling module calls `name` now, given no positions."""

    def create(*args: Any, **kwargs: Any) -> Any:
        return getattr(home, name)(*args, **{**kwargs, "position_ids": None})

    return create


@functools.cache
def _forward(original):
    inner = inspect.unwrap(original)
    home = sys.modules.get(getattr(inner, "__module__", ""))
    names = [name for name in _SEARCHING if name in names_in(inner) and hasattr(home, name)]
    parameters = list(inspect.signature(original).parameters)
    if not names or "position_ids" not in parameters:
        return None
    counting = with_globals(original, {name: _without_positions(home, name) for name in names})
    if counting is None:
        return None
    place = parameters.index("position_ids") - 1

    @functools.wraps(original)
    def forward(self, *args, **kwargs):
        given = args[place] if len(args) > place else kwargs.get("position_ids")
        return (counting if given is None else original)(self, *args, **kwargs)

    vars(forward).update(liger_original=original, liger_counts=True)
    return forward


def counting_forward(cls: Any) -> Callable[..., Any] | None:
    """The forward for models of a class that makes their masks without positions where none are given; None where the
    class's own makes no masks, or is such a forward."""
    return None if is_counting(cls) else _forward(cls.forward)


def is_counting(cls: Any) -> bool:
    """Whether models of a class have such a forward."""
    return hasattr(cls.forward, "liger_counts")


def counting(base: type) -> tuple[str, tuple[type], dict[str, Any]]:
    """The part, for replace_class, whose forward that is."""
    return base.__name__, (base,), {"forward": counting_forward(base)}
