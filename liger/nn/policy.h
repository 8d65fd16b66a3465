#pragma once
#include <torch/nn/cloneable.h>
#include <torch/nn/modules/common.h>
#include <torch/nn/modules/container/any.h>
#include <torch/nn/pimpl.h>
#include "liger/nn/module.h"

namespace liger::nn {

struct LinearPolicyLossOptions {
  TORCH_ARG(PolicyOptions, loss);
  TORCH_ARG(double, temperature) = 1;
};

/// liger::policy_loss of completions under a policy's head, whose logits are never held in full:
///   hidden  [batch, tokens, width]
///   weight  [classes, width]
///   ids     [batch, tokens]
///   bias    [classes]
/// Tokens that the mask leaves out cost nothing, unless masked_terms.
struct LinearPolicyLossImpl : torch::nn::Cloneable<LinearPolicyLossImpl> {
  explicit LinearPolicyLossImpl(LinearPolicyLossOptions o = {}) : options(std::move(o)) {}
  void reset() override {}

  FORWARD_HAS_DEFAULT_ARGS({4, torch::nn::AnyValue(at::Tensor())})
  PolicyResult forward(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& ids,
                       const PolicyInputs& inputs, const at::Tensor& bias = {}) {
    const LogProbOptions head{.temperature = options.temperature()};
    const at::Tensor read = options.loss().masked_terms ? ids : ids.masked_fill(inputs.mask == 0, head.ignore_index);
    return policy_loss(linear_log_prob(hidden, weight, read, head, given(bias)).logp, inputs, options.loss());
  }

  void pretty_print(std::ostream& to) const override {
    const PolicyOptions& o = options.loss();
    print(to, *this, "loss", o.loss, "sequence_level", o.sequence_level, "epsilon_low", o.epsilon_low, "epsilon_high",
          o.epsilon_high, "beta", o.beta, "temperature", options.temperature());
  }

  LinearPolicyLossOptions options;
};
TORCH_MODULE(LinearPolicyLoss);

}  // namespace liger::nn
