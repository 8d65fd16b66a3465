"""Attention masks of ones, which trainers pass with every batch of whole rows, are dropped where a model is called.

A compiled model cannot read a mask's values: it would write the mask out, and attention would compute all of it. So a
hook looks at the mask before the compiled region begins. Where accelerate moves a batch to the device, the values are
still in the host's memory; whether they are ones is noted then, and nothing waits for the device. A mask that was not
moved so is looked at where the model is compiled, which is one wait per batch; elsewhere the forward looks itself.
"""

import functools
import importlib.util
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._dynamo.eval_frame import get_eval_frame_callback  # type: ignore[import-not-found]
from torch._dynamo.eval_frame import skip_code
from transformers import PreTrainedModel

from liger_kernel.transformers.patching.attention import passes_to_modules
from liger_kernel.transformers.patching.report import Report

#: What transformers calls a cache, by its version and by the model.
CACHES = ("past_key_values", "cache", "cache_params")
# With these a mask of ones stays.
_BESIDE = ("position_ids", *CACHES)

#: The attribute of a mask of ones: its version when it was looked at. Changes in place give it another.
NOTE = "liger_ones_at"


def is_ones(mask: Any) -> bool:
    """Whether a mask is one of rows without padding. Other numbers than 0 and 1 mean documents to some tools."""
    return isinstance(mask, Tensor) and mask.dim() == 2 and bool((mask == 1).all())


def _without_ones(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The hook of a model: its arguments without a mask of ones. It calls no Python functions, which would be compiled.

    Positions that are given may be those of documents, which transformers looks for where there is no mask.
    """
    mask: Any = kwargs.get("attention_mask")
    if type(mask) is not Tensor or torch.compiler.is_compiling():
        return None
    inputs: Any = args[0] if args else kwargs.get("input_ids")
    inputs = kwargs.get("inputs_embeds") if inputs is None else inputs
    if len(args) > 1 or type(inputs) is not Tensor or mask.shape != inputs.shape[:2] or mask.is_meta:
        return None
    for name in _BESIDE:
        if kwargs.get(name) is not None:
            return None
    version = mask.__dict__.get(NOTE)
    if version is None:
        compiles = model._compiled_call_impl is not None or get_eval_frame_callback() not in (None, False)
        if mask.is_cpu or compiles and not (mask.is_cuda and torch.cuda.is_current_stream_capturing()):
            ones = bool((mask == 1).all())
        else:
            ones = False
    else:
        ones = version == mask._version
    return (args, {**kwargs, "attention_mask": None}) if ones else None


# Run by Python, not compiled as the first of the model's frames; within a frame that is compiled it is traced, and does
# nothing.
skip_code(_without_ones.__code__)


def drop_masks_of_ones(model: nn.Module) -> None:
    """Have a model called without an `attention_mask` [batch, tokens] of ones, which masks nothing.

    For a module that wraps a patched model and is compiled with it, such as PEFT's. A patched model itself drops such
    masks, and so does what accelerate or a Trainer has prepared. The mask stays where `position_ids` or a cache are
    given, where the call of the model is itself in a compiled function, and where an enclosing model reads it.
    """
    if not _is_read(model) and _without_ones not in model._forward_pre_hooks.values():
        model.register_forward_pre_hook(_without_ones, with_kwargs=True)


def is_counting(cls: Any) -> bool:
    """Whether models of a class make masks without positions where none are given (masks.py)."""
    return hasattr(cls.forward, "liger_counts")


def counts(model: nn.Module) -> bool:
    """Whether a part of a model does."""
    return any(is_counting(type(module)) for module in model.modules())


def _is_read(model: nn.Module) -> bool:
    """Whether a transformers model that encloses such a part does more with a mask than pass it on. In transformers
    4.57, PaliGemma unmasks the prefix only where there is a mask, and Qwen3-VL computes positions that look like those
    of packed documents where there is none."""
    enclosing: set[Any] = {
        type(module)
        for module in model.modules()
        if isinstance(module, PreTrainedModel) and not is_counting(type(module)) and counts(module)
    }
    return not all(map(passes_to_modules, enclosing))


def takes_none(model: nn.Module) -> bool:
    """Whether a model may be called without a mask of ones."""
    return counts(model) and not _is_read(model)


def use(model: nn.Module | None, report: Report) -> None:
    """Drop masks of ones from calls of a patched model, and of models that accelerate prepares."""
    if model is not None and takes_none(model) and _without_ones not in model._forward_pre_hooks.values():
        report.edits.set(model._forward_pre_hooks, _KEY, _without_ones)
        report.edits.set(model._forward_pre_hooks_with_kwargs, _KEY, True)
    if importlib.util.find_spec("accelerate"):
        from accelerate import Accelerator, data_loader

        if not hasattr(data_loader.send_to_device, "liger_original"):
            report.edits.set(data_loader, "send_to_device", _noting(data_loader.send_to_device))
        if not hasattr(Accelerator.prepare_model, "liger_original"):
            report.edits.set(Accelerator, "prepare_model", _preparing(Accelerator.prepare_model))


_KEY = "liger_without_ones"  # in the place of a number, which a handle would have


def _noting(original: Any) -> Any:
    @functools.wraps(original)
    def send_to_device(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        mask = tensor.get("attention_mask") if isinstance(tensor, Mapping) else None
        ones = getattr(mask, "is_cpu", False) and is_ones(mask)
        sent = original(tensor, *args, **kwargs)
        if ones:
            setattr(sent["attention_mask"], NOTE, sent["attention_mask"]._version)
        return sent

    vars(send_to_device)["liger_original"] = original
    return send_to_device


def _preparing(original: Any) -> Any:
    @functools.wraps(original)
    def prepare_model(*args: Any, **kwargs: Any) -> Any:
        model = original(*args, **kwargs)
        if isinstance(model, nn.Module) and takes_none(model):
            drop_masks_of_ones(model)
        return model

    vars(prepare_model)["liger_original"] = original
    return prepare_model
