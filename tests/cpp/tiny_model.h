#pragma once
#include <torch/torch.h>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <string>
#include "liger/models/llama.h"

/// What the tests of models share: folders that go away, errors as text, and a tiny model.

namespace fs = std::filesystem;
using torch::Tensor;

struct Folder {
  Folder() {
    std::string name = (fs::temp_directory_path() / "liger-XXXXXX").string();
    path = ::mkdtemp(name.data());
  }
  ~Folder() { fs::remove_all(path); }
  std::string operator/(const std::string& name) const { return (path / name).string(); }
  fs::path path;
};

inline std::string error_of(const std::function<void()>& f) {
  try {
    f();
  } catch (const c10::Error& error) { return error.what_without_backtrace(); }
  return "none";
}

inline liger::LlamaConfig tiny(const std::string& type = "llama") {
  liger::LlamaConfig c;
  c.model_type = type, c.vocab_size = 40, c.hidden_size = 32, c.intermediate_size = 48, c.num_hidden_layers = 2,
  c.num_attention_heads = 4, c.num_key_value_heads = 2;
  c.head_dim = 8, c.qk_norm = type == "qwen3", c.qkv_bias = type == "qwen2", c.eos_token_ids = {3},
  c.initializer_range = 0.2, c.max_position_embeddings = 64;
  if (c.hybrid()) {
    c.qk_norm = c.output_gate = true, c.norm_offset = 1, c.partial_rotary_factor = 0.5;
    c.linear_attention = {true, false}, c.linear_conv_kernel_dim = 3, c.linear_key_head_dim = 8,
    c.linear_value_head_dim = 6, c.linear_num_key_heads = 2, c.linear_num_value_heads = 4;
  }
  return c;
}

/// Of the same weights, but without this library's operators.
inline Tensor plain_logits(liger::nn::LlamaForCausalLM& model, const Tensor& ids) {
  const auto p = model->named_parameters();
  const auto& c = model->config;
  const auto norm = [&](const Tensor& x, const std::string& name) {
    return x * torch::rsqrt(x.square().mean(-1, true) + c.rms_norm_eps) * p[name + ".weight"];
  };
  const auto inv = torch::pow(c.rope_theta, -torch::arange(0, c.head_dim, 2, torch::kFloat) / double(c.head_dim));
  const auto half = torch::outer(torch::arange(ids.size(1), torch::kFloat), inv), angle = torch::cat({half, half}, -1);
  const auto turn = [&](const Tensor& x) {
    const auto parts = x.chunk(2, -1);
    return x * angle.cos() + torch::cat({-parts[1], parts[0]}, -1) * angle.sin();
  };
  Tensor x = p["model.embed_tokens.weight"].index_select(0, ids.flatten()).view({ids.size(0), ids.size(1), -1});
  const auto mask = torch::full({ids.size(1), ids.size(1)}, -INFINITY).triu(1);
  for (int64_t i = 0; i < c.num_hidden_layers; ++i) {
    const std::string layer = "model.layers." + std::to_string(i) + ".";
    const auto linear = [&](const Tensor& t, const std::string& name) {
      const auto y = torch::matmul(t, p[layer + name + ".weight"].t());
      if (!p.contains(layer + name + ".lora_A")) return y;
      const auto low = torch::matmul(t, p[layer + name + ".lora_A"].t());
      return y + model->lora->alpha / double(model->lora->rank) * torch::matmul(low, p[layer + name + ".lora_B"].t());
    };
    const auto heads = [&](const Tensor& t, int64_t n) {
      return t.view({ids.size(0), ids.size(1), n, c.head_dim}).transpose(1, 2);
    };
    const auto y = norm(x, layer + "input_layernorm");
    const auto q = turn(heads(linear(y, "self_attn.q_proj"), 4)),
               k = turn(heads(linear(y, "self_attn.k_proj"), 2)).repeat_interleave(2, 1);
    const auto v = heads(linear(y, "self_attn.v_proj"), 2).repeat_interleave(2, 1);
    const auto weights = torch::softmax(torch::matmul(q, k.transpose(2, 3)) / std::sqrt(double(c.head_dim)) + mask, -1);
    x = x +
        linear(torch::matmul(weights, v).transpose(1, 2).reshape({ids.size(0), ids.size(1), -1}), "self_attn.o_proj");
    const auto z = norm(x, layer + "post_attention_layernorm");
    x = x + linear(torch::silu(linear(z, "mlp.gate_proj")) * linear(z, "mlp.up_proj"), "mlp.down_proj");
  }
  return torch::matmul(norm(x, "model.norm"), model->head_weight().t());
}
