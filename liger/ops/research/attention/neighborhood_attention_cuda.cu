#include "liger/core/cuda/math.cuh"
#include "liger/core/cuda/row_layout.cuh"
#include "liger/ops/research/attention/neighborhood_attention.h"

namespace liger::cuda::neighborhood_attention {
namespace {

constexpr int kThreads = 256;

/// A thread's pack of a row; zeros where there is none.
template <class T>
struct Part {
  static constexpr int kWidth = Row<T>::kWidth;
  using Vec = cuda::Vec<kWidth>;
  int64_t cols;
  bool has;

  __device__ explicit Part(int64_t cols) : cols(cols), has(int64_t(threadIdx.x) * kWidth < cols) {}
  __device__ Vec load(const void* matrix, int64_t row) const {
    if (!has || row < 0) return {};
    return to_vec(Pack<T, kWidth>::read(static_cast<const T*>(matrix) + row * cols + threadIdx.x * kWidth));
  }
  __device__ void store(void* matrix, int64_t row, const Vec& v) const {
    if (has) packed<T>(v).write(static_cast<T*>(matrix) + row * cols + threadIdx.x * kWidth);
  }
};

/// Rounded, as the maximum is: their difference is 0 where they are the same.
template <class Args>
__device__ float score(const Args& a, float product) {
  return Math<float>::rounded_product(a.scale, product);
}

__device__ inline int64_t own_row() { return int64_t(blockIdx.x) * blockDim.y + threadIdx.y; }

/// out and stats.
/// The threads of a query have a pack of its columns each. They walk along its keys, which neighbouring queries of the
/// block find in L1, and scale what they have summed when a larger score comes. The limit is that walk's latency.
template <class T>
__global__ void __launch_bounds__(kThreads) forward_kernel(NeighborhoodAttentionForward a) {
  await_previous();
  const Part<T> part(a.cols);
  const int64_t row = own_row();
  const bool mine = row < a.rows;
  const auto q = part.load(a.q, mine ? row : -1);
  RowReduce<Sum> reduce;
  typename Part<T>::Vec out;
  float max = -INFINITY, total = 0;
  for (int64_t t = -a.half; t <= a.half; ++t) {
    const int64_t key = mine ? neighbor(a, row, t) : -1;
    const auto v = part.load(a.v, key);
    const float s = score(a, reduce(sum(q * part.load(a.k, key))));
    if (key < 0) continue;
    const float before = max;
    max = fmaxf(max, s);
    const float rescale = expf(before - max), e = expf(s - max);
    total = total * rescale + e, out = out * rescale + v * e;
  }
  if (!mine) return;
  part.store(a.out, row, out * (1 / total));
  if (threadIdx.x == 0) a.stats[row * 2] = max, a.stats[row * 2 + 1] = total;
}

/// p and dp of a query and a key.
template <class V>
__device__ std::array<float, 2> weights(const NeighborhoodAttentionBackward& a, RowReduce<Sums<2>>& reduce, const V& q,
                                        const V& k, const V& dout, const V& v, int64_t query) {
  const Sums<2>::Value sums = reduce({{sum(q * k), sum(dout * v)}});
  return {query < 0 ? 0 : expf(score(a, sums.v[0]) - a.stats[query * 2]) / a.stats[query * 2 + 1], sums.v[1]};
}

/// dq and delta. As forward_kernel.
template <class T>
__global__ void __launch_bounds__(kThreads) queries_kernel(NeighborhoodAttentionBackward a) {
  await_previous();
  const Part<T> part(a.cols);
  const int64_t row = own_row() < a.rows ? own_row() : -1;
  const auto q = part.load(a.q, row), dout = part.load(a.dout, row);
  RowReduce<Sums<2>> reduce;
  typename Part<T>::Vec of_dp, of_p;  // Σ p · dp · k and Σ p · k
  float delta = 0;
  for (int64_t t = -a.half; t <= a.half; ++t) {
    const int64_t key = row < 0 ? -1 : neighbor(a, row, t);
    const auto k = part.load(a.k, key);
    const auto [p, dp] = weights(a, reduce, q, k, dout, part.load(a.v, key), key < 0 ? -1 : row);
    delta += p * dp, of_dp = of_dp + k * (p * dp), of_p = of_p + k * p;
  }
  if (row < 0) return;
  // The product is rounded, as it is in of_dp: the difference is 0 where there is one key.
  const auto less = [&](float x, float y) { return a.scale * (x - Math<float>::rounded_product(y, delta)); };
  part.store(a.dq, row, Part<T>::Vec::map(less, of_dp, of_p));
  if (threadIdx.x == 0) a.delta[row] = delta;
}

/// dk and dv: the queries around a key are those whose key it is.
template <class T>
__global__ void __launch_bounds__(kThreads) keys_kernel(NeighborhoodAttentionBackward a) {
  await_previous();
  const Part<T> part(a.cols);
  const int64_t row = own_row() < a.rows ? own_row() : -1;
  const auto k = part.load(a.k, row), v = part.load(a.v, row);
  RowReduce<Sums<2>> reduce;
  typename Part<T>::Vec dk, dv;
  for (int64_t t = -a.half; t <= a.half; ++t) {
    const int64_t query = row < 0 ? -1 : neighbor(a, row, t);
    const auto q = part.load(a.q, query), dout = part.load(a.dout, query);
    const auto [p, dp] = weights(a, reduce, q, k, dout, v, query);
    dk = dk + q * (p * (dp - (query < 0 ? 0 : a.delta[query]))), dv = dv + dout * p;
  }
  if (row < 0) return;
  part.store(a.dk, row, dk * a.scale), part.store(a.dv, row, dv);
}

template <class T>
RowThreads threads_of(int64_t cols) {
  return RowThreads::of(ceil_div(cols, Row<T>::kWidth), {.few = 128, .most = kThreads});
}

}  // namespace

LIGER_REGISTER(neighborhood_attention_forward, [](const NeighborhoodAttentionForward& a, Stream s) {
  dispatch(a.dtype, [&]<class T>() { launch(forward_kernel<T>, threads_of<T>(a.cols).of_rows(a.rows), s, a); });
});
LIGER_REGISTER(neighborhood_attention_backward, [](const NeighborhoodAttentionBackward& a, Stream s) {
  dispatch(a.dtype, [&]<class T>() {
    const Grid grid = threads_of<T>(a.cols).of_rows(a.rows);
    launch(queries_kernel<T>, grid, s, a);
    launch(keys_kernel<T>, grid, s, a);
  });
});

}  // namespace liger::cuda::neighborhood_attention
