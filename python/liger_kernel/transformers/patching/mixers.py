"""What a patch does for mixers of hybrid models, so that they call the functions of mixer_functions.py.

In transformers 5.15 and newer a mixer calls functions of its modeling module; MIXERS of families.py says which one is
replaced by which. They find documents in the keyword arguments that the model was given: `cu_seqlens`, else
`cu_seq_lens_q`, else `seq_idx`. A model that gets nothing but position_ids keeps these to its attention, so that it
gets a forward that reads them, once per step, and hands on where documents begin as `STARTS`. Functions that are not
replaced drop what they do not know.

Before, gated delta nets hold their functions as attributes, the convolution as None where causal-conv1d is not
installed.
"""

import dis
import functools
import inspect
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from liger_kernel.operators.coverage import has_replaced_forward
from liger_kernel.operators.documents import document_starts
from liger_kernel.transformers.causal_lm import names_in, original_forward
from liger_kernel.transformers.patching.formulas import as_written, formula_name
from liger_kernel.transformers.patching.masks import SEARCHING
from liger_kernel.transformers.patching.mixer_functions import (
    STARTS,
    liger_causal_conv1d_fn,
    liger_chunk_gated_delta_rule,
    starts_in,
)
from liger_kernel.transformers.patching.ones import CACHES
from liger_kernel.transformers.patching.place import NewForward
from liger_kernel.transformers.patching.report import Report

_MASKS = frozenset((*SEARCHING, "create_recurrent_attention_mask"))
# Of these models layers drop the keyword arguments of the model, or mixers do.
_DROPPED = re.compile(r"\.modeling_(jamba|zamba|inkling\w*)$")


def plain_causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **_: Any
) -> Tensor:
    """The convolution by torch's operators, as mixers run it that hold no such function."""
    width = weight.shape[-1]
    y = F.conv1d(x.to(weight.dtype), weight.unsqueeze(1), bias, padding=width - 1, groups=len(weight))
    y = y[..., : x.shape[-1]]
    return (y if activation is None else ACT2FN[activation](y)).to(x.dtype)


@dataclass(frozen=True)
class Held:
    """A function that a mixer holds: `ours`, and `theirs` for what that does not take. Unlike a function that one
    makes of the two, it can be pickled."""

    ours: Callable[..., Any]
    theirs: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self.ours(*args, **kwargs)
        return self.theirs(*args, **kwargs) if result is NotImplemented else result


# Attributes of mixers before transformers 5.15, which take them from their modeling module -> what takes their place,
# and what runs, of a module, where an attribute is None or the module has none.
_HELD: dict[str, tuple[Callable[..., Any], Callable[[Any], Any]]] = {
    "causal_conv1d_fn": (liger_causal_conv1d_fn, lambda home: plain_causal_conv1d),
    "chunk_gated_delta_rule": (liger_chunk_gated_delta_rule, lambda home: home.torch_chunk_gated_delta_rule),
}


def _is_own(home: Any, name: str) -> bool:
    """Whether a modeling module defines a function of this name, as from transformers 5.15 on."""
    function = as_written(getattr(home, name, None))
    return inspect.isfunction(function) and function.__module__ == home.__name__


@functools.cache
def _held_by(cls: Any) -> tuple[str, ...]:
    """The functions that modules of a class keep as attributes, which their forward calls."""
    makes = getattr(inspect.unwrap(cls.__init__), "__code__", None)
    if makes is None or not hasattr(cls, "forward"):
        return ()
    kept = {i.argval for i in dis.get_instructions(makes) if i.opname == "STORE_ATTR"}
    return tuple(name for name in _HELD if name in kept & names_in(inspect.unwrap(original_forward(cls))))


def hold(owners: Iterable[Any], namespace: Any, report: Report) -> None:
    """Give mixers that hold functions as attributes those of this package: live modules theirs, and of classes the
    modeling module, from which they take them when they are made."""
    for owner in owners:
        cls = owner if isinstance(owner, type) else type(owner)
        live = owner is not cls
        for name in _held_by(cls):
            if live and has_replaced_forward(owner):
                report.skip("mixers", name, f"the forward of a {cls.__name__} was replaced on the instance")
                continue
            ours, plain = _HELD[name]
            place = owner if live else namespace
            theirs = getattr(place, name, None)
            if not isinstance(theirs, Held):
                home = sys.modules[inspect.unwrap(original_forward(cls)).__module__]
                report.edits.set(place, name, Held(ours, theirs or plain(home)))
            report.note("mixers", name if live else f"{name} of {cls.__name__}", ours.__name__, 1 if live else None)


def _of_text(positions: Tensor | None) -> Tensor | None:
    """The positions [batch, tokens] that count documents' tokens: of four for each token the first; of three, which
    count an image's rows and columns, none."""
    if positions is not None and positions.dim() == 3:
        return positions[0] if positions.shape[0] == 4 else None
    return positions if positions is not None and positions.dim() == 2 else None


def _starts_of_step(given: dict[str, Any]) -> Tensor | None:
    """`starts` of what a model's forward was given. transformers looks in positions only where there is no mask."""
    inputs = given.get("input_ids")
    inputs = given.get("inputs_embeds") if inputs is None else inputs
    if inputs is None or inputs.dim() < 2:
        return None
    starts = starts_in(given, *inputs.shape[:2])
    if starts is None and given.get("attention_mask") is None:
        positions = _of_text(given.get("position_ids"))
        if positions is not None and positions.shape[1] == inputs.shape[1]:
            starts = document_starts(positions.shape[1], position_ids=positions)
    return None if starts is NotImplemented else starts


def _makes_masks(code: Any) -> bool:
    """Whether a function, or one in it, makes transformers' masks: the forward of a model that hands on to layers."""
    inner = (part for part in code.co_consts if inspect.iscode(part))
    return not _MASKS.isdisjoint(code.co_names) or any(map(_makes_masks, inner))


@functools.cache
def _forward(original):
    inner = inspect.unwrap(original)
    home = sys.modules.get(getattr(inner, "__module__", ""))
    parameters = inspect.signature(original).parameters
    takes_more = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    if (
        home is None
        or _DROPPED.search(home.__name__)
        or not takes_more
        or "position_ids" not in parameters
        or not _makes_masks(inner.__code__)
    ):
        return None
    if not _is_own(home, "causal_conv1d_fn"):  # which all such mixers call
        return None
    names = list(parameters)[1:]

    @functools.wraps(original)
    def forward(self, *args, **kwargs):
        if kwargs.get(STARTS) is None:
            starts = _starts_of_step({**dict(zip(names, args)), **kwargs})
            if starts is not None:
                kwargs[STARTS] = starts
        return original(self, *args, **kwargs)

    vars(forward)["liger_documents"] = original
    return forward


def documents_forward(cls: Any) -> Callable[..., Any] | None:
    """The forward for models of a class that hands on where documents begin; None where the class's own calls no such
    mixers, or is such a forward."""
    if not issubclass(cls, PreTrainedModel) or hasattr(cls.forward, "liger_documents"):
        return None
    return _forward(cls.forward)


#: The part whose forward that is.
handing_on = NewForward(documents_forward)


def hand_documents_on(owners: Iterable[Any], report: Report) -> None:
    """Give live models, or classes of models, such forwards."""
    by = lambda forward: "documents of position_ids" if hasattr(forward, "liger_documents") else None
    report.give_forwards(owners, handing_on, "mixers", by)


#: What a forward computes at once, for reports.
CONVOLVES = "gates and convolution"


@functools.cache
def _convolving(original):
    masked = inspect.unwrap(original).__globals__["apply_mask_to_padding_states"]

    @functools.wraps(original)
    def forward(self, hidden_states, *args, **kwargs):
        conv = self.conv
        cached = args or any(kwargs.get(name) is not None for name in CACHES)
        if cached or getattr(conv, "_hf_hook", None) is not None:
            return original(self, hidden_states, *args, **kwargs)
        before, after, x = self.in_proj(masked(hidden_states, kwargs.get("attention_mask"))).chunk(3, -1)
        x, weight = (before * x).transpose(1, 2), conv.weight.squeeze(1)
        y = liger_causal_conv1d_fn(x, weight, conv.bias, **kwargs)
        if y is NotImplemented:
            y = plain_causal_conv1d(x, weight, conv.bias)
        return self.out_proj(after * y.transpose(1, 2))

    vars(forward).update(liger_original=original, liger_fuses=CONVOLVES)
    return forward


def convolving_forward(cls: Any) -> Callable[..., Any] | None:
    """The forward of a gated short convolution, out_proj(after · conv(before · x)) of [before, after, x] = in_proj(h),
    in the layout of the projection, with neighbouring channels; None for a class that is none, or has it.

    transformers takes the three of a view with neighbouring tokens: their gradients are written in that layout, and
    copied to the other. With a cache, or arguments by place, the original runs.
    """
    if not issubclass(cls, nn.Module) or hasattr(cls.forward, "liger_fuses"):
        return None
    return _convolving(cls.forward) if formula_name(cls) == "gated_convolution" else None


#: The part whose forward that is.
convolving = NewForward(convolving_forward)


def replace_rest(owners: Iterable[nn.Module | type], namespace: Any, report: Report) -> None:
    """What a patch does for mixers besides replacing functions of modeling modules."""
    hold(owners, namespace, report)
    replaced = {entry.name.partition(" ")[0] for entry in report.replaced if entry.switch == "mixers"}
    if "causal_conv1d_fn" in replaced:
        by = lambda forward: CONVOLVES if getattr(forward, "liger_fuses", None) == CONVOLVES else None
        report.give_forwards(owners, convolving, "mixers", by)
    if replaced:
        hand_documents_on(owners, report)
