#pragma once
#include <cmath>
#include "liger/core/kernel.h"
#include "liger/core/math.h"

namespace liger {

/// The table of maps of a row to probabilities.
///   Softmax    y = exp(x) / Σ exp(x)
///   Sparsemax  y = max(x − τ, 0) with the τ for which Σ y = 1
/// Sparsemax gives the nearest probabilities to x (Martins & Astudillo 2016, arXiv:1602.02068). The set S where y > 0
/// determines
///   τ = (Σ_S x − 1) / |S|
/// It is found exactly, by shrinking S from {x > max − 1} to {x > τ of S} until nothing leaves it (Michelot 1986): τ
/// only grows.
enum class Simplex : int8_t { Softmax = 0, Sparsemax = 1 };

struct SoftmaxForward {
  const void* x;  // [rows, cols], stride elements apart
  void* y;        // [rows, cols]
  int64_t rows, cols, x_stride;
  int64_t queries;  // causal: row r has its first r % queries + 1 columns, the others are not read, and 0; or 0
  DType dtype;
  Simplex kind;
};

///   Softmax    dx = y (dy − Σ y dy)
///   Sparsemax  dx = [y > 0] (dy − Σ [y > 0] dy / Σ [y > 0])
struct SoftmaxBackward {
  const void *dy, *y;  // [rows, cols]
  void* dx;            // [rows, cols]
  int64_t rows, cols;
  DType dtype;
  Simplex kind;
};

/// How many columns of a row there are.
LIGER_HD inline int64_t length(const SoftmaxForward& a, int64_t row) {
  if (a.queries == 0 || row % a.queries >= a.cols) return a.cols;
  return row % a.queries + 1;
}

/// The largest float that is not above v: x > v and x > floor_of(v) are the same for floats x.
LIGER_HD inline float floor_of(double v) {
  const float f = float(v);
  return f > v ? std::nextafter(f, -INFINITY) : f;
}

inline constinit Kernel<SoftmaxForward> softmax_forward{"softmax_forward"};
inline constinit Kernel<SoftmaxBackward> softmax_backward{"softmax_backward"};

}  // namespace liger
