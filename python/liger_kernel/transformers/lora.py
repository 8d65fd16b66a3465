"""PEFT's LoRA layers of a patched model, computed by the operators linear, qkv, gated_mlp, gated_linear and
fused_experts.

Which of them a call uses is decided when it is made, by what the layers are then: adapters may be added, switched,
merged, disabled or taken off at any time. What the operators do not compute runs PEFT's own forward: several active
adapters, DoRA and other variants, biases of an adapter, hooks, sharded weights, weights that are quantised in another
way than bitsandbytes' four bits, and without autocast an adapter of another dtype than the input's.
"""

import itertools
import operator
import sys
import weakref
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from liger_kernel._library import ops
from liger_kernel.operators.coverage import DENSE, is_bare, kernels_cover
from liger_kernel.operators.eight_bit import LigerLinear8bit
from liger_kernel.operators.eight_bit_experts import in_eight_bits
from liger_kernel.operators.experts import is_whole, reason_to_keep
from liger_kernel.operators.linear import GATE_UP_DOWN, Layer, is_autocast, layer_of, linear, tensor_of
from liger_kernel.operators.mlp import (
    TOP2,
    LigerBlockSparseTop2MLP,
    LigerClampedSwishMLP,
    LigerGEGLUMLP,
    LigerGraniteSwiGLUMLP,
    LigerMLP,
    LigerModernBertMLP,
    LigerPhi3SwiGLUMLP,
    LigerSwiGLUMLP,
    LigerUngatedMLP,
)
from liger_kernel.transformers.patching.place import is_variant, replace_class
from liger_kernel.transformers.patching.report import Report
from liger_kernel.utils import is_dtensor


class Adapter(NamedTuple):
    """scale · (dropout(x) aᵀ) bᵀ, which a LoRA layer adds to what its base gives; a, b and dropout may be None."""

    a: torch.Tensor | None = None
    b: torch.Tensor | None = None
    scale: float = 1.0
    dropout: nn.Module | None = None


def _adapter_of(module, x):
    """The adapter that the forward of a LoRA layer applies; None where that is more than an Adapter."""
    if module.merged or module._disable_adapters:
        return None if module.merged and module._disable_adapters else Adapter()
    parts = module._modules
    active, adapters = module.active_adapters, parts["lora_A"]._modules
    if len(active) != 1:
        active = [name for name in active if name in adapters]
        if len(active) > 1:
            return None
    if not active or active[0] not in adapters:
        return Adapter()
    name = active[0]
    a, b = (_weight_of(parts[matrix]._modules[name], x) for matrix in ("lora_A", "lora_B"))
    if a is None or b is None or module.lora_variant and name in module.lora_variant:
        return None
    known = {torch.float32, torch.get_autocast_dtype(x.device.type)} if is_autocast(x) else {x.dtype}
    if not {a.dtype, b.dtype} <= known:
        return None
    dropout = parts["lora_dropout"]._modules[name]
    if not is_bare(dropout):
        return None
    if type(dropout) is nn.Identity or type(dropout) is nn.Dropout and not (dropout.p and dropout.training):
        dropout = None
    scale = module.scaling[name]
    if isinstance(scale, torch.Tensor):  # as PEFT's hot-swapping has it: the host would wait for its value
        return None
    if torch.compiler.is_compiling() and scale != 1:  # a number would be a constant of the graph
        b, scale = b * scale, 1.0
    return Adapter(a, b, scale, dropout)


def _weight_of(layer, x):
    """The weight of a matrix of an adapter; None where a call of it with x is more than that."""
    if type(layer) is not nn.Linear or tensor_of(layer, "bias") is not None:
        return None
    if not is_bare(layer) and not _only_moves(layer, x):
        return None
    weight = tensor_of(layer, "weight")
    return weight if type(weight) in DENSE else None


def _only_moves(layer, x):
    """Whether the forward of a matrix is that of ms-swift, which moves x to the matrix, and x is there."""
    own = getattr(layer.__dict__.get("forward"), "__func__", None)
    if f"{getattr(own, '__module__', '')}.{getattr(own, '__name__', '')}" != "swift.tuners.peft.keep_device_forward":
        return False
    return layer.weight.device == x.device and not layer._forward_hooks and not layer._forward_pre_hooks


_NO_MERGING = "a base in eight bits takes no adapter in: save the adapter, load the original model, merge there"


class LoRALinear:
    """The part of a PEFT layer whose forward is one operator, or two GEMMs after the forward of its base where that is
    more than a matrix."""

    _modules: dict  # of the layer that this class comes before

    def liger_layer(self, x) -> Layer | None:
        """What forward computes; None where that is more than a Layer."""
        base, adapter = layer_of(self._modules["base_layer"], x), _adapter_of(self, x)
        return None if base is None or adapter is None else base._replace(**adapter._asdict())

    def forward(self, x, *args, **kwargs):
        adapter = None if args or kwargs or not kernels_cover(x) else _adapter_of(self, x)
        if adapter is None or adapter.a is None:
            return super().forward(x, *args, **kwargs)
        base = self._modules["base_layer"]
        if (layer := layer_of(base, x)) is None:
            return _add(base(x), self._dropped(x, adapter), adapter)
        dropped = None if adapter.dropout is None else self._dropped(x, adapter)
        return linear(x, layer._replace(**adapter._asdict()), dropped)

    def merge(self, *args, **kwargs):
        if type(self.get_base_layer()) is LigerLinear8bit:
            raise ValueError(_NO_MERGING)
        return super().merge(*args, **kwargs)

    def _dropped(self, x, adapter):
        """What an adapter sees of x. It is dropped out in the dtype that PEFT gives it, in which torch draws the same
        mask."""
        if adapter.dropout is None:
            return x
        seen = super()._cast_input_dtype(x, adapter.a.dtype) if self.liger_casts else x
        return adapter.dropout(seen).to(x.dtype)

    def _cast_input_dtype(self, x, dtype):
        """Not to float under autocast, whose GEMM would take it back."""
        if x is None or self.lora_variant or not is_autocast(x):
            return super()._cast_input_dtype(x, dtype)
        dropouts = (self.lora_dropout[name] for name in self.active_adapters if name in self.lora_dropout)
        if any(type(dropout) is not nn.Identity for dropout in dropouts):
            return super()._cast_input_dtype(x, dtype)
        return x


def _add(y, x, adapter):
    """y + scale · (x aᵀ) bᵀ, rounded once where the dtypes allow it."""
    low = nn.functional.linear(x, adapter.a)
    if y.dtype != low.dtype:
        return y + (nn.functional.linear(low, adapter.b) * adapter.scale).to(y.dtype)
    return torch.addmm(y.flatten(0, -2), low.flatten(0, -2), adapter.b.t(), alpha=adapter.scale).view(y.shape)


class ParamWrapper:
    """The part of PEFT's layer for a weight of experts (`target_parameters`): rows are multiplied by the matrices of
    its adapter, which PEFT adds to the weight at each call. PEFT looks for its own class by this name."""

    def forward(self, x, *args, **kwargs):
        experts = self.get_base_layer()
        adapter = None if "liger_kept" in vars(self) else self._adapter(experts)
        if adapter is None or "adapter_names" in kwargs or torch.compiler.is_compiling():
            return super().forward(x, *args, **kwargs)
        waiting = vars(experts).setdefault("liger_adapters", {})
        waiting[self.parameter_name] = adapter
        try:
            y = self.base_layer(x, *args, **kwargs)
        finally:
            taken = waiting.pop(self.parameter_name, None) is None
        if taken:
            return y
        self.liger_kept = True  # what ran was no forward of ours
        return super().forward(x, *args, **kwargs)

    def merge(self, *args, **kwargs):
        if in_eight_bits(self.get_base_layer(), self.parameter_name) is not None:
            raise ValueError(_NO_MERGING)
        return super().merge(*args, **kwargs)

    def _adapter(self, experts):
        """(first, second, scale) of the one adapter that the forward applies; None where there is none, or more."""
        active = [name for name in self.active_adapters if name in self.lora_A]
        weight = experts._parameters.get(self.parameter_name)
        if is_dtensor(weight) and getattr(experts, "_is_expert_parallel", False):
            raise NotImplementedError(
                f"an adapter of {self.parameter_name} of experts that are spread over ranks: PEFT makes it whole on "
                "every rank, and nothing sums its gradient. Give such experts no target_parameters."
            )
        if self.merged or self.disable_adapters or len(active) != 1 or weight is None:
            return None
        if not is_whole(experts, self.parameter_name):
            return None
        matrices = self.lora_A[active[0]].weight, self.lora_B[active[0]].weight
        if self.num_experts == 1 or reason_to_keep(experts) or any(type(matrix) not in DENSE for matrix in matrices):
            return None
        if isinstance(self.scaling[active[0]], torch.Tensor):
            return None
        return self.get_delta_factors(active[0])


#: The forwards of gated MLPs, and the layers whose adapters are part of their operator.
_GATED_MLPS: dict[Any, tuple[str, ...]] = {
    LigerSwiGLUMLP.forward: GATE_UP_DOWN,
    LigerMLP.forward: GATE_UP_DOWN,
    LigerGEGLUMLP.forward: GATE_UP_DOWN,
    LigerBlockSparseTop2MLP.forward: TOP2,
    LigerPhi3SwiGLUMLP.forward: ("down_proj",),
    LigerGraniteSwiGLUMLP.forward: ("output_linear",),
    LigerModernBertMLP.forward: ("Wo",),
    LigerClampedSwishMLP.forward: ("down_proj",),
}


def _layers_of_mlp(module) -> list[nn.Module | None]:
    """The layers whose adapters are part of the operator of an MLP of this package; none of another module."""
    own = (cls for cls in type(module).__mro__ if cls.__module__.startswith("liger_kernel."))
    forward = next((vars(cls)["forward"] for cls in own if "forward" in vars(cls)), None)
    names = module.liger_layers[1:] if forward is LigerUngatedMLP.forward else _GATED_MLPS.get(forward, ())
    return [getattr(module, name, None) for name in names]


def _is_matrix(module) -> bool:
    """Whether a linear layer, or the base of a LoRA layer, is one that operators take."""
    return layer_of(getattr(module, "base_layer", module)) is not None


def _has_experts(module) -> bool:
    """Whether PEFT's layer for a parameter is that of experts whose forward can take its adapter."""
    experts = module.get_base_layer()
    return hasattr(module, "get_delta_factors") and any(
        module.parameter_name in known and all(hasattr(experts, name) for name in known)
        for known in (("gate_up_proj", "down_proj"), ("up_proj", "down_proj"))
    )


def _reason_to_keep(module):
    """Why a LoRA layer runs PEFT's forward, as far as that is known before a call; None if it does not."""
    if any(name in module.lora_variant for name in module.active_adapters):
        return "its adapter is DoRA or another variant"
    if any(layer.bias is not None for layer in module.lora_B.values()):
        return "its adapter has a bias"
    return None


# PEFT's classes for linear layers, of which those of packages that are not installed may be missing, and whether their
# forward casts the input of an adapter under autocast.
_CLASSES = {
    "layer.Linear": True,
    "torchao.TorchaoLoraLinear": True,
    "inc.IncLoraLinear": True,
    "gptq.GPTQLoraLinear": True,
    "bnb.Linear8bitLt": False,
    "bnb.Linear4bit": False,
    "awq.AwqLoraLinear": False,
    "aqlm.AqlmLoraLinear": False,
    "eetq.EetqLoraLinear": False,
    "hqq.HqqLoraLinear": False,
}


def _casts_input(cls) -> bool | None:
    """The value of _CLASSES for a class of PEFT; None if it is not among them."""
    return _CLASSES.get(f"{cls.__module__}.{cls.__qualname__}".removeprefix("peft.tuners.lora."))


def fuse_adapters(model, report: Report) -> None:
    """Give the LoRA layers of a model, and the MLPs that hold some, the forwards of this module."""
    peft = sys.modules.get("peft.tuners.lora.layer")  # without it no model has its layers
    if peft is None:
        return
    for module in list(model.modules()):
        if not isinstance(module, peft.LoraLayer):
            continue
        if (casts := _casts_input(type(module))) is not None:
            replace_class(module, LoRALinear, report.edits, liger_casts=casts)
        if type(module).__name__ == "ParamWrapper" and _has_experts(module):
            if not is_variant(type(module), ParamWrapper):
                replace_class(module, ParamWrapper, report.edits)
            report.note("lora", "weight of experts with an adapter", "fused_experts", 1)
        elif not is_variant(type(module), LoRALinear):
            reason = f"a {type(module).__name__} of PEFT runs its own forward"
            report.skip("lora", "Linear with an adapter", reason)
        elif reason := _reason_to_keep(module):
            report.skip("lora", "Linear with an adapter", reason)
        elif _is_matrix(module):
            report.note("lora", "Linear with an adapter", "linear", 1)
        else:
            report.note("lora", f"{type(module.base_layer).__name__} with an adapter", "addmm", 1)
    for module in model.modules():
        of_mlp = _layers_of_mlp(module)
        if any(is_variant(type(layer), LoRALinear) for layer in of_mlp) and all(map(_is_matrix, of_mlp)):
            kind = "MLP" if isinstance(module, LigerUngatedMLP) else "gated MLP"
            report.note("lora", f"{kind} with adapters", module.liger_operator, 1)


def watch_adapters(model, report: Report) -> None:
    """Fuse the adapters that `model` has, and have follow_adapters report those that come later."""
    fuse_adapters(model, report)
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            report.keep_on(module)


@torch.compiler.disable
def follow_adapters(model) -> None:
    """Fuse what was added to a patched model since the last call. PEFT keeps a dict of adapters on the model, whose
    configurations are other ones where an adapter has been deleted and added again under its name."""
    adapters, seen = vars(model).get("peft_config"), vars(model).get("liger_adapters", ())
    if adapters is None:
        return
    now = [adapters]
    for config in adapters.values():
        now += config, getattr(config, "target_modules", None)
    if len(seen) == len(now) and all(map(operator.is_, seen, now)):
        return
    model.liger_adapters = now
    report = Report.kept_on(model) or Report(type(model).__name__)
    report.replaced = [entry for entry in report.replaced if entry.switch != "lora"]
    report.skipped = [entry for entry in report.skipped if entry.switch != "lora"]
    fuse_adapters(model, report)


#: The model that asks for follow_adapters, by the inner model that its forward calls.
_owners: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def follow_later(model) -> None:
    """Have follow_adapters run before a model whose forward is its own, while its `liger_lora` is True. PEFT before
    0.21 calls that forward past its hooks, but not past those of the model within."""
    inner = model.base_model if isinstance(model, PreTrainedModel) else model
    _owners[inner] = weakref.ref(model)
    for module in (model, inner):
        if follow not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(follow)


def follow(model, args=()) -> None:
    """follow_adapters, before a forward of a model that asks for it."""
    if torch.compiler.is_compiling():
        return
    model = _owners.get(model, lambda: model)()
    if getattr(model, "liger_lora", False):
        follow_adapters(model)


#: Models' numbers, by which liger/ops/linear/adapter_casts_op.h holds what their last forward has cast.
_numbers: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
_next_number = itertools.count(1)


def _number_of(model):
    number = _numbers.get(model)
    if number is None:
        number = _numbers[model] = next(_next_number)
        weakref.finalize(model, ops.forget_adapter_casts, number).atexit = False
    return number


def casting_once(forward):
    """A forward of models, whose adapters in float are cast under autocast once for all the calls in it and in its
    backward pass, by one launch, instead of by each call. A compiled forward casts them in each call."""

    def casting(model, *args, **kwargs):  # not as functools.wraps has it: accelerate takes its own wrappers off by that
        autocast = torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu")
        if (
            torch.compiler.is_compiling()
            or not autocast
            or "liger_outer" in kwargs
            or "liger_adapters" not in vars(model)
        ):
            return forward(model, *args, **kwargs)
        ops.begin_adapter_casts(_number_of(model))
        try:
            return forward(model, *args, **kwargs)
        finally:
            ops.end_adapter_casts()

    return casting
