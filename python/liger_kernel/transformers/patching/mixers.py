"""The functions that mixers of hybrid models call: short convolutions, within packed documents.

In transformers 5.15 and newer a mixer calls functions of its modeling module; MIXERS of families.py says which one is
replaced by which function of this file. They take the keyword arguments that the model was given, and find documents in
them: `cu_seqlens`, else `cu_seq_lens_q`, else `seq_idx`. A model that gets nothing but position_ids keeps these to its
attention, so that it gets a forward that reads them, once per step, and hands on where documents begin as `STARTS`.
Functions that are not replaced drop what they do not know.

Before, gated delta nets hold the convolution as an attribute, None where causal-conv1d is not installed.
"""

import dis
import functools
import inspect
import re
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from liger_kernel.operators.causal_conv1d import ACTIVATIONS, liger_causal_conv1d
from liger_kernel.operators.coverage import CAUSAL_CONV1D_KERNELS, DENSE, has_replaced_forward, kernels_cover
from liger_kernel.operators.documents import document_starts
from liger_kernel.transformers.causal_lm import names_in, original_forward
from liger_kernel.transformers.patching.families import MIXERS
from liger_kernel.transformers.patching.formulas import as_written
from liger_kernel.transformers.patching.masks import SEARCHING
from liger_kernel.transformers.patching.place import NewForward
from liger_kernel.transformers.patching.report import Report

#: The keyword argument that says where documents begin: `starts` of liger_kernel.operators.documents.
STARTS = "liger_starts"
_MASKS = frozenset((*SEARCHING, "create_recurrent_attention_mask"))
# Of these models layers drop the keyword arguments of the model, or mixers do.
_DROPPED = re.compile(r"\.modeling_(jamba|zamba|inkling\w*)$")
_HELD = "causal_conv1d_fn"  # the attribute of mixers before transformers 5.15


def starts_in(given: dict[str, Any], batch: int, tokens: int) -> Any:
    """`starts` [batch, tokens] of a call's keyword arguments; None where they name no documents, NotImplemented where
    what they name is of other rows: those of a cache come before."""
    starts, lengths = given.get(STARTS), given.get("cu_seqlens")
    lengths = given.get("cu_seq_lens_q") if lengths is None else lengths
    index = given.get("seq_idx")
    if starts is None:
        if lengths is not None and batch != 1:
            return NotImplemented
        if lengths is None and index is not None and index.dim() != 2:
            return NotImplemented
        starts = document_starts(tokens, lengths, index)
    if starts is None:
        return None
    if starts.shape[0] not in (1, batch) or starts.shape[1] != tokens:
        # Positions are no request: without this part, nothing reads them.
        return None if lengths is None and index is None else NotImplemented
    return starts.expand(batch, tokens)


def liger_causal_conv1d_fn(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **kwargs: Any
) -> Any:
    """transformers' causal_conv1d_fn, within the documents that keyword arguments name; NotImplemented for what
    liger_causal_conv1d does not take."""
    if not kernels_cover(x, CAUSAL_CONV1D_KERNELS) or activation not in ACTIVATIONS or weight.shape[-1] > 8:
        return NotImplemented
    if any(t is not None and (type(t) not in DENSE or not kernels_cover(t)) for t in (x, weight, bias)):
        return NotImplemented
    starts = starts_in(kwargs, x.shape[0], x.shape[2])
    return starts if starts is NotImplemented else liger_causal_conv1d(x, weight, bias, activation, starts=starts)


def causal_conv1d_or_plain(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **kwargs: Any
) -> Tensor:
    """The same, and torch's operators for what it does not take, as mixers run them that hold no such function."""
    y = liger_causal_conv1d_fn(x, weight, bias, activation, **kwargs)
    if y is not NotImplemented:
        return y
    width = weight.shape[-1]
    y = F.conv1d(x.to(weight.dtype), weight.unsqueeze(1), bias, padding=width - 1, groups=len(weight))
    y = y[..., : x.shape[-1]]
    return (y if activation is None else ACT2FN[activation](y)).to(x.dtype)


def _is_own(home: Any, name: str) -> bool:
    """Whether a modeling module has a function of this name of its own, as from transformers 5.15 on."""
    function = as_written(getattr(home, name, None))
    return inspect.isfunction(function) and function.__module__ == home.__name__


@functools.cache
def _holds(cls: Any) -> bool:
    """Whether modules of a class keep the convolution as an attribute, which their forward calls."""
    makes = getattr(inspect.unwrap(cls.__init__), "__code__", None)
    kept = makes is not None and any(
        i.opname == "STORE_ATTR" and i.argval == _HELD for i in dis.get_instructions(makes)
    )
    return kept and _HELD in names_in(inspect.unwrap(original_forward(cls)))


def hold(owners: Iterable[Any], namespace: Any, report: Report) -> None:
    """Give mixers that hold the convolution as an attribute this one: live modules theirs, and of classes the modeling
    module, from which they take it when they are made."""
    for owner in owners:
        cls = owner if isinstance(owner, type) else type(owner)
        if not hasattr(cls, "forward") or not _holds(cls):
            continue
        if owner is cls:
            report.edits.set(namespace, _HELD, causal_conv1d_or_plain)
            report.note("mixers", f"{_HELD} of {cls.__name__}", liger_causal_conv1d_fn.__name__)
        elif has_replaced_forward(owner):
            report.skip("mixers", _HELD, f"the forward of a {cls.__name__} was replaced on the instance")
        else:
            report.edits.set(owner, _HELD, causal_conv1d_or_plain)
            report.note("mixers", _HELD, liger_causal_conv1d_fn.__name__, 1)


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
    if not any(_is_own(home, name) for name in MIXERS):
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


def replace_rest(owners: Iterable[nn.Module | type], namespace: Any, report: Report) -> None:
    """What a patch does for mixers besides replacing functions of modeling modules."""
    hold(owners, namespace, report)
    if any(entry.switch == "mixers" for entry in report.replaced):
        hand_documents_on(owners, report)
