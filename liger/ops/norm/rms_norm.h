#pragma once
#include "liger/core/kernel.h"

namespace liger {

/// Where the reference model rounds to x's dtype: x̂ before the weight (Llama), the product only (Gemma), every step (None).
enum class Casting : int8_t { None = -1, Llama = 0, Gemma = 1 };

/// y = x̂ · (w + offset),  x̂ = x · rstd,  rstd = 1 / sqrt(mean(x²) + eps), for each row. Without a weight, y = x̂.
struct RmsNormForward {
  const void *x, *w;       // [rows, cols], [cols] or null
  void* y;                 // [rows, cols]
  float* rstd;             // [rows], kept for backward
  int64_t rows, cols;
  DType dtype, w_dtype;
  float eps, offset;
  Casting casting;
};

/// g = dy · (w + offset);  dx = rstd · (g - x̂ · mean(g · x̂));  dw = Σ_rows dy · x̂.
struct RmsNormBackward {
  const void *dy, *x, *w;
  const float* rstd;
  void* dx;                // null where x is frozen
  float* dw;               // [shares, cols], for sum_shares; null where w is frozen or absent
  int64_t rows, cols, shares;
  DType dtype, w_dtype;
  float offset;
  Casting casting;
};

inline constinit Kernel<RmsNormForward> rms_norm_forward{"rms_norm_forward"};
inline constinit Kernel<RmsNormBackward> rms_norm_backward{"rms_norm_backward"};

}  // namespace liger
