#pragma once
#include <torch/nn.h>
#include "liger/nn/module.h"

namespace liger::nn {

struct ShortConvolutionOptions {
  ShortConvolutionOptions(int64_t channels, int64_t width = 4) : channels_(channels), width_(width) {}
  TORCH_ARG(int64_t, channels);
  TORCH_ARG(int64_t, width);
  TORCH_ARG(bool, bias) = false;
  TORCH_ARG(bool, silu) = true;
};

/// liger::causal_conv1d of x [batch, time, channels], as layers hand it on, with its own weight: [channels, 1, width],
/// that of a torch::nn::Conv1d with as many groups as channels.
struct ShortConvolutionImpl : torch::nn::Cloneable<ShortConvolutionImpl> {
  explicit ShortConvolutionImpl(ShortConvolutionOptions o) : options(std::move(o)) { reset(); }

  void reset() override {
    const double bound = 1 / std::sqrt(double(options.width()));
    weight =
        register_parameter("weight", torch::empty({options.channels(), 1, options.width()}).uniform_(-bound, bound));
    if (options.bias()) bias = register_parameter("bias", torch::zeros({options.channels()}));
  }

  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(at::Tensor())})

  /// starts [batch, time], int32, as causal_conv1d takes them.
  at::Tensor forward(const at::Tensor& x, const at::Tensor& starts = {}) {
    return causal_conv1d(x.transpose(1, 2), weight.squeeze(1), given(bias), options.silu(), given(starts))
        .transpose(1, 2);
  }

  void pretty_print(std::ostream& to) const override {
    print(to, *this, "channels", options.channels(), "width", options.width(), "bias", options.bias(), "silu",
          options.silu());
  }

  ShortConvolutionOptions options;
  at::Tensor weight, bias;
};
TORCH_MODULE(ShortConvolution);

}  // namespace liger::nn
