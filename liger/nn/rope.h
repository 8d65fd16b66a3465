#pragma once
#include <torch/nn.h>
#include "liger/nn/module.h"

namespace liger::nn {

struct RotaryEmbeddingOptions {
  RotaryEmbeddingOptions(int64_t dim) : dim_(dim) {}
  TORCH_ARG(int64_t, dim);  // columns of a head that are rotated
  TORCH_ARG(double, base) = 10000;
  TORCH_ARG(bool, interleaved) = false;  // neighbouring columns turn, instead of the two halves
};

/// liger::rope for tokens at positions first, first + 1, …; the angle of column pair i is position · base^(−2i/dim).
/// Angles are float whatever the module is cast to: bfloat16 tells 641 of 2048 positions apart.
struct RotaryEmbeddingImpl : torch::nn::Cloneable<RotaryEmbeddingImpl> {
  explicit RotaryEmbeddingImpl(RotaryEmbeddingOptions o) : options(std::move(o)) { reset(); }

  void reset() override {
    const auto exponent = torch::arange(0, options.dim(), 2, torch::kFloat) / double(options.dim());
    inv_freq = register_buffer("inv_freq", torch::pow(options.base(), -exponent));
  }

  FORWARD_HAS_DEFAULT_ARGS({2, torch::nn::AnyValue(int64_t{0})})

  /// q [batch, heads, seq, ≥ dim], k likewise.
  std::tuple<at::Tensor, at::Tensor> forward(const at::Tensor& q, const at::Tensor& k, int64_t first = 0) {
    const auto positions = torch::arange(first, first + q.size(2), inv_freq.options());
    const auto half = torch::outer(positions, inv_freq),
               angles = options.interleaved() ? half : torch::cat({half, half}, -1);
    return rope(q, k, angles.cos(), angles.sin(), false, options.interleaved());
  }

  void to(torch::Device device, torch::Dtype, bool non_blocking = false) override { Module::to(device, non_blocking); }
  void to(torch::Dtype, bool = false) override {}
  void to(torch::Device device, bool non_blocking = false) override { Module::to(device, non_blocking); }

  void pretty_print(std::ostream& to) const override {
    print(to, *this, "dim", options.dim(), "base", options.base(), "interleaved", options.interleaved());
  }

  RotaryEmbeddingOptions options;
  at::Tensor inv_freq;
};
TORCH_MODULE(RotaryEmbedding);

}  // namespace liger::nn
