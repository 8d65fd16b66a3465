#pragma once
#include "liger/core/kernel.h"

namespace liger {

/// One of the tensors that are rotated, [batch, heads, seq, dim] with any strides (in elements) but 1 in the last dimension.
struct RopeTensor {
  const void* in;
  void* out;
  int64_t heads;
  struct Strides { int64_t batch, head, seq; } in_strides, out_strides;
};

/// (o₁, o₂) = (x₁ c − x₂ s, x₂ c + x₁ s), x₁ and x₂ the two halves of the leading `rotary` columns of a head, c and s the leading
/// rotary/2 columns of cos and sin at the token; the other columns pass through. direction −1 turns back: that is the gradient.
struct Rope {
  RopeTensor q, k;
  const void *cos, *sin;   // [batch or 1, seq, ...]
  int64_t table_batch_stride, table_seq_stride;
  int64_t batch, seq, dim, rotary;
  DType dtype, table_dtype;
  float direction;
};

inline constinit Kernel<Rope> rope_kernel{"rope"};

}  // namespace liger
