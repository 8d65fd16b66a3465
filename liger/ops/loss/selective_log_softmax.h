#pragma once
#include "liger/core/kernel.h"
#include "liger/core/math.h"

namespace liger {

/// An exponent whose exp is 0: what lies lower weighs nothing, and its product with 0 is to be no NaN.
inline constexpr float kSelectiveLowest = -200;

/// Statistics of a chunk of a row of logits z / T, z = map(x). Rows whose id is ignore_index are not read. They are
///   m = max z
///   s = Σ exp((z − m)/T)
///   Σ exp((z − m)/T) (z − m)/T
///   Σ z
inline constexpr int kSelectiveParts = 4;
struct SelectiveParts {
  const void* x;              // [rows, cols], stride elements apart
  const int64_t* ids;         // [rows]
  float* parts;               // [rows, ⌈cols / chunk⌉, kSelectiveParts]
  int64_t rows, cols, chunk;  // chunk: elements of a row whose statistics are taken at once (row_chunk_size)
  int64_t x_stride, ignore_index;
  float inverse_temperature;
  LogitMap map;
  bool mean_logit;  // whether Σ z is wanted
  DType dtype;
};

/// Of a row, all 0 where it is ignored:
///   p          = softmax(z / T)
///   logp       = ln p_id
///   entropy    = −Σ p ln p
///   lse        = ln Σ exp(z / T)
///   mean_logit = mean(z / T)
struct SelectiveLogSoftmax {
  const void* x;            // [rows, cols], stride elements apart
  const int64_t* ids;       // [rows]
  const float* parts;       // of SelectiveParts: per_row = ⌈cols / chunk⌉
  float *logp, *entropy;    // [rows]
  float *lse, *mean_logit;  // [rows] or null
  float* stats;             // [rows, 3]: m and s of the row, and mean = Σ p (z − m)/T
  int64_t* bad_id;          // on the host: an id outside [0, cols); null on devices that assert instead
  int64_t rows, cols, per_row, x_stride, ignore_index;
  float inverse_temperature;
  LogitMap map;
  DType dtype;
};

/// With the gradients g of logp, h of entropy, l of lse and k of mean_logit:
///   dx_j = (g ([j = id] − p_j) − h p_j (ln p_j + entropy) + l p_j + k / classes) / T · ∂z_j/∂x_j
///   ln p_j + entropy = (z_j − m)/T − mean
/// 0 in ignored rows. The columns may be some of the classes: first, first + 1, ...
struct SelectiveBackward {
  const float *dlogp, *dentropy;    // g, h [rows]
  const float *dlse, *dmean_logit;  // l, k [rows] or null: 0
  const void* x;                    // [rows, cols], stride elements apart
  const int64_t* ids;               // [rows]
  const float* stats;               // of SelectiveLogSoftmax
  void* dx;                         // [rows, cols]; may be x where its rows are cols apart
  int64_t rows, cols, x_stride, ignore_index;
  int64_t first, classes;  // the class of column 0, and how many there are in all
  float inverse_temperature;
  LogitMap map;
  DType dtype;
};

inline constinit Kernel<SelectiveParts> selective_parts{"selective_log_softmax_parts"};
inline constinit Kernel<SelectiveLogSoftmax> selective_log_softmax_rows{"selective_log_softmax"};
inline constinit Kernel<SelectiveBackward> selective_backward{"selective_log_softmax_backward"};

}  // namespace liger
