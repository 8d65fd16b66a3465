#pragma once
#include <algorithm>
#include <initializer_list>
#include "liger/core/kernel.h"
#include "liger/options.h"

namespace liger {

/// One of the tensors that are normalised and rotated: [batch, heads, seq, cols] with any strides (in elements) but 1
/// in the last dimension. Its rows are numbered in the order [batch, seq, heads].
struct NormedHeads {
  struct Strides {
    int64_t batch, head, seq;
  };
  const void *x, *dy;  // dy of backward
  void* out;           // y; dx of backward, null where x is frozen
  const void* w;       // [cols] or null
  float* rstd;         // [batch, seq, heads]
  float* dw;           // [partials, cols]; null where not wanted
  int64_t heads, partials;
  Strides x_strides, dy_strides, out_strides;
  DType w_dtype;
};

/// RMSNorm of each head's row and its rotation, of q and k:
///   rstd = 1 / sqrt(mean(x²) + eps)
///   n    = x · rstd · (w + offset), rounded to x's dtype
///   y₁   = n₁ c − n₂ s
///   y₂   = n₂ c + n₁ s
/// for columns i and rotary/2 + i of the leading `rotary` ones, c and s column i of the token's row in the tables; the
/// other columns of y are n's. `casting` says where x · rstd is rounded before it meets the weight.
/// The gradient, g the rotation back of dy, rounded to x's dtype:
///   g₁ = dy₁ c + dy₂ s
///   g₂ = dy₂ c − dy₁ s
///   x̂  = x · rstd
///   u  = g · (w + offset)
///   dx = rstd · (u − x̂ · mean(u · x̂))
///   dw = Σ_rows g · x̂
/// The kernels read and write whole packs of 16 bytes: what they are given fits(). Other sizes and layouts run the
/// norm's kernels and the rotation's, of which these have every bit of y and dx.
struct QkNormRope {
  static constexpr int64_t kMostBytes = 1024;  // of a row

  NormedHeads q, k;
  const void *cos, *sin;  // [batch or 1, seq, at least rotary/2]
  int64_t table_batch_stride, table_seq_stride;
  int64_t batch, seq, cols, rotary;
  DType dtype, table_dtype;
  float eps, offset, inv_cols;  // 1 / cols
  Casting casting;

  constexpr int64_t rows(const NormedHeads& t) const { return batch * seq * t.heads; }

  bool fits() const {
    const int64_t bytes = dtype == DType::F32 ? 4 : 2, pack = 16 / bytes;
    const auto whole = [&](std::initializer_list<int64_t> numbers) {
      return std::all_of(numbers.begin(), numbers.end(), [&](int64_t n) { return n % pack == 0; });
    };
    const auto aligned = [](std::initializer_list<const void*> pointers) {
      return std::all_of(pointers.begin(), pointers.end(),
                         [](const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; });
    };
    const auto tensor = [&](const NormedHeads& t) {
      const auto &x = t.x_strides, &dy = t.dy_strides, &out = t.out_strides;
      return aligned({t.x, t.dy, t.out, t.w}) &&
             whole({x.batch, x.head, x.seq, dy.batch, dy.head, dy.seq, out.batch, out.head, out.seq});
    };
    return cols * bytes <= kMostBytes && whole({cols, rotary / 2, table_batch_stride, table_seq_stride}) &&
           aligned({cos, sin}) && tensor(q) && tensor(k);
  }
};

inline constinit Kernel<QkNormRope> qk_norm_rope_forward{"qk_norm_rope_forward"};
inline constinit Kernel<QkNormRope> qk_norm_rope_backward{"qk_norm_rope_backward"};

}  // namespace liger
