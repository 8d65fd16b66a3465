#pragma once
#include "liger/core/kernel.h"
#include "liger/core/math.h"

namespace liger {

/// For each row:
///   rstd = 1 / sqrt(mean(u²) + eps)
///   x̂    = u · rstd
/// where the norm comes first, with
///   u = x
///   y = x̂ · w · act(gate)
/// and where the gate does, with
///   u = x · act(gate)
///   y = x̂ · w
struct GatedRMSNorm {
  const void *x, *gate, *w;    // [rows, cols], the same, [groups, cols]
  float* rstd;                 // [rows], which forward writes
  int64_t rows, cols, groups;  // row r is of group r % groups
  DType dtype, w_dtype;
  Gate act;
  bool gate_first;
  Casting casting;  // Llama or Gemma

  /// Whether the reference rounds x̂ · w before it meets the gate: where that has x's dtype.
  constexpr bool rounds_product() const { return casting == Casting::Llama && w_dtype == dtype; }
};

struct GatedRMSNormForward : GatedRMSNorm {
  void* y;
  float eps;
};

///   du = rstd · (g − x̂ · mean(g · x̂))
/// where the norm comes first, with
///   g     = dy · act(gate) · w
///   dx    = du
///   dgate = dy · x̂ · w · act'(gate)
///   dw    = Σ_rows dy · act(gate) · x̂
/// and where the gate does, with
///   g     = dy · w
///   dx    = du · act(gate)
///   dgate = du · x · act'(gate)
///   dw    = Σ_rows dy · x̂
struct GatedRMSNormBackward : GatedRMSNorm {
  const void* dy;
  void *dx, *dgate;  // null where not wanted
  float* dw;         // [groups, partials, cols], for add_partials; null where not wanted
  int64_t partials;  // of a group
};

inline constinit Kernel<GatedRMSNormForward> gated_rms_norm_forward{"gated_rms_norm_forward"};
inline constinit Kernel<GatedRMSNormBackward> gated_rms_norm_backward{"gated_rms_norm_backward"};

/// act of a float or a vector V of them, as SiLU in liger/core/math.h.
template <class M, class V>
LIGER_HD V gate_value(Gate act, V x) {
  return M::div(act == Gate::SiLU ? x : V(1), V(1) + M::exp(V(0) - x));
}

/// Its derivative.
template <class M, class V>
LIGER_HD V gate_slope(Gate act, V x) {
  const V s = M::div(V(1), V(1) + M::exp(V(0) - x)), rest = V(1) - s;
  return s * (act == Gate::SiLU ? V(1) + x * rest : rest);
}

}  // namespace liger
