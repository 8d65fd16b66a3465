#pragma once
#include "liger/core/eight_bit.h"
#include "liger/core/kernel.h"

namespace liger {

/// Rows in 8 bits of up to three matrices side by side:
///   v[r]  = x₀[r] · factor₀, x₁[r] · factor₁, …     factorᵢ is per column, or 1
struct QuantiseRows {
  struct Part {
    const void* x;        // [rows, cols], rows `stride` apart
    const float* factor;  // [cols], or null
    int64_t cols, stride;
  };
  Part parts[3];
  int count;
  RowBytes to;  // v: [rows, Σ cols]
  int64_t rows;
  DType dtype;
};

/// out[c, first + r] = x[r, c], of numbers of 8 bits.
struct TransposeBytes {
  const uint8_t* x;  // [rows, cols]
  uint8_t* out;      // [cols, ≥ first + rows], rows `stride` apart
  int64_t rows, cols, first, stride;
};

/// out = (x ⊙ x_scale) (w ⊙ w_scale)ᵀ + factor · low bᵀ + bias, where each row of x and w has a scale, and low and b
/// may be missing (rank 0). The products of 8-bit numbers are summed in float (E4M3, by the tensor cores, which keep 14
/// bits of each term and sum) or exactly (Int8), those of the adapter in float; out is rounded once.
struct ScaledMatmul {
  const uint8_t *x, *w;            // [rows, depth], [cols, depth]
  const float *x_scale, *w_scale;  // [rows]; [cols], or null: 1
  const void *low, *b;             // [rows, rank], [cols, rank]: rows low_stride and b_stride apart
  const void* bias;                // [cols], or null
  void* out;                       // [rows, cols]
  int64_t rows, cols, depth, rank, low_stride, b_stride;
  float factor;
  DType dtype;  // of low, b, bias and out: 16 bits
  EightBit format;
};

inline constinit Kernel<QuantiseRows> eight_bit_rows{"eight_bit_rows"};
inline constinit Kernel<TransposeBytes> transpose_bytes{"transpose_bytes"};
// Of devices for which has_scaled_matmul says yes. It takes depths that are multiples of 16, columns and a rank that
// are multiples of 8.
inline constinit Kernel<ScaledMatmul> scaled_matmul{"scaled_matmul"};

}  // namespace liger
