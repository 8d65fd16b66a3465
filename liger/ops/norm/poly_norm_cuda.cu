#include "liger/core/cuda/tile.cuh"
#include "liger/ops/norm/poly_norm.h"

namespace liger::cuda::poly_norm {
namespace {

using Powers = Sums<3>;  // of x³, x², x
using Totals = Sums<4>;  // S₃, S₂, S₁ and Σ dy

/// f(x, …)'s values summed over a thread's columns.
template <class S, class Tile, class F, class... Tiles>
__device__ typename S::Value gather(F f, const Tile& x, const Tiles&... more) {
  typename S::Value sums = S::identity();
#pragma unroll
  for (int i = 0; i < Tile::kItems; ++i) sums = S()(sums, f(x.v[i], more.v[i]...));
  return sums;
}

__device__ inline Powers::Value powers(float x) {
  const float x2 = x * x;
  return {x2 * x2 * x2, x2 * x2, x2};
}

__device__ inline Totals::Value products(float x, float dy) { return {dy * x * x * x, dy * x * x, dy * x, dy}; }

/// w_i · r_i, the factor of each power.
__device__ inline Powers::Value factors(const float* w, const float* rstd) { return {w[0] * rstd[0], w[1] * rstd[1], w[2] * rstd[2]}; }

template <class T, class Tile>
__device__ void output(const PolyNormForward& a, const Tile& x, const float* rstd, const Place& at) {
  const auto k = factors(a.w, rstd);
  const float b = *a.b;
  store<T>(Tile::map([=](float x) { return ((k.v[0] * x + k.v[1]) * x + k.v[2]) * x + b; }, x), a.y, at);
}

__device__ inline Powers::Value inverse_roots(Powers::Value sums, const PolyNormForward& a) {
  for (float& s : sums.v) s = 1 / sqrtf(s / a.cols + a.eps);  // rsqrtf would be off by up to two units
  return sums;
}

__device__ inline void keep(const PolyNormForward& a, const Powers::Value& rstd, int64_t row) {
  if (threadIdx.x == 0 && row < a.rows)
    for (int p = 0; p < 3; ++p) a.rstd[row * 3 + p] = rstd.v[p];
}

template <class T, class Tile>
__device__ Tile slope(const PolyNormBackward& a, const Tile& x, const Tile& dy, const Totals::Value& sums, int64_t row) {
  const float* r = a.rstd + row * 3;
  const auto k = factors(a.w, r);
  const float c3 = 3 * k.v[0] * r[0] * r[0] * sums.v[0] / a.cols, c2 = 2 * k.v[1] * r[1] * r[1] * sums.v[1] / a.cols, c1 = k.v[2] * r[2] * r[2] * sums.v[2] / a.cols;
  return Tile::map([=](float x, float dy) {
    const float x2 = x * x;
    return dy * (3 * k.v[0] * x2 + 2 * k.v[1] * x + k.v[2]) - ((c3 * x2 + c2) * x2 + c1) * x;
  }, x, dy);
}

/// What a row adds to dw and db.
__device__ inline Totals::Value contribution(const PolyNormBackward& a, Totals::Value sums, int64_t row) {
  for (int p = 0; p < 3; ++p) sums.v[p] *= a.rstd[row * 3 + p];
  return sums;
}

template <class T, class Tile>
__global__ void __maxnreg__(64) forward_kernel(PolyNormForward a) {
  const Rows<Tile> rows;
  Place at = Tile::template place<T>(a.x, rows.first, a.rows, a.cols);
  RowReduce<Powers> reduce;
  for (int i = 0; i < rows.kCount; ++i, at.row += rows.step) {
    const Tile x = load<T, Tile>(a.x, at);
    const auto rstd = inverse_roots(reduce(gather<Powers>(powers, x)), a);
    output<T>(a, x, rstd.v, at);
    keep(a, rstd, at.row);
  }
}

/// Longer rows are read again, from a cache.
template <class T, class Tile>
__global__ void __launch_bounds__(kTileThreads) forward_long_kernel(PolyNormForward a) {
  Place at = Tile::template place<T>(a.x, blockIdx.x, a.rows, a.cols);
  const int64_t end = a.cols + at.shift;
  RowReduce<Powers> reduce;
  Powers::Value sums{};
  for (at.from = 0; at.from < end; at.from += Tile::covered()) sums = Powers()(sums, gather<Powers>(powers, load<T, Tile>(a.x, at)));
  const auto rstd = inverse_roots(reduce(sums), a);
  for (at.from = 0; at.from < end; at.from += Tile::covered()) output<T>(a, load<T, Tile>(a.x, at), rstd.v, at);
  keep(a, rstd, at.row);
}

/// A share walks every shares-th group of rows and fetches the next one while it works.
template <class T, class Tile>
__global__ void __launch_bounds__(kTileThreads) backward_kernel(PolyNormBackward a) {
  __shared__ Totals::Value of_rows[kTileThreads];
  const int64_t share = Tile::group(), step = a.shares * blockDim.y;
  RowReduce<Totals, Tile::kSpread> reduce;
  Totals::Value total{};
  Place at = Tile::template place<T>(a.x, share * blockDim.y + threadIdx.y, a.rows, a.cols);
  auto next_x = fetch<T, Tile, true>(a.x, at), next_dy = fetch<T, Tile, true>(a.dy, at);
  for (int64_t first = share * blockDim.y; first < a.rows; first += step) {
    complete<T>(next_x, a.x, at), complete<T>(next_dy, a.dy, at);
    const Tile x = unpack(next_x, at), dy = unpack(next_dy, at);
    const Place here = at;
    at.row += step;
    next_x = fetch<T, Tile, true>(a.x, at), next_dy = fetch<T, Tile, true>(a.dy, at);
    const auto sums = reduce(gather<Totals>(products, x, dy));
    if (here.row >= a.rows) continue;
    total = Totals()(total, contribution(a, sums, here.row));
    if (a.dx) store<T>(slope<T>(a, x, dy, sums, here.row), a.dx, here);
  }
  if (threadIdx.x == 0) of_rows[threadIdx.y] = total;
  __syncthreads();
  if (threadIdx.x == 0 && threadIdx.y == 0 && (!Tile::kSpread || cluster_rank() == 0)) {
    for (int y = 1; y < int(blockDim.y); ++y) total = Totals()(total, of_rows[y]);
    for (int p = 0; p < 4; ++p) a.sums[share * 4 + p] = total.v[p];
  }
  reduce.finish();
}

template <class T, class Tile>
__global__ void __launch_bounds__(kTileThreads) backward_long_kernel(PolyNormBackward a) {
  RowReduce<Totals> reduce;
  Totals::Value total{};
  for (int64_t row = blockIdx.x; row < a.rows; row += a.shares) {
    Place at = Tile::template place<T>(a.x, row, a.rows, a.cols);
    const int64_t end = a.cols + at.shift;
    Totals::Value sums{};
    for (at.from = 0; at.from < end; at.from += Tile::covered())
      sums = Totals()(sums, gather<Totals>(products, load<T, Tile>(a.x, at), load<T, Tile>(a.dy, at)));
    sums = reduce(sums);
    total = Totals()(total, contribution(a, sums, row));
    for (at.from = 0; a.dx && at.from < end; at.from += Tile::covered())
      store<T>(slope<T>(a, load<T, Tile>(a.x, at), load<T, Tile>(a.dy, at), sums, row), a.dx, at);
  }
  if (threadIdx.x == 0)
    for (int p = 0; p < 4; ++p) a.sums[blockIdx.x * 4 + p] = total.v[p];
}

}  // namespace

LIGER_REGISTER(poly_norm_forward, [](const PolyNormForward& a, Stream s) {
  dispatch(a.dtype, [&]<class T>() {
    const Memory memory{{a.x, (const void*)a.y}, {}};
    if (!dispatch_tile<T, 16, 16, false>(a.cols, {.few = 128, .most = 512}, memory, [&]<class Tile>(Tiling t) { launch(forward_kernel<T, Tile>, Rows<Tile>::grid(t, a.rows), s, a); }))
      dispatch_walk<T, 16>(a.cols, memory, [&]<class Tile>(Tiling t) { launch(forward_long_kernel<T, Tile>, t.grid(a.rows), s, a); });
  });
});
LIGER_REGISTER(poly_norm_backward, [](const PolyNormBackward& a, Stream s) {
  if (a.rows == 0) return;
  dispatch(a.dtype, [&]<class T>() {
    const Memory memory{{a.dy, a.x, (const void*)a.dx}, {}};
    constexpr Threads block{.few = 512, .most = kTileThreads};
    if (!dispatch_tile<T, 8, 8, true>(a.cols, block, memory, [&]<class Tile>(Tiling t) { launch(backward_kernel<T, Tile>, t.grid(a.shares), s, a); }))
      dispatch_walk<T, 8>(a.cols, memory, [&]<class Tile>(Tiling t) { launch(backward_long_kernel<T, Tile>, t.grid(a.shares), s, a); });
  });
});

}  // namespace liger::cuda::poly_norm
