#pragma once
#include <ATen/core/Tensor.h>
#include <optional>
#include <tuple>
#include "liger/functions/activation.h"
#include "liger/options.h"

namespace liger {

/// A linear layer, perhaps with a low-rank adapter (Hu et al. 2021, arXiv:2106.09685):
///   y = x weightᵀ + bias + scale · (x aᵀ) bᵀ
/// weight [out, in] and bias [out] in x's dtype; a [rank, in] and b [out, rank], given together, in x's dtype or in
/// float32: the operators then take them in x's dtype, and make their gradients in float.
///
/// With weight_scale, float32 [out], the weight is frozen and in 8 bits: int8, or uint8 with the bits of E4M3
/// (float8_e4m3fn), and stands for weight_scale[i] · weight[i]. On Hopper, for x in 16 bits, each row of x and of the
/// gradients is rounded to the same 8 bits, with one scale per row, and products are those of 8-bit numbers; elsewhere
/// the weight is multiplied in x's dtype. Products are then off by 1 % (int8) to 4 % (E4M3) of their norm.
struct AdaptedLinear {
  at::Tensor weight;
  std::optional<at::Tensor> bias{}, a{}, b{};
  double scale = 1;
  std::optional<at::Tensor> weight_scale{};
};

/// A matrix as `weight` and `weight_scale` of an AdaptedLinear, rounded to nearest:
///   weight_scale[i] = max |matrix[i]| / largest     1 for a row of zeros; largest is 448 for E4M3, 127 for Int8
///   weight[i]       = matrix[i] / weight_scale[i]
std::tuple<at::Tensor, at::Tensor> quantise_rows(const at::Tensor& matrix, EightBit format);

/// y of x [..., in]: [..., out]. The low-rank term is added inside the GEMM of the weight, in float. `dropped`, x after
/// a dropout, is what the adapter sees instead of x. Backward keeps x and x aᵀ.
at::Tensor linear(const at::Tensor& x, const AdaptedLinear& layer, const std::optional<at::Tensor>& dropped = {});

/// The same of three layers of one input: one GEMM reads x for the three a, and GEMMs add up the gradient of x. With
/// head_dim the results for x [..., seq, in] are [..., heads, seq, head_dim], laid out as [..., seq, heads, head_dim].
std::tuple<at::Tensor, at::Tensor, at::Tensor> qkv(const at::Tensor& x, const AdaptedLinear& q, const AdaptedLinear& k,
                                                   const AdaptedLinear& v, int64_t head_dim = 0);

struct MLPOptions {
  Activation activation = Activation::SiLU;
  double gate_multiplier = 1, down_multiplier = 1;  // m and d
  int64_t chunk = 0;                                // tokens worked on at once, which bounds the memory; 0: all
  bool recompute = false;                           // backward recomputes gate and up
  LIGER_OPTIONS(activation, gate_multiplier, down_multiplier, chunk, recompute)
};

/// A gated MLP of such layers:
///   y = d · down(act(m · gate(x)) · up(x))
/// Backward keeps x, gate and up, or only x with `recompute`, and recomputes the rest. Sums over chunks are in float.
at::Tensor gated_mlp(const at::Tensor& x, const AdaptedLinear& gate, const AdaptedLinear& up, const AdaptedLinear& down,
                     const MLPOptions& options = {});

struct ActivatedLinearOptions {
  Activation activation = Activation::SiLU;
  LIGER_OPTIONS(activation)
};

/// The last layer of an MLP without a gate, whose first one makes x [..., F]:
///   y = layer(act(x))
/// Backward keeps x, and recomputes act(x).
at::Tensor activated_linear(const at::Tensor& x, const AdaptedLinear& layer,
                            const ActivatedLinearOptions& options = {});

struct GatedLinearOptions {
  Activation activation = Activation::SiLU;
  double gate_multiplier = 1;  // m
  GateOptions gate;
  LIGER_OPTIONS(activation, gate_multiplier, gate)
};

/// The last layer of a gated MLP whose first one makes gate and up side by side, x [..., 2F] = [gate, up]:
///   y = layer(act(m · gate) · up)
/// or with the clamps of GateOptions. Backward keeps x, and recomputes the product.
at::Tensor gated_linear(const at::Tensor& x, const AdaptedLinear& layer, const GatedLinearOptions& options = {});

[[deprecated("liger::linear")]] inline at::Tensor lora_linear(const at::Tensor& x, const AdaptedLinear& layer,
                                                              const std::optional<at::Tensor>& dropped = {}) {
  return linear(x, layer, dropped);
}
[[deprecated("liger::qkv")]] inline auto lora_qkv(const at::Tensor& x, const AdaptedLinear& q, const AdaptedLinear& k,
                                                  const AdaptedLinear& v, int64_t head_dim = 0) {
  return qkv(x, q, k, v, head_dim);
}
[[deprecated("liger::gated_mlp")]] inline at::Tensor lora_mlp(const at::Tensor& x, const AdaptedLinear& gate,
                                                              const AdaptedLinear& up, const AdaptedLinear& down,
                                                              Activation activation = Activation::SiLU,
                                                              bool recompute = false) {
  return gated_mlp(x, gate, up, down, {.activation = activation, .recompute = recompute});
}
[[deprecated("liger::gated_mlp")]] inline at::Tensor fused_mlp(const at::Tensor& x, const at::Tensor& gate,
                                                               const at::Tensor& up, const at::Tensor& down,
                                                               MLPOptions options = {},
                                                               const std::optional<at::Tensor>& gate_bias = {},
                                                               const std::optional<at::Tensor>& up_bias = {},
                                                               const std::optional<at::Tensor>& down_bias = {}) {
  options.recompute = true;
  return gated_mlp(x, {gate, gate_bias}, {up, up_bias}, {down, down_bias}, options);
}

}  // namespace liger
