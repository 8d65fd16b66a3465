#pragma once
#include "liger/core/kernel.h"
#include "liger/core/math.h"

namespace liger {

/// The operators' maps of a row to probabilities. Sparsemax is in liger/ops/research/sparsemax.
enum class Simplex : int8_t { Softmax = 0, Sparsemax = 1 };

///   y = exp(x) / Σ exp(x)
struct SoftmaxForward {
  const void* x;  // [rows, cols], stride elements apart
  void* y;        // [rows, cols]
  int64_t rows, cols, x_stride;
  int64_t queries;  // causal: row r has its first r % queries + 1 columns, the others are not read, and 0; or 0
  DType dtype;
};

///   dx = y (dy − Σ y dy)
struct SoftmaxBackward {
  const void *dy, *y;  // [rows, cols]
  void* dx;            // [rows, cols]
  int64_t rows, cols;
  DType dtype;
};

/// How many columns of a row there are.
LIGER_HD inline int64_t length(const SoftmaxForward& a, int64_t row) {
  if (a.queries == 0 || row % a.queries >= a.cols) return a.cols;
  return row % a.queries + 1;
}

inline constinit Kernel<SoftmaxForward> softmax_forward{"softmax_forward"};
inline constinit Kernel<SoftmaxBackward> softmax_backward{"softmax_backward"};
inline constinit Kernel<SoftmaxForward> sparsemax_forward{"sparsemax_forward"};
inline constinit Kernel<SoftmaxBackward> sparsemax_backward{"sparsemax_backward"};

}  // namespace liger
