#pragma once
#include <torch/nn.h>
#include "liger/nn/module.h"
#ifndef LIGER_NO_RESEARCH
#include "liger/nn/research.h"
#endif

namespace liger::nn {

struct GatedMLPOptions {
  GatedMLPOptions(int64_t hidden_size, int64_t intermediate_size)
      : hidden_size_(hidden_size), intermediate_size_(intermediate_size) {}
  TORCH_ARG(int64_t, hidden_size);
  TORCH_ARG(int64_t, intermediate_size);
  TORCH_ARG(bool, bias) = false;
  TORCH_ARG(Activation, activation) = Activation::SiLU;
  TORCH_ARG(bool, recompute) = false;  // keep only the input for backward
  TORCH_ARG(int64_t, chunk) = 0;       // tokens worked on at once; 0: all
};

/// act(x), element by element.
struct ActivationLayerImpl : torch::nn::Cloneable<ActivationLayerImpl> {
  explicit ActivationLayerImpl(Activation activation = Activation::ReLUSquared) : activation(activation) {}
  void reset() override {}

  at::Tensor forward(const at::Tensor& x) { return activate(x, activation); }
  void pretty_print(std::ostream& to) const override { print(to, *this, "activation", activation); }

  Activation activation;
};
TORCH_MODULE(ActivationLayer);

struct XIELUOptions {
  TORCH_ARG(double, alpha_p) = 0.8;  // at the start
  TORCH_ARG(double, alpha_n) = 0.8;
  TORCH_ARG(double, beta) = 0.5;
  TORCH_ARG(double, eps) = -1e-6;
};

/// liger::xielu with its parameters.
struct XIELUImpl : torch::nn::Cloneable<XIELUImpl> {
  explicit XIELUImpl(XIELUOptions o = {}) : options(o) { reset(); }

  void reset() override {
    const auto inverse = [](double softplus) { return torch::full({1}, std::log(std::expm1(softplus))); };
    alpha_p = register_parameter("alpha_p", inverse(options.alpha_p()));
    alpha_n = register_parameter("alpha_n", inverse(options.alpha_n() - options.beta()));
    beta = register_buffer("beta", torch::scalar_tensor(options.beta()));
    eps = register_buffer("eps", torch::scalar_tensor(options.eps()));
  }

  at::Tensor forward(const at::Tensor& x) { return xielu(x, alpha_p, alpha_n, beta, eps); }
  void pretty_print(std::ostream& to) const override {
    print(to, *this, "alpha_p", options.alpha_p(), "alpha_n", options.alpha_n(), "beta", options.beta(), "eps",
          options.eps());
  }

  XIELUOptions options;
  at::Tensor alpha_p, alpha_n, beta, eps;
};
TORCH_MODULE(XIELU);

/// liger::gated_mlp of three layers without adapters: SwiGLU, GeGLU and their relatives.
struct GatedMLPImpl : torch::nn::Cloneable<GatedMLPImpl> {
  explicit GatedMLPImpl(GatedMLPOptions o) : options(std::move(o)) { reset(); }

  void reset() override {
    const auto linear = [&](const char* name, int64_t in, int64_t out) {
      return register_module(name, torch::nn::Linear(torch::nn::LinearOptions(in, out).bias(options.bias())));
    };
    gate_proj = linear("gate_proj", options.hidden_size(), options.intermediate_size());
    up_proj = linear("up_proj", options.hidden_size(), options.intermediate_size());
    down_proj = linear("down_proj", options.intermediate_size(), options.hidden_size());
  }

  at::Tensor forward(const at::Tensor& x) {
    const auto layer = [](const torch::nn::Linear& of) { return AdaptedLinear{of->weight, given(of->bias)}; };
    return gated_mlp(x, layer(gate_proj), layer(up_proj), layer(down_proj),
                     {.activation = options.activation(), .chunk = options.chunk(), .recompute = options.recompute()});
  }

  void pretty_print(std::ostream& to) const override {
    print(to, *this, "hidden_size", options.hidden_size(), "intermediate_size", options.intermediate_size(), "bias",
          options.bias(), "activation", options.activation(), "recompute", options.recompute(), "chunk",
          options.chunk());
  }

  GatedMLPOptions options;
  torch::nn::Linear gate_proj{nullptr}, up_proj{nullptr}, down_proj{nullptr};
};
TORCH_MODULE(GatedMLP);

/// liger::softmax.
struct SoftmaxImpl : torch::nn::Cloneable<SoftmaxImpl> {
  void reset() override {}
  at::Tensor forward(const at::Tensor& x) { return softmax(x); }
  void pretty_print(std::ostream& to) const override { print(to, *this); }
};
TORCH_MODULE(Softmax);

}  // namespace liger::nn
