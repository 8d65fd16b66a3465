"""What runs when a module is called, and for which tensors there are kernels."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.nn.modules import module as nn_module

from liger_kernel._library import ops
from liger_kernel._variant import made_of

#: The types of tensors as torch has them. The last two stand for the others where torch.export traces.
DENSE = (torch.Tensor, torch.nn.Parameter, FakeTensor, FunctionalTensor)

_AFTER = ("_forward_hooks", "_backward_hooks", "_backward_pre_hooks")
_HOOKS = ("_forward_pre_hooks", *_AFTER)
_GLOBAL = {name: getattr(nn_module, "_global" + name) for name in _HOOKS}

# Whose hooks hand on what a forward returns, whatever it is: they gather weights, or watch.
_HANDING_ON = ("torch.distributed.fsdp.", "torch.distributed._composable.", "torch.utils.", "accelerate.", "deepspeed.")


def is_bare(module: nn.Module) -> bool:
    """Whether a call of `module` runs the forward of its class and nothing else.

    It does not where the instance has its own forward (accelerate's offloading) or a compiled one, and where the
    module, or all modules, have hooks. A parametrisation changes the class, which is the caller's to compare.
    """
    own = module.__dict__  # asked at each call, of several modules: what is told at once comes first
    if own["_forward_hooks"] or own["_forward_pre_hooks"] or own["_backward_hooks"] or own["_backward_pre_hooks"]:
        return False
    if "forward" in own or own.get("_compiled_call_impl"):
        return False
    return not any(_GLOBAL.values())


#: What modules of transformers call the activation that they hold, and the submodules that forwards of MLPs call,
#: if only to read a parameter (torch.nn.utils.parametrize).
ACTIVATION_NAMES = ("act_fn", "activation_fn", "act", "activation")
_CALLED = frozenset(
    (
        "gate_proj",
        "up_proj",
        "down_proj",
        "gate_up_proj",
        "w1",
        "w2",
        "w3",
        "input_linear",
        "output_linear",
        "Wi",
        "Wo",
        "drop",
        "fc1",
        "fc2",
        "linear_fc1",
        "linear_fc2",
        "dense_h_to_4h",
        "dense_4h_to_h",
        "parametrizations",
    )
)


def activations_in(module: nn.Module) -> list[Any]:
    """What a gated MLP, or experts, hold beside the submodules that their forward calls: activations, as modules and as
    functions; silu where there is none, which their source then has."""
    own = module.__dict__
    held = [child for name, child in own["_modules"].items() if child is not None and name not in _CALLED]
    if not held:  # a function is an attribute
        held = [own[name] for name in ACTIVATION_NAMES if callable(own.get(name))]
    return held or [nn.functional.silu]


def kinds_in(module: nn.Module) -> frozenset:
    """The classes, or functions, of what activations_in finds; of what this package has replaced, the original ones."""
    return frozenset(made_of(type(held)) if isinstance(held, nn.Module) else held for held in activations_in(module))


def runs_activation(module: nn.Module, kinds: frozenset) -> bool:
    """Whether each activation that a module holds now is one of these functions, or of one of these classes, perhaps
    replaced by this package, and bare: a fused forward does not call it."""
    for held in activations_in(module):
        if not isinstance(held, nn.Module):
            known = held in kinds
        else:
            known = (held.__class__ in kinds or made_of(held.__class__) in kinds) and is_bare(held)
        if not known:
            return False
    return True


def result_changed_by(module: nn.Module, but: Iterable[str] = ()) -> Any:
    """What may change the result of a call of `module` or that result's gradient, or None: it must see a usual result.

    Code of the modules whose names begin with one of `but` is left out.
    """
    if has_replaced_forward(module):
        own = module.__dict__["forward"]
        # One of this package, which kernels has put there, hands on what is asked for.
        if getattr(own, "liger_original", None) is not type(module).forward and not _is_of(own, but):
            return own
    found = [hook for hooks in (module.__dict__, _GLOBAL) for name in _AFTER for hook in hooks[name].values()]
    steps: list[Any] = [module._hf_hook] if "_old_forward" in module.__dict__ else []
    for step in steps:
        steps += getattr(step, "hooks", ())
        found.append(step.post_forward)
    return next((hook for hook in found if not _hands_on(hook) and not _is_of(hook, but)), None)


def _hands_on(hook) -> bool:
    return _is_of(hook, _HANDING_ON)


def _is_of(hook, modules) -> bool:
    # A partial object's own module is functools.
    return (getattr(getattr(hook, "func", hook), "__module__", None) or "").startswith(tuple(modules))


def has_replaced_forward(module: nn.Module) -> bool:
    """Whether somebody has put a forward on the instance; accelerate's hooks do, and call `_old_forward` from it."""
    own = module.__dict__
    if "_old_forward" in own:
        return (
            not _hands_on(own["forward"]) or getattr(own["_old_forward"], "__func__", None) is not type(module).forward
        )
    return "forward" in own


_DTYPES = frozenset((torch.float32, torch.float16, torch.bfloat16))
_covered: set[tuple] = set()  # (device, kernels) that the library has said yes to


def _has_kernels(device, kernels):
    key = device, kernels
    if key not in _covered and ops.has_kernels(device, list(kernels)):  # a backend may still be plugged in
        _covered.add(key)
    return key in _covered


def is_transformed() -> bool:
    """Whether a transform of torch.func (grad, vjp, vmap) is active."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def is_recorded(x: Any) -> bool:
    """Whether autograd records what is done to x, and nobody else does: a compiler fuses what it sees, and modes, as
    those of selective checkpointing, look for torch's operators."""
    return (
        x.__class__ is torch.Tensor
        and torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and torch._C._len_torch_dispatch_stack() == 0
    )


# What torch.compiler.assume_constant_result does. That function imports torch._dynamo, which takes two seconds, also
# where nothing is compiled. Compiled code is guarded by the transforms under which it was traced.
for _constant in (_has_kernels, is_transformed):
    vars(_constant)["_dynamo_marked_constant"] = True


def kernels_cover(tensor: torch.Tensor, kernels: tuple[str, ...] = ()) -> bool:
    """Whether the library has all of these kernels, or any if none is named, for the tensor's dtype and device, and
    nobody transforms what is done to it, as torch.func's grad and vmap do: operators have no rules for that."""
    if tensor.dtype not in _DTYPES or is_transformed():
        return False
    return tensor.is_meta or _has_kernels(tensor.device, kernels)


# What runs forward and backward of each kind of part, beside GEMMs.
NORM_KERNELS = ("norm_forward", "norm_backward", "row_partials", "add_partials")
GATED_NORM_KERNELS = ("gated_rms_norm_forward", "gated_rms_norm_backward", "row_partials", "add_partials")
GATED_KERNELS = ("gated_forward", "gated_backward")
_OF_EXPERTS = (
    *("sort_by_expert", "spread_tokens", "combine_experts", "experts_backward"),
    *("row_partials", "add_partials"),
)
EXPERTS_KERNELS = (*_OF_EXPERTS, *GATED_KERNELS)
UNGATED_EXPERTS_KERNELS = (*_OF_EXPERTS, "activate_forward")
ROUTER_KERNELS = ("route_forward", "route_backward")
ROUTER_LOSS_KERNELS = ("expert_load_forward", "expert_load_backward", "row_partials", "add_partials")
ACTIVATION_KERNELS = ("activate_forward", "activate_backward")
XIELU_KERNELS = ("xielu_forward", "xielu_backward", "row_partials", "add_partials")
ROPE_KERNELS = ("rope",)
CAUSAL_CONV1D_KERNELS = ("causal_conv1d_forward", "causal_conv1d_backward", "row_partials", "add_partials")
DELTA_RULE_KERNELS = ("gated_delta_rule_forward", "gated_delta_rule_backward", "gated_delta_rule_workspace")
CHANNEL_DELTA_RULE_KERNELS = tuple(name.replace("gated", "channel") for name in DELTA_RULE_KERNELS)
DELTA_GATES_KERNELS = ("delta_gates_forward", "delta_gates_backward", "row_partials", "add_partials")
CHANNEL_GATES_KERNELS = ("channel_gates_forward", "channel_gates_backward", "row_partials", "add_partials")
HEAD_KERNELS = ("cross_entropy_norm", "cross_entropy", "add_partials", "scale_rows", "stream_capturing")


def is_dense(weight: torch.Tensor, kernels: tuple[str, ...] = ()) -> bool:
    """Whether a weight is a tensor as torch has them, also while torch.export traces: no shard, nothing quantised; and
    there are these kernels for it."""
    return type(weight) in DENSE and kernels_cover(weight, kernels)
