#pragma once
#include "liger/core/kernel.h"

namespace liger {

/// For each row:
///   y_o = Σ_i weight_oi · x_i + of_f_o · f
/// A layer's input is one y, without f; the streams behind it are as many as the x.
struct MHCMixForward {
  static constexpr int kMostStreams = 16;
  const void *x, *f;           // [rows, in, cols], [rows, cols] or null
  const float *weight, *of_f;  // [rows, out, in], [rows, out]
  void* y;                     // [rows, out, cols]
  int64_t rows, cols;
  int in, out;
  DType dtype, f_dtype;  // the latter: dtype or float
};

///   dx_i       = Σ_o weight_oi · dy_o
///   df         = Σ_o of_f_o · dy_o
///   dweight_oi = Σ_cols dy_o · x_i
///   dof_f_o    = Σ_cols dy_o · f
struct MHCMixBackward {
  const void *dy, *x, *f;  // f: or null
  const float *weight, *of_f;
  void *dx, *df;  // null where x and f are frozen
  float *dweight, *dof_f;
  int64_t rows, cols;
  int in, out;
  DType dtype, f_dtype;
};

inline constinit Kernel<MHCMixForward> mhc_mix_forward{"mhc_mix_forward"};
inline constinit Kernel<MHCMixBackward> mhc_mix_backward{"mhc_mix_backward"};

}  // namespace liger
