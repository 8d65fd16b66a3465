"""A tiny random model of every class that a row of the table of families names, and inputs for it."""

import importlib
import importlib.util

import torch
import transformers
from conftest import COMMON, VOCABULARY

IMAGE, VIDEO, START, END = 120, 121, 122, 123
TEXT = {**COMMON, "vocab_size": VOCABULARY}
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


def _generator(seed=0):
    return torch.Generator().manual_seed(seed)


def _ids(rows=2, length=10, seed=0):
    return torch.randint(3, 110, (rows, length), generator=_generator(seed))


def text(seed=0, rows=2, length=10):
    """Token ids and labels, of which some are ignored."""
    ids = _ids(rows, length, seed)
    labels = ids.clone()
    labels[0, :4] = -100
    return {"input_ids": ids, "labels": labels}


def _with_image(tokens, image=IMAGE, start=True, types=False, **pixels):
    """Two rows that hold an image of so many tokens."""

    def inputs(seed=0):
        ids = _ids(2, tokens + 8, seed)
        ids[:, 3 : 3 + tokens] = image
        if start:
            ids[:, 2], ids[:, 3 + tokens] = START, END
        labels = ids.clone()
        labels[ids == image] = -100
        labels[1, :4] = -100
        made = {name: value(seed) if callable(value) else value for name, value in pixels.items()}
        marks = {types: (ids == image).long()} if types else {}
        return {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids), **marks, **made}

    return inputs


def _noise(*shape):
    return lambda seed: torch.randn(*shape, generator=_generator(seed))


# Two images of 4 x 4 patches of 3 x 2 x 4 x 4 numbers, four patches a token.
_GRID = {"pixel_values": _noise(32, 96), "image_grid_thw": torch.tensor([[1, 4, 4], [1, 4, 4]])}
_QWEN_IMAGE = _with_image(4, types="mm_token_type_ids", **_GRID)


def _config(name):
    """A config class; transformers 4 does not export those of parts."""
    if hasattr(transformers, name):
        return getattr(transformers, name)
    from liger_kernel.transformers.families import FAMILIES

    homes = (
        importlib.import_module(row.module.replace("modeling_", "configuration_"))
        for row in FAMILIES.values()
        if _there(row)
    )
    return next(getattr(home, name) for home in homes if hasattr(home, name))


def _there(row):
    return importlib.util.find_spec(row.module.rpartition(".")[0])


def _of(name, **fields):
    return lambda: _config(name)(**{**TEXT, **fields})


def _holding(name, text, vision, **fields):
    """A config made of two: `text` and `vision` are (class name, fields)."""

    def make():
        parts = [_config(kind)(**{**base, **own}).to_dict() for (kind, own), base in ((text, TEXT), (vision, {}))]
        return _config(name)(text_config=parts[0], vision_config=parts[1], attn_implementation="eager", **fields)

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
_GEMMA4_VISION = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16,
    "patch_size": 4, "pooling_kernel_size": 2, "position_embedding_size": 16, "rms_norm_eps": 0.03, "initializer_range": 0.1,
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
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_global_layers": 1, "attention_heads": 2, "vision_output_dim": 64,
    "image_size": 8, "patch_size": 4, "norm_eps": 0.03, "max_num_tiles": 1, "intermediate_layers_indices": [0],
    "supported_aspect_ratios": [[1, 1]], "initializer_range": 0.1,
}  # fmt: skip
_MLLAMA_TEXT = {
    "cross_attention_layers": [1],
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    "rope_scaling": {"rope_type": "default"},
}


def _mllama(seed=0):
    return {
        **text(seed),
        "pixel_values": _noise(2, 1, 1, 3, 8, 8)(seed),
        "aspect_ratio_ids": torch.ones(2, 1, dtype=torch.long),
        "aspect_ratio_mask": torch.ones(2, 1, 1, dtype=torch.long),
        "cross_attention_mask": torch.ones(2, 10, 1, 1, dtype=torch.long),
    }


def _gemma4(seed=0):
    # 4 x 4 patches of an image, pooled by 2 x 2 into four tokens.
    places = torch.stack(torch.meshgrid(torch.arange(4), torch.arange(4), indexing="xy"), -1).reshape(1, 16, 2)
    made = _with_image(4, types="mm_token_type_ids", pixel_values=_noise(2, 16, 48))(seed)
    return {**made, "pixel_values": made["pixel_values"].sigmoid(), "image_position_ids": places.repeat(2, 1, 1)}


def _pixtral(seed=0):
    return {"pixel_values": _noise(2, 3, 8, 8)(seed), "image_sizes": torch.tensor([[8, 8], [8, 8]])}


# family -> class -> (its config, its inputs)
TINY_MODELS = {
    "llama": {"LlamaForCausalLM": (_of("LlamaConfig", mlp_bias=True), text)},
    "mistral": {"MistralForCausalLM": (_of("MistralConfig", sliding_window=4), text)},
    "ministral": {"MinistralForCausalLM": (_of("MinistralConfig", sliding_window=4), text)},
    "qwen2": {"Qwen2ForCausalLM": (_of("Qwen2Config"), text)},
    "qwen3": {"Qwen3ForCausalLM": (_of("Qwen3Config"), text)},
    "smollm3": {"SmolLM3ForCausalLM": (_of("SmolLM3Config", no_rope_layers=[1, 0]), text)},
    "granite": {
        "GraniteForCausalLM": (
            _of("GraniteConfig", logits_scaling=3.0, embedding_multiplier=1.5, residual_multiplier=0.7, attention_multiplier=0.3), text)
    },
    "phi3": {"Phi3ForCausalLM": (_of("Phi3Config", partial_rotary_factor=0.5, rope_parameters=PARTIAL), text)},
    "glm4": {"Glm4ForCausalLM": (_of("Glm4Config", partial_rotary_factor=0.5, rope_parameters=PARTIAL), text)},
    "olmo2": {"Olmo2ForCausalLM": (_of("Olmo2Config"), text)},
    "olmo3": {"Olmo3ForCausalLM": (_of("Olmo3Config", sliding_window=4), text)},
    "exaone4": {"Exaone4ForCausalLM": (_of("Exaone4Config", sliding_window=4, layer_types=["sliding_attention", "full_attention"]), text)},
    "falcon_h1": {
        "FalconH1ForCausalLM": (
            _of("FalconH1Config", mamba_d_ssm=64, mamba_n_heads=4, mamba_d_state=16, mamba_chunk_size=8, lm_head_multiplier=0.3, mlp_bias=True,
                mlp_multipliers=[0.7, 1.3], key_multiplier=0.8), text)
    },
    "hunyuan_v1_dense": {"HunYuanDenseV1ForCausalLM": (_of("HunYuanDenseV1Config"), text)},
    "hunyuan_v1_moe": {"HunYuanMoEV1ForCausalLM": (_of("HunYuanMoEV1Config", num_experts=4, moe_topk=2), text)},
    "nemotron": {
        "NemotronForCausalLM": (_of("NemotronConfig", hidden_act="relu2", norm_eps=0.03, partial_rotary_factor=0.5, rope_parameters=PARTIAL), text)
    },
    "gemma": {"GemmaForCausalLM": (_of("GemmaConfig", **_GEMMA), text)},
    "gemma2": {"Gemma2ForCausalLM": (_of("Gemma2Config", final_logit_softcapping=1.0, **_GEMMA), text)},
    "gemma3_text": {"Gemma3ForCausalLM": (_of("Gemma3TextConfig", **_GEMMA3), text)},
    "gemma3": {
        "Gemma3ForConditionalGeneration": (
            _holding("Gemma3Config", ("Gemma3TextConfig", _GEMMA3), _SIGLIP, mm_tokens_per_image=4, boi_token_index=START, eoi_token_index=END,
                     image_token_index=IMAGE, image_token_id=IMAGE),
            _with_image(4, types="token_type_ids", pixel_values=_noise(2, 3, 8, 8)))
    },
    "gemma4_text": {"Gemma4ForCausalLM": (_of("Gemma4TextConfig", **_GEMMA4), text)},
    "gemma4": {
        "Gemma4ForConditionalGeneration": (
            _holding("Gemma4Config", ("Gemma4TextConfig", _GEMMA4), ("Gemma4VisionConfig", _GEMMA4_VISION), boi_token_id=START, eoi_token_id=END,
                     image_token_id=IMAGE, video_token_id=VIDEO, boa_token_id=124, eoa_token_index=125, audio_token_id=126),
            _gemma4)
    },
    "paligemma": {
        "PaliGemmaForConditionalGeneration": (
            _holding("PaliGemmaConfig", ("GemmaConfig", {"hidden_activation": "gelu_pytorch_tanh"}), ("SiglipVisionConfig", {**_VISION, "vision_use_head": False, "projection_dim": 64}),
                     projection_dim=64, image_token_index=IMAGE, image_token_id=IMAGE),
            _with_image(4, start=False, types="token_type_ids", pixel_values=_noise(2, 3, 8, 8)))
    },
    "mixtral": {"MixtralForCausalLM": (_of("MixtralConfig", **ROUTED, num_local_experts=4), text)},
    "qwen3_moe": {"Qwen3MoeForCausalLM": (_of("Qwen3MoeConfig", **EXPERTS, mlp_only_layers=[0]), text)},
    "qwen3_next": {"Qwen3NextForCausalLM": (_of("Qwen3NextConfig", **EXPERTS, **LINEAR, mlp_only_layers=[0], rope_parameters=PARTIAL), text)},
    "gpt_oss": {"GptOssForCausalLM": (_of("GptOssConfig", **ROUTED, num_local_experts=4, sliding_window=4), text)},
    "deepseek_v4": {
        "DeepseekV4ForCausalLM": (
            _of("DeepseekV4Config", **EXPERTS, n_routed_experts=4, num_key_value_heads=1, q_lora_rank=32, o_groups=2, o_lora_rank=16,
                index_n_heads=2, index_head_dim=16, index_topk=4, sliding_window=4, hc_mult=2, partial_rotary_factor=0.5,
                layer_types=["sliding_attention", "sliding_attention"], mlp_layer_types=["moe", "moe"]),
            text)
    },
    "llama4": {
        "Llama4ForCausalLM": (_of("Llama4TextConfig", **_LLAMA4), text),
        "Llama4ForConditionalGeneration": (
            _holding("Llama4Config", ("Llama4TextConfig", _LLAMA4),
                     ("Llama4VisionConfig", {**_VISION, "image_size": 16, "vision_output_dim": 64, "projector_input_dim": 64, "projector_output_dim": 64,
                                             "intermediate_size": 128, "norm_eps": 0.03}),
                     boi_token_index=START, eoi_token_index=END, image_token_index=IMAGE, image_token_id=IMAGE),
            _with_image(4, pixel_values=_noise(2, 3, 16, 16))),
    },
    "mllama": {
        "MllamaForCausalLM": (_of("MllamaTextConfig", **_MLLAMA_TEXT), text),
        "MllamaForConditionalGeneration": (
            _holding("MllamaConfig", ("MllamaTextConfig", _MLLAMA_TEXT), ("MllamaVisionConfig", _MLLAMA_VISION), image_token_index=IMAGE), _mllama),
    },
    "llava": {
        "LlavaForConditionalGeneration": (
            _holding("LlavaConfig", ("LlamaConfig", {}), ("CLIPVisionConfig", _VISION), image_token_index=IMAGE, image_token_id=IMAGE),
            _with_image(4, start=False, pixel_values=_noise(2, 3, 8, 8)))
    },
    "internvl": {
        "InternVLForConditionalGeneration": (
            _holding("InternVLConfig", ("Qwen2Config", {}), ("InternVLVisionConfig", {**_VISION, "image_size": [16, 16], "patch_size": [4, 4],
                                                                                     "norm_type": "rms_norm", "use_qk_norm": True}),
                     image_token_id=IMAGE, image_seq_length=4),
            _with_image(4, start=False, pixel_values=_noise(2, 3, 16, 16)))
    },
    "smolvlm": {
        "SmolVLMForConditionalGeneration": (
            _holding("SmolVLMConfig", ("LlamaConfig", {}), ("SmolVLMVisionConfig", {**_VISION, "image_size": 16}), image_token_id=IMAGE, pad_token_id=0),
            _with_image(4, start=False, pixel_values=_noise(2, 1, 3, 16, 16)))
    },
    "qwen2_vl": {
        "Qwen2VLForConditionalGeneration": (
            _holding("Qwen2VLConfig", ("Qwen2VLTextConfig", _QWEN2_TEXT),
                     ("Qwen2VLVisionConfig", {**_QWEN_VISION, "embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2}), **_TOKENS), _QWEN_IMAGE)
    },
    "qwen2_5_vl": {
        "Qwen2_5_VLForConditionalGeneration": (
            _holding("Qwen2_5_VLConfig", ("Qwen2_5_VLTextConfig", _QWEN2_TEXT),
                     ("Qwen2_5_VLVisionConfig", {**_QWEN_VISION, "hidden_act": "silu", "fullatt_block_indexes": [1], "window_size": 16}), **_TOKENS),
            _QWEN_IMAGE)
    },
    "qwen3_vl": {
        "Qwen3VLForConditionalGeneration": (
            _holding("Qwen3VLConfig", ("Qwen3VLTextConfig", _QWEN3_TEXT), ("Qwen3VLVisionConfig", _QWEN3_VISION), **_TOKENS), _QWEN_IMAGE)
    },
    "qwen3_vl_moe": {
        "Qwen3VLMoeForConditionalGeneration": (
            _holding("Qwen3VLMoeConfig", ("Qwen3VLMoeTextConfig", {**EXPERTS, **_QWEN3_TEXT, "mlp_only_layers": [0]}),
                     ("Qwen3VLMoeVisionConfig", _QWEN3_VISION), **_TOKENS), _QWEN_IMAGE)
    },
    "qwen3_5": {
        "Qwen3_5ForCausalLM": (_of("Qwen3_5TextConfig", **LINEAR, **_PARTIAL_TEXT), text),
        "Qwen3_5ForConditionalGeneration": (
            _holding("Qwen3_5Config", ("Qwen3_5TextConfig", {**LINEAR, **_PARTIAL_TEXT}), ("Qwen3_5VisionConfig", _QWEN3_VISION), **_TOKENS),
            _QWEN_IMAGE),
    },
    "qwen3_5_moe": {
        "Qwen3_5MoeForCausalLM": (_of("Qwen3_5MoeTextConfig", **EXPERTS, **LINEAR, **_PARTIAL_TEXT), text),
        "Qwen3_5MoeForConditionalGeneration": (
            _holding("Qwen3_5MoeConfig", ("Qwen3_5MoeTextConfig", {**EXPERTS, **LINEAR, **_PARTIAL_TEXT}), ("Qwen3_5MoeVisionConfig", _QWEN3_VISION),
                     **_TOKENS), _QWEN_IMAGE),
    },
    "glm4v": {
        "Glm4vForConditionalGeneration": (
            _holding("Glm4vConfig", ("Glm4vTextConfig", _GLM_TEXT), ("Glm4vVisionConfig", _GLM_VISION), **_GLM_TOKENS), _QWEN_IMAGE)
    },
    "glm4v_moe": {
        "Glm4vMoeForConditionalGeneration": (
            _holding("Glm4vMoeConfig", ("Glm4vMoeTextConfig", _GLM_MOE), ("Glm4vMoeVisionConfig", _GLM_VISION), **_GLM_TOKENS), _QWEN_IMAGE)
    },
    "pixtral": {
        "PixtralVisionModel": (
            lambda: transformers.PixtralVisionConfig(**{**_VISION, "hidden_act": "silu", "head_dim": 16}, attn_implementation="eager"), _pixtral)
    },
}  # fmt: skip


def model_of(family, name, config=None):
    """A model in training mode with random weights; norms' weights, far from one, and biases too, which transformers starts at constants."""
    from liger_kernel.transformers.families import FAMILIES

    torch.manual_seed(0)
    cls = getattr(importlib.import_module(FAMILIES[family].module), name)
    model = cls(config or TINY_MODELS[family][name][0]())
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() < 2:
                parameter.add_(torch.randn_like(parameter), alpha=0.5)
            else:
                parameter.copy_(
                    torch.randn_like(parameter) * 0.1
                )  # experts and projections that transformers leaves empty or tiny
        for module in model.modules():
            # A default of no config: of the size of the activations' variance, so that it counts.
            for eps in ("variance_epsilon", "eps"):
                if isinstance(getattr(module, eps, None), float):
                    setattr(module, eps, 0.03)
    return model.train()
