#include "liger/core/cuda/math.cuh"
#include "liger/core/cuda/stream.cuh"
#include "liger/ops/loss/divergence.h"

namespace liger::cuda::divergence {
namespace {

/// How many labels count, at least 1. One block.
__global__ void __launch_bounds__(1024) count_kernel(DivergenceCount a) {
  await_previous();
  float n = 0;
  for (int64_t r = threadIdx.x; r < a.rows; r += blockDim.x) n += a.labels[r] != a.ignore_index;
  n = RowReduce<Sum>()(n);
  if (threadIdx.x == 0) *a.count = fmaxf(n, 1);
}

/// Σ f(x, target) over a row chunk and, in the same pass, dx = scale · f'.
/// A block has the chunk, a thread a pack at a time, for which no address is checked where all matrices lie alike. The
/// limit is memory: each number is read and written once.
/// kEach: elements have losses and upstream gradients of their own.
template <class X, class T, class Formula, bool kEach>
__global__ void __launch_bounds__(256) chunks_kernel(DivergenceChunks a, RowChunks<X> chunks) {
  await_previous();
  constexpr int kWidth = Row<X>::kWidth;
  const Row<X> x = chunks.of(a.x, a.cols), dx = chunks.of(a.dx, a.cols);
  const Row<T> target = chunks.template of<T>(a.target, a.cols);
  const Row<float> upstream = chunks.template of<float>(a.upstream, a.cols),
                   each = chunks.template of<float>(a.each, a.cols);
  const float scale = a.count ? a.scale / *a.count : a.scale;
  const bool ignored = a.labels && a.labels[chunks.row()] == a.ignore_index;
  float sum = 0;
  for_each_place(x, target.aligned(x) && dx.aligned(x) && upstream.aligned(x) && each.aligned(x),
                 [&]<bool kWhole>(int k, std::bool_constant<kWhole>) {
                   float f[kWidth] = {}, df[kWidth] = {}, g[kWidth];
                   if (!ignored) {
                     x.template load<kWhole>(k, X(Formula::kNothing), x).to_float(f),
                         target.template load<kWhole>(k, T(Formula::kNothing), x).to_float(df);
                     if (kEach && a.upstream) upstream.template load<kWhole>(k, 0, x).to_float(g);
#pragma unroll
                     for (int j = 0; j < kWidth; ++j) {
                       const auto at = Formula::template at<Math<X>>(f[j], df[j], a.parameter);
                       sum += at.f;
                       f[j] = at.f, df[j] = at.df * (kEach && a.upstream ? scale * g[j] : scale);
                     }
                   }
                   if (kEach && a.each) each.template store<kWhole>(k, f, x);
                   if (a.dx) dx.template store<kWhole>(k, df, x);
                 });
  if (kEach) return;
  sum = RowReduce<Sum>()(sum);
  if (threadIdx.x == 0) a.sums[blockIdx.x] = sum;
}

/// The loss: the chunks' sums, added up in a fixed order, times scale. One block.
template <class T>
__global__ void __launch_bounds__(1024) total_kernel(DivergenceTotal a) {
  await_previous();
  float sum = 0;
#pragma unroll 8
  for (int64_t i = threadIdx.x; i < a.chunks; i += blockDim.x) sum += a.sums[i];
  sum = RowReduce<Sum>()(sum);
  if (threadIdx.x == 0) *static_cast<T*>(a.total) = T(float(sum * (a.count ? a.scale / *a.count : a.scale)));
}

}  // namespace

LIGER_REGISTER(divergence_count,
               [](const DivergenceCount& a, Stream s) { launch(count_kernel, {.blocks = 1, .threads = 1024}, s, a); });

LIGER_REGISTER(divergence_chunks, [](const DivergenceChunks& a, Stream s) {
  dispatch_weighted(a.dtype, a.target_dtype, [&]<class X, class T>() {
    dispatch_divergence(a.kind, [&]<class Formula>() {
      const RowChunks<X> chunks(a.rows, a.cols, a.chunk);
      launch(a.sums ? chunks_kernel<X, T, Formula, false> : chunks_kernel<X, T, Formula, true>, chunks.grid(), s, a,
             chunks);
    });
  });
});

LIGER_REGISTER(divergence_total, [](const DivergenceTotal& a, Stream s) {
  dispatch(a.dtype, [&]<class T>() { launch(total_kernel<T>, {.blocks = 1, .threads = 1024}, s, a); });
});

}  // namespace liger::cuda::divergence
