#pragma once
#include "liger/core/kernel.h"

namespace liger {

/// The gates of a recurrence, for each token and head:
///   dt = min(max(softplus(a + dt_bias), low), high)
///   g  = c dt
///   β  = σ(b), or dt without b
/// with c = −exp(A) where A is a logarithm, else A: those of gated delta nets (Yang et al. 2024, arXiv:2412.06464) with
/// b, and of Mamba-2 (Dao & Gu 2024, arXiv:2405.21060) without.
struct DeltaGates {
  const void *a, *b;           // [rows, heads]; b may be null
  int64_t a_stride, b_stride;  // elements from one row to the next
  Numbers A, dt_bias;          // [heads]; without dt_bias: 0
  int64_t rows, heads;
  float low, high;
  bool log;
  DType dtype;  // of a and b
};

struct DeltaGatesForward : DeltaGates {
  float *g, *beta;  // [rows, heads]
};

///   ddt      = c dg, or c dg + dβ without b
///   da       = ddt σ(a + dt_bias) where low <= softplus(a + dt_bias) <= high, else 0
///   db       = dβ β (1 − β)
///   dA       = Σ_rows dg dt, times c where A is a logarithm
///   ddt_bias = Σ_rows da
struct DeltaGatesBackward : DeltaGates {
  const float *dg, *dbeta;  // [rows, heads]; null: 0
  void *da, *db;            // [rows, heads], in dtype; db is null without b
  float *dA, *ddt_bias;     // [partials, heads], for add_partials
  int64_t partials;
};

inline constinit Kernel<DeltaGatesForward> delta_gates_forward{"delta_gates_forward"};
inline constinit Kernel<DeltaGatesBackward> delta_gates_backward{"delta_gates_backward"};

}  // namespace liger
