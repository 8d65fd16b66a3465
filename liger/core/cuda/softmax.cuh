#pragma once
#include "liger/core/cuda/math.cuh"
#include "liger/core/cuda/reduce.cuh"

namespace liger::cuda {

/// max and Σ exp(z − max) of what was pushed so far (Milakov & Gimelshein 2018, arXiv:1805.02867); merges in any order. T is the
/// type that z came in: 16-bit logits take one instruction an exponential.
template <class T>
struct OnlineSoftmax {
  struct Value { float max, sum; };
  __device__ static Value identity() { return {-3.402823466e38f, 0}; }  // finite, so that −inf − max is no NaN

  /// exp(z − max).
  __device__ static float exp(float z, float max) {
    if constexpr (sizeof(T) == 2) return exp2_approx((z - max) * kLog2e);
    return expf(z - max);
  }

  template <int n>
  __device__ static void push(Value& v, const float (&z)[n]) {
    float top = v.max;
#pragma unroll
    for (int j = 0; j < n; ++j) top = fmaxf(top, z[j]);
    v.sum *= exp(v.max, top);
    v.max = top;
#pragma unroll
    for (int j = 0; j < n; ++j) v.sum += exp(z[j], top);
  }

  __device__ Value operator()(Value a, Value b) const {
    const float top = fmaxf(a.max, b.max);
    return {top, a.sum * exp(a.max, top) + b.sum * exp(b.max, top)};
  }

  __device__ static Value shuffle(Value v, int lane) { return {__shfl_xor_sync(~0u, v.max, lane), __shfl_xor_sync(~0u, v.sum, lane)}; }
  __device__ static float lse(Value v) { return v.max + logf(v.sum); }
};

/// The largest value and where it stands first.
struct ArgMax {
  struct Value { float max; int at; };
  __device__ static Value identity() { return {-INFINITY, 2147483647}; }
  __device__ Value operator()(Value a, Value b) const { return b.max > a.max || (b.max == a.max && b.at < a.at) ? b : a; }
  __device__ static Value shuffle(Value v, int lane) { return {__shfl_xor_sync(~0u, v.max, lane), __shfl_xor_sync(~0u, v.at, lane)}; }
};

}  // namespace liger::cuda
