#include "liger/models/config.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <tuple>
#include "liger/models/config_reader.h"

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
/// The families, with the defaults in which they differ.
constexpr struct Family {
  const char* name;
  const char* architecture;
  int64_t kv_heads, head_dim, max_position_embeddings, bos_token_id, eos_token_id;  // 0 or -1: none
} kFamilies[] = {{"llama", "LlamaForCausalLM", 0, 0, 2048, 1, 2},
                 {"mistral", "MistralForCausalLM", 8, 0, 131072, 1, 2},
                 {"qwen2", "Qwen2ForCausalLM", 32, 0, 32768, -1, -1},
                 {"qwen3", "Qwen3ForCausalLM", 32, 128, 32768, -1, -1},
                 {"qwen3_5_text", "Qwen3_5ForCausalLM", 4, 256, 32768, -1, -1}};

using enum FieldUse;
constexpr ConfigFields kFields[] = {
    {Read,
     "model_type vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads "
     "num_key_value_heads head_dim hidden_act rms_norm_eps initializer_range tie_word_embeddings attention_bias "
     "mlp_bias max_position_embeddings original_max_position_embeddings rope_parameters rope_scaling rope_theta "
     "use_sliding_window sliding_window max_window_layers layer_types bos_token_id eos_token_id pad_token_id "
     "dtype torch_dtype partial_rotary_factor full_attention_interval linear_conv_kernel_dim linear_key_head_dim "
     "linear_value_head_dim linear_num_key_heads linear_num_value_heads"},
    {Refused, "attention_dropout", "[0]"},
    {Refused, "is_causal", "[true]"},
    {Refused, "is_encoder_decoder torchscript", "[false]"},
    {Refused, "pruned_heads", "[{}]"},
    {Refused, "transformers_weights", R"(["model.safetensors"])"},
    {Refused, "per_layer_config quantization_config compression_config fusion_config"},
    // Names, and what is cached, printed or returned.
    {Harmless,
     "architectures transformers_version name_or_path _name_or_path _commit_hash tokenizer_class prefix "
     "use_cache return_dict output_hidden_states output_attentions tie_last_hidden_states"},
    // How the same is computed.
    {Harmless,
     "attn_implementation experts_implementation pretraining_tp chunk_size_feed_forward gradient_checkpointing "
     "use_bfloat16 tf_legacy_loss"},
    // Of decoders that see an encoder, and of classifiers.
    {Harmless,
     "is_decoder add_cross_attention cross_attention_hidden_size tie_encoder_decoder decoder_start_token_id "
     "sep_token_id finetuning_task task_specific_params problem_type id2label label2id num_labels"},
    // Of generation: liger::nn::GenerateOptions says how that is done here.
    {Harmless,
     "max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature "
     "top_k top_p typical_p epsilon_cutoff eta_cutoff repetition_penalty encoder_repetition_penalty "
     "length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids num_return_sequences "
     "output_scores return_dict_in_generate forced_bos_token_id forced_eos_token_id remove_invalid_values "
     "exponential_decay_length_penalty suppress_tokens begin_suppress_tokens num_assistant_tokens "
     "num_assistant_tokens_schedule assistant_confidence_threshold assistant_lookbehind target_lookbehind"},
};

using Reader = ConfigReader;

const Family& read_family(const Reader& in, LlamaConfig& c) {
  in.check(in.read("model_type", c.model_type), "there is no model_type");
  const auto family = std::find_if(std::begin(kFamilies), std::end(kFamilies),
                                   [&](const Family& known) { return c.model_type == known.name; });
  in.check(family != std::end(kFamilies), "model_type ", c.model_type,
           " is none of llama, mistral, qwen2, qwen3, qwen3_5_text");
  return *family;
}

void read_sizes(const Reader& in, const Family& family, LlamaConfig& c) {
  in.need("vocab_size", c.vocab_size), in.need("hidden_size", c.hidden_size);
  in.need("intermediate_size", c.intermediate_size), in.need("num_hidden_layers", c.num_hidden_layers);
  in.need("num_attention_heads", c.num_attention_heads);
  in.read_or_none("num_key_value_heads", c.num_key_value_heads, family.kv_heads, 0);
  in.read_or_none("head_dim", c.head_dim, family.head_dim, 0);
  c.max_position_embeddings = family.max_position_embeddings;
  in.read("max_position_embeddings", c.max_position_embeddings);
  for (const auto& [name, size, least] :
       {std::tuple("vocab_size", c.vocab_size, 1), std::tuple("hidden_size", c.hidden_size, 1),
        std::tuple("intermediate_size", c.intermediate_size, 1),
        std::tuple("num_hidden_layers", c.num_hidden_layers, 0),
        std::tuple("num_attention_heads", c.num_attention_heads, 1),
        std::tuple("num_key_value_heads", c.num_key_value_heads, 0), std::tuple("head_dim", c.head_dim, 0),
        std::tuple("max_position_embeddings", c.max_position_embeddings, 1)})
    in.check(size >= least, name, " is ", size);
  in.check(c.num_attention_heads % c.kv_heads() == 0, "num_attention_heads ", c.num_attention_heads,
           " is no multiple of num_key_value_heads ", c.kv_heads());
  in.check(c.head_width() > 0 && c.head_width() % 2 == 0, "head_dim, or hidden_size / num_attention_heads, is ",
           c.head_width(), ", which is not even");
}

bool has_attention_bias(const LlamaConfig& c) {
  return c.model_type == "llama" || c.model_type == "qwen3" || c.hybrid();
}

constexpr const char *kLinear = "linear_attention", *kFull = "full_attention";

std::array<std::pair<const char*, int64_t*>, 5> linear_sizes(LlamaConfig& c) {
  return {{{"linear_conv_kernel_dim", &c.linear_conv_kernel_dim},
           {"linear_key_head_dim", &c.linear_key_head_dim},
           {"linear_value_head_dim", &c.linear_value_head_dim},
           {"linear_num_key_heads", &c.linear_num_key_heads},
           {"linear_num_value_heads", &c.linear_num_value_heads}}};
}

void read_biases(const Reader& in, LlamaConfig& c) {
  if (has_attention_bias(c)) in.read("attention_bias", c.qkv_bias);
  if (c.model_type == "llama") in.read("mlp_bias", c.mlp_bias);
  c.output_bias = c.qkv_bias;
  if (c.model_type == "qwen2") c.qkv_bias = true;
  c.qk_norm = c.model_type == "qwen3" || c.hybrid();
}

/// Which layers of Qwen3.5 have linear attention, of what sizes, and in what else its layers differ.
void read_hybrid(const Reader& in, LlamaConfig& c) {
  c.output_gate = true, c.norm_offset = 1;
  in.check(c.activation == Activation::SiLU, "hidden_act: convolutions have no other one than silu");
  if (std::vector<std::string> kinds; in.read("layer_types", kinds)) {
    in.check(int64_t(kinds.size()) == c.num_hidden_layers, "layer_types has ", kinds.size(),
             " entries, and num_hidden_layers is ", c.num_hidden_layers);
    for (const std::string& kind : kinds) {
      in.check(kind == kLinear || kind == kFull, "layer_types: ", kind, " is not known");
      c.linear_attention.push_back(kind == kLinear);
    }
  } else {
    c.full_attention_interval = 4;
    in.read("full_attention_interval", c.full_attention_interval);
    in.check(c.full_attention_interval > 0, "full_attention_interval is ", c.full_attention_interval);
  }
  for (const auto& [name, size] : linear_sizes(c)) {
    in.read(name, *size);
    in.check(*size > 0, name, " is ", *size);
  }
  in.check(c.linear_num_value_heads % c.linear_num_key_heads == 0, "linear_num_value_heads ", c.linear_num_value_heads,
           " is no multiple of linear_num_key_heads ", c.linear_num_key_heads);
  in.check(c.linear_conv_kernel_dim <= 8, "linear_conv_kernel_dim ", c.linear_conv_kernel_dim, " is above 8");
}

/// Llama has no window; Mistral's is that of every layer, unless layer_types says otherwise; Qwen's begins with layer
/// max_window_layers.
void read_window(const Reader& in, LlamaConfig& c) {
  int64_t window = 0, first = 0;
  bool slides = c.model_type == "mistral";
  if (c.model_type != "llama") in.read_or_none("sliding_window", window, 4096, 0);
  if (c.model_type.starts_with("qwen"))
    first = 28, in.read("use_sliding_window", slides), in.read("max_window_layers", first);
  in.check(window >= 0, "sliding_window is ", window);
  slides = slides && window > 0;
  const int64_t layers = c.num_hidden_layers;
  int64_t sliding = slides ? layers - std::clamp<int64_t>(first, 0, layers) : 0, full = layers - sliding;
  if (std::vector<std::string> kinds; in.read("layer_types", kinds)) {
    in.check(int64_t(kinds.size()) == layers, "layer_types has ", kinds.size(), " entries, and num_hidden_layers is ",
             layers);
    sliding = std::count(kinds.begin(), kinds.end(), "sliding_attention");
    full = std::count(kinds.begin(), kinds.end(), "full_attention");
  }
  in.check(sliding + full == layers, "layer_types ", in.content.value("layer_types", json()).dump(), " are not known");
  in.check(sliding == 0 || full == 0, "a sliding window of some layers only (use_sliding_window, max_window_layers ",
           first, ", layer_types) is not known");
  in.check(sliding == 0 || slides,
           "layer_types has sliding_attention, but there is no use_sliding_window with a "
           "sliding_window");
  if (sliding > 0) c.sliding_window = window;
}

/// rope_parameters since transformers 5, before rope_theta and rope_scaling; where there are both, transformers takes
/// rope_scaling.
void read_rope(const Reader& in, LlamaConfig& c) {
  json rope = json::object();
  const char* name = "rope_scaling";
  if (!in.read(name, rope) || rope.empty()) in.read(name = "rope_parameters", rope);
  in.check(rope.is_object(), name, " is no object");
  for (const auto& [key, value] : rope.items())
    in.check(!value.is_object(), name, ".", key, ": rotary angles of some layers only are not known");
  double& partial = c.partial_rotary_factor;
  if (c.hybrid()) partial = 0.25;
  if (!in.read(rope, "partial_rotary_factor", partial)) in.read("partial_rotary_factor", partial);
  in.check(partial == 1 || c.hybrid(), name, ": partial_rotary_factor ", partial, " is not known");
  in.check(partial > 0 && partial <= 1 && c.rotary_width() % 2 == 0, name, ": partial_rotary_factor ", partial,
           " of heads of ", c.head_width(), " is no even number");
  if (!in.read(rope, "rope_theta", c.rope_theta)) in.read("rope_theta", c.rope_theta);
  RopeScaling& r = c.rope_scaling;
  if (!in.read(rope, "rope_type", r.type)) in.read(rope, "type", r.type);
  if (r.type == "default") return;
  in.check(r.type == "linear" || r.type == "llama3" || r.type == "yarn", name, ": unknown rope_type ", r.type);
  in.need(rope, "factor", r.factor);
  r.original_max_position_embeddings = double(c.max_position_embeddings);
  if (!in.read("original_max_position_embeddings", r.original_max_position_embeddings))
    in.read(rope, "original_max_position_embeddings", r.original_max_position_embeddings);
  if (r.type == "llama3")
    in.need(rope, "low_freq_factor", r.low_freq_factor), in.need(rope, "high_freq_factor", r.high_freq_factor);
  for (const auto& [key, value] : {std::pair("beta_fast", &r.beta_fast), std::pair("beta_slow", &r.beta_slow)})
    if (double given = 0; in.read(rope, key, given) && given != 0) *value = given;  // 0 says the default
  in.read(rope, "attention_factor", r.attention_factor), in.read(rope, "mscale", r.mscale);
  in.read(rope, "mscale_all_dim", r.mscale_all_dim), in.read(rope, "truncate", r.truncate);
}

void read_tokens(const Reader& in, const Family& family, LlamaConfig& c) {
  in.read_or_none("bos_token_id", c.bos_token_id, family.bos_token_id, -1);
  int64_t eos = -1;
  if (in.content.contains("eos_token_id") && in.content["eos_token_id"].is_array())
    in.read("eos_token_id", c.eos_token_ids);
  else if (in.read_or_none("eos_token_id", eos, family.eos_token_id, -1); eos >= 0) c.eos_token_ids = {eos};
  if (int64_t pad; in.read("pad_token_id", pad)) {
    in.check(pad >= -c.vocab_size && pad < c.vocab_size, "pad_token_id ", pad, " is no token of ", c.vocab_size);
    c.pad_token_id = pad < 0 ? pad + c.vocab_size : pad;  // torch's embedding counts from the end
  }
}

}  // namespace

const std::map<std::string, ConfigField>& LlamaConfig::fields() {
  static const auto all = by_name(kFields);
  return all;
}

LlamaConfig LlamaConfig::load(const std::string& folder) {
  const std::string path = (fs::path(folder) / "config.json").string();
  const json file = read_json(path);
  json content = file;
  if (file.value("model_type", json()) == "qwen3_5" && file.contains("text_config")) {
    content = file["text_config"];
    for (const char* name : {"dtype", "torch_dtype", "tie_word_embeddings"})  // which may stand outside alone
      if (content.is_object() && !content.contains(name) && file.contains(name)) content[name] = file[name];
  }
  const Reader in{content, path, fields()};
  LlamaConfig c;
  const Family& family = read_family(in, c);
  in.refuse_unknown();
  read_sizes(in, family, c);
  in.read("rms_norm_eps", c.rms_norm_eps), in.read("initializer_range", c.initializer_range);
  in.read("tie_word_embeddings", c.tie_word_embeddings), in.choose("hidden_act", kActivations, c.activation);
  if (!in.choose("dtype", kDtypes, c.dtype)) in.choose("torch_dtype", kDtypes, c.dtype);
  read_biases(in, c);
  c.hybrid() ? read_hybrid(in, c) : read_window(in, c);
  read_rope(in, c);
  read_tokens(in, family, c);
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
  for (const Family& family : kFamilies)
    if (model_type == family.name) out["architectures"] = {family.architecture};
  out["model_type"] = model_type, out["vocab_size"] = vocab_size, out["hidden_size"] = hidden_size,
  out["intermediate_size"] = intermediate_size;
  out["num_hidden_layers"] = num_hidden_layers, out["num_attention_heads"] = num_attention_heads,
  out["num_key_value_heads"] = kv_heads(), out["head_dim"] = head_width();
  out["max_position_embeddings"] = max_position_embeddings, out["rms_norm_eps"] = rms_norm_eps,
  out["initializer_range"] = initializer_range;
  out["hidden_act"] = named(kActivations, activation), out["dtype"] = named(kDtypes, dtype),
  out["tie_word_embeddings"] = tie_word_embeddings;
  if (has_attention_bias(*this)) out["attention_bias"] = qkv_bias;
  if (model_type == "llama") out["mlp_bias"] = mlp_bias;
  out.erase("layer_types");
  if (hybrid()) {
    out.erase("text_config"), out.erase("vision_config");  // what transformers would read instead
    LlamaConfig copy = *this;
    for (const auto& [name, size] : linear_sizes(copy)) out[name] = *size;
    for (int64_t i = 0; i < num_hidden_layers; ++i) out["layer_types"].push_back(is_linear(i) ? kLinear : kFull);
  } else if (model_type == "mistral") out["sliding_window"] = sliding_window > 0 ? json(sliding_window) : json();
  else if (model_type != "llama") out["use_sliding_window"] = sliding_window > 0;
  if (model_type != "mistral" && sliding_window > 0)
    out["sliding_window"] = sliding_window, out["max_window_layers"] = 0;
  json rope = {{"rope_type", rope_scaling.type}, {"rope_theta", rope_theta}};
  if (hybrid()) rope["partial_rotary_factor"] = out["partial_rotary_factor"] = partial_rotary_factor;
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
  // null says that there is none: what is missing has a default.
  out["bos_token_id"] = bos_token_id >= 0 ? json(bos_token_id) : json();
  out["pad_token_id"] = pad_token_id >= 0 ? json(pad_token_id) : json();
  out["eos_token_id"] = eos_token_ids.empty()       ? json()
                        : eos_token_ids.size() == 1 ? json(eos_token_ids[0])
                                                    : json(eos_token_ids);
  write_json(path, out);
}

}  // namespace liger
