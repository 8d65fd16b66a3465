#pragma once
#include "liger/core/cuda/cluster_exchange.cuh"

namespace liger::cuda {

template <class V>
struct SumOf {
  using Value = V;
  static __device__ Value identity() { return 0; }
  __device__ Value operator()(Value a, Value b) const { return a + b; }
  __device__ static Value shuffle(Value v, int lane) { return __shfl_xor_sync(~0u, v, lane); }
};

using Sum = SumOf<float>;

/// n sums at once.
template <int n>
struct Sums {
  struct Value {
    float v[n];
  };
  static __device__ Value identity() { return {}; }
  __device__ Value operator()(Value a, Value b) const {
#pragma unroll
    for (int i = 0; i < n; ++i) a.v[i] += b.v[i];
    return a;
  }
  __device__ static Value shuffle(Value v, int lane) {
#pragma unroll
    for (int i = 0; i < n; ++i) v.v[i] = __shfl_xor_sync(~0u, v.v[i], lane);
    return v;
  }
};

/// A sum of floats and what it was rounded by on its way (Knuth's TwoSum).
struct CarriedSum {
  struct Value {
    float v[1], rest;
  };
  static __device__ Value identity() { return {}; }
  __device__ Value operator()(Value a, Value b) const {
    const float sum = a.v[0] + b.v[0], of_b = sum - a.v[0];
    return {{sum}, a.rest + b.rest + ((a.v[0] - (sum - of_b)) + (b.v[0] - of_b))};
  }
  __device__ static Value shuffle(Value v, int lane) {
    return {{__shfl_xor_sync(~0u, v.v[0], lane)}, __shfl_xor_sync(~0u, v.rest, lane)};
  }
};

/// Reduces over groups of `lanes` neighbouring lanes, a power of two; every one of them gets the result. kShort: by
/// Op's own way, which takes fewer instructions and waits longer.
template <class Op, bool kShort = false>
__device__ typename Op::Value reduce_lanes(typename Op::Value v, int lanes, Op op = {}) {
  if constexpr (kShort && requires { Op::lanes(v, lanes); }) {
    return Op::lanes(v, lanes);
  } else if (lanes < 32) {
    for (int lane = lanes / 2; lane > 0; lane /= 2) v = op(v, Op::shuffle(v, lane));
  } else {
#pragma unroll
    for (int lane = 16; lane > 0; lane /= 2) v = op(v, Op::shuffle(v, lane));
  }
  return v;
}

/// Reduces over the threads of a row (threadIdx.x, and where the row is spread over a cluster its blocks); every one of
/// them gets the result. blockDim.x is a power of two up to 32 or a multiple of 32, to kWarps · 32 threads a block. Two
/// sets of slots alternate, so that one barrier a call is enough; kBuffers = 1: it is called once. A call may name
/// another operation on the same values.
template <class Op, bool kSpread = false, bool kShort = kSpread, int kWarps = 32, int kBuffers = 2>
struct RowReduce {
  struct Nothing {};
  int buffer = 0;
  std::conditional_t<kSpread, ClusterExchange<typename Op::Value, kBuffers>, Nothing> exchange;

  template <class By = Op>
  __device__ typename Op::Value operator()(typename Op::Value v, By op = {}) {
    const int threads = blockDim.x;
    v = reduce_lanes<By, kShort>(v, threads, op);
    if (!kSpread && threads <= 32) return v;
    __shared__ typename Op::Value slots[kBuffers][kWarps];
    const int warps = threads / 32, lane = threadIdx.x % 32, first = threadIdx.y * warps;
    auto* partial = slots[buffer];
    if (kBuffers > 1) buffer ^= 1;
    if (lane == 0) partial[first + threadIdx.x / 32] = v;
    __syncthreads();
    v = reduce_lanes<By, kShort>(lane < warps ? partial[first + lane] : By::identity(), 32, op);
    if constexpr (kSpread) {
      typename Op::Value all = By::identity();
      exchange(v, [&](const typename Op::Value& of_block) { all = op(all, of_block); });
      v = all;
    }
    return v;
  }
};

}  // namespace liger::cuda
