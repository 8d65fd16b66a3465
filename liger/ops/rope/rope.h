#pragma once
#include "liger/core/kernel.h"

namespace liger {

/// One of the tensors that are rotated, [batch, heads, seq, dim] with any strides (in elements) but 1 in the last
/// dimension.
struct RopeTensor {
  const void* in;
  void* out;
  int64_t heads;
  struct Strides {
    int64_t batch, head, seq;
  } in_strides, out_strides;
};

/// Which columns of a head are a pair, and where its cosine and sine lie in a token's rows of the tables:
///   Halves       columns i and rotary/2 + i; cos[i], sin[i]
///   Sections     the same, in the plane of the tables in whose section i lies:
///                i < section_ends[0], i < section_ends[1], or beyond
///   Interleaved  columns 2i and 2i + 1; cos[2i], cos[2i + 1]: complex numbers
enum class RopePairs : int8_t { Halves, Sections, Interleaved };

///   o₁ = x₁ c − x₂ s
///   o₂ = x₂ c + x₁ s
/// for each pair of the leading `rotary` columns of a head, c and s its cosine and sine at the token; the other columns
/// pass through, and so does v. direction −1 turns back: that is the gradient.
struct Rope {
  RopeTensor q, k, v;     // v has no heads where q and k are tensors of their own
  const void *cos, *sin;  // [planes, batch or 1, seq, ...]
  int64_t table_plane_stride, table_batch_stride, table_seq_stride;
  int64_t batch, seq, dim, rotary;
  int64_t section_ends[2];
  RopePairs pairs;
  DType dtype, table_dtype;
  float direction;
};

inline constinit Kernel<Rope> rope_kernel{"rope"};

}  // namespace liger
