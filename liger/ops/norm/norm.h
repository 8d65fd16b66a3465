#pragma once
#include "liger/core/eight_bit.h"
#include "liger/options.h"

namespace liger {

/// RMSNorm and, where `centred`, LayerNorm:
///   s    = x + residual, rounded to x's dtype; x where residual is null
///   rstd = 1 / sqrt(mean(s²) + eps)
///   rstd = 1 / sqrt(mean((s − mean(s))²) + eps)  centred
///   x̂    = s · rstd
///   x̂    = (s − mean(s)) · rstd                  centred
///   n    = x̂ · (w + offset) + b
///   y    = n, or n · (1 + scale) + shift where scale is given
/// Only a centred norm has b, only one that is not has residual, scale and shift. `casting` says where x̂ is rounded
/// before it meets the weight; LayerNorm's is not.
struct NormForward {
  bool centred;
  const void *x, *residual;                         // [rows, cols]
  const void *w, *b;                                // [cols] or null
  const void *scale, *shift;                        // [modulations, cols] or null: a row for each per_modulation rows
  void *s, *y;                                      // [rows, cols]; s is null without a residual
  float *mean, *rstd;                               // [rows], kept for backward; mean of a centred norm
  int64_t rows, cols, modulations, per_modulation;  // rows
  DType dtype, w_dtype, modulation_dtype;
  float eps, offset, inv_cols;  // 1 / cols
  Casting casting;
};

///   g  = dy · (w + offset), with a scale dy · (1 + scale) · (w + offset)
///   dx = rstd · (g − x̂ · mean(g · x̂)) + ds
///   dx = rstd · (g − mean(g) − x̂ · mean(g · x̂))  centred
///   dw = Σ_rows dy · x̂
///   db = Σ_rows dy
/// Sums over rows come as partial sums (liger/core/partial_sums.h).
/// Where several rows share a modulation, there are as many partial sums for each modulation, in that order, of which
/// the gradients are made:
///   of w      Σ (1 + scale) · dw
///   of scale  (w + offset) · dw
///   of shift  db
/// Where each row has its own, dw is Σ_rows dy · (1 + scale) · x̂, and
///   dscale = dy · x̂ · (w + offset)
///   dshift = dy
struct NormBackward {
  bool centred;
  const void *dy, *ds, *x, *w, *scale;  // x: what was normalised, s where there was a residual; ds may be null
  const float *mean, *rstd;
  void* dx;                                                   // null where x is frozen
  float *dw, *db;                                             // [partials, cols]; null where not wanted
  void *dscale, *dshift;                                      // [rows, cols] of modulation_dtype; null where not wanted
  int64_t rows, cols, partials, modulations, per_modulation;  // rows
  DType dtype, w_dtype, modulation_dtype;
  float offset, inv_cols;  // 1 / cols
  Casting casting;

  /// Whether each row has its own modulation, or several rows share one.
  bool own_modulation() const { return scale && per_modulation == 1; }
  bool shared_modulation() const { return scale && per_modulation > 1; }
};

/// NormForward that is not centred, of 16-bit numbers, which gives y in 8 bits too.
struct NormForwardBytes {
  NormForward norm;
  RowBytes y;
};

inline constinit Kernel<NormForward> norm_forward{"norm_forward"};
// Optional. Its rows begin and end at 16-byte boundaries, as the weight does, and have at most kMostByteColumns.
inline constinit Kernel<NormForwardBytes> norm_forward_bytes{"norm_forward_bytes"};
inline constinit Kernel<NormBackward> norm_backward{"norm_backward"};

}  // namespace liger
