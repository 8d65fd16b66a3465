#pragma once
#include <array>
#include "liger/core/kernel.h"
#include "liger/core/math.h"

namespace liger {

/// For each row, over the blocks n:
///   r_n = 1 / sqrt(mean(v_n²) + eps)
///   s_n = r_n · Σ_cols query · weight · v_n
///   α   = softmax(s)
///   h   = Σ_n α_n · v_n
struct AttentionResidualsForward {
  const void* v;               // [blocks, rows, cols]
  const void *query, *weight;  // [cols]
  void* h;                     // [rows, cols]
  float *alpha, *rstd;         // [rows, blocks]
  int64_t rows, cols;
  int blocks;
  DType dtype, weight_dtype;  // the latter that of query and weight: dtype or float
  float eps;
};

///   u       = query · weight
///   dα_n    = Σ_cols dh · v_n
///   ds_n    = α_n · (dα_n − Σ_m α_m · dα_m)
///   dv_n    = α_n · dh + ds_n · r_n · u − ds_n · r_n³ / cols · (Σ_cols u · v_n) · v_n
///   g       = Σ_rows Σ_n ds_n · r_n · v_n
///   dquery  = weight · g
///   dweight = query · g
struct AttentionResidualsBackward {
  const void *dh, *v, *query, *weight;
  const float *alpha, *rstd;
  void* dv;  // null where v is frozen
  float* g;  // [partials, cols], for add_partials
  int64_t rows, cols, partials;
  int blocks;
  DType dtype, weight_dtype;
};

inline constinit Kernel<AttentionResidualsForward> attention_residuals_forward{"attention_residuals_forward"};
inline constinit Kernel<AttentionResidualsBackward> attention_residuals_backward{"attention_residuals_backward"};

struct AttentionResiduals {
  static constexpr int kMostBlocks = 32;

  /// Makes dα what it is less that of the block with the largest weight, and returns their mean Σ_n α_n · dα_n. The
  /// difference of the two is ds / α: of equal blocks it is 0, whatever the weights were rounded by.
  template <class N>
  LIGER_HD static N mean_from_heaviest(const float* alpha, N* dalpha, int blocks) {
    int heaviest = 0;
    for (int n = 1; n < blocks; ++n)
      if (alpha[n] > alpha[heaviest]) heaviest = n;
    const N base = dalpha[heaviest];
    N mean = 0;
    for (int n = 0; n < blocks; ++n) mean += alpha[n] * (dalpha[n] -= base);
    return mean;
  }

  /// The terms of mean(v²) and of s.
  struct Scores {
    template <class V>
    LIGER_HD std::array<V, 2> operator()(V v, V query, V weight) const {
      return {v * v, v * (query * weight)};
    }
  };
};

}  // namespace liger
