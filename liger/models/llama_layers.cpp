#include "liger/models/llama.h"

#include <torch/torch.h>
#include <algorithm>
#include "liger/nn/activation.h"

namespace liger::nn {
namespace {

using at::Tensor;

RMSNormOptions norm_options(const LlamaConfig& config, int64_t width) {
  const Casting casting = config.norm_offset != 0 ? Casting::Gemma : Casting::Llama;
  return RMSNormOptions(width).eps(config.rms_norm_eps).offset(config.norm_offset).casting(casting);
}

/// Whether an adapter of some layers sees its input through a dropout: an operator for several layers has none.
bool any_drops(std::initializer_list<const Projection*> layers) {
  return std::any_of(layers.begin(), layers.end(), [](const Projection* layer) { return (*layer)->drops(); });
}

}  // namespace

void ProjectionImpl::adapt(const LoraConfig& lora) {
  options.rank(lora.rank).alpha(lora.alpha).rslora(lora.rslora).dropout(lora.dropout);
  add_adapter();
}

void LlamaAttentionImpl::reset() {
  const LlamaConfig& c = config;
  const int64_t heads = c.num_attention_heads, kv_heads = c.kv_heads(), width = c.head_width();
  const int64_t queries = heads * width * (c.output_gate ? 2 : 1);
  q_proj = register_module("q_proj", Projection(c.hidden_size, queries, c.qkv_bias));
  k_proj = register_module("k_proj", Projection(c.hidden_size, kv_heads * width, c.qkv_bias));
  v_proj = register_module("v_proj", Projection(c.hidden_size, kv_heads * width, c.qkv_bias));
  o_proj = register_module("o_proj", Projection(heads * width, c.hidden_size, c.output_bias));
  if (c.qk_norm) {
    q_norm = register_module("q_norm", RMSNorm(norm_options(c, width)));
    k_norm = register_module("k_norm", RMSNorm(norm_options(c, width)));
  }
}

std::array<Tensor, 3> LlamaAttentionImpl::project(const Tensor& x) {
  if (any_drops({&q_proj, &k_proj, &v_proj})) return {q_proj(x), k_proj(x), v_proj(x)};  // in this order
  const auto [q, k, v] = qkv(x, q_proj->layer(), k_proj->layer(), v_proj->layer());
  return {q, k, v};
}

Tensor LlamaAttentionImpl::forward(const Tensor& x, const Positions& positions, KVCache* cache, int64_t layer) {
  const int64_t batch = x.size(0), tokens = x.size(1);
  const int64_t heads = config.num_attention_heads, kv_heads = config.kv_heads(), width = config.head_width();
  const auto split = [&](const Tensor& projected, RMSNorm& norm, int64_t of_heads) {
    const Tensor y = projected.view({batch, tokens, of_heads, -1}).slice(-1, 0, width);
    return (norm.is_empty() ? y : norm(y)).transpose(1, 2);
  };
  RMSNorm none{nullptr};
  const auto [xq, xk, xv] = project(x);
  auto [q, k] = rope(split(xq, q_norm, heads), split(xk, k_norm, kv_heads), positions.cos, positions.sin);
  Tensor v = split(xv, none, kv_heads);
  if (cache) {
    const auto grown = [&](std::vector<Tensor>& kept, const Tensor& added) {
      if (int64_t(kept.size()) <= layer) kept.resize(layer + 1);
      Tensor& all = kept[layer];
      if (!all.defined() || all.size(2) < cache->length + tokens) {
        const Tensor larger = at::empty(
            {batch, kv_heads, std::max(cache->capacity, 2 * (cache->length + tokens)), width}, added.options());
        if (all.defined()) larger.narrow(2, 0, cache->length).copy_(all.narrow(2, 0, cache->length));
        all = larger;
      }
      all.narrow(2, cache->length, tokens).copy_(added);
      return all.narrow(2, 0, cache->length + tokens);
    };
    k = grown(cache->keys, k), v = grown(cache->values, v);
  }
  const bool causal = !positions.mask.defined() && tokens > 1;
  const Tensor y =
      at::scaled_dot_product_attention(q, k, v, given(positions.mask), 0, causal, std::nullopt, heads != kv_heads);
  const Tensor joined = y.transpose(1, 2).reshape({batch, tokens, heads * width});
  if (!config.output_gate) return o_proj(joined);
  const Tensor gate = xq.view({batch, tokens, heads, -1}).slice(-1, width).flatten(-2);
  return o_proj(joined * at::sigmoid(gate));
}

void LlamaMLPImpl::reset() {
  const LlamaConfig& c = config;
  gate_proj = register_module("gate_proj", Projection(c.hidden_size, c.intermediate_size, c.mlp_bias));
  up_proj = register_module("up_proj", Projection(c.hidden_size, c.intermediate_size, c.mlp_bias));
  down_proj = register_module("down_proj", Projection(c.intermediate_size, c.hidden_size, c.mlp_bias));
}

Tensor LlamaMLPImpl::forward(const Tensor& x) {
  if (any_drops({&gate_proj, &up_proj, &down_proj})) {
    const Tensor gate = gate_proj(x), up = up_proj(x);  // in this order, in which PEFT draws the masks of dropouts
    return down_proj(gated(gate, up, config.activation));
  }
  return gated_mlp(x, gate_proj->layer(), up_proj->layer(), down_proj->layer(), {.activation = config.activation});
}

void LlamaDecoderLayerImpl::reset() {
  const LlamaConfig& c = config;
  if (is_linear) {
    const auto options = GatedDeltaNetOptions(c.hidden_size)
                             .key_heads(c.linear_num_key_heads)
                             .heads(c.linear_num_value_heads)
                             .key_dim(c.linear_key_head_dim)
                             .value_dim(c.linear_value_head_dim)
                             .width(c.linear_conv_kernel_dim)
                             .eps(c.rms_norm_eps);
    linear_attn = register_module("linear_attn", LinearAttention(options));
  } else {
    self_attn = register_module("self_attn", LlamaAttention(c));
  }
  mlp = register_module("mlp", LlamaMLP(c));
  input_layernorm = register_module("input_layernorm", RMSNorm(norm_options(c, c.hidden_size)));
  post_attention_layernorm = register_module("post_attention_layernorm", RMSNorm(norm_options(c, c.hidden_size)));
}

Tensor LlamaDecoderLayerImpl::mix(const Tensor& x, const Positions& positions, KVCache* cache, int64_t layer) {
  if (cache && int64_t(cache->states.size()) <= layer) cache->states.resize(layer + 1);
  return linear_attn->mix(positions.kept.defined() ? x * positions.kept.to(x.scalar_type()) : x, positions.starts,
                          cache ? &cache->states[layer] : nullptr);
}

Tensor LlamaDecoderLayerImpl::forward(const Tensor& x, const Positions& positions, KVCache* cache, int64_t layer) {
  const Tensor normed = input_layernorm(x);
  const Tensor mixed = is_linear ? mix(normed, positions, cache, layer) : self_attn(normed, positions, cache, layer);
  const RMSNormOptions& norm = post_attention_layernorm->options;
  const auto [y, s] =
      fused_add_rms_norm(mixed, x, post_attention_layernorm->weight, norm.eps(), norm.offset(), norm.casting());
  return s + mlp(y);
}

void LlamaModelImpl::Tokens::reset() { weight = register_parameter("weight", torch::empty({classes, hidden})); }

void LlamaModelImpl::reset() {
  const LlamaConfig& c = config;
  embed_tokens = register_module("embed_tokens", std::make_shared<Tokens>(c.vocab_size, c.hidden_size));
  layers = register_module("layers", torch::nn::ModuleList());
  for (int64_t i = 0; i < c.num_hidden_layers; ++i) layers->push_back(LlamaDecoderLayer(c, c.is_linear(i)));
  norm = register_module("norm", RMSNorm(norm_options(c, c.hidden_size)));
}

}  // namespace liger::nn
