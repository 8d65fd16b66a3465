#pragma once
#include <torch/nn.h>
#include "liger/nn/module.h"
#ifndef LIGER_NO_RESEARCH
#include "liger/nn/research.h"
#endif

namespace liger::nn {

struct RMSNormOptions {
  RMSNormOptions(int64_t hidden_size) : hidden_size_(hidden_size) {}
  TORCH_ARG(int64_t, hidden_size);
  TORCH_ARG(double, eps) = 1e-6;
  TORCH_ARG(double, offset) = 0;  // 1 for Gemma, whose weight starts at 0
  TORCH_ARG(Casting, casting) = Casting::Llama;
  TORCH_ARG(bool, elementwise_affine) = true;
};

/// What the RMS norms have in common: options, and a weight that starts as the identity. clone() makes a Derived.
template <class Derived>
struct RMSNormBase : torch::nn::Cloneable<Derived> {
  explicit RMSNormBase(RMSNormOptions o) : options(std::move(o)) { RMSNormBase::reset(); }

  void reset() override {
    if (options.elementwise_affine())
      weight = this->register_parameter("weight", torch::full({options.hidden_size()}, 1 - options.offset()));
  }

  void pretty_print(std::ostream& to) const override {
    print(to, *this, "hidden_size", options.hidden_size(), "eps", options.eps(), "offset", options.offset(), "casting",
          options.casting(), "elementwise_affine", options.elementwise_affine());
  }

  RMSNormOptions options;
  at::Tensor weight;
};

/// liger::rms_norm with its own weight.
struct RMSNormImpl : RMSNormBase<RMSNormImpl> {
  using RMSNormBase::RMSNormBase;
  at::Tensor forward(const at::Tensor& x) {
    return rms_norm(x, given(weight), options.eps(), options.offset(), options.casting());
  }
};
TORCH_MODULE(RMSNorm);

/// liger::fused_add_rms_norm: (norm(s), s) for s = x + residual.
struct FusedAddRMSNormImpl : RMSNormBase<FusedAddRMSNormImpl> {
  using RMSNormBase::RMSNormBase;
  std::tuple<at::Tensor, at::Tensor> forward(const at::Tensor& x, const at::Tensor& residual) {
    return fused_add_rms_norm(x, residual, given(weight), options.eps(), options.offset(), options.casting());
  }
};
TORCH_MODULE(FusedAddRMSNorm);

/// liger::modulated_rms_norm: norm(x) · (1 + scale) + shift.
struct ModulatedRMSNormImpl : RMSNormBase<ModulatedRMSNormImpl> {
  using RMSNormBase::RMSNormBase;
  FORWARD_HAS_DEFAULT_ARGS({2, torch::nn::AnyValue(at::Tensor())})
  at::Tensor forward(const at::Tensor& x, const at::Tensor& scale, const at::Tensor& shift = {}) {
    return modulated_rms_norm(x, given(weight), scale, given(shift), options.eps(), options.offset(),
                              options.casting());
  }
};
TORCH_MODULE(ModulatedRMSNorm);

struct RMSNormGatedOptions {
  RMSNormGatedOptions(int64_t hidden_size) : hidden_size_(hidden_size) {}
  TORCH_ARG(int64_t, hidden_size);
  TORCH_ARG(double, eps) = 1e-6;
  TORCH_ARG(GatedNormOptions, norm);
};

/// liger::gated_rms_norm with its own weight.
struct RMSNormGatedImpl : torch::nn::Cloneable<RMSNormGatedImpl> {
  explicit RMSNormGatedImpl(RMSNormGatedOptions o) : options(std::move(o)) { reset(); }

  void reset() override { weight = register_parameter("weight", torch::ones({options.hidden_size()})); }

  at::Tensor forward(const at::Tensor& x, const at::Tensor& gate) {
    return gated_rms_norm(x, gate, weight, options.eps(), options.norm());
  }

  void pretty_print(std::ostream& to) const override {
    const GatedNormOptions& norm = options.norm();
    print(to, *this, "hidden_size", options.hidden_size(), "eps", options.eps(), "activation", norm.activation,
          "norm_before_gate", norm.norm_before_gate, "groups", norm.groups, "casting", norm.casting);
  }

  RMSNormGatedOptions options;
  at::Tensor weight;
};
TORCH_MODULE(RMSNormGated);

struct LayerNormOptions {
  LayerNormOptions(int64_t hidden_size) : hidden_size_(hidden_size) {}
  TORCH_ARG(int64_t, hidden_size);
  TORCH_ARG(double, eps) = 1e-6;  // as LigerLayerNorm in Python; torch::nn::LayerNorm has 1e-5
  TORCH_ARG(bool, bias) = true;
};

/// liger::layer_norm with its own weight and bias.
struct LayerNormImpl : torch::nn::Cloneable<LayerNormImpl> {
  explicit LayerNormImpl(LayerNormOptions o) : options(std::move(o)) { reset(); }

  void reset() override {
    weight = register_parameter("weight", torch::ones({options.hidden_size()}));
    if (options.bias()) bias = register_parameter("bias", torch::zeros({options.hidden_size()}));
  }

  at::Tensor forward(const at::Tensor& x) { return layer_norm(x, weight, given(bias), options.eps()); }

  void pretty_print(std::ostream& to) const override {
    print(to, *this, "hidden_size", options.hidden_size(), "eps", options.eps(), "bias", options.bias());
  }

  LayerNormOptions options;
  at::Tensor weight, bias;
};
TORCH_MODULE(LayerNorm);

}  // namespace liger::nn
