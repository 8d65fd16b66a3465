#pragma once
#include <torch/nn.h>
#include <cmath>
#include "liger/nn/module.h"

namespace liger::nn {

struct LoRALinearOptions {
  LoRALinearOptions(int64_t in_features, int64_t out_features)
      : in_features_(in_features), out_features_(out_features) {}
  TORCH_ARG(int64_t, in_features);
  TORCH_ARG(int64_t, out_features);
  TORCH_ARG(int64_t, rank) = 8;     // 0: no adapter, and a weight that trains
  TORCH_ARG(double, alpha) = 8;     // of the scale alpha / rank
  TORCH_ARG(bool, rslora) = false;  // the scale alpha / √rank (Kalajdzievski 2023, arXiv:2312.03732)
  TORCH_ARG(double, dropout) = 0;   // the probability that training takes an element of the adapter's input away
  TORCH_ARG(bool, bias) = true;     // of the frozen layer
  TORCH_ARG(std::optional<EightBit>, base) = std::nullopt;  // the format of a weight in 8 bits: quantise
};

/// What linear layers with an adapter have in common: frozen weights, which are not initialised here, and the two
/// matrices of the adapter, which begin as PEFT's do. clone() makes a Derived.
template <class Derived>
struct LoRALinearBase : torch::nn::Cloneable<Derived> {
  explicit LoRALinearBase(LoRALinearOptions o) : options(std::move(o)) { LoRALinearBase::reset(); }

  void reset() override {
    const int64_t in = options.in_features(), out = options.out_features();
    TORCH_CHECK_VALUE(options.rank() >= 0 && options.dropout() >= 0 && options.dropout() < 1,
                      "rank must not be negative and dropout be in [0, 1), got ", options.rank(), " and ",
                      options.dropout());
    const bool trains = options.rank() == 0;
    weight = this->register_parameter("weight", torch::empty({out, in}), trains);
    if (options.bias()) bias = this->register_parameter("bias", torch::empty({out}), trains);
    if (!trains) add_adapter();
    if (options.base()) quantise(*options.base());
  }

  /// y = x weightᵀ + bias + scale · (x lora_Aᵀ) lora_Bᵀ for x [..., in_features]: [..., out_features].
  at::Tensor forward(const at::Tensor& x) {
    return linear(x, layer(), drops() ? std::optional(at::dropout(x, options.dropout(), true)) : std::nullopt);
  }

  /// What an operator takes: qkv and gated_mlp run several layers at once.
  AdaptedLinear layer() const {
    return {weight, given(bias), given(lora_A), given(lora_B), scale(), given(weight_scale)};
  }

  /// Whether the adapter sees its input through a dropout, of which the operators for several layers know nothing.
  bool drops() const { return options.rank() > 0 && options.dropout() > 0 && this->is_training(); }

  double scale() const {
    if (options.rank() == 0) return 1;
    return options.alpha() / (options.rslora() ? std::sqrt(double(options.rank())) : double(options.rank()));
  }

  /// Puts the weight, which must not be trained, into 8 bits (AdaptedLinear): no longer exact. A later to(dtype) would
  /// round its scales.
  void quantise(EightBit format) {
    TORCH_CHECK(!weight.requires_grad(), "a weight that is trained cannot be in 8 bits");
    const auto [numbers, scales] = quantise_rows(weight, format);
    weight.set_data(numbers);
    weight_scale = this->register_buffer("weight_scale", scales);
    options.base(format);
  }

  /// weight + scale · lora_B lora_A, added in float, or double, and rounded to weight's dtype. No gradients.
  at::Tensor merged_weight() const {
    const torch::NoGradGuard no_gradients;
    TORCH_CHECK(!options.base(), "a weight in 8 bits takes no adapter in: merge it into the original weight");
    if (options.rank() == 0) return weight;
    const auto wide = at::promote_types(weight.scalar_type(), at::kFloat);
    return at::addmm(weight.to(wide), lora_B.to(wide), lora_A.to(wide), 1, scale()).to(weight.scalar_type());
  }

  void pretty_print(std::ostream& to) const override {
    print(to, *this, "in_features", options.in_features(), "out_features", options.out_features(), "rank",
          options.rank(), "alpha", options.alpha(), "rslora", options.rslora(), "dropout", options.dropout(), "bias",
          options.bias());
  }

  LoRALinearOptions options;
  at::Tensor weight, bias, lora_A, lora_B;  // [out, in], [out], [rank, in] and [out, rank]
  at::Tensor weight_scale;                  // [out], of a weight in 8 bits

 protected:
  /// On the weight's device, in float: PEFT has its adapters so beside weights of 16 bits too.
  void add_adapter() {
    const auto wide = at::TensorOptions(weight.device()).dtype(at::promote_types(weight.scalar_type(), at::kFloat));
    lora_A = this->register_parameter("lora_A", torch::empty({options.rank(), options.in_features()}, wide));
    lora_B = this->register_parameter("lora_B", torch::zeros({options.out_features(), options.rank()}, wide));
    torch::nn::init::kaiming_uniform_(lora_A, std::sqrt(5.));
  }
};

/// liger::linear with a frozen weight and its adapter (Hu et al. 2021, arXiv:2106.09685). The frozen ones begin as
/// torch::nn::Linear's; weight.set_data(w) shares those of another layer.
struct LoRALinearImpl : LoRALinearBase<LoRALinearImpl> {
  explicit LoRALinearImpl(LoRALinearOptions o) : LoRALinearBase(std::move(o)) { draw(); }

  void reset() override {
    LoRALinearBase::reset();
    draw();
  }

 private:
  void draw() {
    if (options.base()) return;  // of a clone, which gets the other's numbers
    torch::nn::init::kaiming_uniform_(weight, std::sqrt(5.));
    const double bound = 1 / std::sqrt(double(options.in_features()));
    if (bias.defined()) torch::nn::init::uniform_(bias, -bound, bound);
  }
};
TORCH_MODULE(LoRALinear);

}  // namespace liger::nn
