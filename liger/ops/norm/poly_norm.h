#pragma once
#include "liger/core/kernel.h"

namespace liger {

/// y = w₀ · N(x³) + w₁ · N(x²) + w₂ · N(x) + b for each row,  N(u) = u · rstd(u),  rstd(u) = 1 / sqrt(mean(u²) + eps).
struct PolyNormForward {
  const void* x;  // [rows, cols]
  Numbers w, b;   // [3], [1]
  void* y;        // [rows, cols]
  float* rstd;    // [rows, 3], of x³, x², x
  int64_t rows, cols;
  DType dtype;
  float eps;
};

/// With r_p = rstd(xᵖ) and S_p = Σ_cols dy · xᵖ:
///   dx = Σ_p w₃₋ₚ · (p · xᵖ⁻¹ · r_p · dy − p/cols · x²ᵖ⁻¹ · r_p³ · S_p);  dw₃₋ₚ = Σ_rows r_p · S_p;  db = Σ dy.
struct PolyNormBackward {
  const void *dy, *x;
  Numbers w;
  const float* rstd;
  void* dx;        // null where x is frozen
  float *dw, *db;  // [partials, 3], [partials], for add_partials
  int64_t rows, cols, partials;
  DType dtype;
};

inline constinit Kernel<PolyNormForward> poly_norm_forward{"poly_norm_forward"};
inline constinit Kernel<PolyNormBackward> poly_norm_backward{"poly_norm_backward"};

}  // namespace liger
