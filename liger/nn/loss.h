#pragma once
#include <torch/nn.h>
#include "liger/nn/module.h"

namespace liger::nn {

/// liger::cross_entropy with its options, and a copy of the classes' weight as a buffer; returns the loss.
struct CrossEntropyLossImpl : torch::nn::Cloneable<CrossEntropyLossImpl> {
  explicit CrossEntropyLossImpl(CrossEntropyOptions o = {}, at::Tensor class_weight = {})
      : options(o), weight(std::move(class_weight)) {
    reset();
  }

  void reset() override {
    if (weight.defined()) weight = register_buffer("weight", weight.detach().clone());  // clone() writes into it
  }

  at::Tensor forward(const at::Tensor& logits, const at::Tensor& target) {
    return cross_entropy(logits, target, options, given(weight)).loss;
  }

  void pretty_print(std::ostream& to) const override {
    print(to, *this, "ignore_index", options.ignore_index, "reduction", options.reduction, "label_smoothing",
          options.label_smoothing, "lse_square_scale", options.lse_square_scale, "softcap", options.softcap,
          "token_scaling", options.token_scaling, "weight", weight);
  }

  CrossEntropyOptions options;
  at::Tensor weight;
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

  at::Tensor forward(const at::Tensor& x, const at::Tensor& target) {
    return kl_div(x, target, options.reduction(), options.log_target(), options.eps());
  }

  void pretty_print(std::ostream& to) const override {
    print(to, *this, "reduction", options.reduction(), "log_target", options.log_target(), "eps", options.eps());
  }

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

  FORWARD_HAS_DEFAULT_ARGS({2, torch::nn::AnyValue(at::Tensor())})
  at::Tensor forward(const at::Tensor& x, const at::Tensor& target, const at::Tensor& labels = {}) {
    return jsd(x, target, given(labels), options.beta(), options.ignore_index(), options.reduction());
  }

  void pretty_print(std::ostream& to) const override {
    print(to, *this, "beta", options.beta(), "ignore_index", options.ignore_index(), "reduction", options.reduction());
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

  FORWARD_HAS_DEFAULT_ARGS({2, torch::nn::AnyValue(at::Tensor())})
  at::Tensor forward(const at::Tensor& x, const at::Tensor& target, const at::Tensor& labels = {}) {
    return tvd(x, target, given(labels), options.reduction(), options.ignore_index());
  }

  void pretty_print(std::ostream& to) const override {
    print(to, *this, "reduction", options.reduction(), "ignore_index", options.ignore_index());
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

  void pretty_print(std::ostream& to) const override {
    print(to, *this, "temperature", options.temperature(), "ignore_index", options.ignore_index());
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

/// A language model's head and its loss in one: holds the weight, and gives the logits or, with labels, the loss
/// without them.
struct LinearCrossEntropyImpl : torch::nn::Cloneable<LinearCrossEntropyImpl> {
  explicit LinearCrossEntropyImpl(LinearCrossEntropyOptions o) : options(std::move(o)) { reset(); }

  void reset() override {
    linear = register_module(
        "linear",
        torch::nn::Linear(torch::nn::LinearOptions(options.hidden_size(), options.classes()).bias(options.bias())));
  }

  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(at::Tensor())})

  /// The logits of hidden [..., hidden_size], or the loss of target [...].
  at::Tensor forward(const at::Tensor& hidden, const at::Tensor& target = {}) {
    if (!target.defined()) return linear(hidden);
    return fused_linear_cross_entropy(hidden.reshape({-1, hidden.size(-1)}), linear->weight, target.reshape({-1}),
                                      options.loss(), given(linear->bias))
        .loss;
  }

  void pretty_print(std::ostream& to) const override {
    const HeadOptions& o = options.loss();
    print(to, *this, "hidden_size", options.hidden_size(), "classes", options.classes(), "bias", options.bias(),
          "ignore_index", o.ignore_index, "reduction", o.reduction, "label_smoothing", o.label_smoothing,
          "lse_square_scale", o.lse_square_scale, "softcap", o.softcap, "token_scaling", o.token_scaling, "max_bytes",
          o.max_bytes);
  }

  LinearCrossEntropyOptions options;
  torch::nn::Linear linear{nullptr};
};
TORCH_MODULE(LinearCrossEntropy);

}  // namespace liger::nn
