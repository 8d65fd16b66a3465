#include "liger/ops/norm/norm.cuh"

namespace liger::cuda::norm {
namespace {

/// A piece of the row that is normalised, for Added written as the second result: on its way first, then there.
template <class T, class Tile, Norm kNorm>
struct Input {
  Raw<T, Tile> x, residual;

  __device__ Input(const NormForward& a, const Place& at) : x(fetch<T, Tile>(a.x, at)) {
    if constexpr (kNorm == Norm::Added) residual = fetch<T, Tile>(a.residual, at);
  }

  __device__ Tile get(const NormForward& a, const Place& at) const {
    if constexpr (kNorm != Norm::Added) return unpack(x, at);
    const Tile s = round_to<T>(unpack(x, at) + unpack(residual, at));
    store<T>(s, a.s, at);
    return s;
  }
};

template <class T, class W, Norm kNorm, class Tile>
__device__ void output(const NormForward& a, const Tile& x, const Tile& w, Stats stats, const Place& at) {
  const float alpha = tanh_of(kNorm) ? *a.alpha : 0;
  Tile y = weighted<T, kNorm>(normalised<T, Tile, kNorm>(x, stats, alpha), w, a.casting);
  if constexpr (biased(kNorm)) y = y + load<W, Tile>(a.b, at.vector(a.b));
  if constexpr (kNorm == Norm::Modulated) {
    y = round_to<T>(y) * (modulation<T, Tile>(a, a.scale, at) + 1);
    if (a.shift) y = y + modulation<T, Tile>(a, a.shift, at);
  }
  store<T>(y, a.y, at);
}

template <class T>
__device__ float inverse_root(float squares, const NormForward& a) {
  const float rstd = rsqrtf(squares / a.cols + a.eps);
  return a.casting == Casting::None ? round_to<T>(rstd) : rstd;
}

template <Norm kNorm>
__device__ void keep(const NormForward& a, Stats stats, int64_t row) {
  if (threadIdx.x > 0 || row >= a.rows || tanh_of(kNorm)) return;
  a.rstd[row] = stats.rstd;
  if (centred(kNorm)) a.mean[row] = stats.mean;
}

/// Few registers, so that enough blocks share an SM: one loads while another reduces and a third stores.
constexpr int forward_registers(Norm n, Fit fit, int bytes) { return n != Norm::Rms ? 64 : fit == Fit::Peeled || bytes > 2 ? 48 : 40; }

template <class T, class W, class Tile, Norm kNorm>
__global__ void __maxnreg__(forward_registers(kNorm, Tile::kFit, sizeof(T))) forward_kernel(NormForward a) {
  const int64_t row = int64_t(blockIdx.x) * blockDim.y + threadIdx.y;
  const Place at = Tile::template place<T>(a.x, row, a.rows, a.cols);
  RowReduce<Sum> reduce;
  const Input<T, Tile, kNorm> input(a, at);
  const auto w = fetch<W, Tile>(a.w, at.vector(a.w));
  const Tile x = input.get(a, at);
  Stats stats{};
  if constexpr (centred(kNorm)) stats.mean = reduce(sum(x)) / a.cols;
  if constexpr (!tanh_of(kNorm)) stats.rstd = inverse_root<T>(reduce(centred(kNorm) ? squares(x, stats.mean, at) : sum(x * x)), a);
  output<T, W, kNorm>(a, x, unpack(w, at) + (a.w ? a.offset : 1), stats, at);
  keep<kNorm>(a, stats, row);
}

/// Longer rows are read again for each pass, from a cache.
template <class T, class W, class Tile, Norm kNorm>
__global__ void __launch_bounds__(kTileThreads) forward_long_kernel(NormForward a) {
  Place at = Tile::template place<T>(a.x, blockIdx.x, a.rows, a.cols);
  const int64_t end = a.cols + at.shift;
  RowReduce<Sum> reduce;
  Stats stats{};
  const auto total = [&](auto f) {
    float s = 0;
    for (at.from = 0; at.from < end; at.from += Tile::covered()) s += f(Input<T, Tile, kNorm>(a, at).get(a, at));
    return reduce(s);
  };
  if constexpr (centred(kNorm)) stats.mean = total([](const Tile& x) { return sum(x); }) / a.cols;
  if constexpr (!tanh_of(kNorm)) stats.rstd = inverse_root<T>(total([&](const Tile& x) { return squares(x, stats.mean, at); }), a);
  for (at.from = 0; at.from < end; at.from += Tile::covered()) {
    const Input<T, Tile, kNorm> input(a, at);
    const auto w = fetch<W, Tile>(a.w, at.vector(a.w));
    output<T, W, kNorm>(a, input.get(a, at), unpack(w, at) + (a.w ? a.offset : 1), stats, at);
  }
  keep<kNorm>(a, stats, at.row);
}

}  // namespace

LIGER_REGISTER(norm_forward, [](const NormForward& a, Stream s) {
  dispatch_args(a, [&]<class T, class W, Norm kNorm>() {
    const auto pointers = {a.x, a.residual, a.w, a.b, a.scale, a.shift, (const void*)a.s, (const void*)a.y};
    if (!dispatch_tile<T, 16, false>(a.cols, {.few = 128, .most = 512}, pointers, [&]<class Tile>(Tiling t) {
          launch(forward_kernel<T, W, Tile, kNorm>, t.grid(t.groups(a.rows)), s, a);
        }))
      dispatch_walk<T, 16>(a.cols, pointers, [&]<class Tile>(Tiling t) { launch(forward_long_kernel<T, W, Tile, kNorm>, t.grid(a.rows), s, a); });
  });
});

}  // namespace liger::cuda::norm
