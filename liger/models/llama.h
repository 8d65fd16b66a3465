#pragma once
#include <torch/nn.h>
#include <array>
#include <functional>
#include <optional>
#include "liger/models/config.h"
#include "liger/models/lora.h"
#include "liger/models/safetensors.h"
#include "liger/nn/lora.h"
#include "liger/nn/mixers.h"
#include "liger/nn/norm.h"

/// Llama and its relatives (Touvron et al. 2023, arXiv:2302.13971) in libtorch, with this library's norms, rotary
/// embedding, gated MLP, gated delta nets and head. Parameters have the names of Hugging Face's checkpoints.
namespace liger::nn {

/// Keys and values of the tokens so far: for each layer [batch, heads, capacity, width], of which `length` are filled;
/// and the states of layers with linear attention.
struct KVCache {
  int64_t length = 0, capacity = 0;
  std::vector<at::Tensor> keys, values;
  std::vector<MixerState> states;
};

/// y = x weightᵀ + bias, and what an adapter adds, if there is one. The weights are not initialised.
struct ProjectionImpl : LoRALinearBase<ProjectionImpl> {
  ProjectionImpl(int64_t in, int64_t out, bool with_bias)
      : LoRALinearBase(LoRALinearOptions(in, out).rank(0).bias(with_bias)) {}
  using LoRALinearBase::LoRALinearBase;

  /// Adds an adapter to a layer that has none.
  void adapt(const LoraConfig& lora);
};
TORCH_MODULE(Projection);

/// What all layers of a step share.
struct Positions {
  at::Tensor cos, sin;  // [1 or batch, tokens, width], float
  at::Tensor mask;      // [1 or batch, 1, tokens, keys], true where attended; undefined: causal
  // For layers with linear attention. Undefined: a row is one document, and no token is padding.
  at::Tensor starts;  // [batch, tokens], int32: where in the row a token's document begins
  at::Tensor kept;    // [batch, tokens, 1], 0 where there is padding, else 1
};

/// Grouped-query attention (Ainslie et al. 2023, arXiv:2305.13245) by ATen's scaled_dot_product_attention. With
/// config.output_gate q_proj gives a gate beside each head's query, and the head's result is multiplied by its sigmoid.
struct LlamaAttentionImpl : torch::nn::Cloneable<LlamaAttentionImpl> {
  explicit LlamaAttentionImpl(const LlamaConfig& config) : config(config) { reset(); }
  void reset() override;
  at::Tensor forward(const at::Tensor& x, const Positions& positions, KVCache* cache, int64_t layer);
  LlamaConfig config;
  Projection q_proj{nullptr}, k_proj{nullptr}, v_proj{nullptr}, o_proj{nullptr};
  RMSNorm q_norm{nullptr}, k_norm{nullptr};

 private:
  std::array<at::Tensor, 3> project(const at::Tensor& x);
};
TORCH_MODULE(LlamaAttention);

struct LlamaMLPImpl : torch::nn::Cloneable<LlamaMLPImpl> {
  explicit LlamaMLPImpl(const LlamaConfig& config) : config(config) { reset(); }
  void reset() override;
  at::Tensor forward(const at::Tensor& x);
  LlamaConfig config;
  Projection gate_proj{nullptr}, up_proj{nullptr}, down_proj{nullptr};
};
TORCH_MODULE(LlamaMLP);

/// GatedDeltaNet with the model's linear layers.
struct LinearAttentionImpl : GatedDeltaNetBase<LinearAttentionImpl, Projection> {
  using GatedDeltaNetBase::GatedDeltaNetBase;
};
TORCH_MODULE(LinearAttention);

/// Has one of the two kinds of attention.
struct LlamaDecoderLayerImpl : torch::nn::Cloneable<LlamaDecoderLayerImpl> {
  explicit LlamaDecoderLayerImpl(const LlamaConfig& config, bool is_linear = false)
      : config(config), is_linear(is_linear) {
    reset();
  }
  void reset() override;
  at::Tensor forward(const at::Tensor& x, const Positions& positions, KVCache* cache = nullptr, int64_t layer = 0);
  LlamaConfig config;
  bool is_linear;
  LlamaAttention self_attn{nullptr};
  LinearAttention linear_attn{nullptr};
  LlamaMLP mlp{nullptr};
  RMSNorm input_layernorm{nullptr}, post_attention_layernorm{nullptr};

 private:
  at::Tensor mix(const at::Tensor& x, const Positions& positions, KVCache* cache, int64_t layer);
};
TORCH_MODULE(LlamaDecoderLayer);

struct LlamaModelImpl : torch::nn::Cloneable<LlamaModelImpl> {
  explicit LlamaModelImpl(const LlamaConfig& config) : config(config) { reset(); }
  void reset() override;
  struct Tokens : torch::nn::Cloneable<Tokens> {
    Tokens(int64_t classes, int64_t hidden) : classes(classes), hidden(hidden) { reset(); }
    void reset() override;
    int64_t classes, hidden;
    at::Tensor weight;
  };
  LlamaConfig config;
  std::shared_ptr<Tokens> embed_tokens;
  torch::nn::ModuleList layers{nullptr};
  RMSNorm norm{nullptr};
};
TORCH_MODULE(LlamaModel);

/// What a forward pass may be given beside the tokens' ids.
struct CausalLMInputs {
  at::Tensor labels = {};  // [batch, tokens], of which labels[:, 1:] are predicted; −100 where a token does not count
  /// [1 or batch, tokens]; without: 0, 1, … after the cache. Where they do not grow by one, a packed document begins,
  /// which does not see the one before it.
  at::Tensor position_ids = {};
  at::Tensor attention_mask = {};        // [batch, keys], 0 where there is padding
  std::optional<double> num_items = {};  // divides the sum of the losses; without: their mean
  KVCache* cache = nullptr;              // grows by the tokens
  // What a CUDA graph cannot ask the device for, or change: whether position_ids begin documents within a row; without,
  // they are looked at. And a float on the device, in place of num_items.
  std::optional<bool> packed = {};
  at::Tensor divisor = {};
};

struct CausalLMOutput {
  at::Tensor loss;    // a number, with labels
  at::Tensor logits;  // [batch, tokens, classes], without labels
};

struct GenerateOptions {
  TORCH_ARG(int64_t, max_new_tokens) = 20;
  TORCH_ARG(double, temperature) = 0;  // 0: the most probable token
  /// Draws among the most probable tokens that make up this probability (Holtzman et al. 2020, arXiv:1904.09751).
  TORCH_ARG(double, top_p) = 1;
  TORCH_ARG(std::optional<at::Generator>, generator);
};

struct LlamaForCausalLMImpl : torch::nn::Cloneable<LlamaForCausalLMImpl> {
  /// Weights are drawn as transformers draws them: normal with deviation initializer_range; norms are 1, biases 0.
  /// A_log and dt_bias begin as GatedDeltaNet's. Without `draw` they are what the memory held: for who gives them
  /// values.
  explicit LlamaForCausalLMImpl(LlamaConfig config, bool draw = true);
  void reset() override;  // to weights without values

  /// A copy, in which the same weights need gradients.
  std::shared_ptr<torch::nn::Module> clone(const std::optional<at::Device>& device = {}) const override;

  /// The model of a checkpoint folder, of Qwen3.5 the one for text, in `dtype` or that of the config. Weights of this
  /// dtype are views of the files, whose pages a write copies. Where config.json says that head and embedding are tied
  /// and the checkpoint has both, they are tied if they are equal; if not, it warns, and config.tie_word_embeddings
  /// becomes false. Raises c10::Error for a weight that is missing, of another shape, or unknown; then nothing has been
  /// made.
  static std::shared_ptr<LlamaForCausalLMImpl> from_pretrained(const std::string& folder,
                                                               std::optional<at::ScalarType> dtype = {});

  /// Writes config.json and model.safetensors, in files of at most max_shard_bytes, as transformers reads them. What
  /// adapters add is part of the weights that are written.
  void save_pretrained(const std::string& folder, int64_t max_shard_bytes = int64_t(5) << 30) const;

  /// Puts the frozen weights of the blocks' linear layers into 8 bits (AdaptedLinear), but those of which a size is no
  /// multiple of 16 or that have fewer than 128 rows: no longer exact. For a model with adapters, after it has been
  /// moved to its device and dtype. Raises c10::Error for weights that are trained, and where there is no such layer.
  void quantise(EightBit format);

  /// Freezes all weights, and gives an adapter in float to each linear layer of a block that lora.target_modules names.
  /// They are drawn as PEFT draws them: the model computes what it did. Raises c10::Error for a target that is none of
  /// these layers, and for a model that has adapters.
  void add_adapter(const LoraConfig& lora);

  /// The same with an adapter that PEFT, or save_adapter, has saved: adapter_config.json and adapter_model.safetensors.
  /// Raises c10::Error for what LoraConfig::load refuses, and for a tensor that is missing, of another shape, or
  /// unknown; then the model is as it was.
  void load_adapter(const std::string& folder);

  /// Writes the adapter as PEFT loads it.
  void save_adapter(const std::string& folder) const;

  /// ids [batch, tokens], int64. With labels the loss, and no logits are made; without, the logits.
  CausalLMOutput forward(const at::Tensor& ids, const CausalLMInputs& inputs = {});

  /// The last hidden states [batch, tokens, hidden], normalised; what a loss of this library takes beside
  /// head_weight().
  at::Tensor hidden_states(const at::Tensor& ids, const CausalLMInputs& inputs = {});

  /// [classes, hidden]: the head's own weight, or the embedding's where they are tied.
  at::Tensor head_weight() const { return lm_head.is_empty() ? model->embed_tokens->weight : lm_head->weight; }

  /// ids [batch, tokens] and up to max_new_tokens more, until each row has one of the config's eos_token_ids; rows that
  /// end sooner are padded with it. attention_mask [batch, tokens] is 0 where a row is padded, on its left. No
  /// gradients.
  at::Tensor generate(const at::Tensor& ids, const GenerateOptions& options = {}, at::Tensor attention_mask = {});

  void pretty_print(std::ostream& to) const override;

  LlamaConfig config;
  std::optional<LoraConfig> lora;       // of the adapters, where there are some
  bool gradient_checkpointing = false;  // of a layer only the input waits for backward, which runs the layer again
  LlamaModel model{nullptr};
  Projection lm_head{nullptr};

 private:
  Positions positions_of(const at::Tensor& ids, const CausalLMInputs& inputs);
  at::Tensor inv_freq_;
  double attention_factor_ = 1;
};
TORCH_MODULE(LlamaForCausalLM);

/// [rotary_width / 2] angles a position, float, and what cosines and sines are multiplied by.
std::pair<at::Tensor, double> rope_frequencies(const LlamaConfig& config);

}  // namespace liger::nn
