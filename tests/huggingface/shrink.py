"""Small configurations of any model type: the defaults, with their sizes made small."""

import re
import typing

import transformers
from liger_kernel.transformers.patching.families import FAMILIES
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

LAYERS, WIDTH, HEADS, VOCABULARY = 4, 64, 4, 128
# Fields of configurations -> their tiny values; the first pattern that fits counts.
SIZES = (
    (r"(.*_)?vocab_size(_\w+)?|vocab_size_or_config_json_file", VOCABULARY),
    (r"qk_head_dim", 2 * WIDTH // HEADS),
    (r"first_k_dense_replace|num_dense_layers|moe_layer_start_index|num_nextn_predict_layers", 1),
    (r"num_kv_shared_layers|zero_expert_num", 0),
    (r"rotary_dim|(ssm_|mamba_d_)?state(_size)?|mamba_d_state|(mamba_)?chunk_size", 8),
    (r"(mamba_)?n_?groups", 2),
    (r"hidden_size_per_layer_input|laurel_rank|adapter_rank|hc_lowrank|mamba_headdim", 16),
    (r"(num_|n_)?(encoder_|decoder_|hidden_|text_|vision_)?(layers?|blocks)|num_\w*_layers|depth|n_layers?", LAYERS),
    (r".*(num_key_value_heads|num_kv_heads|n_kv_heads|kv_heads|num_query_groups|multi_query_group_num).*", 2),
    (r".*(attention_heads|n_heads?|num_heads|num_attn_heads)", HEADS),
    (r"(\w*_)?(qk_rope_|qk_nope_|v_)?head_(dim|size)|d_kv|qk_(nope|rope)_head_dim|kv_channels", WIDTH // HEADS),
    (r"q_lora_rank|kv_lora_rank|\w*_lora_rank", 32),
    (r"(\w*_)?(hidden_size|d_model|n_embd|embed_dim|embedding_size|hidden_dim|model_dim|embed_size|input_dim)|dim|width"
     r"|embedding_dim|projection_dim|out_hidden_size|output_dim|word_embed_proj_dim|d_embed", WIDTH),
    (r"(\w*_)?(intermediate_size|ffn_dim|ff_dim|d_ff|n_inner|mlp_dim|inner_dim|ffn_hidden_size|dim_ff|dff)(_\w+)?", 96),
    (r"(n_routed_experts|num_experts|num_local_experts|moe_num_experts|n_experts)", 4),
    (r"(num_experts_per_tok|moe_k|moe_topk|num_experts_per_token|top_k_experts|moe_top_k|num_selected_experts)", 2),
    (r"n_group|topk_group|num_expert_groups", 1),
    (r"n_shared_experts|num_shared_experts|moe_num_shared_experts", 1),
    (r"max_position_embeddings|n_positions|max_seq_len|max_source_positions|max_target_positions", 128),
    (r"sliding_window|window_size|attention_window", 8),
    (r"(bos|sep|cls|decoder_start)_token_id", 1), (r"eos_token_id", 2), (r"pad_token_id", 0),
    (r".*(dropout|dropout_prob|pdrop|layerdrop|dropout_rate|drop_path_rate|_drop|drop)", 0.0),
)  # fmt: skip
# What the tiny sizes need besides, by type; a dotted name is a field of a configuration in it.
_SECTIONS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
_TWO_ROPES = {name: {"rope_type": "default", "rope_theta": 1e4} for name in ("full_attention", "sliding_attention")}
_MIXED = ["sliding_attention", "full_attention"] * 2
FIELDS: dict[str, dict[str, typing.Any]] = {
    **dict.fromkeys(("glm46v", "glmga", "paddleocr_vl", "glm_ocr"), {"text_config.rope_parameters": _SECTIONS}),
    "qwen2_5_omni_thinker": {"text_config.rope_parameters": _SECTIONS, "vision_start_token_id": 151652},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 151652},
    "deepseek_v2": {"num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "bailing_hybrid": {"num_experts": 8, "n_group": 1, "topk_group": 1},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "cohere_compass_text": {"rope_parameters": _TWO_ROPES, "layer_types": _MIXED},
    "cohere_compass": {"text_config.rope_parameters": _TWO_ROPES, "text_config.layer_types": _MIXED},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "gemma3n_text": {"intermediate_size": 96, "activation_sparsity_pattern": [0.0] * LAYERS, "layer_types": _MIXED},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 2},
    "nemotron_h": {"mamba_num_heads": 8, "n_groups": 2},
    "zamba2": {"attention_hidden_size": 128, "attention_head_dim": 32, "n_mamba_heads": 8, "hybrid_layer_ids": [1, 3]},
    "zamba": {"attention_hidden_size": 128, "attention_head_dim": 32},
    "codegen": {"rotary_dim": 8}, "gptj": {"rotary_dim": 8},
    "mistral4": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "llama_4_scaling_beta": 0.1,
                                     "original_max_position_embeddings": 64, "partial_rotary_factor": 0.5}},
    "step3p7": {"text_config.sliding_window": 8},
    "qwen4_exp_text": {"layer_types": ["full_attention"] * 4},
    "hunyuan_vl": {"text_config.head_dim": 16}, "zaya": {"num_experts_per_tok": 1},
    "gemma4_unified_text": {"layer_types": _MIXED}, "gemma4_unified": {"text_config.layer_types": _MIXED},
}  # fmt: skip


def _tiny(config_class, own):
    """The fields of a configuration, as small as SIZES has them; `own` ones win."""
    default = config_class()
    made = {}
    for name, value in vars(default).items():
        if name.startswith("_") or name in ("model_type",):
            continue
        for pattern, size in SIZES:
            if re.fullmatch(pattern, name) and isinstance(value, (int, float)) and not isinstance(value, bool):
                made[name] = size
                break
        if name in ("layer_types", "mlp_layer_types", "layers_block_type") and isinstance(value, list):
            made[name] = (list(dict.fromkeys(value)) * LAYERS)[:LAYERS]
    for name, inner in (getattr(config_class, "sub_configs", None) or {}).items():
        value = getattr(default, name, None)
        inner = type(value) if isinstance(value, transformers.PretrainedConfig) else inner
        nested = {key.partition(".")[2]: field for key, field in own.items() if key.startswith(f"{name}.")}
        if inner in CONFIG_MAPPING.values() or isinstance(value, transformers.PretrainedConfig):
            made[name] = _tiny(inner, nested)
            made[name]["model_type"] = inner.model_type
    if "kv_lora_rank" in made and "num_key_value_heads" in made:  # multi-head latent attention
        made["num_key_value_heads"] = HEADS
    return made | {name: field for name, field in own.items() if "." not in name}


def _config_class(kind):
    """The configuration of a model type; that of its class where a transformers does not list the type."""
    if kind in CONFIG_MAPPING:
        return CONFIG_MAPPING[kind]
    row = FAMILIES[kind]
    return getattr(row.namespace(), next(iter(row.loss))).config_class


def shrunk(kind):
    """The small configuration of a model type; whatever its constructor raises where the sizes do not fit."""
    config_class = _config_class(kind)
    config = config_class(**_tiny(config_class, FIELDS.get(kind, {})))
    for each in (config, getattr(config, "text_config", None)):
        if each is not None:
            each.use_cache = False
    return config
