#pragma once
#include "liger/core/cuda/dispatch.h"
#include "liger/core/cuda/math.cuh"
#include "liger/core/cuda/row_layout.cuh"
#include "liger/ops/norm/norm.h"

namespace liger::cuda::norm {

/// What a row is normalised by.
struct Stats {
  float mean, rstd;
};

template <bool kCentred, class Vec>
__device__ Vec normalised(const Vec& x, Stats stats) {
  if constexpr (!kCentred) return x * stats.rstd;
  // A product with the mean would be rounded: of a constant row something would remain.
  else return (x + -stats.mean) * stats.rstd;
}

/// x̂ · w as the reference rounds it; w has its offset.
template <class T, class Vec>
__device__ Vec weighted(Vec xhat, Vec w, Casting casting) {
  if (casting != Casting::Gemma) xhat = round_to<T>(xhat);
  if (casting == Casting::None) w = round_to<T>(w);
  return xhat * w;
}

/// The row of scale and shift that row `row` shares with others.
template <class Args>
__device__ int64_t modulation_of(const Args& a, int64_t row) {
  return row >> 32 ? row / a.per_modulation : unsigned(row) / unsigned(a.per_modulation);  // in 32 bits where it can be
}

/// The columns of pack k of `like`, in row `row` of a matrix or vector that is of T or of floats; zeros outside it.
template <class T, template <class> class R>
__device__ Vec<R<T>::kWidth> load_like(const void* p, DType dtype, int64_t row, int64_t cols, int k, const R<T>& like) {
  if (dtype == DType::F32) return to_vec(R<float>(p, row, cols, cols).load(k, 0.f, like));
  return to_vec(R<T>(p, row, cols, cols).load(k, T(0), like));
}

/// A row's statistics, waited for here, where no other load of them is in flight: ptxas leaves a shuffle where it is.
/// Where their first use comes after the load of the next row's, it may wait for those, too: measured, a fifth of the
/// time.
__device__ inline Stats arrived(Stats s) {
  const int lane = int(threadIdx.y * blockDim.x) % 32;  // the row's first
  return {__shfl_sync(~0u, s.mean, lane), __shfl_sync(~0u, s.rstd, lane)};
}

/// The column sums of a block's rows are partial sum `index`.
template <class Layout, class Like>
__device__ void put_columns(Vec<Like::kWidth> (&sums)[Layout::kPacks], float* partials, int64_t index, int64_t cols,
                            const Like& like) {
  if (!partials) return;
  sum_over_rows(sums);
  if (threadIdx.y > 0) return;
  const typename Layout::template Row<float> to(partials, index, cols, cols);
  unrolled<Layout::kPacks>([&](int p) {
    if (const int k = Layout::pack(p); k < like.packs()) to.store(k, packed<float>(sums[p]), like);
  });
}

/// Adds pack k of a row's part to partial sum blockIdx.x, which its first row begins.
template <class T>
__device__ void add_columns(float* partials, const Vec<Row<T>::kWidth>& v, bool first, int64_t cols, int k,
                            const Row<T>& like) {
  if (!partials) return;
  const Row<float> to(partials, blockIdx.x, cols, cols);
  to.store(k, (first ? v : to_vec(to.load(k, 0.f, like)) + v).v, like);
}

}  // namespace liger::cuda::norm
