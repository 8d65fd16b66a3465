"""The configuration of a small random model of every class that a row of the table of families names, at several sizes.

At the smallest size, the default, it is what the tests take: scales, caps and biases are set, so that none can be lost
unseen. At a size of comparison.SIZES it is what train.py --family trains.
"""

import importlib
import importlib.util
from dataclasses import dataclass

VOCABULARY = 128
# The last tokens, which stand for images and the like.
SPECIAL = 8
IMAGE, VIDEO, START, END = 120, 121, 122, 123
TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "attn_implementation": "eager",
    # Larger than usual, so that no part of the model is near the identity.
    "initializer_range": 0.1,
    # No default of a config, a class or a function: of the size of the embeddings' variance, so that it counts.
    "rms_norm_eps": 0.03,
    "use_cache": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
# The rotary embedding of three positions a token: a pair of columns for each of time, height and width at least.
SECTIONS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
PARTIAL = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
ROUTED = {"output_router_logits": True, "router_aux_loss_coef": 0.5, "num_experts_per_tok": 2}
EXPERTS = {**ROUTED, "num_experts": 4, "moe_intermediate_size": 48}
LINEAR = {
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"],
    "shared_expert_intermediate_size": 48,
}
_QWEN_VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 64,
    "hidden_act": "gelu_pytorch_tanh",
    "initializer_range": 0.1,
}
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
    "layer_norm_eps": 0.03,
    "initializer_range": 0.1,
}
_TOKENS = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START, "vision_end_token_id": END}
_GLM_TOKENS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "image_start_token_id": START,
    "image_end_token_id": END,
    "video_start_token_id": 124,
    "video_end_token_id": 125,
}


@dataclass(frozen=True)
class Size:
    """How much larger than the smallest a model is, and what its training takes as models usually have it."""

    width: int
    depth: int
    vocabulary: int
    intermediate: int
    length: int

    def of(self, fields: dict, text: bool = True) -> dict:
        """The fields of a configuration at this size; of its language model, or of another part."""
        head = min(self.width, 4)  # a head grows to 64; after that there are more of them
        factors = dict.fromkeys(_WIDTHS, self.width) | dict.fromkeys(_DEPTHS, self.depth)
        factors |= dict.fromkeys(_HEAD_WIDTHS, head)
        usual = _USUAL | {"max_position_embeddings": self.length, "attn_implementation": None}
        if text:
            factors |= dict.fromkeys(_HEADS, self.width // head)
            usual |= dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), self.vocabulary)
            usual["intermediate_size"] = self.intermediate
        return {name: self._value(name, value, factors, usual) for name, value in fields.items()}

    def _value(self, name, value, factors, usual):
        if isinstance(value, dict):
            return {inner: self._value(inner, its, factors, usual) for inner, its in value.items()}
        if "_token_i" in name and value >= VOCABULARY - SPECIAL:
            return value + self.vocabulary - VOCABULARY
        if name == "mrope_section":
            return [part * factors["head_dim"] for part in value]
        return usual.get(name, value * factors[name] if name in factors else value)


# Lists that have an entry for each layer are repeated.
_DEPTHS = ("num_hidden_layers", "layer_types", "mlp_layer_types", "no_rope_layers")
_HEADS = ("num_attention_heads", "mamba_n_heads", "linear_num_key_heads", "linear_num_value_heads", "o_groups")
_HEAD_WIDTHS = ("head_dim", "global_head_dim", "linear_key_head_dim", "linear_value_head_dim")
_WIDTHS = (
    "hidden_size", "embed_dim", "out_hidden_size", "intermediate_size", "intermediate_size_mlp",
    "moe_intermediate_size", "shared_expert_intermediate_size", "hidden_size_per_layer_input", "mamba_d_ssm",
    "q_lora_rank", "o_lora_rank", "projection_dim", "vision_output_dim", "projector_input_dim",
    "projector_output_dim",
)  # fmt: skip
_USUAL = {
    "initializer_range": 0.02, "rms_norm_eps": 1e-6, "layer_norm_eps": 1e-6, "norm_eps": 1e-5,
    "final_logit_softcapping": 30.0, "router_aux_loss_coef": 0.001, "num_experts": 16, "num_local_experts": 8,
    "n_routed_experts": 16, "sliding_window": 256, "attention_chunk_size": 256, "index_topk": 64,
    "query_pre_attn_scalar": 64,
}  # fmt: skip


def _config(name):
    """A config class; transformers 4 does not export those of parts."""
    import transformers

    if hasattr(transformers, name):
        return getattr(transformers, name)
    homes = (f"transformers.models.{family}.configuration_{family}" for family in MODELS)
    found = (importlib.import_module(home) for home in homes if importlib.util.find_spec(home.rpartition(".")[0]))
    return next(getattr(home, name) for home in found if hasattr(home, name))


def _scaled(size, fields, text=True):
    return size.of(fields, text) if size else fields


def _of(name, **fields):
    return lambda size=None, **others: _config(name)(**_scaled(size, {**TEXT, **fields, **others}))


def _holding(name, text, vision, **fields):
    """A config made of two: `text` and `vision` are (class name, fields)."""

    def make(size=None):
        parts = [
            _config(kind)(**_scaled(size, {**base, **own}, base is TEXT)).to_dict()
            for (kind, own), base in ((text, TEXT), (vision, {}))
        ]
        whole = _scaled(size, {"attn_implementation": "eager", **fields}, False)
        return _config(name)(text_config=parts[0], vision_config=parts[1], **whole)

    return make


_QWEN2_TEXT = {"rope_parameters": SECTIONS, "rope_scaling": {"type": "mrope", **SECTIONS}}
_QWEN3_TEXT = {
    "rope_parameters": {**SECTIONS, "mrope_interleaved": True},
    "rope_scaling": {"mrope_interleaved": True, **SECTIONS},
}
_QWEN3_VISION = {**_QWEN_VISION, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
_PARTIAL_TEXT = {
    "rope_parameters": {**SECTIONS, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5, "mrope_interleaved": True}
}
_GLM_TEXT = {
    "rope_parameters": {**SECTIONS, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5},
    "partial_rotary_factor": 0.5,
    "rope_scaling": {"rope_type": "default", "mrope_section": [2, 1, 1]},
}
_GLM_VISION = {**_QWEN_VISION, "hidden_act": "silu", "image_size": 16, "rms_norm_eps": 0.03}
_GLM_MOE = {**ROUTED, **_GLM_TEXT, "n_routed_experts": 4, "moe_intermediate_size": 48, "first_k_dense_replace": 1}
_SIGLIP = ("SiglipVisionConfig", {**_VISION, "vision_use_head": False})
_GEMMA = {
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_act": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 16,
    "sliding_window": 4,
}
_GEMMA3 = {**_GEMMA, "layer_types": ["sliding_attention", "full_attention"], "final_logit_softcapping": 1.0}
_GEMMA4 = {
    **_GEMMA3,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 16,
    "global_head_dim": 16,
}
_GEMMA4_EXPERTS = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 48}
_GEMMA4_VISION = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 16, "patch_size": 4, "pooling_kernel_size": 2, "position_embedding_size":
    16, "rms_norm_eps": 0.03, "initializer_range": 0.1,
}  # fmt: skip
_LLAMA4 = {
    "num_local_experts": 2,
    "moe_layers": [1],
    "intermediate_size_mlp": 80,
    "pad_token_id": 0,
    "no_rope_layers": [1, 0],
    "attention_chunk_size": 64,
}
_MLLAMA_VISION = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_global_layers": 1, "attention_heads": 2,
    "vision_output_dim": 64, "image_size": 8, "patch_size": 4, "norm_eps": 0.03, "max_num_tiles": 1,
    "intermediate_layers_indices": [0], "supported_aspect_ratios": [[1, 1]], "initializer_range": 0.1,
}  # fmt: skip
_MLLAMA_TEXT = {
    "cross_attention_layers": [1],
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    "rope_scaling": {"rope_type": "default"},
}

# family -> class -> its configuration, a function of a Size or None, and of a text model's other fields
MODELS = {
    "llama": {"LlamaForCausalLM": _of("LlamaConfig", mlp_bias=True)},
    "mistral": {"MistralForCausalLM": _of("MistralConfig", sliding_window=4)},
    "ministral": {"MinistralForCausalLM": _of("MinistralConfig", sliding_window=4)},
    "qwen2": {"Qwen2ForCausalLM": _of("Qwen2Config")},
    "qwen3": {"Qwen3ForCausalLM": _of("Qwen3Config")},
    "smollm3": {"SmolLM3ForCausalLM": _of("SmolLM3Config", no_rope_layers=[1, 0])},
    "granite": {
        "GraniteForCausalLM": _of("GraniteConfig", logits_scaling=3.0, embedding_multiplier=1.5,
            residual_multiplier=0.7, attention_multiplier=0.3),
    },
    "phi3": {"Phi3ForCausalLM": _of("Phi3Config", partial_rotary_factor=0.5, rope_parameters=PARTIAL)},
    "glm4": {"Glm4ForCausalLM": _of("Glm4Config", partial_rotary_factor=0.5, rope_parameters=PARTIAL)},
    "olmo2": {"Olmo2ForCausalLM": _of("Olmo2Config")},
    "olmo3": {"Olmo3ForCausalLM": _of("Olmo3Config", sliding_window=4)},
    "exaone4": {
        "Exaone4ForCausalLM": _of("Exaone4Config", sliding_window=4, layer_types=["sliding_attention",
            "full_attention"]),
    },
    "falcon_h1": {
        "FalconH1ForCausalLM": _of("FalconH1Config", mamba_d_ssm=64, mamba_n_heads=4, mamba_d_state=16,
            mamba_chunk_size=8, lm_head_multiplier=0.3, mlp_bias=True, mlp_multipliers=[0.7, 1.3],
            key_multiplier=0.8),
    },
    "hunyuan_v1_dense": {"HunYuanDenseV1ForCausalLM": _of("HunYuanDenseV1Config")},
    "hunyuan_v1_moe": {"HunYuanMoEV1ForCausalLM": _of("HunYuanMoEV1Config", num_experts=4, moe_topk=2)},
    "nemotron": {
        "NemotronForCausalLM": _of("NemotronConfig", hidden_act="relu2", norm_eps=0.03, partial_rotary_factor=0.5,
            rope_parameters=PARTIAL),
    },
    "gemma": {"GemmaForCausalLM": _of("GemmaConfig", **_GEMMA)},
    "gemma2": {"Gemma2ForCausalLM": _of("Gemma2Config", final_logit_softcapping=1.0, **_GEMMA)},
    "gemma3_text": {"Gemma3ForCausalLM": _of("Gemma3TextConfig", **_GEMMA3)},
    "gemma3": {
        "Gemma3ForConditionalGeneration": _holding("Gemma3Config", ("Gemma3TextConfig", _GEMMA3), _SIGLIP,
            mm_tokens_per_image=4, boi_token_index=START, eoi_token_index=END, image_token_index=IMAGE,
            image_token_id=IMAGE),
    },
    "gemma4_text": {"Gemma4ForCausalLM": _of("Gemma4TextConfig", **_GEMMA4, **_GEMMA4_EXPERTS)},
    "gemma4": {
        "Gemma4ForConditionalGeneration": _holding("Gemma4Config", ("Gemma4TextConfig", _GEMMA4),
            ("Gemma4VisionConfig", _GEMMA4_VISION), boi_token_id=START, eoi_token_id=END, image_token_id=IMAGE,
            video_token_id=VIDEO, boa_token_id=124, eoa_token_index=125, audio_token_id=126),
    },
    "paligemma": {
        "PaliGemmaForConditionalGeneration": _holding("PaliGemmaConfig", ("GemmaConfig",
            {"hidden_activation": "gelu_pytorch_tanh"}), ("SiglipVisionConfig", {**_VISION, "vision_use_head": False,
            "projection_dim": 64}), projection_dim=64, image_token_index=IMAGE, image_token_id=IMAGE),
    },
    "mixtral": {"MixtralForCausalLM": _of("MixtralConfig", **ROUTED, num_local_experts=4)},
    "qwen3_moe": {"Qwen3MoeForCausalLM": _of("Qwen3MoeConfig", **EXPERTS, mlp_only_layers=[0])},
    "qwen3_next": {
        "Qwen3NextForCausalLM": _of("Qwen3NextConfig", **EXPERTS, **LINEAR, mlp_only_layers=[0],
            rope_parameters=PARTIAL),
    },
    "gpt_oss": {"GptOssForCausalLM": _of("GptOssConfig", **ROUTED, num_local_experts=4, sliding_window=4)},
    "deepseek_v4": {
        "DeepseekV4ForCausalLM": _of("DeepseekV4Config", **EXPERTS, n_routed_experts=4, num_key_value_heads=1,
            q_lora_rank=32, o_groups=2, o_lora_rank=16, index_n_heads=2, index_head_dim=16, index_topk=4,
            sliding_window=4, hc_mult=2, partial_rotary_factor=0.5, layer_types=["sliding_attention",
            "sliding_attention"], mlp_layer_types=["moe", "moe"]),
    },
    "llama4": {
        "Llama4ForCausalLM": _of("Llama4TextConfig", **_LLAMA4),
        "Llama4ForConditionalGeneration": _holding("Llama4Config", ("Llama4TextConfig", _LLAMA4),
            ("Llama4VisionConfig", {**_VISION, "image_size": 16, "vision_output_dim": 64, "projector_input_dim": 64,
            "projector_output_dim": 64, "intermediate_size": 128, "norm_eps": 0.03}), boi_token_index=START,
            eoi_token_index=END, image_token_index=IMAGE, image_token_id=IMAGE),
    },
    "mllama": {
        "MllamaForCausalLM": _of("MllamaTextConfig", **_MLLAMA_TEXT),
        "MllamaForConditionalGeneration": _holding("MllamaConfig", ("MllamaTextConfig", _MLLAMA_TEXT),
            ("MllamaVisionConfig", _MLLAMA_VISION), image_token_index=IMAGE),
    },
    "llava": {
        "LlavaForConditionalGeneration": _holding("LlavaConfig", ("LlamaConfig", {}), ("CLIPVisionConfig", _VISION),
            image_token_index=IMAGE, image_token_id=IMAGE),
    },
    "internvl": {
        "InternVLForConditionalGeneration": _holding("InternVLConfig", ("Qwen2Config", {}), ("InternVLVisionConfig",
            {**_VISION, "image_size": [16, 16], "patch_size": [4, 4], "norm_type": "rms_norm", "use_qk_norm": True}),
            image_token_id=IMAGE, image_seq_length=4),
    },
    "smolvlm": {
        "SmolVLMForConditionalGeneration": _holding("SmolVLMConfig", ("LlamaConfig", {}), ("SmolVLMVisionConfig",
            {**_VISION, "image_size": 16}), image_token_id=IMAGE, pad_token_id=0),
    },
    "qwen2_vl": {
        "Qwen2VLForConditionalGeneration": _holding("Qwen2VLConfig", ("Qwen2VLTextConfig", _QWEN2_TEXT),
            ("Qwen2VLVisionConfig", {**_QWEN_VISION, "embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2}), **_TOKENS),
    },
    "qwen2_5_vl": {
        "Qwen2_5_VLForConditionalGeneration": _holding("Qwen2_5_VLConfig", ("Qwen2_5_VLTextConfig", _QWEN2_TEXT),
            ("Qwen2_5_VLVisionConfig", {**_QWEN_VISION, "hidden_act": "silu", "fullatt_block_indexes": [1],
            "window_size": 16}), **_TOKENS),
    },
    "qwen3_vl": {
        "Qwen3VLForConditionalGeneration": _holding("Qwen3VLConfig", ("Qwen3VLTextConfig", _QWEN3_TEXT),
            ("Qwen3VLVisionConfig", _QWEN3_VISION), **_TOKENS),
    },
    "qwen3_vl_moe": {
        "Qwen3VLMoeForConditionalGeneration": _holding("Qwen3VLMoeConfig", ("Qwen3VLMoeTextConfig", {**EXPERTS,
            **_QWEN3_TEXT, "mlp_only_layers": [0]}), ("Qwen3VLMoeVisionConfig", _QWEN3_VISION), **_TOKENS),
    },
    "qwen3_5": {
        "Qwen3_5ForCausalLM": _of("Qwen3_5TextConfig", **LINEAR, **_PARTIAL_TEXT),
        "Qwen3_5ForConditionalGeneration": _holding("Qwen3_5Config", ("Qwen3_5TextConfig", {**LINEAR,
            **_PARTIAL_TEXT}), ("Qwen3_5VisionConfig", _QWEN3_VISION), **_TOKENS),
    },
    "qwen3_5_moe": {
        "Qwen3_5MoeForCausalLM": _of("Qwen3_5MoeTextConfig", **EXPERTS, **LINEAR, **_PARTIAL_TEXT),
        "Qwen3_5MoeForConditionalGeneration": _holding("Qwen3_5MoeConfig", ("Qwen3_5MoeTextConfig", {**EXPERTS,
            **LINEAR, **_PARTIAL_TEXT}), ("Qwen3_5MoeVisionConfig", _QWEN3_VISION), **_TOKENS),
    },
    "glm4v": {
        "Glm4vForConditionalGeneration": _holding("Glm4vConfig", ("Glm4vTextConfig", _GLM_TEXT), ("Glm4vVisionConfig",
            _GLM_VISION), **_GLM_TOKENS),
    },
    "glm4v_moe": {
        "Glm4vMoeForConditionalGeneration": _holding("Glm4vMoeConfig", ("Glm4vMoeTextConfig", _GLM_MOE),
            ("Glm4vMoeVisionConfig", _GLM_VISION), **_GLM_TOKENS),
    },
    "pixtral": {
        "PixtralVisionModel": lambda: _config("PixtralVisionConfig")(**{**_VISION, "hidden_act": "silu",
            "head_dim": 16}, attn_implementation="eager"),
    },
}  # fmt: skip


def language_models() -> list[str]:
    """The families that have a language model: they can be trained on text."""
    return [family for family, classes in MODELS.items() if any("For" in name for name in classes)]


def language_model(family: str, size: Size, dtype):
    """A model of the family's first class at a size, with transformers' own initial weights."""
    import transformers

    name, config = next(iter(MODELS[family].items()))
    return getattr(transformers, name)._from_config(config(size), dtype=dtype)


# What a model with images wants to know of text in training: that none of it is an image, or that all counts.
MARKS = {"gemma3": {"token_type_ids": 0}, "gemma4": {"mm_token_type_ids": 0}, "paligemma": {"token_type_ids": 1}}
