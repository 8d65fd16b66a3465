#pragma once
#include "liger/core/kernel.h"
#include "liger/core/math.h"

namespace liger {

///   c = act(m · a) · b
/// rounded where the unfused model rounds: act, then the product. Rows may lie apart in memory, as the halves of a
/// fused gate-up product do.
struct GatedForward {
  const void *a, *b;  // [rows, cols], stride elements apart
  void* c;            // [rows, cols]
  int64_t rows, cols, a_stride, b_stride;
  DType dtype;
  Activation activation;
  float gate_multiplier;  // m
};

///   da = (dc · b) · act'(m · a) · m
///   db = dc · act(m · a)
struct GatedBackward {
  const void *dc, *a, *b;
  void *da, *db;  // d_stride elements apart
  int64_t rows, cols, a_stride, b_stride, d_stride;
  DType dtype;
  Activation activation;
  float gate_multiplier;
};

inline constinit Kernel<GatedForward> gated_forward{"gated_forward"};
inline constinit Kernel<GatedBackward> gated_backward{"gated_backward"};

/// Calls f.operator()<Act>() with the formula of `a`.
template <class F>
void dispatch_activation(Activation a, F&& f) {
  switch (a) {
#define LIGER_CASE(formula, name) \
  case Activation::formula: return f.template operator()<formula>();
    LIGER_ACTIVATIONS(LIGER_CASE)
#undef LIGER_CASE
  }
}

}  // namespace liger
