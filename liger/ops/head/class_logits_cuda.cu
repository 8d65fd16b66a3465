#include "liger/core/cuda/math.cuh"
#include "liger/core/cuda/reduce.cuh"
#include "liger/core/cuda/stream.cuh"
#include "liger/ops/head/class_logits.h"

namespace liger::cuda::class_logits {
namespace {

constexpr unsigned kWarps = 8, kThreads = 32 * kWarps;
constexpr int kTogether = 4;  // rows that a thread has in flight

/// A block has a row of x, a warp one of its classes after another. The limit is the rate at which rows of the weight
/// come from the L2 cache.
template <class T>
__global__ void __launch_bounds__(kThreads) forward_kernel(ClassLogits a) {
  await_previous();
  const int64_t row = blockIdx.x;
  const Row<T> x(a.x, row, a.cols, a.cols);
  for (int64_t k = threadIdx.y; k < a.count; k += kWarps) {
    const int64_t i = row * a.count + k, c = a.ids[i];
    if (c < -1 || c >= a.classes) fail_label(c, a.classes);
    float sum = 0;
    if (c >= 0) {
      const Row<T> w(a.w, c, a.cols, a.cols);
#pragma unroll 4
      for (int p = threadIdx.x; p < x.packs(); p += 32) {
        float of_x[Row<T>::kWidth], of_w[Row<T>::kWidth];
        x.load(p, T(0)).to_float(of_x), w.load(p, T(0), x).to_float(of_w);
#pragma unroll
        for (int j = 0; j < Row<T>::kWidth; ++j) sum = fmaf(of_x[j], of_w[j], sum);
      }
    }
    sum = reduce_lanes<Sum>(sum, 32);
    if (threadIdx.x == 0) a.y[i] = c < 0 ? 0 : sum + (a.bias ? float(static_cast<const T*>(a.bias)[c]) : 0);
  }
}

/// y = Σ_i factor(i) · row(i) over i below n, of the threads of a block, in that order; like: a row whose packs the
/// threads share.
template <class T, class Factor, class RowOf>
__device__ void weighted_sum(const Row<T>& like, const Row<T>& y, int64_t n, Factor factor, RowOf row) {
  constexpr int kWidth = Row<T>::kWidth;
  for (int p = threadIdx.x; p < like.packs(); p += kThreads) {
    float total[kWidth] = {}, sum[kWidth] = {};
    for (int64_t begin = 0; begin < n; begin += kTogether) {
      typename Row<T>::Pack packs[kTogether];
      float by[kTogether];
#pragma unroll
      for (int u = 0; u < kTogether; ++u) {
        const bool there = begin + u < n;
        by[u] = there ? factor(begin + u) : 0;
        if (there) packs[u] = row(begin + u).load(p, T(0), like);
        else packs[u] = Row<T>::Pack::filled(T(0));
      }
#pragma unroll
      for (int u = 0; u < kTogether; ++u) {
        float f[kWidth];
        packs[u].to_float(f);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) sum[j] = fmaf(by[u], f[j], sum[j]);
      }
      if (begin % kClassTerms != kClassTerms - kTogether && begin + kTogether < n) continue;
#pragma unroll
      for (int j = 0; j < kWidth; ++j) total[j] += sum[j], sum[j] = 0;
    }
    y.store(p, total, like);
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads) dx_kernel(ClassLogitsDx a) {
  await_previous();
  const int64_t row = blockIdx.x, first = row * a.count;
  const Row<T> dx(a.dx, row, a.cols, a.cols);
  weighted_sum(
      dx, dx, a.count, [&](int64_t k) { return a.ids[first + k] < 0 ? 0 : a.dy[first + k]; },
      [&](int64_t k) { return Row<T>(a.w, max(a.ids[first + k], int64_t(0)), a.cols, a.cols); });
}

/// The block of a class's first pair has all of its pairs.
template <class T>
__global__ void __launch_bounds__(kThreads) dw_kernel(ClassLogitsDw a) {
  await_previous();
  const int64_t first = blockIdx.x, c = a.ids[first];
  if (c < 0 || (first > 0 && a.ids[first - 1] == c)) return;
  int64_t low = first + 1, high = a.pairs;  // the first pair of a later class
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (a.ids[middle] == c) low = middle + 1;
    else high = middle;
  }
  if (a.dw) {
    const Row<T> dw(a.dw, c, a.cols, a.cols);
    weighted_sum(
        dw, dw, low - first, [&](int64_t i) { return a.dy[a.from[first + i]]; },
        [&](int64_t i) { return Row<T>(a.x, a.from[first + i] / a.count, a.cols, a.cols); });
  }
  if (!a.db) return;
  float sum = 0;
  for (int64_t i = first + threadIdx.x; i < low; i += kThreads) sum += a.dy[a.from[i]];
  sum = RowReduce<Sum>()(sum);
  if (threadIdx.x == 0) a.db[c] = sum;
}

}  // namespace

LIGER_REGISTER(class_logits_forward, [](const ClassLogits& a, Stream s) {
  dispatch(a.dtype, [&]<class T>() { launch(forward_kernel<T>, {.blocks = a.rows, .threads = {32, kWarps}}, s, a); });
});
LIGER_REGISTER(class_logits_dx, [](const ClassLogitsDx& a, Stream s) {
  dispatch(a.dtype, [&]<class T>() { launch(dx_kernel<T>, {.blocks = a.rows, .threads = kThreads}, s, a); });
});
LIGER_REGISTER(class_logits_dw, [](const ClassLogitsDw& a, Stream s) {
  dispatch(a.dtype, [&]<class T>() { launch(dw_kernel<T>, {.blocks = a.pairs, .threads = kThreads}, s, a); });
});

}  // namespace liger::cuda::class_logits
