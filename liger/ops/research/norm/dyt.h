#pragma once
#include "liger/core/kernel.h"

namespace liger {

/// Dynamic tanh (Zhu et al. 2025, arXiv:2503.10622):
///   y = tanh(alpha · x) · w + b
struct DyTForward {
  const void* x;      // [rows, cols]
  Numbers alpha;      // [1]
  const void *w, *b;  // [cols] of w_dtype; b may be null
  void* y;            // [rows, cols]
  int64_t rows, cols;
  DType dtype, w_dtype;
};

///   t      = tanh(alpha · x)
///   g      = dy · w
///   dx     = alpha · (1 − t²) · g
///   dw     = Σ_rows dy · t
///   db     = Σ_rows dy
///   dalpha = Σ x · (1 − t²) · g
/// Sums over rows come as partial sums (liger/core/partial_sums.h).
struct DyTBackward {
  const void *dy, *x;       // [rows, cols]
  Numbers alpha;            // [1]
  const void* w;            // [cols] of w_dtype
  void* dx;                 // [rows, cols] or null
  float *dw, *db, *dalpha;  // [partials, cols]; dalpha [partials]; null where not wanted
  int64_t rows, cols, partials;
  DType dtype, w_dtype;
};

inline constinit Kernel<DyTForward> dyt_forward{"dyt_forward"};
inline constinit Kernel<DyTBackward> dyt_backward{"dyt_backward"};

}  // namespace liger
