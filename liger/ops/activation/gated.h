#pragma once
#include "liger/core/kernel.h"
#include "liger/core/math.h"

namespace liger {

/// The table of gates: SwiGLU is gated(SiLU), GeGLU gated(GeLUTanh) or gated(GeLUErf); the formulas are in
/// liger/core/math.h.
enum class Activation : int8_t { SiLU = 0, GeLUTanh = 1, GeLUErf = 2, ReLUSquared = 3 };

/// c = act(m · a) · b, rounded where the unfused model rounds: act, then the product. Rows may lie apart in memory, as
/// the halves of a fused gate-up product do.
struct GatedForward {
  const void *a, *b;  // [rows, cols], stride elements apart
  void* c;            // [rows, cols]
  int64_t rows, cols, a_stride, b_stride;
  DType dtype;
  Activation activation;
  float gate_multiplier;  // m
};

/// da = (dc · b) · act'(m · a) · m;  db = dc · act(m · a).
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
    case Activation::SiLU: return f.template operator()<SiLU>();
    case Activation::GeLUTanh: return f.template operator()<GeLUTanh>();
    case Activation::GeLUErf: return f.template operator()<GeLUErf>();
    case Activation::ReLUSquared: return f.template operator()<ReLUSquared>();
  }
}

}  // namespace liger
