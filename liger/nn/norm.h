#pragma once
#include <torch/nn.h>
#include "liger/ops.h"

namespace liger::nn {

struct RMSNormOptions {
  RMSNormOptions(int64_t hidden_size) : hidden_size_(hidden_size) {}
  TORCH_ARG(int64_t, hidden_size);
  TORCH_ARG(double, eps) = 1e-6;
  TORCH_ARG(double, offset) = 0;                    // 1 for Gemma, whose weight starts at 0
  TORCH_ARG(Casting, casting) = Casting::Llama;
  TORCH_ARG(bool, elementwise_affine) = true;
};

/// liger::rms_norm with a weight of its own, which starts as the identity.
struct RMSNormImpl : torch::nn::Cloneable<RMSNormImpl> {
  explicit RMSNormImpl(RMSNormOptions o) : options(std::move(o)) { reset(); }

  void reset() override {
    if (options.elementwise_affine()) weight = register_parameter("weight", torch::full({options.hidden_size()}, 1 - options.offset()));
  }

  at::Tensor forward(const at::Tensor& x) {
    return rms_norm(x, weight.defined() ? std::optional(weight) : std::nullopt, options.eps(), options.offset(), options.casting());
  }

  RMSNormOptions options;
  at::Tensor weight;
};
TORCH_MODULE(RMSNorm);

}  // namespace liger::nn
