#pragma once
#include "liger/core/cuda/cluster.cuh"
#include "liger/ops/activation/softmax.h"

/// Maps of rows to probabilities. A map's push takes the values of the first pass, settle whatever else is to be known
/// of the row, value gives y. In backward its weight w of y weighs dy, and kMean says that the weighted sum is a mean.
namespace liger::cuda::probabilities {

/// Σ and how many.
template <class S>
struct SumCount {
  struct Value {
    S sum;
    float count;
  };
  static __device__ Value identity() { return {0, 0}; }
  __device__ Value operator()(Value a, Value b) const { return {a.sum + b.sum, a.count + b.count}; }
  __device__ static Value shuffle(Value v, int lane) {
    return {__shfl_xor_sync(~0u, v.sum, lane), __shfl_xor_sync(~0u, v.count, lane)};
  }
};

/// Each element of a pack becomes f of it, and of that of another.
template <class Pack, class F>
__device__ Pack mapped(const Pack& pack, F f) {
  float x[Pack::kWidth];
  pack.to_float(x);
#pragma unroll
  for (float& v : x) v = f(v);
  return Pack::from_float(x);
}

template <class Pack, class F>
__device__ Pack mapped(const Pack& first, const Pack& second, F f) {
  float x[Pack::kWidth], y[Pack::kWidth];
  first.to_float(x), second.to_float(y);
#pragma unroll
  for (int j = 0; j < Pack::kWidth; ++j) x[j] = f(x[j], y[j]);
  return Pack::from_float(x);
}

/// y = Map of x.
/// A row belongs to a part of a block's threads or to a cluster of blocks (KeptRows, cluster.cuh), which keeps it on
/// chip: the first pass gathers what settles the row, the last one writes y. The limit is memory; sparsemax searches
/// its threshold in passes between, on chip. Of a causal row only what counts is read.
template <class T, template <class> class Map, class KeptRows>
__global__ void __launch_bounds__(KeptRows::kThreads, KeptRows::kBlocks)
    forward_kernel(SoftmaxForward a, KeptRows rows) {
  await_previous();
  const int64_t n = length(a, rows.row());
  const RowSet<T, 1> set{{Row<T>(a.x, rows.row(), a.x_stride, n)}, T(-INFINITY)};
  const Row<T> y(a.y, rows.row(), a.cols, n);
  typename KeptRows::State state;
  rows.begin(state, set);
  typename Map<T>::template Reduce<KeptRows> reduce;
  Map<T> map;
  rows.template pass<2, true>(state, set, [&](int, const auto& packs) { map.push(packs); });
  map.settle(rows, reduce, state, set);
  rows.template again<2>(state, set, [&](int k, auto& packs) {
#pragma unroll
    for (auto& pack : packs) pack = mapped(pack, [&](float v) { return map.value(v); });
    y.template store<KeptRows::kThreads>(k, packs, set.of[0]);
  });
  if (n == a.cols || !rows.leads() || rows.row() >= a.rows) return;
  const Row<T> rest(static_cast<T*>(a.y) + n, rows.row(), a.cols, a.cols - n);
  for_each_pack_of(rest, [&](int k) { rest.store(k, Row<T>::Pack::filled(T(0)), rest); });
}

/// dx = w · (dy − Σ w · dy). For softmax w is y; for sparsemax 1 on the support, and the sum is a mean over it.
/// As forward_kernel: y and dy are read once, and kept on chip for the second pass.
template <class T, template <class> class Map, class KeptRows>
__global__ void __launch_bounds__(KeptRows::kThreads, KeptRows::kBlocks)
    backward_kernel(SoftmaxBackward a, KeptRows rows) {
  await_previous();
  const auto of = [&](const void* matrix) { return Row<T>(matrix, rows.row(), a.cols, a.cols); };
  const RowSet<T, 2> set{{of(a.y), of(a.dy)}, T(0)};
  const Row<T> dx = of(a.dx);
  using Weighted = SumCount<float>;
  typename KeptRows::template Reduce<Weighted> reduce;
  auto in = Weighted::identity();
  typename KeptRows::State state;
  rows.begin(state, set);
  rows.template pass<2, true>(state, set, [&](int, const auto& pairs) {
#pragma unroll
    for (const auto& pair : pairs)
      mapped(pair.of[0], pair.of[1],
             [&](float w, float d) { return in.count += Map<T>::weight(w), in.sum += Map<T>::weight(w) * d; });
  });
  in = reduce(in);
  const float mean = Map<T>::kMean ? in.sum / in.count : in.sum;
  rows.template again<2>(state, set, [&](int k, const auto& pairs) {
    constexpr int n = std::extent_v<std::remove_reference_t<decltype(pairs)>>;
    typename Row<T>::Pack packs[n];
#pragma unroll
    for (int i = 0; i < n; ++i)
      packs[i] =
          mapped(pairs[i].of[0], pairs[i].of[1], [&](float w, float d) { return Map<T>::weight(w) * (d - mean); });
    dx.template store<KeptRows::kThreads>(k, packs, set.of[0]);
  });
}

/// kAlone: of dispatch_kept_rows.
template <template <class> class Map, bool kAlone>
void forward(const SoftmaxForward& a, Stream s) {
  dispatch(a.dtype, [&]<class T>() {
    dispatch_kept_rows<T, 1>(a.x, a.rows, a.cols, a.x_stride, kAlone, true, [&](const auto& rows) {
      launch(forward_kernel<T, Map, std::decay_t<decltype(rows)>>, rows.grid(), s, a, rows);
    });
  });
}

template <template <class> class Map, bool kAlone>
void backward(const SoftmaxBackward& a, Stream s) {
  dispatch(a.dtype, [&]<class T>() {
    dispatch_kept_rows<T, 2>(a.y, a.rows, a.cols, a.cols, kAlone, true, [&](const auto& rows) {
      launch(backward_kernel<T, Map, std::decay_t<decltype(rows)>>, rows.grid(), s, a, rows);
    });
  });
}

}  // namespace liger::cuda::probabilities
