"""By which way each module of a model computes the same bits for a row in any batch, and which modules do not."""

import inspect
import re
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from liger_kernel._invariance import products
from liger_kernel._invariance.attention import IMPLEMENTATION
from liger_kernel.operators.eight_bit import LigerLinear8bit
from liger_kernel.operators.quantised import is_in_4_bits
from liger_kernel.transformers.causal_lm import names_in, original_forward
from liger_kernel.transformers.patching.families import MIXERS
from liger_kernel.transformers.patching.report import Report

SWITCH = "batch_invariant"
_PATCH = "call liger_kernel.patch(model) first"
#: What torch computes one row at a time, or element by element.
_BY_ROW = (nn.Embedding, nn.LayerNorm, nn.RMSNorm)
_ACROSS_ROWS = (nn.modules.batchnorm._BatchNorm, nn.MultiheadAttention, nn.modules.rnn.RNNBase)
_CONVOLVES = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def judge(model: nn.Module, report: Report) -> None:
    """Note the way of each module, or why it is refused; attention is switched over."""
    _check_whole(model, report)
    for name, module in model.named_modules():
        kind = type(module).__name__
        if isinstance(module, nn.Linear) or is_in_4_bits(getattr(module, "weight", None)):
            _judge_linear(module, report)
        elif reason := _refused(module):
            report.skip(SWITCH, kind, f"{reason} ({name})")
        elif _calls_interface(module):
            report.edits.set(module.config, "_attn_implementation_internal", IMPLEMENTATION)
            report.note(SWITCH, kind, _way_of_attention(module), 1)
        elif re.search(r"Experts$", kind) and not _is_ours(module):
            report.edits.set(module.config, "_experts_implementation_internal", "eager")
            report.note(SWITCH, kind, "a product of each expert", 1)
        elif _is_ours(module):
            report.note(SWITCH, kind, "this package's kernels", 1)
        elif isinstance(module, _BY_ROW):
            report.note(SWITCH, kind, "one row at a time", 1)
        elif any(isinstance(child, _CONVOLVES) for child in module.children()):
            report.note(SWITCH, kind, "this package's kernels of mixers", 1)


def _check_whole(model, report):
    kind = type(model).__name__
    if hasattr(model, "_orig_mod") or any(module._compiled_call_impl is not None for module in model.modules()):
        report.skip(SWITCH, kind, "torch.compile chooses kernels by the shape of the batch")
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor) and "tp" in (parameter.device_mesh.mesh_dim_names or ()):
            report.skip(SWITCH, kind, f"tensor parallel sums of ranks have no fixed order ({name})")
            return


def _judge_linear(module, report):
    kind, weight = type(module).__name__, module.weight
    if isinstance(module, LigerLinear8bit) or is_in_4_bits(weight) or weight.element_size() == 1:
        report.skip(SWITCH, kind, "products with quantised weights have not been measured")
    else:
        report.note(SWITCH, kind, products.way_of(weight).words, 1)


def _refused(module: Any) -> str | None:
    """Why a module that is no linear layer is refused."""
    kind = type(module).__name__
    if isinstance(module, LigerLinear8bit):
        return "products with quantised weights have not been measured"
    if isinstance(module, nn.Dropout) and module.p > 0 and module.training:
        return "dropout draws by the place in the batch: call model.eval(), or set it to 0"
    if isinstance(module, _ACROSS_ROWS):
        return "it computes several rows together"
    own = _is_ours(module)
    if re.search(r"Experts$", kind) and not own and not _has_loop(module):
        return f"its products and sums have an order that depends on the batch: {_PATCH}"
    if re.search(r"Norm(Gated)?$", kind) and not own and not isinstance(module, _BY_ROW):
        return f"its mean is one of torch's, whose order depends on the number of rows: {_PATCH}"
    if re.search(r"Attention(V\d)?$", kind) and not any(_attends(child) for child in module.children()):
        if not _calls_interface(module):
            return "it does not call transformers' attention interface"
        if not getattr(module, "is_causal", True):
            return "its attention is not causal"
        if module.training and getattr(module, "attention_dropout", 0):
            return "it drops attention weights: call model.eval(), or set attention_dropout to 0"
    if any(isinstance(child, _CONVOLVES) for child in module.children()) and not _has_our_mixer(module):
        return f"its convolution and its recurrence are not this package's: {_PATCH}"
    return None


def _has_loop(module: Any) -> bool:
    """Whether transformers can run experts as a loop, in which a token's experts are summed in their order."""
    return hasattr(getattr(module, "config", None), "_experts_implementation_internal")


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
    named = names_in(forward) & MIXERS.keys()
    functions = [vars(module).get(name) or forward.__globals__.get(name) for name in named]
    functions = [function for function in functions if function is not None]
    return bool(functions) and all(_home(function).startswith("liger_kernel.") for function in functions)
