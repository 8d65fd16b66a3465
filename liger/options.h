#pragma once
#include <cstdint>
#include <tuple>
#include <type_traits>

/// The table of activations, in the order of the numbers that operators take: the formula in liger/core/math.h, and its
/// name in Python. SwiGLU is gated(SiLU), GeGLU gated(GeLUTanh) or gated(GeLUErf).
#define LIGER_ACTIVATIONS(entry) \
  entry(SiLU, "silu") entry(GeLUTanh, "gelu_tanh") entry(GeLUErf, "gelu_erf") entry(ReLUSquared, "relu_squared")

namespace liger {

#define LIGER_FORMULA(formula, name) formula,
enum class Activation : int8_t { LIGER_ACTIVATIONS(LIGER_FORMULA) };
#undef LIGER_FORMULA

/// Where the reference model of a norm rounds to x's dtype: x̂ before the weight (Llama), the product only (Gemma),
/// every step (None).
enum class Casting : int8_t { None = -1, Llama = 0, Gemma = 1 };

/// What a gated norm makes of its gate: silu(x) = x · σ(x), or σ(x).
enum class Gate : int8_t { SiLU, Sigmoid };

/// What a router makes of its logits: softmax(z) over all experts, σ(z), or √softplus(z).
enum class RouterScore : int8_t { Softmax, Sigmoid, SqrtSoftplus };

/// z = softcap · tanh(scale · y / softcap), or scale · y without a softcap (0), of what a head's GEMM gives.
struct LogitMap {
  float scale = 1, softcap = 0;
};

}  // namespace liger

/// Lists a struct's fields. Schemas, bindings and what the graph keeps for backward follow from the list. A field may
/// be a struct that lists its fields too.
#define LIGER_FIELDS(...)                                             \
  static constexpr const char* field_names() { return #__VA_ARGS__; } \
  auto fields() { return std::tie(__VA_ARGS__); }                     \
  auto fields() const { return std::tie(__VA_ARGS__); }

/// The same for options, which a schema has last and with their defaults:
///
///     struct Options {
///       double temperature = 1;
///       bool entropy = false;
///       LIGER_OPTIONS(temperature, entropy)
///     };
#define LIGER_OPTIONS(...)         \
  using Defaults = std::true_type; \
  LIGER_FIELDS(__VA_ARGS__)
