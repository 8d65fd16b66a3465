#include <algorithm>
#include "liger/core/cuda/stream.cuh"
#include "liger/ops/embedding/embedding.h"

namespace liger::cuda::embedding {
namespace {

template <class T>
__global__ void __launch_bounds__(256) forward_kernel(EmbeddingForward a) {
  await_previous();
  const int64_t i = int64_t(blockIdx.x) * blockDim.y + threadIdx.y;
  if (i >= a.tokens) return;
  const int64_t id = a.ids[i];
  if (id < 0 || id >= a.classes) fail_index("id", id, a.classes);
  const Row<T> w(a.w, id, a.cols, a.cols), y(a.y, i, a.cols, a.cols);
  for_each_pack<4>(w, 0, w.packs(), T(0), [&](int k, const auto& pack) {
    float f[Row<T>::kWidth];
    pack.to_float(f);
    y.store(k, f, w);
  });
}

inline constexpr int kAtOnce = 4;  // rows that a thread has in flight

/// sum += the packs k of `n` rows, in their order: row(i) is the i-th.
template <class T, class F>
__device__ void add_rows(float* sum, int k, const Row<T>& like, int n, F row) {
  constexpr int kWidth = Row<T>::kWidth;
  for (int i = 0; i < n; i += kAtOnce) {
    typename Row<T>::Pack packs[kAtOnce] = {};
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u)
      if (i + u < n) packs[u] = row(i + u).load(k, T(0), like);
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      float f[kWidth];
      packs[u].to_float(f);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) sum[j] += f[j];
    }
  }
}

/// A block per chunk of `order`; nothing to do where a chunk holds more than one id.
template <class T>
__global__ void __launch_bounds__(256) chunks_kernel(EmbeddingBackward a) {
  await_previous();
  const int64_t chunk = int64_t(blockIdx.x) * blockDim.y + threadIdx.y, begin = chunk * a.chunk;
  if (begin + a.chunk > a.tokens || a.sorted[begin] != a.sorted[begin + a.chunk - 1]) return;
  float* part = a.part + chunk * a.cols;
  const Row<T> like(a.dw, 0, a.cols, a.cols);
  for (int k = threadIdx.x; k < like.packs(); k += blockDim.x) {
    float sum[Row<T>::kWidth] = {};
    add_rows(sum, k, like, int(a.chunk), [&](int i) { return Row<T>(a.dy, a.order[begin + i], a.cols, a.cols); });
    for (int j = 0; j < Row<T>::kWidth; ++j)
      if (const int c = like.column(k) + j; c >= 0 && c < like.n) part[c] = sum[j];
  }
}

/// dw_v from the tokens before the first chunk that is all its own, such chunks, and the tokens after them.
template <class T>
__global__ void __launch_bounds__(256, 5) rows_kernel(EmbeddingBackward a) {
  await_previous();
  const int64_t v = int64_t(blockIdx.x) * blockDim.y + threadIdx.y;
  if (v >= a.classes) return;
  const int begin = a.first[v], end = v == a.padding ? begin : a.first[v + 1], chunk = int(a.chunk);
  const int first = (begin + chunk - 1) / chunk, last = end / chunk, head = first < last ? first * chunk : end, tail = first < last ? last * chunk : end;
  const Row<T> dw(a.dw, v, a.cols, a.cols);
  if (begin == end) {  // most rows
    constexpr float zeros[Row<T>::kWidth] = {};
    for (int k = threadIdx.x; k < dw.packs(); k += blockDim.x) dw.store(k, zeros, dw);
    return;
  }
  const auto token = [&](int i) { return Row<T>(a.dy, a.order[i], a.cols, a.cols); };
  for (int k = threadIdx.x; k < dw.packs(); k += blockDim.x) {
    float sum[Row<T>::kWidth] = {};
    add_rows(sum, k, dw, head - begin, [&](int i) { return token(begin + i); });
#pragma unroll 4
    for (int p = first; p < last; ++p)
#pragma unroll
      for (int j = 0; j < Row<T>::kWidth; ++j)
        if (const int c = dw.column(k) + j; c >= 0 && c < dw.n) sum[j] += a.part[p * a.cols + c];
    add_rows(sum, k, dw, end - tail, [&](int i) { return token(tail + i); });
    dw.store(k, sum, dw);
  }
}

template <class T>
__global__ void __launch_bounds__(256) few_kernel(EmbeddingBackwardFew a) {
  await_previous();
  const int64_t i = int64_t(blockIdx.x) * blockDim.y + threadIdx.y;
  if (i >= a.tokens || !a.first(i)) return;
  const int64_t id = a.ids[i];
  const Row<T> dw(a.dw, id, a.cols, a.cols);
  for (int k = threadIdx.x; k < dw.packs(); k += blockDim.x) {
    float sum[Row<T>::kWidth] = {};
    for (int64_t j = i; j < a.tokens;) {
      constexpr int kMost = 16;  // in a sum of their own, as in chunks of the sorted ones: that of 256 would not be as near as torch's
      int64_t found[kMost];
      int n = 0;
      for (; j < a.tokens && n < kMost; ++j)
        if (a.ids[j] == id) found[n++] = j;
      float part[Row<T>::kWidth] = {};
      add_rows(part, k, dw, n, [&](int u) { return Row<T>(a.dy, found[u], a.cols, a.cols); });
#pragma unroll
      for (int u = 0; u < Row<T>::kWidth; ++u) sum[u] += part[u];
    }
    dw.store(k, sum, dw);
  }
}

/// 256 threads, so many on a row that each has `packs` of its packs.
template <class T>
Grid grid(int64_t rows, int64_t cols, int packs) {
  unsigned x = 32;
  while (x < 256 && x * packs * Row<T>::kWidth < cols) x *= 2;
  const dim3 threads(x, 256 / x);
  return {.blocks = (rows + threads.y - 1) / threads.y, .threads = threads};
}

}  // namespace

LIGER_REGISTER(embedding_forward, [](const EmbeddingForward& a, Stream s) {
  dispatch(a.dtype, [&]<class T>() { launch(forward_kernel<T>, grid<T>(a.tokens, a.cols, 4), s, a); });
});
LIGER_REGISTER(embedding_backward, [](const EmbeddingBackward& a, Stream s) {
  dispatch(a.dtype, [&]<class T>() {
    launch(chunks_kernel<T>, grid<T>(a.tokens / a.chunk, a.cols, 1), s, a);
    launch(rows_kernel<T>, grid<T>(a.classes, a.cols, 1), s, a);
  });
});

LIGER_REGISTER(embedding_backward_few, [](const EmbeddingBackwardFew& a, Stream s) {
  dispatch(a.dtype, [&]<class T>() { launch(few_kernel<T>, grid<T>(a.tokens, a.cols, 1), s, a); });
});

}  // namespace liger::cuda::embedding
