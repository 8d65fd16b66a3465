"""Published models by name, as configurations; weights are random."""

import json
from pathlib import Path
from typing import Any

_LLAMA = {"vocab_size": 128256, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0}
_QWEN3 = {"vocab_size": 151936, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
          "head_dim": 128}  # fmt: skip
_QWEN3_30B = {**_QWEN3, "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
              "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_attention_heads": 32,
              "num_key_value_heads": 4, "norm_topk_prob": True}  # fmt: skip
_MIXTRAL = {"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_local_experts": 8,
            "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
            "max_position_embeddings": 32768, "rope_theta": 1e6}  # fmt: skip
_GPT_OSS = {"vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880, "num_local_experts": 32,
            "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8,
            "head_dim": 64, "sliding_window": 128}  # fmt: skip

#: name -> (the model whose config.json has these values, its type, the fields that differ from the type's defaults).
#: The scaling of rotary frequencies, which costs no time, is left out.
SHAPES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama-1b": ("meta-llama/Llama-3.2-1B", "llama",
                 {**_LLAMA, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
                  "num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": True}),
    "llama-3b": ("meta-llama/Llama-3.2-3B", "llama",
                 {**_LLAMA, "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28,
                  "num_attention_heads": 24, "num_key_value_heads": 8, "tie_word_embeddings": True}),
    "llama-8b": ("meta-llama/Llama-3.1-8B", "llama",
                 {**_LLAMA, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
                  "num_attention_heads": 32, "num_key_value_heads": 8}),
    "mistral-7b": ("mistralai/Mistral-7B-v0.3", "mistral",
                   {"vocab_size": 32768, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
                    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 32768,
                    "rope_theta": 1e6, "sliding_window": None}),
    "qwen2.5-0.5b": ("Qwen/Qwen2.5-0.5B", "qwen2",
                     {"vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
                      "num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": True,
                      "max_position_embeddings": 32768, "rope_theta": 1e6}),
    "qwen2.5-7b": ("Qwen/Qwen2.5-7B", "qwen2",
                   {"vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
                    "num_attention_heads": 28, "num_key_value_heads": 4, "max_position_embeddings": 131072,
                    "rope_theta": 1e6}),
    "qwen3-0.6b": ("Qwen/Qwen3-0.6B", "qwen3",
                   {**_QWEN3, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
                    "num_attention_heads": 16, "num_key_value_heads": 8, "tie_word_embeddings": True}),
    "qwen3-1.7b": ("Qwen/Qwen3-1.7B", "qwen3",
                   {**_QWEN3, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28,
                    "num_attention_heads": 16, "num_key_value_heads": 8, "tie_word_embeddings": True}),
    "qwen3-4b": ("Qwen/Qwen3-4B", "qwen3",
                 {**_QWEN3, "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
                  "num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": True}),
    "qwen3-8b": ("Qwen/Qwen3-8B", "qwen3",
                 {**_QWEN3, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
                  "num_attention_heads": 32, "num_key_value_heads": 8}),
    "qwen3.5-2b": ("Qwen/Qwen3.5-2B, its text model", "qwen3_5_text",
                   {"vocab_size": 248320, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 24,
                    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "linear_num_key_heads": 16,
                    "linear_num_value_heads": 16, "tie_word_embeddings": True}),
    "nemotron-h-2b": ("the first 20 layers of nvidia/Nemotron-H-4B-Base-8K, of 52", "nemotron_h",
                      {"vocab_size": 131072, "hidden_size": 3072, "intermediate_size": 12288,
                       "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-", "num_attention_heads": 32,
                       "num_key_value_heads": 8, "head_dim": 128, "mamba_num_heads": 112, "mamba_head_dim": 64,
                       "ssm_state_size": 128, "n_groups": 8, "chunk_size": 128, "max_position_embeddings": 8192}),
    "nemotron-3-5b": ("the first 7 layers of nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16, of 52", "nemotron_h",
                      {"vocab_size": 131072, "hidden_size": 2688, "hybrid_override_pattern": "MEMEM*E",
                       "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128, "mamba_num_heads": 64,
                       "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8, "conv_kernel": 4, "chunk_size": 128,
                       "n_routed_experts": 128, "num_experts_per_tok": 6, "n_shared_experts": 1,
                       "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712,
                       "norm_topk_prob": True, "routed_scaling_factor": 2.5, "max_position_embeddings": 262144}),
    "lfm2-1.2b": ("LiquidAI/LFM2-1.2B", "lfm2",
                  {"vocab_size": 65536, "hidden_size": 2048, "intermediate_size": 12288, "num_hidden_layers": 16,
                   "num_attention_heads": 32, "num_key_value_heads": 8, "full_attn_idxs": [2, 5, 8, 10, 12, 14],
                   "conv_L_cache": 3, "block_multiple_of": 256, "max_position_embeddings": 128000}),
    "gemma2-2b": ("google/gemma-2-2b", "gemma2",
                  {"vocab_size": 256000, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
                   "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256}),
    "modernbert-base": ("answerdotai/ModernBERT-base", "modernbert",
                        {"vocab_size": 50368, "hidden_size": 768, "intermediate_size": 1152, "num_hidden_layers": 22,
                         "num_attention_heads": 12}),
    "qwen3-30b-a3b": ("Qwen/Qwen3-30B-A3B", "qwen3_moe", _QWEN3_30B),
    "qwen3-moe-4b": ("the first 6 layers of Qwen/Qwen3-30B-A3B", "qwen3_moe", {**_QWEN3_30B, "num_hidden_layers": 6}),
    "mixtral-8x7b": ("mistralai/Mixtral-8x7B-v0.1", "mixtral", _MIXTRAL),
    "mixtral-3b": ("the first 2 layers of mistralai/Mixtral-8x7B-v0.1", "mixtral",
                   {**_MIXTRAL, "num_hidden_layers": 2}),
    "gpt-oss-20b": ("openai/gpt-oss-20b", "gpt_oss", _GPT_OSS),
    "gpt-oss-4b": ("the first 4 layers of openai/gpt-oss-20b", "gpt_oss", {**_GPT_OSS, "num_hidden_layers": 4}),
    "tiny": ("no published model: for a CPU", "llama",
             {"vocab_size": 32768, "hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4,
              "num_attention_heads": 4, "num_key_value_heads": 1}),
}  # fmt: skip
#: Lists of a configuration that have an entry for each layer.
_PER_LAYER = ("layer_types", "mlp_layer_types", "no_rope_layers")


class Unknown(ValueError):
    """A model that is none of what `config_of` takes; the message says what it takes."""


def config_of(model: str, layers: int | None = None):
    """The configuration of a built-in shape, a folder, a config.json or a name in the local cache, with its first
    `layers` layers or all; and the folder or name that has weights for it, or None. Raises Unknown."""
    import transformers

    if model in SHAPES:
        _, kind, fields = SHAPES[model]
        config = transformers.AutoConfig.for_model(kind, **fields)
        if layers:
            _shorten(config, layers)
        return config, None
    try:
        path = Path(model)
        if path.suffix == ".json":
            fields = json.loads(path.read_text())
            config, weights = transformers.AutoConfig.for_model(fields.pop("model_type", ""), **fields), None
        else:
            config = transformers.AutoConfig.from_pretrained(model, local_files_only=True)
            weights = model if not path.is_dir() or any(path.glob("*.safetensors")) else None
    except (OSError, ValueError) as error:
        shapes = ", ".join(SHAPES)
        raise Unknown(
            f"{model} is neither a folder with a config.json, such a file, a model in the local cache "
            f"(`hf download {model}` puts it there) nor one of {shapes}: {str(error).splitlines()[0]}"
        ) from None
    if layers:
        _shorten(config.get_text_config(), layers)
        weights = None
    return config, weights


def _shorten(config, layers):
    config.num_hidden_layers = layers
    for name in _PER_LAYER:
        if isinstance(entries := getattr(config, name, None), list):
            setattr(config, name, entries[:layers])
