#pragma once
#include <torch/nn.h>
#include <cmath>
#include "liger/nn/module.h"

namespace liger::nn {

struct RouterOptions {
  RouterOptions(int64_t hidden_size, int64_t experts, int64_t top_k)
      : hidden_size_(hidden_size), experts_(experts), top_k_(top_k) {}
  TORCH_ARG(int64_t, hidden_size);
  TORCH_ARG(int64_t, experts);
  TORCH_ARG(int64_t, top_k);
  TORCH_ARG(bool, bias) = false;
  TORCH_ARG(bool, selection_bias) = false;  // a buffer, zeros at first, that counts in the choice only
  TORCH_ARG(liger::RouteOptions, route);
};

/// liger::route of the logits x wᵀ + bias, which are beside its results.
struct RouterImpl : torch::nn::Cloneable<RouterImpl> {
  struct Output {
    at::Tensor logits, weights, index, counts;
  };

  explicit RouterImpl(RouterOptions o) : options(std::move(o)) { reset(); }

  void reset() override {
    weight = register_parameter("weight", torch::empty({options.experts(), options.hidden_size()}));
    bias = register_parameter("bias", options.bias() ? torch::empty({options.experts()}) : at::Tensor());
    if (options.selection_bias())
      e_score_correction_bias = register_buffer("e_score_correction_bias", torch::zeros({options.experts()}));
    const double bound = 1 / std::sqrt(double(options.hidden_size()));  // as torch::nn::Linear
    torch::NoGradGuard no_grad;
    weight.uniform_(-bound, bound);
    if (bias.defined()) bias.uniform_(-bound, bound);
  }

  /// given [..., top_k]: the experts to replay, as liger::route has them.
  Output forward(const at::Tensor& x, const at::Tensor& given = {}) {
    const auto logits = at::linear(x, weight, nn::given(bias));
    const auto routed =
        liger::route(logits, options.top_k(), options.route(), nn::given(e_score_correction_bias), nn::given(given));
    return {logits, routed.weights, routed.index, routed.counts};
  }

  void pretty_print(std::ostream& to) const override {
    print(to, *this, "hidden_size", options.hidden_size(), "experts", options.experts(), "top_k", options.top_k(),
          "bias", options.bias(), "selection_bias", options.selection_bias(), "score", options.route().score,
          "normalise", options.route().normalise);
  }

  RouterOptions options;
  at::Tensor weight, bias, e_score_correction_bias;

 protected:
  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(at::Tensor())})
};
TORCH_MODULE(Router);

}  // namespace liger::nn
