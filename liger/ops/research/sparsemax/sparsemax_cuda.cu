#include "liger/ops/activation/probabilities.cuh"
#include "liger/ops/research/sparsemax/sparsemax.h"

namespace liger::cuda::sparsemax {
namespace {

/// The largest value, or NaN where there is one.
struct Largest {
  using Value = float;
  static __device__ Value identity() { return -INFINITY; }
  __device__ Value operator()(Value a, Value b) const { return a >= b || a != a ? a : b; }
  __device__ static Value shuffle(Value v, int lane) { return __shfl_xor_sync(~0u, v, lane); }
};

template <class T>
struct Sparsemax {
  using Members = probabilities::SumCount<double>;
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

}  // namespace

LIGER_REGISTER(sparsemax_forward, probabilities::forward<Sparsemax, true>);
LIGER_REGISTER(sparsemax_backward, probabilities::backward<Sparsemax, true>);

}  // namespace liger::cuda::sparsemax
