#include "liger/models/config.h"

#include <cmath>
#include <filesystem>
#include <fstream>
#include "liger/models/json.h"

namespace liger {
namespace {

using nlohmann::json;
namespace fs = std::filesystem;

constexpr struct {
  const char* name;
  Activation activation;
} kActivations[] = {{"silu", Activation::SiLU},
                    {"swish", Activation::SiLU},
                    {"gelu_pytorch_tanh", Activation::GeLUTanh},
                    {"gelu", Activation::GeLUErf},
                    {"relu2", Activation::ReLUSquared}};
constexpr struct {
  const char* name;
  at::ScalarType dtype;
} kDtypes[] = {{"float32", at::kFloat}, {"bfloat16", at::kBFloat16}, {"float16", at::kHalf}};
constexpr struct {
  const char* name;
  const char* architecture;
} kModels[] = {{"llama", "LlamaForCausalLM"},
               {"mistral", "MistralForCausalLM"},
               {"qwen2", "Qwen2ForCausalLM"},
               {"qwen3", "Qwen3ForCausalLM"}};

struct Reader {
  const json& content;
  const std::string& path;

  /// Reads a field that is there and not null; says whether it was.
  template <class T>
  bool read(const json& from, const char* name, T& into) const {
    if (!from.contains(name) || from[name].is_null()) return false;
    try {
      into = from[name].get<T>();
    } catch (const json::exception& error) { TORCH_CHECK(false, path, ": ", name, ": ", error.what()); }
    return true;
  }
  template <class T>
  bool read(const char* name, T& into) const {
    return read(content, name, into);
  }
  template <class T>
  void need(const char* name, T& into) const {
    TORCH_CHECK(read(name, into), path, ": there is no ", name);
  }

  template <class Table, class T>
  void choose(const char* name, const Table& table, T& into) const {
    std::string given;
    if (!read(name, given)) return;
    for (const auto& [known, value] : table)
      if (given == known) {
        into = value;
        return;
      }
    TORCH_CHECK(false, path, ": unknown ", name, " ", given);
  }
};

}  // namespace

LlamaConfig LlamaConfig::load(const std::string& folder) {
  const std::string path = (fs::path(folder) / "config.json").string();
  const json content = read_json(path);
  const Reader in{content, path};
  LlamaConfig c;
  in.need("model_type", c.model_type);
  bool known = false;
  for (const auto& model : kModels) known = known || c.model_type == model.name;
  TORCH_CHECK(known, path, ": model_type ", c.model_type, " is none of llama, mistral, qwen2, qwen3");
  in.need("vocab_size", c.vocab_size), in.need("hidden_size", c.hidden_size),
      in.need("intermediate_size", c.intermediate_size);
  in.need("num_hidden_layers", c.num_hidden_layers), in.need("num_attention_heads", c.num_attention_heads);
  in.read("num_key_value_heads", c.num_key_value_heads), in.read("head_dim", c.head_dim),
      in.read("max_position_embeddings", c.max_position_embeddings);
  in.read("rms_norm_eps", c.rms_norm_eps), in.read("initializer_range", c.initializer_range),
      in.read("tie_word_embeddings", c.tie_word_embeddings);
  in.choose("hidden_act", kActivations, c.activation);
  in.choose(content.contains("dtype") ? "dtype" : "torch_dtype", kDtypes, c.dtype);
  in.read("attention_bias", c.qkv_bias), in.read("mlp_bias", c.mlp_bias);
  c.output_bias = c.qkv_bias;
  if (c.model_type == "qwen2") c.qkv_bias = true, c.output_bias = false;
  if (c.model_type == "mistral") c.qkv_bias = c.output_bias = false;
  if (c.model_type == "qwen3" && c.head_dim == 0) c.head_dim = 128;
  c.qk_norm = c.model_type == "qwen3";
  bool slides = c.model_type == "mistral";
  in.read("use_sliding_window", slides);
  if (slides && in.read("sliding_window", c.sliding_window) && c.model_type != "mistral") {
    int64_t full_layers = 0;
    in.read("max_window_layers", full_layers);
    TORCH_CHECK(full_layers == 0, path, ": a sliding window of some layers only (max_window_layers ", full_layers,
                ") is not known");
  }
  // rope_parameters since transformers 5, before rope_theta and rope_scaling.
  in.read("rope_theta", c.rope_theta);
  for (const char* name : {"rope_scaling", "rope_parameters"}) {
    json rope;
    if (!in.read(name, rope)) continue;
    TORCH_CHECK(rope.is_object(), path, ": ", name, " is no object");
    RopeScaling& r = c.rope_scaling;
    if (!in.read(rope, "rope_type", r.type)) in.read(rope, "type", r.type);
    TORCH_CHECK(r.type == "default" || r.type == "linear" || r.type == "llama3" || r.type == "yarn", path,
                ": unknown rope_type ", r.type);
    r.original_max_position_embeddings = double(c.max_position_embeddings);
    in.read(rope, "rope_theta", c.rope_theta), in.read(rope, "factor", r.factor);
    in.read(rope, "original_max_position_embeddings", r.original_max_position_embeddings),
        in.read(rope, "low_freq_factor", r.low_freq_factor);
    in.read(rope, "high_freq_factor", r.high_freq_factor), in.read(rope, "beta_fast", r.beta_fast),
        in.read(rope, "beta_slow", r.beta_slow);
    in.read(rope, "attention_factor", r.attention_factor), in.read(rope, "mscale", r.mscale),
        in.read(rope, "mscale_all_dim", r.mscale_all_dim);
    in.read(rope, "truncate", r.truncate);
    double partial = 1;
    in.read(rope, "partial_rotary_factor", partial);
    TORCH_CHECK(partial == 1, path, ": partial_rotary_factor ", partial, " is not known");
  }
  in.read("bos_token_id", c.bos_token_id);
  if (content.contains("eos_token_id") && content["eos_token_id"].is_array()) in.read("eos_token_id", c.eos_token_ids);
  else if (int64_t one; in.read("eos_token_id", one)) c.eos_token_ids = {one};
  TORCH_CHECK(c.hidden_size > 0 && c.vocab_size > 0 && c.intermediate_size > 0 && c.num_hidden_layers >= 0 &&
                  c.num_attention_heads > 0 && c.kv_heads() > 0 && c.num_attention_heads % c.kv_heads() == 0 &&
                  c.head_width() % 2 == 0,
              path, ": sizes that fit no model");
  return c;
}

void LlamaConfig::save(const std::string& folder) const {
  const std::string path = (fs::path(folder) / "config.json").string();
  json out = fs::exists(path) ? read_json(path) : json::object();
  const auto named = [](const auto& table, const auto& value) {
    for (const auto& [name, of] : table)
      if (of == value) return std::string(name);
    TORCH_CHECK(false, "a config without a name for one of its values");
  };
  for (const auto& [name, architecture] : kModels)
    if (model_type == name) out["architectures"] = {architecture};
  out["model_type"] = model_type, out["vocab_size"] = vocab_size, out["hidden_size"] = hidden_size,
  out["intermediate_size"] = intermediate_size;
  out["num_hidden_layers"] = num_hidden_layers, out["num_attention_heads"] = num_attention_heads,
  out["num_key_value_heads"] = kv_heads(), out["head_dim"] = head_width();
  out["max_position_embeddings"] = max_position_embeddings, out["rms_norm_eps"] = rms_norm_eps,
  out["initializer_range"] = initializer_range;
  out["hidden_act"] = named(kActivations, activation), out["dtype"] = named(kDtypes, dtype),
  out["tie_word_embeddings"] = tie_word_embeddings;
  if (model_type == "llama" || model_type == "qwen3") out["attention_bias"] = qkv_bias;
  if (model_type == "llama") out["mlp_bias"] = mlp_bias;
  if (model_type == "mistral") out["sliding_window"] = sliding_window > 0 ? json(sliding_window) : json();
  else if (sliding_window > 0)
    out["use_sliding_window"] = true, out["sliding_window"] = sliding_window, out["max_window_layers"] = 0;
  json rope = {{"rope_type", rope_scaling.type}, {"rope_theta", rope_theta}};
  const RopeScaling& r = rope_scaling;
  if (r.type != "default") rope["factor"] = r.factor;
  if (r.type == "llama3" || r.type == "yarn")
    rope["original_max_position_embeddings"] = int64_t(r.original_max_position_embeddings);
  if (r.type == "llama3") rope["low_freq_factor"] = r.low_freq_factor, rope["high_freq_factor"] = r.high_freq_factor;
  if (r.type == "yarn") {
    rope["beta_fast"] = r.beta_fast, rope["beta_slow"] = r.beta_slow, rope["truncate"] = r.truncate;
    for (const auto& [name, value] : {std::pair("attention_factor", r.attention_factor), std::pair("mscale", r.mscale),
                                      std::pair("mscale_all_dim", r.mscale_all_dim)})
      if (value != 0) rope[name] = value;
  }
  out.erase("rope_scaling"), out.erase("torch_dtype");
  out["rope_parameters"] = rope, out["rope_theta"] = rope_theta;
  if (r.type != "default") out["rope_scaling"] = rope;
  if (bos_token_id >= 0) out["bos_token_id"] = bos_token_id;
  if (eos_token_ids.size() == 1) out["eos_token_id"] = eos_token_ids[0];
  else if (!eos_token_ids.empty()) out["eos_token_id"] = eos_token_ids;
  fs::create_directories(folder);
  const std::string beside = path + ".tmp";
  std::ofstream(beside) << out.dump(2) << "\n";
  std::error_code error;
  fs::rename(beside, path, error);
  TORCH_CHECK(!error, path, ": ", error.message());
}

}  // namespace liger
