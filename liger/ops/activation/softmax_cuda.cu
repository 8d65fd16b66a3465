#include "liger/core/cuda/cluster.cuh"
#include "liger/core/cuda/softmax.cuh"
#include "liger/ops/activation/softmax.h"

namespace liger::cuda::softmax {
namespace {

/// Σ and how many.
template <class S>
struct SumCount {
  struct Value { S sum; float count; };
  static __device__ Value identity() { return {0, 0}; }
  __device__ Value operator()(Value a, Value b) const { return {a.sum + b.sum, a.count + b.count}; }
  __device__ static Value shuffle(Value v, int lane) { return {__shfl_xor_sync(~0u, v.sum, lane), __shfl_xor_sync(~0u, v.count, lane)}; }
};

/// The largest value, or NaN where there is one.
struct Largest {
  using Value = float;
  static __device__ Value identity() { return -INFINITY; }
  __device__ Value operator()(Value a, Value b) const { return a >= b || a != a ? a : b; }
  __device__ static Value shuffle(Value v, int lane) { return __shfl_xor_sync(~0u, v, lane); }
};

// A row of the table: push takes the values of the first pass, settle whatever else is to be known of the row, value gives y.
// In backward w weighs dy, and kMean says that the weighted sum is a mean.

template <class T>
struct Softmax {
  using Online = OnlineSoftmax<T>;
  static constexpr bool kMean = false;
  typename Online::Value v = Online::identity();
  typename Online::Sum inverse;

  template <int n>
  __device__ void push(const float (&x)[n]) { Online::push(v, x); }

  template <class Rows>
  struct Reduce { typename Rows::template Reduce<Online> all; };

  template <class Rows, class Load>
  __device__ void settle(const Rows&, Reduce<Rows>& reduce, const typename Rows::Kept&, int, Load) {
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

  template <int n>
  __device__ void push(const float (&x)[n]) {
#pragma unroll
    for (int j = 0; j < n; ++j) max = Largest()(max, x[j]);
  }

  template <class Rows>
  struct Reduce {
    typename Rows::template Reduce<Largest> largest;
    typename Rows::template Reduce<Members> members;
  };

  template <class Rows, class Load>
  __device__ void settle(const Rows& rows, Reduce<Rows>& reduce, const typename Rows::Kept& kept, int packs, Load load) {
    double tau = reduce.largest(max) - 1.;
    for (float members = -1;;) {
      const float bound = floor_of(tau);
      auto in = Members::identity();
      if (!(max <= bound)) {  // else none of this thread's values is a member; NaN is one, and spreads
        rows.again(kept, packs, load, [&](int, const auto& pack) {
          float x[Row<T>::kWidth];
          pack.to_float(x);
#pragma unroll
          for (const float v : x)
            if (!(v <= bound)) in.sum += v, in.count += 1;
        });
      }
      in = reduce.members(in);
      if (const double next = (in.sum - 1) / in.count; !(next < tau)) tau = next;  // rounding must not let a member return
      if (in.count == members) break;
      members = in.count;
    }
    high = float(tau), low = float(tau - high);
  }

  __device__ float value(float x) const {
    const float y = x - high - low;
    return y <= 0 ? 0 : y;
  }
  static __device__ float weight(float y) { return y <= 0 ? 0 : y > 0 ? 1 : y; }
};

template <class T, template <class> class Map, class Rows>
__global__ void __launch_bounds__(Rows::kThreads, Rows::kBlocks) forward_kernel(SoftmaxForward a, Rows rows) {
  constexpr int kWidth = Row<T>::kWidth;
  const Row<T> x(a.x, rows.row(), a.x_stride, a.cols), y(a.y, rows.row(), a.cols, a.cols);
  const Packs<T> load{x, T(-INFINITY)};
  typename Rows::Kept kept;
  typename Map<T>::template Reduce<Rows> reduce;
  Map<T> map;
  rows.pass(kept, x.packs(), load, [&](int, const auto& pack) {
    float f[kWidth];
    pack.to_float(f);
    map.push(f);
  });
  map.settle(rows, reduce, kept, x.packs(), load);
  rows.again(kept, x.packs(), load, [&](int k, const auto& pack) {
    float f[kWidth];
    pack.to_float(f);
#pragma unroll
    for (float& v : f) v = map.value(v);
    y.store(k, f, x);
  });
}

template <class T>
struct Pair { typename Row<T>::Pack y, dy; };

template <class T, template <class> class Map, class Rows>
__global__ void __launch_bounds__(Rows::kThreads, Rows::kBlocks) backward_kernel(SoftmaxBackward a, Rows rows) {
  constexpr int kWidth = Row<T>::kWidth;
  const Row<T> y(a.y, rows.row(), a.cols, a.cols), dy(a.dy, rows.row(), a.cols, a.cols), dx(a.dx, rows.row(), a.cols, a.cols);
  const auto load = [&](int k) { return Pair<T>{y.load(k, T(0)), dy.load(k, T(0), y)}; };
  using Weighted = SumCount<float>;
  typename Rows::template Reduce<Weighted> reduce;
  auto in = Weighted::identity();
  typename Rows::Kept kept;
  rows.pass(kept, y.packs(), load, [&](int, const Pair<T>& pair) {
    float w[kWidth], d[kWidth];
    pair.y.to_float(w), pair.dy.to_float(d);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) in.sum += Map<T>::weight(w[j]) * d[j], in.count += Map<T>::weight(w[j]);
  });
  in = reduce(in);
  const float mean = Map<T>::kMean ? in.sum / in.count : in.sum;
  rows.again(kept, y.packs(), load, [&](int k, const Pair<T>& pair) {
    float w[kWidth], d[kWidth];
    pair.y.to_float(w), pair.dy.to_float(d);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) d[j] = Map<T>::weight(w[j]) * (d[j] - mean);
    dx.store(k, d, y);
  });
}

/// f.operator()<Map>(rows).
template <class T, class Value, class Args, class F>
void dispatch_rows(const Args& a, int64_t stride, std::initializer_list<const void*> pointers, F f) {
  const auto with = [&](const auto& rows) { a.kind == Simplex::Softmax ? f.template operator()<Softmax>(rows) : f.template operator()<Sparsemax>(rows); };
  using Short = ShortRows<T, Value>;
  const bool aligned = aligned16(pointers) && a.cols % Row<T>::kWidth == 0 && stride % Row<T>::kWidth == 0;
  if (Short::fit(a.cols, aligned)) with(Short(a.rows, a.cols, aligned, a.kind == Simplex::Sparsemax));
  else with(Clusters<T, Value>(a.rows, a.cols));
}

}  // namespace

LIGER_REGISTER(softmax_forward, [](const SoftmaxForward& a, Stream s) {
  dispatch(a.dtype, [&]<class T>() {
    dispatch_rows<T, typename Row<T>::Pack>(a, a.x_stride, {a.x}, [&]<template <class> class Map>(const auto& rows) {
      launch(forward_kernel<T, Map, std::decay_t<decltype(rows)>>, rows.grid(), s, a, rows);
    });
  });
});
LIGER_REGISTER(softmax_backward, [](const SoftmaxBackward& a, Stream s) {
  dispatch(a.dtype, [&]<class T>() {
    dispatch_rows<T, Pair<T>>(a, a.cols, {a.y}, [&]<template <class> class Map>(const auto& rows) {
      launch(backward_kernel<T, Map, std::decay_t<decltype(rows)>>, rows.grid(), s, a, rows);
    });
  });
});

}  // namespace liger::cuda::softmax
