#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <vector>
#include "liger/ops.h"

namespace liger {

/// How rotary angles are stretched to longer contexts, as in Hugging Face's rope_parameters.
struct RopeScaling {
  std::string type = "default";  // default; linear; llama3 (Llama 3.1); yarn (Peng et al. 2023, arXiv:2309.00071)
  double factor = 1;
  double original_max_position_embeddings = 0;
  double low_freq_factor = 1, high_freq_factor = 4;            // llama3
  double beta_fast = 32, beta_slow = 1, attention_factor = 0;  // yarn; 0: what factor and mscale give
  double mscale = 0, mscale_all_dim = 0;
  bool truncate = true;
};

/// What becomes of a field of config.json, or of an adapter's adapter_config.json.
enum class FieldUse {
  Read,      // it says what the model is
  Harmless,  // it changes neither the loss nor its gradients
  Refused    // it may change the model in a way that is not known here, unless it is null or one of `allowed`
};
struct ConfigField {
  FieldUse use;
  const char* allowed = "[]";  // JSON
};

/// The model that a config.json of Hugging Face describes: llama, mistral, qwen2, qwen3 or qwen3_5_text. Of one that
/// also sees images, qwen3_5, it is the model for text.
struct LlamaConfig {
  std::string model_type = "llama";
  int64_t vocab_size = 32000, hidden_size = 4096, intermediate_size = 11008, num_hidden_layers = 32,
          num_attention_heads = 32;
  int64_t num_key_value_heads = 0;  // 0: as many as heads
  int64_t head_dim = 0;             // 0: hidden_size / num_attention_heads
  int64_t max_position_embeddings = 2048;
  int64_t sliding_window = 0;  // of every layer; 0: none
  double rms_norm_eps = 1e-6, rope_theta = 10000, initializer_range = 0.02;
  RopeScaling rope_scaling;
  Activation activation = Activation::SiLU;
  bool tie_word_embeddings = false, qkv_bias = false, output_bias = false, mlp_bias = false;
  bool qk_norm = false;              // Qwen 3: an RMS norm of each head's queries and keys
  bool output_gate = false;          // Qwen3.5: what a head's attention gives is multiplied by σ of a gate
  double norm_offset = 0;            // Qwen3.5: 1, which norms add to their weights, but that of linear attention
  double partial_rotary_factor = 1;  // the part of each head that is rotated
  /// Qwen3.5: for each layer whether its attention is linear, a gated delta net. Empty: it is in every layer but each
  /// full_attention_interval-th, or, where that is 0, in none.
  std::vector<bool> linear_attention;
  int64_t full_attention_interval = 0;
  int64_t linear_conv_kernel_dim = 4, linear_key_head_dim = 128, linear_value_head_dim = 128, linear_num_key_heads = 16,
          linear_num_value_heads = 32;
  at::ScalarType dtype = at::kFloat;  // of the checkpoint
  int64_t bos_token_id = -1;          // -1: none
  int64_t pad_token_id = -1;          // -1: none; its row of the embedding gets no gradient
  std::vector<int64_t> eos_token_ids;

  int64_t kv_heads() const { return num_key_value_heads > 0 ? num_key_value_heads : num_attention_heads; }
  int64_t head_width() const { return head_dim > 0 ? head_dim : hidden_size / num_attention_heads; }
  int64_t rotary_width() const { return int64_t(double(head_width()) * partial_rotary_factor); }
  bool hybrid() const { return model_type == "qwen3_5_text"; }
  bool is_linear(int64_t layer) const {
    if (!linear_attention.empty()) return linear_attention.at(size_t(layer));
    return full_attention_interval > 0 && (layer + 1) % full_attention_interval != 0;
  }

  /// Fields that are missing have the defaults of transformers. Raises c10::Error, naming the file and the field, for
  /// what is of another type, or describes a model that is none of these, and for sizes that are missing.
  static LlamaConfig load(const std::string& folder);

  /// Every field that a config of these families has in transformers 4.57 or 5, and those beyond that its code asks
  /// for. What is none of them, transformers keeps and does not look at; so does load.
  static const std::map<std::string, ConfigField>& fields();

  /// Writes config.json as transformers reads it. Fields of the file that is there already and are not this struct's
  /// stay.
  void save(const std::string& folder) const;
};

}  // namespace liger
