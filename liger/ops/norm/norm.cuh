#pragma once
#include "liger/core/cuda/math.cuh"
#include "liger/core/cuda/ring.cuh"
#include "liger/ops/norm/norm.h"

namespace liger::cuda::norm {

/// What a row is made of.
struct Stats { float mean, rstd; };

template <class T, class Tile, Norm kNorm>
__device__ Tile normalised(const Tile& x, Stats stats, float alpha) {
  if constexpr (tanh_of(kNorm)) return Tile::map([=](float v) { return Math<T>::tanh(alpha * v); }, x);
  if constexpr (centred(kNorm)) {
    // One step where its error, of mean · rstd, is far below what bf16 shows.
    if constexpr (std::is_same_v<T, bfloat16>) return Tile::map([rstd = stats.rstd, onto = -stats.mean * stats.rstd](float v) { return fmaf(v, rstd, onto); }, x);
    return (x + -stats.mean) * stats.rstd;
  }
  return x * stats.rstd;
}

/// Where the columns at `at` of scale and shift lie, in the row that the one at `at` shares with others.
template <class Args>
__device__ Place of_modulation(const Args& a, const Place& at) {
  if (at.row >= at.rows) return Place(0, 0, at.cols, at.shift, at.from);
  const int64_t row = at.row >> 32 ? at.row / a.per_modulation : unsigned(at.row) / unsigned(a.per_modulation);  // the short one if it can be
  return Place(row, a.modulations, at.cols, at.shift, at.from);
}

template <class T, class Tile, class Args>
__device__ Tile modulation(const Args& a, const void* m, const Place& at) {
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
