#pragma once
#include <torch/nn.h>
#include "liger/ops.h"

namespace liger::nn {

/// liger::cross_entropy with its options; returns the loss.
struct CrossEntropyLossImpl : torch::nn::Cloneable<CrossEntropyLossImpl> {
  explicit CrossEntropyLossImpl(CrossEntropyOptions o = {}, std::optional<at::Tensor> class_weight = {}) : options(o), class_weight(std::move(class_weight)) {}
  void reset() override {}

  at::Tensor forward(const at::Tensor& logits, const at::Tensor& target) { return cross_entropy(logits, target, options, class_weight).loss; }

  CrossEntropyOptions options;
  std::optional<at::Tensor> class_weight;
};
TORCH_MODULE(CrossEntropyLoss);

struct KLDivLossOptions {
  TORCH_ARG(Reduction, reduction) = Reduction::Mean;
  TORCH_ARG(bool, log_target) = false;
  TORCH_ARG(double, eps) = 1e-10;
};

/// liger::kl_div with its options.
struct KLDivLossImpl : torch::nn::Cloneable<KLDivLossImpl> {
  explicit KLDivLossImpl(KLDivLossOptions o = {}) : options(o) {}
  void reset() override {}

  at::Tensor forward(const at::Tensor& x, const at::Tensor& target) { return kl_div(x, target, options.reduction(), options.log_target(), options.eps()); }

  KLDivLossOptions options;
};
TORCH_MODULE(KLDivLoss);

struct JSDLossOptions {
  TORCH_ARG(double, beta) = 0.5;
  TORCH_ARG(int64_t, ignore_index) = -100;
  TORCH_ARG(Reduction, reduction) = Reduction::BatchMean;
};

/// liger::jsd with its options.
struct JSDLossImpl : torch::nn::Cloneable<JSDLossImpl> {
  explicit JSDLossImpl(JSDLossOptions o = {}) : options(o) {}
  void reset() override {}

  at::Tensor forward(const at::Tensor& x, const at::Tensor& target, const std::optional<at::Tensor>& labels = {}) {
    return jsd(x, target, labels, options.beta(), options.ignore_index(), options.reduction());
  }

  JSDLossOptions options;
};
TORCH_MODULE(JSDLoss);

struct TVDLossOptions {
  TORCH_ARG(Reduction, reduction) = Reduction::BatchMean;
  TORCH_ARG(int64_t, ignore_index) = -100;
};

/// liger::tvd with its options.
struct TVDLossImpl : torch::nn::Cloneable<TVDLossImpl> {
  explicit TVDLossImpl(TVDLossOptions o = {}) : options(o) {}
  void reset() override {}

  at::Tensor forward(const at::Tensor& x, const at::Tensor& target, const std::optional<at::Tensor>& labels = {}) {
    return tvd(x, target, labels, options.reduction(), options.ignore_index());
  }

  TVDLossOptions options;
};
TORCH_MODULE(TVDLoss);

struct SelectiveLogSoftmaxOptions {
  TORCH_ARG(double, temperature) = 1;
  TORCH_ARG(int64_t, ignore_index) = -100;
};

/// liger::selective_log_softmax with its options.
struct SelectiveLogSoftmaxImpl : torch::nn::Cloneable<SelectiveLogSoftmaxImpl> {
  explicit SelectiveLogSoftmaxImpl(SelectiveLogSoftmaxOptions o = {}) : options(o) {}
  void reset() override {}

  std::tuple<at::Tensor, at::Tensor> forward(const at::Tensor& logits, const at::Tensor& ids) {
    return selective_log_softmax(logits, ids, options.temperature(), options.ignore_index());
  }

  SelectiveLogSoftmaxOptions options;
};
TORCH_MODULE(SelectiveLogSoftmax);

struct LinearCrossEntropyOptions {
  LinearCrossEntropyOptions(int64_t hidden_size, int64_t classes) : hidden_size_(hidden_size), classes_(classes) {}
  TORCH_ARG(int64_t, hidden_size);
  TORCH_ARG(int64_t, classes);
  TORCH_ARG(bool, bias) = false;
  TORCH_ARG(HeadOptions, loss);
};

/// A language model's head and its loss in one: holds the weight, and gives the logits or, with labels, the loss without them.
struct LinearCrossEntropyImpl : torch::nn::Cloneable<LinearCrossEntropyImpl> {
  explicit LinearCrossEntropyImpl(LinearCrossEntropyOptions o) : options(std::move(o)) { reset(); }

  void reset() override {
    linear = register_module("linear", torch::nn::Linear(torch::nn::LinearOptions(options.hidden_size(), options.classes()).bias(options.bias())));
  }

  at::Tensor forward(const at::Tensor& hidden) { return linear(hidden); }

  /// hidden [..., hidden_size], target [...].
  at::Tensor forward(const at::Tensor& hidden, const at::Tensor& target) {
    const auto bias = linear->bias.defined() ? std::optional(linear->bias) : std::nullopt;
    return fused_linear_cross_entropy(hidden.reshape({-1, hidden.size(-1)}), linear->weight, target.reshape({-1}), options.loss(), bias).loss;
  }

  LinearCrossEntropyOptions options;
  torch::nn::Linear linear{nullptr};
};
TORCH_MODULE(LinearCrossEntropy);

}  // namespace liger::nn
