"""Fused-loss forwards and losses; `model.<family>.lce_forward` is made from the family's row when it is asked for."""

import sys
import types

from liger_kernel.transformers.families import FAMILIES


_FIRST = ("input_ids", "attention_mask", "position_ids", "past_key_values", "inputs_embeds", "labels", "use_cache", "output_attentions",
          "output_hidden_states")
_LAST = ("cache_position", "logits_to_keep", "skip_logits")
_RETURN_DICT_LAST = ("qwen3",)


def _order(family):
    """The parameters of the API's `lce_forward`, which some transformers' forward takes as keywords alone."""
    return (*_FIRST, *_LAST, "return_dict") if family in _RETURN_DICT_LAST else (*_FIRST, "return_dict", *_LAST)


def _family_module(row):
    """The module `model.<family>`, whose `lce_forward` stands for the forward of the family's causal language model."""
    module = types.ModuleType(f"{__name__}.{row.name}", f"The fused-loss forward of {row.name}.")

    def __getattr__(name):
        if name != "lce_forward":
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
        from liger_kernel.transformers import causal_lm

        class_name, spec = next(iter(row.loss.items()))
        return causal_lm.fused_forward(causal_lm.original_forward(getattr(row.namespace(), class_name)), spec, _order(row.name))

    module.__getattr__ = __getattr__
    return module


for _row in FAMILIES.values():
    if _row.loss:
        globals()[_row.name] = sys.modules[f"{__name__}.{_row.name}"] = _family_module(_row)
