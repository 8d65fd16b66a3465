#pragma once
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

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

/// Numbers of 8 bits:
///   E4M3   floats with 4 bits of exponent and 3 of mantissa, up to 448 (OCP 8-bit Floating Point, 2023)
///   Int8   integers from −127 to 127
enum class EightBit : uint8_t { E4M3, Int8 };

/// What a router makes of its logits: softmax(z) over all experts, σ(z), or √softplus(z).
enum class RouterScore : int8_t { Softmax, Sigmoid, SqrtSoftplus };

/// z = softcap · tanh(scale · y / softcap), or scale · y without a softcap (0), of what a head's GEMM gives.
struct LogitMap {
  float scale = 1, softcap = 0;
};

template <size_t i, class T>
struct Ref {
  T& to;
};
template <class Indices, class... T>
struct IndexedRefs;
template <size_t... i, class... T>
struct IndexedRefs<std::index_sequence<i...>, T...> : Ref<i, T>... {
  template <class F>
  decltype(auto) apply(F&& f) const {
    return f(Ref<i, T>::to...);
  }
};
/// What std::tie gives, with its bases side by side: std::tuple is a chain of them, with which a compiler takes a sixth
/// longer for the operators and a quarter more memory. refs.apply(f) is f(field...), get<i>(refs) the i-th field.
template <class... T>
struct Refs : IndexedRefs<std::index_sequence_for<T...>, T...> {
  static constexpr size_t kSize = sizeof...(T);
};
template <class... T>
Refs<T...> refs(T&... t) {
  return {{{t}...}};
}
template <size_t i, class T>
T& get(const Ref<i, T>& ref) {
  return ref.to;
}

}  // namespace liger

/// Lists a struct's fields. Schemas, bindings and what the graph keeps for backward follow from the list. A field may
/// be a struct that lists its fields too.
#define LIGER_FIELDS(...)                                             \
  static constexpr const char* field_names() { return #__VA_ARGS__; } \
  auto fields() { return liger::refs(__VA_ARGS__); }                  \
  auto fields() const { return liger::refs(__VA_ARGS__); }

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
