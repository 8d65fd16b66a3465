#pragma once
#include "liger/core/cuda/math.cuh"
#include "liger/core/cuda/pipeline.cuh"
#include "liger/ops/norm/norm.h"

namespace liger::cuda::norm {

/// What a row is made of.
struct Stats {
  float mean, rstd;
};

template <class T, class Tile, Norm kNorm>
__device__ Tile normalised(const Tile& x, Stats stats, float alpha) {
  if constexpr (tanh_of(kNorm)) return Tile::map([=](float v) { return Math<T>::tanh(alpha * v); }, x);
  if constexpr (centred(kNorm))
    return (x + -stats.mean) *
           stats.rstd;  // a product with the mean would be rounded: of a constant row something would remain
  return x * stats.rstd;
}

/// The row of scale and shift that row `row` shares with others; behind the last where there is none.
template <Norm kNorm, class Args>
__device__ int64_t modulation_of(const Args& a, int64_t row) {
  if (!modulated(kNorm) || row >= a.rows) return a.modulations;
  return row >> 32 ? row / a.per_modulation : unsigned(row) / unsigned(a.per_modulation);  // the short one if it can be
}

template <class T, class Tile, class Args, class At>
__device__ Tile modulation(const Args& a, const void* m, const At& at) {
  return a.modulation_dtype == DType::F32 ? load_loose<float, Tile>(m, at) : load_loose<T, Tile>(m, at);
}

/// x̂ · w as the reference rounds it; w has its offset.
template <class T, Norm kNorm, class Tile>
__device__ Tile weighted(Tile xhat, Tile w, Casting casting) {
  if (!biased(kNorm) && casting != Casting::Gemma) xhat = round_to<T>(xhat);
  if (!biased(kNorm) && casting == Casting::None) w = round_to<T>(w);
  return xhat * w;
}

/// f.operator()<T, W, kNorm>().
template <class Args, class F>
void dispatch_args(const Args& a, F&& f) {
  dispatch_weighted(a.dtype, a.w_dtype, [&]<class T, class W>() {
    dispatch_norm(a.norm, [&]<Norm kNorm>() { f.template operator()<T, W, kNorm>(); });
  });
}

}  // namespace liger::cuda::norm
