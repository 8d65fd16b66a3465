"""Forwards of decoder layers and of attention that compute several steps by one operator.

A decoder layer whose source is known (formulas.py) gets a forward of this module, which adds to the residual stream and
normalises the sum at once. Attention keeps its own forward, whatever it is. That forward runs on a shallow copy of the
module in which q_proj, k_proj and v_proj share their results: the first of them that is called computes all three, if
they are called with the same tensor.

The operators run where a call of the modules would run what their classes say and nothing else
(liger_kernel/operators/linear.py and residual.py); the modules are called elsewhere.
"""

import functools
import inspect
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from liger_kernel.operators.linear import qkv, read_in
from liger_kernel.operators.residual import add_and_normalise, is_rms_norm, normalise
from liger_kernel.transformers.causal_lm import names_in
from liger_kernel.transformers.patching.formulas import formula_name
from liger_kernel.transformers.patching.mixer_functions import STARTS
from liger_kernel.transformers.patching.place import NewForward
from liger_kernel.transformers.patching.report import Report

ADD_AND_NORM, PROJECTIONS = "add and norm", "projections"
#: What a forward computes at once -> the operator that does, for reports.
OPERATORS = {ADD_AND_NORM: "fused_add_rms_norm", PROJECTIONS: "qkv"}
_QKV = ("q_proj", "k_proj", "v_proj")


class _Shared:
    """q_proj, k_proj and v_proj of one module during one call of its forward."""

    __slots__ = ("modules", "results", "version", "x")

    def __init__(self, modules: tuple[nn.Module, ...]) -> None:
        self.modules = modules
        self.x: torch.Tensor | None = None

    def result(self, i: int, x: torch.Tensor) -> torch.Tensor:
        if self.x is None:
            self.x, self.version, self.results = x, x._version, qkv(x, *self.modules)
        if self.results is None or x is not self.x or x._version != self.version:
            return self.modules[i](x)
        return self.results[i]


class _Projection:
    """One of three projections during such a call; its attributes are those of the module."""

    __slots__ = ("_i", "_shared")

    def __init__(self, shared: _Shared, i: int) -> None:
        self._shared, self._i = shared, i

    def __call__(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        # A tensor of inference mode has no version.
        if args or kwargs or x.__class__ is not torch.Tensor or x.is_inference():
            return self._shared.modules[self._i](x, *args, **kwargs)
        return self._shared.result(self._i, x)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._shared.modules[self._i], name)


@functools.cache
def _projects_once(code) -> bool:
    """Whether the source of a forward calls q_proj, k_proj and v_proj once each, with the same name."""
    try:
        source = inspect.getsource(code)
    except (OSError, TypeError):
        return False
    calls = re.findall(r"self\.([qkv]_proj)\((\w+)\)", source)
    return sorted(name for name, _ in calls) == sorted(_QKV) and len({given for _, given in calls}) == 1


def on_copy(
    original: Callable[..., Any], replaced: Callable[[dict[str, Any]], dict[str, Any] | None]
) -> Callable[..., Any]:
    """A forward that runs `original` on a shallow copy of the module, which has other submodules: those that `replaced`
    makes of the module's own, by their names; on the module itself where that is None, and under torch.compile."""

    @functools.wraps(original)
    def forward(self, *args, **kwargs):
        if torch.compiler.is_compiling():
            return original(self, *args, **kwargs)
        own = self.__dict__
        submodules = own["_modules"]
        if (others := replaced(submodules)) is None:
            return original(self, *args, **kwargs)
        copy = object.__new__(self.__class__)
        of_copy = copy.__dict__
        of_copy.update(own)
        of_copy["_modules"] = {**submodules, **others}
        result = original(copy, *args, **kwargs)
        for name, value in of_copy.items():  # what the forward, or the attention function that it calls, has set
            if own.get(name) is not value and name != "_modules":
                own[name] = value
        return result

    return forward


def _sharing(submodules: dict[str, Any]) -> dict[str, Any] | None:
    modules = submodules.get("q_proj"), submodules.get("k_proj"), submodules.get("v_proj")
    if None in modules or not torch.is_grad_enabled() and type(modules[0]) is nn.Linear:
        return None
    shared = _Shared(modules)  # type: ignore[arg-type]
    return {name: _Projection(shared, i) for i, name in enumerate(_QKV)}


def projecting(original: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of attention that computes q_proj, k_proj and v_proj by one operator, and all else as `original`."""
    forward = on_copy(original, _sharing)
    vars(forward).update(liger_original=original, liger_fuses=PROJECTIONS)
    return forward


@dataclass(frozen=True)
class Steps:
    """The names of a decoder layer's submodules, in the order in which they run, and of what else it reads.

    `after_mixer` and `after_mlp` are norms or dropouts of what is then added, or nothing; `scale` is a factor of it.
    """

    norm: str = "input_layernorm"
    mixer: str = "self_attn"
    after_mixer: str | None = None
    second_norm: str = "post_attention_layernorm"
    mlp: str = "mlp"
    after_mlp: str | None = None
    scale: str | None = None
    #: A mixer that a layer may have instead, its name of the cache, and its only arguments; all that the layer has but
    #: those of rotary attention if None.
    linear: str | None = None
    linear_cache: str = "cache_params"
    linear_only: tuple[str, ...] | None = None


_NEXT = "post_feedforward_layernorm"
_CONVOLVES = Steps(
    norm="operator_norm", second_norm="ffn_norm", mlp="feed_forward", linear="conv", linear_cache="past_key_values"
)
#: The part of a decoder layer (formulas.py) -> its steps.
STEPS = {
    "decoder_layer": Steps(),
    "scaled_decoder_layer": Steps(scale="residual_multiplier"),
    "sandwich_decoder_layer": Steps(
        after_mixer="post_attention_layernorm", second_norm="pre_feedforward_layernorm", after_mlp=_NEXT
    ),
    "glm4_decoder_layer": Steps(after_mixer="post_self_attn_layernorm", after_mlp="post_mlp_layernorm"),
    "dropout_decoder_layer": Steps(after_mixer="resid_attn_dropout", after_mlp="resid_mlp_dropout"),
    "feed_forward_decoder_layer": Steps(second_norm="pre_ff_layernorm", mlp="feed_forward"),
    "hybrid_decoder_layer": Steps(linear="linear_attn"),
    "early_hybrid_decoder_layer": Steps(
        linear="linear_attn", linear_only=("cache_params", "cache_position", "attention_mask")
    ),
    "convolution_decoder_layer": _CONVOLVES,
    "early_convolution_decoder_layer": replace(
        _CONVOLVES, linear_only=("past_key_values", "attention_mask", "seq_idx")
    ),
    "sandwich_convolution_decoder_layer": replace(
        _CONVOLVES, after_mixer="post_operator_norm", after_mlp="post_ffn_norm"
    ),
}


def linear_arguments(kwargs: dict[str, Any], steps: Steps) -> dict[str, Any]:
    """The arguments of the other mixer of a hybrid decoder layer, of those of the layer."""
    given = {name: value for name, value in kwargs.items() if name not in ("position_embeddings", "position_ids")}
    if "past_key_values" in given:
        given[steps.linear_cache] = given.pop("past_key_values")
    if steps.linear_only is None:
        return given
    if "seq_idx" in steps.linear_only and given.get("seq_idx") is None:
        given["seq_idx"] = given.get(STARTS)  # where documents begin tells them apart, as their numbers do
    return {name: given[name] for name in steps.linear_only if name in given}


def adding(original: Callable[..., Any], steps: Steps) -> Callable[..., Any]:
    """The forward of a decoder layer that adds attention's result to the residual stream and normalises the sum by one
    operator; `original` where it is called by position."""

    @functools.wraps(original)
    def forward(self, hidden_states, *args, **kwargs):
        if args:
            return original(self, hidden_states, *args, **kwargs)
        modules = self._modules
        scale = None if steps.scale is None else getattr(self, steps.scale)
        if steps.linear is not None and steps.linear in modules:
            normalised = modules[steps.norm](hidden_states)
            added = modules[steps.linear](hidden_states=normalised, **linear_arguments(kwargs, steps))
        else:
            mixer = modules[steps.mixer]
            normalised = normalise(modules[steps.norm], hidden_states, read_in(mixer))
            added = mixer(hidden_states=normalised, **kwargs)[0]
        if steps.after_mixer is not None:
            added = modules[steps.after_mixer](added)
        if scale is not None:
            added = added * scale
        mlp = modules[steps.mlp]
        residual, normalised = add_and_normalise(modules[steps.second_norm], hidden_states, added, read_in(mlp))
        added = mlp(normalised)
        if isinstance(added, tuple):  # experts', with the router's logits
            added = added[0]
        if steps.after_mlp is not None:
            added = modules[steps.after_mlp](added)
        return residual + (added if scale is None else added * scale)

    vars(forward).update(liger_original=original, liger_fuses=ADD_AND_NORM)
    return forward


def fused_forward(cls: Any) -> Any:
    """A forward for modules of a class that computes several steps at once, with the name of these in `liger_fuses`;
    None where there is none."""
    if not issubclass(cls, nn.Module) or issubclass(cls, PreTrainedModel):
        return None
    return _fused_forward(cls, cls.forward)


@functools.cache
def _fused_forward(cls, forward):
    if hasattr(forward, "liger_fuses"):
        return None
    code = getattr(inspect.unwrap(forward), "__code__", None)
    if code is not None and _projects_once(code):
        return projecting(forward)
    steps = STEPS.get(formula_name(cls) or "")
    return None if steps is None else adding(forward, steps)


def fuse(owners: Iterable[Any], report: Report) -> None:
    """Give live layers and attention, or classes of them whose norms are replaced, such forwards."""
    norms = {entry.name for entry in report.replaced if entry.switch == "rms_norm"}

    def fits(owner, forward):
        if forward.liger_fuses != ADD_AND_NORM:
            return True
        if isinstance(owner, type):
            return norms & names_in(owner.__init__)
        return any(is_rms_norm(child.__class__) for child in owner.children())

    by = lambda forward: OPERATORS.get(getattr(forward, "liger_fuses", ""))
    report.give_forwards(owners, fused, "layers", by, fits)


#: The part whose forward that is.
fused = NewForward(fused_forward)
