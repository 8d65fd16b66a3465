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
  // The rounding of 1/Σ would be in every value of a row: where values are floats it is a double, and they are rounded once.
  using Scalar = std::conditional_t<sizeof(T) == 2, float, double>;
  Scalar inverse;

  template <int n>
  __device__ void push(const float (&x)[n]) { Online::push(v, x); }

  template <class Clusters, class Load>
  __device__ void settle(const Clusters& cluster, int, Load) {
    RowReduce<Online> reduce;
    v = cluster.reduce(reduce, v);
    inverse = 1 / Scalar(v.sum);
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

  template <class Clusters, class Load>
  __device__ void settle(const Clusters& cluster, int packs, Load load) {
    RowReduce<Largest> largest;
    RowReduce<Members> reduce;
    double tau = cluster.reduce(largest, max) - 1.;
    for (float members = -1;;) {
      const float bound = floor_of(tau);
      auto in = Members::identity();
      if (!(max <= bound)) {  // else none of this thread's values is a member; NaN is one, and spreads
        cluster.again(packs, load, [&](int, const auto& pack) {
          float x[Row<T>::kWidth];
          pack.to_float(x);
#pragma unroll
          for (const float v : x)
            if (!(v <= bound)) in.sum += v, in.count += 1;
        });
      }
      in = cluster.reduce(reduce, in);
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

template <class T, template <class> class Map>
__global__ void __launch_bounds__(Clusters<T>::kThreads, Clusters<T>::kBlocks) forward_kernel(SoftmaxForward a, Clusters<T> cluster) {
  constexpr int kWidth = Row<T>::kWidth;
  const Row<T> x(a.x, cluster.row(), a.x_stride, a.cols), y(a.y, cluster.row(), a.cols, a.cols);
  const auto load = [&](int k) { return x.load(k, T(-INFINITY)); };
  Map<T> map;
  cluster.pass(x.packs(), load, [&](int, const auto& pack) {
    float f[kWidth];
    pack.to_float(f);
    map.push(f);
  });
  map.settle(cluster, x.packs(), load);
  cluster.again(x.packs(), load, [&](int k, const auto& pack) {
    float f[kWidth];
    pack.to_float(f);
#pragma unroll
    for (float& v : f) v = map.value(v);
    y.store(k, f, x);
  });
}

template <class T>
struct Pair { typename Row<T>::Pack y, dy; };

template <class T, template <class> class Map>
__global__ void __launch_bounds__(Clusters<T>::kThreads, Clusters<T>::kBlocks) backward_kernel(SoftmaxBackward a, Clusters<T, Pair<T>> cluster) {
  constexpr int kWidth = Row<T>::kWidth;
  const Row<T> y(a.y, cluster.row(), a.cols, a.cols), dy(a.dy, cluster.row(), a.cols, a.cols), dx(a.dx, cluster.row(), a.cols, a.cols);
  const auto load = [&](int k) { return Pair<T>{y.load(k, T(0)), dy.load(k, T(0), y)}; };
  using Weighted = SumCount<float>;
  auto in = Weighted::identity();
  cluster.pass(y.packs(), load, [&](int, const Pair<T>& pair) {
    float w[kWidth], d[kWidth];
    pair.y.to_float(w), pair.dy.to_float(d);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) in.sum += Map<T>::weight(w[j]) * d[j], in.count += Map<T>::weight(w[j]);
  });
  RowReduce<Weighted> reduce;
  in = cluster.reduce(reduce, in);
  const float mean = Map<T>::kMean ? in.sum / in.count : in.sum;
  cluster.again(y.packs(), load, [&](int k, const Pair<T>& pair) {
    float w[kWidth], d[kWidth];
    pair.y.to_float(w), pair.dy.to_float(d);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) d[j] = Map<T>::weight(w[j]) * (d[j] - mean);
    dx.store(k, d, y);
  });
}

}  // namespace

LIGER_REGISTER(softmax_forward, [](const SoftmaxForward& a, Stream s) {
  dispatch(a.dtype, [&]<class T>() {
    const auto cluster = Clusters<T>(a.rows, a.cols).short_rows(a.kind == Simplex::Sparsemax);
    launch(a.kind == Simplex::Softmax ? forward_kernel<T, Softmax> : forward_kernel<T, Sparsemax>, cluster.grid(), s, a, cluster);
  });
});
LIGER_REGISTER(softmax_backward, [](const SoftmaxBackward& a, Stream s) {
  dispatch(a.dtype, [&]<class T>() {
    const auto cluster = Clusters<T, Pair<T>>(a.rows, a.cols).short_rows();
    launch(a.kind == Simplex::Softmax ? backward_kernel<T, Softmax> : backward_kernel<T, Sparsemax>, cluster.grid(), s, a, cluster);
  });
});

}  // namespace liger::cuda::softmax
