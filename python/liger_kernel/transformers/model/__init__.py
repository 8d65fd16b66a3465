"""Fused-loss forwards and losses; `model.<module>.lce_forward` is made from the family's row when it is asked for."""

import sys
import types

from liger_kernel.transformers.families import FAMILIES

_FIRST = ("input_ids", "attention_mask", "position_ids", "past_key_values", "inputs_embeds", "labels", "use_cache", "output_attentions",
          "output_hidden_states")
_LAST = ("cache_position", "logits_to_keep", "skip_logits")
_RETURN_DICT_LAST = ("exaone4", "falcon_h1", "hunyuan_v1", "qwen3")
_ROUTED = ("mixtral", "qwen3_moe", "qwen3_next", "gpt_oss")

# Modules whose forwards are those of more than one class: module -> name -> (family, class).
_NAMES = {
    "gemma3": {"causal_forward": ("gemma3_text", "Gemma3ForCausalLM"), "multimodal_forward": ("gemma3", "Gemma3ForConditionalGeneration")},
    "gemma4": {"causal_forward": ("gemma4_text", "Gemma4ForCausalLM"), "multimodal_forward": ("gemma4", "Gemma4ForConditionalGeneration")},
    "hunyuan_v1": {"lce_forward": ("hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM")},
    "qwen3_5": {"lce_forward_for_multimodal": ("qwen3_5", "Qwen3_5ForConditionalGeneration")},
    "qwen3_5_moe": {"lce_forward_conditional_generation": ("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration")},
}
_ELSEWHERE = ("gemma3_text", "gemma4_text", "hunyuan_v1_dense", "hunyuan_v1_moe")


def _order(module):
    """The parameters of the API's `lce_forward` of a text model, which some transformers' forward takes as keywords alone."""
    if module in _ROUTED:
        return (*_FIRST, "output_router_logits", *_LAST, "return_dict")
    return (*_FIRST, *_LAST, "return_dict") if module in _RETURN_DICT_LAST else (*_FIRST, "return_dict", *_LAST)


def _forwards_module(name, forwards):
    """The module `model.<name>`, whose forwards stand for those of the classes that `forwards` names."""
    module = types.ModuleType(f"{__name__}.{name}", f"The fused-loss forward of {name}.")

    def __getattr__(attribute):
        if attribute not in forwards:
            raise AttributeError(f"module {module.__name__!r} has no attribute {attribute!r}")
        from liger_kernel.transformers import causal_lm

        family, class_name = forwards[attribute]
        row = FAMILIES[family]
        original = causal_lm.original_forward(getattr(row.namespace(), class_name))
        order = _order(name) if class_name.endswith("ForCausalLM") and name != "mllama" else ()
        return causal_lm.fused_forward(original, row.loss[class_name], order)

    module.__getattr__ = __getattr__
    return module


def _forwards():
    modules = {name: {"lce_forward": (name, next(iter(row.loss)))} for name, row in FAMILIES.items() if row.loss and name not in _ELSEWHERE}
    for name, forwards in _NAMES.items():
        shared = {} if "causal_forward" in forwards else modules.get(name, {})
        modules[name] = {**shared, **forwards}
    return {**modules, "pixtral": {}}


for _name, _targets in _forwards().items():
    globals()[_name] = sys.modules[f"{__name__}.{_name}"] = _forwards_module(_name, _targets)
