#include "liger/core/cuda/cluster.cuh"
#include "liger/core/cuda/softmax.cuh"
#include "liger/ops/activation/softmax.h"

namespace liger::cuda::softmax {
namespace {

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

/// The largest value, or NaN where there is one.
struct Largest {
  using Value = float;
  static __device__ Value identity() { return -INFINITY; }
  __device__ Value operator()(Value a, Value b) const { return a >= b || a != a ? a : b; }
  __device__ static Value shuffle(Value v, int lane) { return __shfl_xor_sync(~0u, v, lane); }
};

// A row of the table: push takes the values of the first pass, settle whatever else is to be known of the row, value
// gives y. In backward w weighs dy, and kMean says that the weighted sum is a mean.

template <class T>
struct Softmax {
  using Online = OnlineSoftmax<T>;
  static constexpr bool kMean = false;
  typename Online::Value v = Online::identity();
  typename Online::Sum inverse;

  template <class Pack, int n>
  __device__ void push(const Pack (&packs)[n]) {
    Online::push(v, packs);
  }

  template <class KeptRows>
  struct Reduce {
    typename KeptRows::template Reduce<Online> all;
  };

  template <class KeptRows>
  __device__ void settle(const KeptRows&, Reduce<KeptRows>& reduce, typename KeptRows::State&,
                         const typename KeptRows::RowSet&) {
    v = reduce.all(v);
    inverse = 1 / v.sum;
  }

  __device__ float value(float x) const { return float(Online::exp(x, v.max) * inverse); }
  static __device__ float weight(float y) { return y; }
};

template <class T>
struct Sparsemax {
  using Members = SumCount<double>;
  static constexpr bool kMean = true;
  float max = Largest::identity();
  float high, low;  // τ in two floats, so that y has no error but its own

  template <class Pack, int n>
  __device__ void push(const Pack (&packs)[n]) {
#pragma unroll
    for (const Pack& pack : packs) {
      float x[Pack::kWidth];
      pack.to_float(x);
#pragma unroll
      for (const float v : x) max = Largest()(max, v);
    }
  }

  template <class KeptRows>
  struct Reduce {
    typename KeptRows::template Reduce<Largest> largest;
    typename KeptRows::template Reduce<Members, 2> members;
  };

  template <class KeptRows>
  __device__ void settle(const KeptRows& rows, Reduce<KeptRows>& reduce, typename KeptRows::State& state,
                         const typename KeptRows::RowSet& set) {
    // τ is searched as its distance from the largest value, which is a member of the support however large it is.
    const float largest = reduce.largest(max), below = nextafterf(largest, -INFINITY);
    double tau = -1;
    for (float members = -1;;) {
      const float rounded = floor_of(largest + tau), bound = rounded < below ? rounded : below;
      auto in = Members::identity();
      if (!(max <= bound)) {  // else none of this thread's values is a member; NaN is one, and spreads
        rows.template again<1>(state, set, [&](int, const auto& packs) {
          float x[Row<T>::kWidth];
          packs[0].to_float(x);
#pragma unroll
          for (const float v : x)
            if (!(v <= bound)) in.sum += double(v) - largest, in.count += 1;
        });
      }
      in = reduce.members(in);
      if (const double next = (in.sum - 1) / in.count; !(next < tau))
        tau = next;  // rounding must not let a member return
      if (in.count == members) break;
      members = in.count;
    }
    high = float(largest + tau), low = float(largest - double(high) + tau);
  }

  __device__ float value(float x) const {
    float y = x - high, rest = low;
    if constexpr (sizeof(T) == 4) {
      // And what the difference was rounded by (Knuth's TwoSum), where it can show: the only entry of a row is 1.
      const float back = y - x;
      if (y > -1) rest += (high + back) - (x - (y - back));
    }
    y -= rest;
    return y <= 0 ? 0 : y;
  }
  static __device__ float weight(float y) { return y <= 0 ? 0 : y > 0 ? 1 : y; }
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

/// y = softmax(x) or sparsemax(x), as Map says.
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

/// f.operator()<Map>(rows).
template <class T, int kMatrices, class Args, class F>
void dispatch_map(const Args& a, const void* matrix, int64_t stride, F f) {
  dispatch_kept_rows<T, kMatrices>(
      matrix, a.rows, a.cols, stride, a.kind == Simplex::Sparsemax, true, [&](const auto& rows) {
        a.kind == Simplex::Softmax ? f.template operator()<Softmax>(rows) : f.template operator()<Sparsemax>(rows);
      });
}

}  // namespace

LIGER_REGISTER(softmax_forward, [](const SoftmaxForward& a, Stream s) {
  dispatch(a.dtype, [&]<class T>() {
    dispatch_map<T, 1>(a, a.x, a.x_stride, [&]<template <class> class Map>(const auto& rows) {
      launch(forward_kernel<T, Map, std::decay_t<decltype(rows)>>, rows.grid(), s, a, rows);
    });
  });
});
LIGER_REGISTER(softmax_backward, [](const SoftmaxBackward& a, Stream s) {
  dispatch(a.dtype, [&]<class T>() {
    dispatch_map<T, 2>(a, a.y, a.cols, [&]<template <class> class Map>(const auto& rows) {
      launch(backward_kernel<T, Map, std::decay_t<decltype(rows)>>, rows.grid(), s, a, rows);
    });
  });
});

}  // namespace liger::cuda::softmax
