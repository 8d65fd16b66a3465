"""By which way each module of a model computes the same bits for a row in any batch, and which modules do not."""

import inspect
import re
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers.pytorch_utils import Conv1D

from liger_kernel._invariance import products
from liger_kernel._invariance.attention import IMPLEMENTATION
from liger_kernel.operators.eight_bit import LigerLinear8bit
from liger_kernel.operators.quantised import is_in_4_bits
from liger_kernel.transformers.causal_lm import names_in, original_forward
from liger_kernel.transformers.patching.report import Report

SWITCH = "batch_invariant"
_PATCH = "call liger_kernel.patch(model) first"
#: What torch computes one row at a time, or element by element.
_BY_ROW = (nn.Embedding, nn.LayerNorm, nn.RMSNorm)
_ACROSS_ROWS = (nn.modules.batchnorm._BatchNorm, nn.MultiheadAttention, nn.modules.rnn.RNNBase)
_CONVOLVES = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


#: The functions by which mixers of hybrid models see more tokens than one, but those that decode.
_MIXES = re.compile(r"causal_conv1d|scan|chunk")
_DECODES = re.compile(r"update|recurrent|step")


def judge(model: nn.Module, report: Report) -> None:
    """Note the way of each module, or why it is refused; attention is switched over."""
    _check_whole(model, report)
    refused: dict[tuple[str, str], list[str]] = {}
    for name, module in model.named_modules():
        kind = type(module).__name__
        if reason := _refused(module):
            refused.setdefault((kind, reason), []).append(name)
        elif way := _way_of(module):
            report.note(SWITCH, kind, way, 1)
        if reason is None and _calls_interface(module):
            report.edits.set(module.config, "_attn_implementation_internal", IMPLEMENTATION)
        if reason is None and _is_loop(module):
            report.edits.set(module.config, "_experts_implementation_internal", "eager")
    for (kind, reason), names in refused.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        report.skip(SWITCH, kind, f"{reason} ({names[0]}{more})")


def _way_of(module: Any) -> str | None:
    """How a module that is not refused computes; None for one that only calls others."""
    if isinstance(module, (nn.Linear, Conv1D)):
        return products.way_of(module.weight).words
    if _calls_interface(module):
        return _way_of_attention(module)
    if _is_loop(module):
        return "a product of each expert"
    if _is_ours(module):
        return "this package's kernels"
    if isinstance(module, _BY_ROW):
        return "one row at a time"
    return "this package's kernels of mixers" if _convolves(module) else None


def _check_whole(model, report):
    kind = type(model).__name__
    if hasattr(model, "_orig_mod") or any(module._compiled_call_impl is not None for module in model.modules()):
        report.skip(SWITCH, kind, "torch.compile chooses kernels by the shape of the batch")
    if _is_split(model):
        report.skip(SWITCH, kind, "tensor and expert parallelism sum over ranks in no fixed order")


def _is_split(model):
    """Whether ranks hold parts of layers, other than FSDP2's, which are gathered before they are used."""
    config = getattr(model.config, "distributed_config", None)
    sizes = [getattr(model, "_tp_size", None), *(getattr(config, name, None) for name in ("tp_size", "ep_size"))]
    if any(size and size > 1 for size in sizes):
        return True
    sharded = any(isinstance(module, FSDPModule) for module in model.modules())
    return not sharded and any(isinstance(parameter, DTensor) for parameter in model.parameters())


def _refused(module: Any) -> str | None:
    kind, weight = type(module).__name__, getattr(module, "weight", None)
    in_8_bits = isinstance(module, nn.Linear) and module.weight.element_size() == 1
    if isinstance(module, LigerLinear8bit) or is_in_4_bits(weight) or in_8_bits:
        return "products with quantised weights have not been measured"
    if isinstance(module, nn.Dropout) and module.p > 0 and module.training:
        return "dropout draws by the place in the batch: call model.eval(), or set it to 0"
    if isinstance(module, _ACROSS_ROWS):
        return "it computes several rows together"
    own = _is_ours(module)
    if _are_experts(module) and not own and not _is_loop(module):
        return f"its products and sums have an order that depends on the batch: {_PATCH}"
    if re.search(r"Norm(Gated)?$", kind) and not own and not isinstance(module, _BY_ROW):
        return f"its mean is one of torch's, whose order depends on the number of rows: {_PATCH}"
    if _convolves(module):
        return None if _has_our_mixer(module) else f"its recurrence is not this package's: {_PATCH}"
    if _attends(module) and not any(_attends(child) for child in module.children()):
        if not _calls_interface(module):
            return "it does not call transformers' attention interface"
        if not getattr(module, "is_causal", True):
            return "its attention is not causal"
        if module.training and getattr(module, "attention_dropout", 0):
            return "it drops attention weights: call model.eval(), or set attention_dropout to 0"
    return None


def _are_experts(module):
    return type(module).__name__.endswith("Experts")


def _is_loop(module: Any) -> bool:
    """Whether transformers can run experts as a loop, in which a token's experts are summed in their order."""
    own = getattr(module, "config", None)
    return _are_experts(module) and not _is_ours(module) and hasattr(own, "_experts_implementation_internal")


def _convolves(module):
    return any(isinstance(child, _CONVOLVES) for child in module.children())


def _attends(module):
    return re.search(r"Attention(V\d)?$", type(module).__name__) is not None


def _calls_interface(module: Any) -> bool:
    names = names_in(original_forward(type(module))) if hasattr(type(module), "forward") else set()
    return hasattr(module, "config") and "ALL_ATTENTION_FUNCTIONS" in names


def _way_of_attention(module):
    parameter = next(module.parameters(), None)
    if parameter is not None and parameter.is_cuda and parameter.element_size() == 2:
        return "flash attention with the documents' boundaries"
    return "attention to one document at a time"


def _is_ours(module: nn.Module) -> bool:
    return _home(type(module).forward).startswith("liger_kernel.operators")


def _home(function) -> str:
    return getattr(function, "__module__", None) or ""


def _has_our_mixer(module: Any) -> bool:
    """Whether the functions by which a mixer sees more tokens than one are this package's."""
    if _is_ours(module):
        return True
    forward = inspect.unwrap(type(module).forward)
    named = {name for name in names_in(forward) if _MIXES.search(name) and not _DECODES.search(name)}
    functions = [vars(module).get(name) or forward.__globals__.get(name) for name in named]
    functions = [function for function in functions if callable(function)]
    return bool(functions) and all(_home(function).startswith("liger_kernel.") for function in functions)
