"""The API's modules of forwards: which class each forward is of, and the parameters that it takes."""

import importlib
import re
import types

from liger_kernel.transformers.patching.families import FAMILIES

PACKAGE = "liger_kernel.transformers.model"

# The parameters of the API's forwards, after `self`: transformers' own forwards take some of them only as keywords.
_TOKENS = "input_ids attention_mask position_ids"
_TEXT = "past_key_values inputs_embeds labels use_cache"
_OUTPUTS = "output_attentions output_hidden_states"
_KEEP = "logits_to_keep skip_logits"
_USUAL = f"{_TOKENS} {_TEXT} {_OUTPUTS} return_dict cache_position {_KEEP}"
_DICT_LAST = f"{_TOKENS} {_TEXT} {_OUTPUTS} cache_position {_KEEP} return_dict"
_ROUTED = f"{_TOKENS} {_TEXT} {_OUTPUTS} output_router_logits cache_position {_KEEP} return_dict"
_GRIDS = "pixel_values pixel_values_videos image_grid_thw video_grid_thw"
_QWEN_VL = f"{_TOKENS} {_TEXT} {_OUTPUTS} return_dict {_GRIDS} rope_deltas mm_token_type_ids cache_position"
_QWEN3_5_VL = f"{_TOKENS} past_key_values inputs_embeds labels {_GRIDS} mm_token_type_ids {_KEEP}"
_GEMMA_VL = (
    "input_ids pixel_values attention_mask position_ids past_key_values token_type_ids cache_position inputs_embeds "
    f"labels use_cache {_OUTPUTS} return_dict {_KEEP}"
)
_LLAVA = (
    "input_ids pixel_values attention_mask position_ids past_key_values inputs_embeds vision_feature_layer "
    f"vision_feature_select_strategy labels use_cache {_OUTPUTS} return_dict cache_position logits_to_keep "
    "image_sizes skip_logits"
)
_ORDERS = {
    **dict.fromkeys(("exaone4", "falcon_h1", "hunyuan_v1", "qwen3"), _DICT_LAST),
    **dict.fromkeys(("qwen3_moe", "qwen3_next"), _ROUTED),
    "gpt_oss": _ROUTED.removesuffix(" return_dict"),
    "mixtral": _USUAL.replace("return_dict", "output_router_logits return_dict"),
    "deepseek_v4": f"{_TOKENS} {_TEXT} output_router_logits {_KEEP}",
    "mllama": _USUAL.replace(
        "past_key_values", "cross_attention_states cross_attention_mask full_text_row_masked_out_mask past_key_values"
    ),
    "paligemma": _GEMMA_VL,
    "gemma3.multimodal_forward": _GEMMA_VL,
    "gemma4.multimodal_forward": (
        "input_ids pixel_values pixel_values_videos input_features attention_mask input_features_mask position_ids "
        "image_position_ids video_position_ids past_key_values mm_token_type_ids inputs_embeds labels use_cache "
        f"{_OUTPUTS} return_dict cache_position {_KEEP}"
    ),
    **dict.fromkeys(("llava", "internvl"), _LLAVA),
    "smolvlm": (
        f"{_TOKENS} past_key_values inputs_embeds pixel_values pixel_attention_mask image_hidden_states labels "
        f"use_cache {_OUTPUTS} cache_position return_dict {_KEEP}"
    ),
    "qwen2_vl": f"{_QWEN_VL} skip_logits",
    "qwen2_5_vl": f"{_QWEN_VL} second_per_grid_ts skip_logits",
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe"), f"{_QWEN_VL} second_per_grid_ts {_KEEP}"),
    "qwen3_5": f"{_TOKENS} {_TEXT} cache_position {_KEEP}",
    "qwen3_5.lce_forward_for_multimodal": _QWEN3_5_VL,
    "qwen3_5_moe": _ROUTED.replace("cache_position", "mm_token_type_ids cache_position"),
    "qwen3_5_moe.lce_forward_conditional_generation": _QWEN3_5_VL,
    "muse_glimmer": (
        "input_ids pixel_values image_grid_thw pixel_values_videos video_grid_thw attention_mask position_ids "
        f"{_TEXT} {_KEEP}"
    ),
    "glm4v": _USUAL.replace("cache_position", "mm_token_type_ids cache_position"),
    "glm4v_moe": f"{_TOKENS} past_key_values inputs_embeds labels {_GRIDS} rope_deltas mm_token_type_ids "
    f"cache_position {_KEEP} return_dict",
}

# Modules whose forwards are those of more than one class: module -> name -> (family, class).
_NAMES = {
    "gemma3": {
        "causal_forward": ("gemma3_text", "Gemma3ForCausalLM"),
        "multimodal_forward": ("gemma3", "Gemma3ForConditionalGeneration"),
    },
    "gemma4": {
        "causal_forward": ("gemma4_text", "Gemma4ForCausalLM"),
        "multimodal_forward": ("gemma4", "Gemma4ForConditionalGeneration"),
    },
    "hunyuan_v1": {"lce_forward": ("hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM")},
    "qwen3_5": {"lce_forward_for_multimodal": ("qwen3_5", "Qwen3_5ForConditionalGeneration")},
    "qwen3_5_moe": {"lce_forward_conditional_generation": ("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration")},
}
# Families whose forwards are in another's module.
_ELSEWHERE = ("gemma3_text", "gemma4_text", "hunyuan_v1_dense", "hunyuan_v1_moe")


def forwards() -> dict[str, dict[str, tuple[str, str]]]:
    """Module -> name of a forward -> (family, class)."""
    modules = {
        name: {"lce_forward": (name, next(iter(row.loss)))}
        for name, row in FAMILIES.items()
        if row.loss and name not in _ELSEWHERE
    }
    for name, others in _NAMES.items():
        shared = {} if "causal_forward" in others else modules.get(name, {})
        modules[name] = {**shared, **others}
    return {**modules, "pixtral": {}}


def parameters(module: str, forward: str) -> tuple[str, ...]:
    """The names of a forward's parameters after `self`, in their order."""
    return tuple(_ORDERS.get(f"{module}.{forward}", _ORDERS.get(module, _USUAL)).split())


# What callers import from any of these modules -> where it is.
_SHARED = {
    "lce_maybe_trainable_lm_head|_liger_for_causal_lm_loss": "liger_kernel.compat.heads",
    "LigerForCausalLMLoss|unpack_cross_entropy_result": "liger_kernel.transformers.model.loss_utils",
    r"Liger\w*CausalLMOutputWithPast": "liger_kernel.transformers.model.output_classes",
    "PEFT_AVAILABLE": "liger_kernel.utils",
}


def module_of(name: str, classes: dict[str, tuple[str, str]]) -> types.ModuleType:
    """The module `model.<name>`; `classes`: name of a forward -> (family, class)."""
    module = types.ModuleType(f"{PACKAGE}.{name}", f"The fused-loss forward of {name}.")

    def __getattr__(attribute):
        # Before any import: inspect.getmodule asks all modules for __file__, also while transformers is being imported.
        home = next((home for names, home in _SHARED.items() if re.fullmatch(names, attribute)), None)
        if home is not None:
            return getattr(importlib.import_module(home), attribute)
        if attribute not in classes:
            raise AttributeError(f"module {module.__name__!r} has no attribute {attribute!r}")
        causal_lm = importlib.import_module("liger_kernel.transformers.causal_lm")
        family, of_class = classes[attribute]
        original = causal_lm.original_forward(getattr(FAMILIES[family].namespace(), of_class))
        return causal_lm.fused_forward(original, FAMILIES[family].loss[of_class], parameters(name, attribute))

    module.__getattr__ = __getattr__  # type: ignore[method-assign]
    return module
