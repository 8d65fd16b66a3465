#pragma once
#include <torch/nn.h>
#include "liger/nn/module.h"
#include "liger/research.h"

/// The modules of liger/research.h.
namespace liger::nn {

struct GroupNormOptions {
  GroupNormOptions(int64_t groups, int64_t channels) : groups_(groups), channels_(channels) {}
  TORCH_ARG(int64_t, groups);
  TORCH_ARG(int64_t, channels);
  TORCH_ARG(double, eps) = 1e-6;  // as LigerGroupNorm in Python; torch::nn::GroupNorm has 1e-5
};

/// liger::group_norm with its own weight and bias.
struct GroupNormImpl : torch::nn::Cloneable<GroupNormImpl> {
  explicit GroupNormImpl(GroupNormOptions o) : options(std::move(o)) { reset(); }

  void reset() override {
    weight = register_parameter("weight", torch::ones({options.channels()}));
    bias = register_parameter("bias", torch::zeros({options.channels()}));
  }

  at::Tensor forward(const at::Tensor& x) { return group_norm(x, weight, bias, options.groups(), options.eps()); }

  void pretty_print(std::ostream& to) const override {
    print(to, *this, "groups", options.groups(), "channels", options.channels(), "eps", options.eps());
  }

  GroupNormOptions options;
  at::Tensor weight, bias;
};
TORCH_MODULE(GroupNorm);

struct DyTOptions {
  DyTOptions(int64_t hidden_size) : hidden_size_(hidden_size) {}
  TORCH_ARG(int64_t, hidden_size);
  TORCH_ARG(double, init_alpha) = 0.5;
  TORCH_ARG(bool, bias) = true;
};

/// liger::dyt with its parameters.
struct DyTImpl : torch::nn::Cloneable<DyTImpl> {
  explicit DyTImpl(DyTOptions o) : options(std::move(o)) { reset(); }

  void reset() override {
    alpha = register_parameter("alpha", torch::full({1}, options.init_alpha()));
    weight = register_parameter("weight", torch::ones({options.hidden_size()}));
    if (options.bias()) bias = register_parameter("bias", torch::zeros({options.hidden_size()}));
  }

  at::Tensor forward(const at::Tensor& x) { return dyt(x, alpha, weight, given(bias)); }

  void pretty_print(std::ostream& to) const override {
    print(to, *this, "hidden_size", options.hidden_size(), "init_alpha", options.init_alpha(), "bias", options.bias());
  }

  DyTOptions options;
  at::Tensor alpha, weight, bias;
};
TORCH_MODULE(DyT);

/// liger::poly_norm with its parameters.
struct PolyNormImpl : torch::nn::Cloneable<PolyNormImpl> {
  explicit PolyNormImpl(double eps = 1e-6) : eps(eps) { reset(); }

  void reset() override {
    weight = register_parameter("weight", torch::full({3}, 1. / 3));
    bias = register_parameter("bias", torch::ones({}));
  }

  at::Tensor forward(const at::Tensor& x) { return poly_norm(x, weight, bias, eps); }
  void pretty_print(std::ostream& to) const override { print(to, *this, "eps", eps); }

  double eps;
  at::Tensor weight, bias;
};
TORCH_MODULE(PolyNorm);

struct SparsemaxOptions {
  TORCH_ARG(int64_t, dim) = -1;
};

/// liger::sparsemax along a dimension.
struct SparsemaxImpl : torch::nn::Cloneable<SparsemaxImpl> {
  explicit SparsemaxImpl(SparsemaxOptions o = {}) : options(o) {}
  void reset() override {}
  at::Tensor forward(const at::Tensor& x) { return sparsemax(x, options.dim()); }
  void pretty_print(std::ostream& to) const override { print(to, *this, "dim", options.dim()); }

  SparsemaxOptions options;
};
TORCH_MODULE(Sparsemax);

struct MultiTokenAttentionOptions {
  MultiTokenAttentionOptions(int64_t in_channels, int64_t out_channels, int64_t kernel_size)
      : in_channels_(in_channels), out_channels_(out_channels), kernel_size_(kernel_size) {}
  TORCH_ARG(int64_t, in_channels);
  TORCH_ARG(int64_t, out_channels);
  TORCH_ARG(int64_t, kernel_size);
  TORCH_ARG(int64_t, padding) = 0;
  TORCH_ARG(int64_t, groups) = 1;
  TORCH_ARG(bool, bias) = true;
  TORCH_ARG(bool, sparse) = false;
};

/// liger::multi_token_attention with its own weight and bias.
struct MultiTokenAttentionImpl : torch::nn::Cloneable<MultiTokenAttentionImpl> {
  explicit MultiTokenAttentionImpl(MultiTokenAttentionOptions o) : options(std::move(o)) { reset(); }

  void reset() override {
    const int64_t size = options.kernel_size(), in = options.in_channels() / options.groups();
    weight = register_parameter("weight", torch::empty({options.out_channels(), in, size, size}));
    torch::nn::init::kaiming_uniform_(weight, std::sqrt(5));
    if (options.bias()) bias = register_parameter("bias", torch::zeros({options.out_channels()}));
  }

  at::Tensor forward(const at::Tensor& scores) {
    liger::MultiTokenAttentionOptions o;
    o.padding = {options.padding(), options.padding()}, o.groups = options.groups(), o.sparse = options.sparse();
    return multi_token_attention(scores, weight, given(bias), o);
  }

  void pretty_print(std::ostream& to) const override {
    print(to, *this, "in_channels", options.in_channels(), "out_channels", options.out_channels(), "kernel_size",
          options.kernel_size(), "padding", options.padding(), "groups", options.groups(), "bias", options.bias(),
          "sparse", options.sparse());
  }

  MultiTokenAttentionOptions options;
  at::Tensor weight, bias;
};
TORCH_MODULE(MultiTokenAttention);

}  // namespace liger::nn
