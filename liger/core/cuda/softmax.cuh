#pragma once
#include "liger/core/cuda/math.cuh"
#include "liger/core/cuda/pack.cuh"
#include "liger/core/cuda/reduce.cuh"

namespace liger::cuda {

/// The largest of `least` and all elements of some packs that is a number.
template <class T, class Pack, int n>
__device__ float largest(const Pack (&packs)[n], float least) {
  if constexpr (Pack::kPairs) {
    unsigned top = packs[0].words[0];
#pragma unroll
    for (const Pack& pack : packs) {
#pragma unroll
      for (const unsigned word : pack.words) top = max_words<T>(top, word);
    }
    const float2 pair = to_floats<T>(top);
    return fmaxf(least, fmaxf(pair.x, pair.y));
  } else {
#pragma unroll
    for (const Pack& pack : packs) {
#pragma unroll
      for (const float v : pack.words) least = fmaxf(least, v);
    }
    return least;
  }
}

/// The online softmax (Milakov & Gimelshein 2018, arXiv:1805.02867): max and Σ exp(z − max) of what was pushed so far.
/// Where the maximum grows, the sum is rescaled; two such pairs merge in any order.
/// T is the type that z came in: 16-bit logits take one instruction an exponential.
template <class T>
struct OnlineSoftmax {
  static constexpr bool kFast = sizeof(T) == 2;
  // The rounding of Σ would be in every value of a row: where values are floats it is a double.
  using Sum = std::conditional_t<kFast, float, double>;
  struct Value {
    float max;
    Sum sum;
  };
  __device__ static Value identity() { return {-3.402823466e38f, 0}; }  // finite, so that −inf − max is no NaN
  /// Of 16-bit numbers from here on, two that are not the same are so far apart that one's exp is nothing against the
  /// other's.
  static constexpr float kFar = 1 << 20;
  /// What a logit is multiplied by. Beyond kFar the rounding of max · log2(e) would be no factor that a float can hold.
  __device__ static float scale(float max) { return fabsf(max) < kFar ? kLog2e : 1; }

  /// exp(z − max), z <= max. In the fast form max · log2(e) is rounded, which is the same factor for all z.
  __device__ static float exp(float z, float max) {
    if constexpr (kFast) return exp2_approx(fmaf(z, scale(max), -__fmul_rn(max, scale(max))));
    return expf(z - max);
  }

  /// What makes Σ exp(z − to) of Σ exp(z − from): exactly 1 where those are the same. A float's would add its own bias
  /// to that of the terms.
  __device__ static Sum rescale(float from, float to) {
    if constexpr (kFast) return exp2_approx(__fmul_rn(from, scale(to)) - __fmul_rn(to, scale(to)));
    else return from == to ? 1. : ::exp(double(from) - to);
  }

  /// All elements of some packs at once.
  template <class Pack, int n>
  __device__ static void push(Value& v, const Pack (&packs)[n]) {
    const float top = largest<T>(packs, v.max);
    float sums[n] = {};
#pragma unroll
    for (int i = 0; i < n; ++i) {
      float z[Pack::kWidth];
      packs[i].to_float(z);
#pragma unroll
      for (const float z_j : z) sums[i] += exp(z_j, top);
    }
#pragma unroll
    for (int i = 1; i < n; ++i) sums[0] += sums[i];
    v = {top, v.sum * rescale(v.max, top) + sums[0]};
  }

  /// Exponentials in half are multiplied by 2^half_exponent, so that those from 2^-29 on have all their bits, and
  /// smaller ones are next to nothing; what is summed of them is multiplied by half_scale in the end.
  __device__ static float half_exponent(float max) { return fabsf(max) < kFar ? 15.f : 0.f; }
  __device__ static float half_scale(float max) { return fabsf(max) < kFar ? 1.f / (1 << 15) : 1.f; }

  /// As push, of 16-bit numbers, whose place exp(z − max) · 2^half_exponent(max) takes, as half: a later pass needs no
  /// exponential. Returns that max; v.sum is to be multiplied by half_scale(v.max) when all is pushed.
  template <class Pack, int n>
  __device__ static float push_exponentials(Value& v, Pack (&packs)[n]) {
    const float top = largest<T>(packs, v.max), shift = fmaf(-top, scale(top), half_exponent(top));
    float sum = 0;
#pragma unroll
    for (Pack& pack : packs) {
#pragma unroll
      for (unsigned& word : pack.words) {
        const float2 z = to_floats<T>(word);
        const float low = exp2_approx(fmaf(z.x, scale(top), shift)), high = exp2_approx(fmaf(z.y, scale(top), shift));
        sum += low + high;
        word = to_word<half>(low, high);
      }
    }
    v = {top, v.sum * rescale(v.max, top) + sum};
    return top;
  }

  __device__ Value operator()(Value a, Value b) const {
    const float top = fmaxf(a.max, b.max);
    return {top, a.sum * rescale(a.max, top) + b.sum * rescale(b.max, top)};
  }

  __device__ static Value shuffle(Value v, int lane) {
    return {__shfl_xor_sync(~0u, v.max, lane), __shfl_xor_sync(~0u, v.sum, lane)};
  }
  /// Over groups of `lanes` lanes: the maximum first, so that each sum is scaled once.
  __device__ static Value lanes(Value v, int lanes) {
    const float top = reduce_lanes<Max>(v.max, lanes);
    return {top, reduce_lanes<SumOf<Sum>>(v.sum * rescale(v.max, top), lanes)};
  }
  struct Max {
    using Value = float;
    __device__ Value operator()(Value a, Value b) const { return fmaxf(a, b); }
    __device__ static Value shuffle(Value v, int lane) { return __shfl_xor_sync(~0u, v, lane); }
  };

  /// ln Σ exp(z − max). In the fast form what max · log2(e) was rounded by is a factor of the sum; it is taken out, so
  /// that a row of one sure class has 0.
  __device__ static float log_sum(Value v) {
    if constexpr (!kFast) return logf(float(v.sum));
    const float by = scale(v.max);
    return fmaf(fmaf(v.max, by, -__fmul_rn(v.max, by)), -1 / kLog2e, logf(v.sum));
  }
  __device__ static float lse(Value v) { return v.max + log_sum(v); }
};

/// The largest value and where it stands first.
struct ArgMax {
  struct Value {
    float max;
    int at;
  };
  __device__ static Value identity() { return {-INFINITY, 2147483647}; }
  /// Whether a is what argmax takes: the larger, NaN before all others, the first of equals.
  __device__ static bool before(Value a, Value b) {
    const bool a_nan = a.max != a.max, b_nan = b.max != b.max;
    if (a_nan || b_nan) return a_nan && (!b_nan || a.at < b.at);
    return a.max > b.max || (a.max == b.max && a.at < b.at);
  }
  __device__ Value operator()(Value a, Value b) const { return before(b, a) ? b : a; }
  __device__ static Value shuffle(Value v, int lane) {
    return {__shfl_xor_sync(~0u, v.max, lane), __shfl_xor_sync(~0u, v.at, lane)};
  }
};

}  // namespace liger::cuda
