"""When the forward of a class of this package stands for that of a module of another class: one Part for each.

The classes themselves know nothing of patching. A class without a Part has that of the class that it derives from.
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from liger_kernel.operators import activation, experts, gated_delta_rule, gated_norm, mlp, norm, router
from liger_kernel.operators.coverage import (
    ACTIVATION_KERNELS,
    CHANNEL_GATES_KERNELS,
    EXPERTS_KERNELS,
    GATED_KERNELS,
    GATED_NORM_KERNELS,
    NORM_KERNELS,
    ROUTER_KERNELS,
    UNGATED_EXPERTS_KERNELS,
    XIELU_KERNELS,
    is_dense,
    kinds_in,
)
from liger_kernel.utils import in_float_under_autocast


@dataclass(frozen=True)
class Part:
    """The conditions of a forward.

    Args:
        kernels: the kernels that it needs for the input's dtype and device.
        keep: (module, running) -> why the module's own forward must run, or None. Not running: the module's weights may
            be shards of those that its forward sees.
        dtype: (module, x) -> x in the dtype of the original's result; None where no dtype of x gives that one.
        attributes: (class, module) -> what the class's forward reads and a module of another class lacks; keywords are
            values in place of the class's defaults.
    """

    kernels: tuple[str, ...] = ()
    keep: Callable[[Any, bool], str | None] | None = None
    dtype: Callable[[Any, Tensor], Tensor | None] | None = None
    attributes: Callable[..., dict[str, Any]] | None = None


def rms_norm_input(x: Tensor, weight: Tensor | None, casting_mode: str) -> Tensor | None:
    """x in the dtype of the result of an RMSNorm, or None. Where it rounds before the weight, the product with the
    weight has the dtype of both."""
    if weight is None or weight.dtype is x.dtype and weight.dim():
        return x
    if weight.dtype is torch.float64 or weight.dim() == 0:  # Gemma 3n's one, of transformers 4
        return None
    return x if casting_mode == "gemma" else x.to(torch.promote_types(x.dtype, weight.dtype))


def _of_rms_norm(module: Any, x: Tensor) -> Tensor | None:
    return rms_norm_input(x, norm.weight_in(module), module.casting_mode)


def _eps(module, default):
    """What eps_of reads and a module of another class lacks: `variance_epsilon` is also what callers may read."""
    if getattr(module, "variance_epsilon", None) is not None:
        return {}
    eps = getattr(module, "eps", None)
    named = {"liger_eps": "eps"} if hasattr(module, "eps") else {}
    return {"variance_epsilon": default if eps is None else eps, **named}


def _rms_norm_attributes(cls: Any, module: nn.Module, **preset: Any) -> dict[str, Any]:
    given = {name: parameter.default for name, parameter in inspect.signature(cls).parameters.items()} | preset
    forward = getattr(type(module).forward, "liger_original", type(module).forward)
    return {
        **_eps(module, given["eps"]),
        **({"liger_with_scale": True} if "with_scale" in forward.__code__.co_names else {}),
        **{name: given.get(name) for name in ("offset", "casting_mode", "in_place", "row_mode")},
        **({} if hasattr(module, "weight") else {"weight": None}),
    }


def _of_layer_norm(module: Any, x: Tensor) -> Tensor | None:
    """None where torch has no kernel for these dtypes."""
    if in_float_under_autocast(x.device):
        return x.float()
    weight, bias, dtype = module.weight, module.bias, x.dtype
    if (weight is None or weight.dtype is dtype) and (bias is None or bias.dtype is dtype):  # told in a microsecond
        return x
    dtypes = {vector.dtype for vector in (weight, bias) if vector is not None}
    return x if x.is_cpu and dtypes == {torch.float32} else None


def _one_dimension(module: Any, running: bool) -> str | None:
    if running:
        return None
    weight, shape = getattr(module, "weight", None), getattr(module, "normalized_shape", 0)
    dimensions = 1 if isinstance(shape, int) else len(shape)
    if dimensions != 1 or (weight is not None and weight.dim() != 1):
        return "it normalises, or weighs, more than the last dimension"
    return None


def _of_gated_norm(module: Any, x: Tensor) -> Tensor:
    """The product with the weight has the dtype of both where it comes last."""
    if module.norm_before_gate or module.casting_mode == "gemma":
        return x
    return x.to(torch.promote_types(x.dtype, module.weight.dtype))


def _known_gate(module: Any, running: bool) -> str | None:
    name = getattr(module, "activation", "silu")
    return None if name in gated_norm.ACTIVATIONS else f"its activation is {name}, not silu or sigmoid"


def _gated_norm_attributes(cls: Any, module: Any) -> dict[str, Any]:
    width = module.weight.shape[0]
    groups = getattr(module, "n_groups", width // getattr(module, "group_size", width))
    return {"groups": groups, **{name: getattr(module, name, value) for name, value in cls.preset.items()}}


def _gelu(cls: Any, module: Any) -> dict[str, Any]:
    """The form of gelu, where that is the exact one."""
    held = getattr(module, "act_fn", None)
    exact = type(held).__name__ == "GELUActivation" or getattr(held, "approximate", None) == "none"
    return {"approximate": "none"} if exact else {}


def _activation(cls: Any, module: Any) -> dict[str, Any]:
    """The number of the activation; what is none of these is tanh's form of GELU."""
    numbers = ("silu", activation.SILU), ("gelu", activation.GELU_ERF), ("relu2", activation.RELU_SQUARED)
    held = kinds_in(module)
    return {"liger_activation": next((n for name, n in numbers if held <= kinds_of((name,))), activation.GELU_TANH)}


def _layers_and_activation(cls: Any, module: Any) -> dict[str, Any]:
    names = next((names for names in mlp.UNGATED if all(hasattr(module, name) for name in names)), mlp.UNGATED[0])
    return {"liger_layers": names, **_activation(cls, module)}


def _dense_router(module: nn.Module, running: bool) -> str | None:
    weights = module.parameters() if running else ()
    return None if all(map(is_dense, weights)) else "its weight is sharded or quantised"


def _router_in_float(module: Any, running: bool) -> str | None:
    if running and torch.is_autocast_enabled(module.weight.device.type):
        return "autocast rounds its scores"
    return _dense_router(module, running)


def _sigmoid_router(module: Any, running: bool) -> str | None:
    if not isinstance(module.score_fn, nn.Sigmoid):
        return f"its scores are {type(module.score_fn).__name__}, not Sigmoid"
    return _router_in_float(module, running)


def _known_bound(module: Any, running: bool) -> str | None:
    low = gated_delta_rule.lower_bound(module)
    if low is not None and low >= 0:
        return f"the lower bound of its gates, {low}, is not below 0"
    return None if not running or is_dense(module.A_log) and is_dense(module.dt_bias) else "its weights are sharded"


def _in_float(module: Any, x: Tensor) -> Tensor:
    return x.float() if in_float_under_autocast(x.device) else x


def _of_xielu(module: Any, x: Tensor) -> Tensor | None:
    """None where the original rounds p and n to a narrower dtype."""
    if in_float_under_autocast(x.device):
        return x.float()
    dtype = module.alpha_p.dtype
    return x.to(dtype) if torch.promote_types(x.dtype, dtype) == dtype else None


def _layer_norm_attributes(cls: Any, module: Any) -> dict[str, Any]:
    return {"hidden_size": module.normalized_shape[0], **_eps(module, 1e-5)}


def _absent_vectors(cls: Any, module: Any) -> dict[str, Any]:
    return {**_eps(module, 1e-5), **{name: None for name in ("weight", "bias") if not hasattr(module, name)}}


def _same(module: Any, x: Tensor) -> Tensor:
    """The result has x's dtype."""
    return x


_RMS_NORM = Part(NORM_KERNELS, dtype=_of_rms_norm, attributes=_rms_norm_attributes)
_LAYER_NORM = Part(NORM_KERNELS, _one_dimension, _of_layer_norm, _layer_norm_attributes)
_MLP = Part(GATED_KERNELS)
_EXPERTS = Part(EXPERTS_KERNELS, experts.reason_to_keep)
_ROUTER = Part(ROUTER_KERNELS, _dense_router)
_PARTS: dict[type, Part] = {
    norm.LigerRMSNorm: _RMS_NORM,
    norm.LigerRMSNormWithoutWeight: replace(_RMS_NORM, dtype=_same),
    norm.LigerLayerNorm: _LAYER_NORM,
    norm.LigerLayerNormForCohere: replace(_LAYER_NORM, dtype=_same, attributes=_absent_vectors),
    gated_norm.LigerRMSNormGated: Part(GATED_NORM_KERNELS, _known_gate, _of_gated_norm, _gated_norm_attributes),
    mlp.GatedMLP: _MLP,
    mlp.LigerGEGLUMLP: replace(_MLP, attributes=_gelu),
    mlp.LigerBlockSparseTop2MLP: _MLP,
    mlp.LigerPhi3SwiGLUMLP: _MLP,
    mlp.LigerModernBertMLP: replace(_MLP, attributes=_activation),
    mlp.LigerUngatedMLP: Part(ACTIVATION_KERNELS, attributes=_layers_and_activation),
    experts.Experts: _EXPERTS,
    experts.LigerUngatedExperts: replace(_EXPERTS, kernels=UNGATED_EXPERTS_KERNELS),
    gated_delta_rule.ForgetGate: Part(CHANNEL_GATES_KERNELS, _known_bound),
    router.Router: _ROUTER,
    router.RouterInFloat: replace(_ROUTER, keep=_router_in_float),
    router.LigerInkling2Router: replace(_ROUTER, keep=_sigmoid_router),
    activation.LigerReLUSquared: Part(ACTIVATION_KERNELS, dtype=_in_float),
    activation.LigerXIELU: Part(XIELU_KERNELS, dtype=_of_xielu),
}


@functools.cache
def part_of(cls: Any) -> Part:
    """The Part of a class, or of the nearest that it derives from; one without conditions where there is none."""
    return next((_PARTS[base] for base in cls.__mro__ if base in _PARTS), Part())


@functools.cache
def kinds_of(names: tuple[str, ...]) -> frozenset:
    """The classes and functions that compute activations which transformers' ACT2FN has under these names."""
    from transformers.activations import ACT2FN

    functions = {"silu": nn.functional.silu, "gelu": nn.functional.gelu}
    return frozenset((*(type(ACT2FN[name]) for name in names), *(functions[n] for n in names if n in functions)))


def unfit(module: nn.Module, part: Any, activations: tuple[str, ...]) -> str | None:
    """Why `part` cannot compute what a module does, by how the module was made, or None."""
    if activations and (others := kinds_in(module) - kinds_of(activations)):
        names = ", ".join(sorted(getattr(kind, "__name__", str(kind)) for kind in others))
        return f"its activation is {names}, not {activations[0]}"
    return None if (keep := part_of(part).keep) is None else keep(module, False)
