#pragma once
#include "liger/core/kernel.h"
#include "liger/core/math.h"

namespace liger {

/// For each row of y = x phi, which has columns for pre, for post and for the rows of res:
///   r    = 1 / sqrt(mean(x²) + rms_eps)
///   mix  = r · y
///   pre  = σ(alpha_pre · mix + b) + pre_eps
///   post = σ(alpha_post · mix + b) · post_scale
///   A    = softmax(alpha_res · mix + b) + ε, row by row
///   res  = R_i · A_ij · C_j
/// Sinkhorn's algorithm (Sinkhorn & Knopp 1967) in the form that keeps what rows and columns were divided by:
///   R = 1
///   C = 1
///   C ← C / (Σ_i R_i · A_ij · C_j + ε)
///   R ← R / (Σ_j R_i · A_ij · C_j + ε)
/// of which the first comes once and then both, rows before columns, iterations − 1 times.
struct MHCCoefficientsForward {
  static constexpr int kMostStreams = 16;
  const void* x;                                    // [rows, cols]
  const float *y, *b;                               // [rows, columns], [columns]
  const float *alpha_pre, *alpha_post, *alpha_res;  // [1]
  float *pre, *post, *res;                          // [rows, streams], the same, [rows, streams, streams]
  float* rstd;                                      // [rows]
  int64_t rows, cols, iterations;
  int streams;  // s: there are 2 s + s² columns
  DType dtype;
  float rms_eps, pre_eps, sinkhorn_eps, post_scale;
};

/// With l for the argument of a sigmoid or of the softmax:
///   dl_pre  = dpre · σ(l) · (1 − σ(l))
///   dl_post = dpost · post_scale · σ(l) · (1 − σ(l))
///   dl_res  = p · (G − Σ_j p · G), p the softmax
///   dy      = r · alpha · dl
///   scale   = −r³ / cols · Σ_columns alpha · dl · y
///   dx      = dy phiᵀ + scale · x
///   db      = Σ_rows dl
///   dalpha  = Σ_rows Σ_columns dl · mix
/// G, the gradient of A, begins as dres · R · C. Each step of Sinkhorn's algorithm, from the last one on, takes away,
/// with R and C as they were after it,
///   G_ij ← G_ij − R_i · C_j · Σ_i A_ij · G_ij, of one that divides columns
///   G_ij ← G_ij − R_i · C_j · Σ_j A_ij · G_ij, of one that divides rows
struct MHCCoefficientsBackward {
  const float *dpre, *dpost, *dres, *y, *b, *alpha_pre, *alpha_post, *alpha_res, *rstd;
  float* factors;      // [iterations, rows, 2, streams], scratch: R and C
  float *dy, *scale;   // [rows, columns], [rows]
  float *db, *dalpha;  // [partials, columns], [3, partials], for add_partials
  int64_t rows, cols, iterations, partials;
  int streams;
  float sinkhorn_eps, post_scale;
};

/// The last of backward, with phi in memory as [cols, columns]:
///   dx   = dy phiᵀ + scale · x
///   dphi = xᵀ dy
/// the latter in partial sums, each over rows that follow one another. A backend may leave it out: GEMMs do the same.
struct MHCProjectionBackward {
  static constexpr int kMostColumns = 24;                         // those of four streams
  static constexpr int64_t kLeastRows = 256, kMostPartials = 32;  // of a partial sum; the more, the more memory
  const void* x;                                                  // [rows, cols]
  const float *dy, *scale;                                        // [rows, columns], [rows]
  Numbers phi;
  void* dx;     // null: not wanted
  float* dphi;  // [partials, cols, columns], or null
  int64_t rows, cols, partials;
  int columns;
  DType dtype;  // of x and dx
};

inline constinit Kernel<MHCCoefficientsForward> mhc_coefficients_forward{"mhc_coefficients_forward"};
inline constinit Kernel<MHCCoefficientsBackward> mhc_coefficients_backward{"mhc_coefficients_backward"};
inline constinit Kernel<MHCProjectionBackward> mhc_projection_backward{"mhc_projection_backward"};

}  // namespace liger
