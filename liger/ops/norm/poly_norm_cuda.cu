#include "liger/core/cuda/pipeline.cuh"
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
__device__ inline Powers::Value factors(const Powers::Value& w, const float* rstd) {
  return {w.v[0] * rstd[0], w.v[1] * rstd[1], w.v[2] * rstd[2]};
}
__device__ inline Powers::Value weights(const Numbers& w) { return {number(w, 0), number(w, 1), number(w, 2)}; }

template <class T, class Tile, class At>
__device__ void output(const PolyNormForward& a, const Tile& x, const Powers::Value& k, float b, const At& at) {
  store<T>(Tile::map([=](float x) { return ((k.v[0] * x + k.v[1]) * x + k.v[2]) * x + b; }, x), a.y, at);
}

/// 1 / sqrt(mean + eps); exact to a float's last place where that shows.
template <class T>
__device__ Powers::Value inverse_roots(Powers::Value sums, const PolyNormForward& a) {
  for (float& s : sums.v) s = sizeof(T) == 2 ? rsqrtf(s * (1.f / a.cols) + a.eps) : 1 / sqrtf(s / a.cols + a.eps);
  return sums;
}

__device__ inline void keep(const PolyNormForward& a, const Powers::Value& rstd, int64_t row) {
  if (threadIdx.x == 0 && row < a.rows)
    for (int p = 0; p < 3; ++p) a.rstd[row * 3 + p] = rstd.v[p];
}

__device__ inline Powers::Value inverse_roots_of(const PolyNormBackward& a, int64_t row) {
  Powers::Value r{};
  if (row < a.rows)
    for (int p = 0; p < 3; ++p) r.v[p] = a.rstd[row * 3 + p];
  return r;
}

template <class Tile>
__device__ Tile slope(const PolyNormBackward& a, const Tile& x, const Tile& dy, const Powers::Value& w,
                      const Powers::Value& rstd, const Totals::Value& sums) {
  const float* r = rstd.v;
  const auto k = factors(w, r);
  const float inv_cols = 1.f / a.cols;
  const float c3 = 3 * k.v[0] * r[0] * r[0] * sums.v[0] * inv_cols,
              c2 = 2 * k.v[1] * r[1] * r[1] * sums.v[1] * inv_cols, c1 = k.v[2] * r[2] * r[2] * sums.v[2] * inv_cols;
  return Tile::map(
      [=](float x, float dy) {
        const float x2 = x * x;
        return dy * (3 * k.v[0] * x2 + 2 * k.v[1] * x + k.v[2]) - ((c3 * x2 + c2) * x2 + c1) * x;
      },
      x, dy);
}

/// Adds to dw and db what a row does.
__device__ inline void collect(Totals::Value& total, Totals::Value sums, const Powers::Value& rstd) {
  for (int p = 0; p < 3; ++p) sums.v[p] *= rstd.v[p];
  total = Totals()(total, sums);
}

__device__ inline void put(const PolyNormBackward& a, const Totals::Value& total, int64_t index) {
  for (int p = 0; p < 3; ++p) a.dw[index * 3 + p] = total.v[p];
  a.db[index] = total.v[3];
}

constexpr int forward_registers(Fit fit) { return fit == Fit::Whole ? 64 : 56; }

/// kPieces packs of a row a thread.
template <class T, class Tile, int kPieces>
__global__ void __maxnreg__(forward_registers(Tile::kFit)) forward_kernel(PolyNormForward a) {
  await_previous();
  using Rows = RowsOf<T, Tile, 1, kPieces>;
  Rows rows(Tile::row(), Tile::step(), a.rows, a.cols, a.x);
  RowReduce<Powers, Tile::kSpread> reduce;
  const auto w = weights(a.w);
  const float b = number(a.b);
  for (int64_t row = Tile::row(); row - threadIdx.y < a.rows; row += Tile::step()) {
    rows.advance();
    Powers::Value sums{};
    each_piece<1>(rows, [&](const auto& x, const auto&) { sums = Powers()(sums, gather<Powers>(powers, x)); });
    const auto rstd = inverse_roots<T>(reduce(sums), a);
    const auto k = factors(w, rstd.v);
    rows.again();
    each_piece<1>(rows, [&](const auto& x, const auto& at) { output<T>(a, x, k, b, at); });
    keep(a, rstd, row);
    if constexpr (!Rows::kWalks) break;
  }
}

/// Longer rows are read again, from a cache.
template <class T, class Tile>
__global__ void __launch_bounds__(kTileThreads) forward_long_kernel(PolyNormForward a) {
  await_previous();
  const Place row = Tile::template place<T>(a.x, blockIdx.x, a.rows, a.cols);
  RowReduce<Powers> reduce;
  Powers::Value sums{};
  for_each_place<Tile>(row,
                       [&](const Place& at) { sums = Powers()(sums, gather<Powers>(powers, load<T, Tile>(a.x, at))); });
  const auto rstd = inverse_roots<T>(reduce(sums), a);
  const auto k = factors(weights(a.w), rstd.v);
  const float b = number(a.b);
  for_each_place<Tile>(row, [&](const Place& at) { output<T>(a, load<T, Tile>(a.x, at), k, b, at); });
  keep(a, rstd, row.row);
}

/// As forward_kernel; a partial sum takes every partials-th group of rows.
template <class T, class Tile, int kPieces>
__global__ void __maxnreg__(64) backward_kernel(PolyNormBackward a) {
  await_previous();
  RowReduce<Totals, Tile::kSpread> reduce;
  Totals::Value total{};
  Pipeline<T, Tile, 2, kPieces> pipeline(Tile::row(), Tile::step(), a.rows, a.cols, a.x, a.dy);
  const auto w = weights(a.w);
  auto next = inverse_roots_of(a, Tile::row());
  for (int64_t row = Tile::row(); row - threadIdx.y < a.rows; row += Tile::step()) {
    const auto rstd = next;
    pipeline.advance();
    next = inverse_roots_of(a, row + Tile::step());
    Totals::Value sums{};
    each_piece<2>(pipeline, [&](const auto& x, const auto& dy, const auto&) {
      sums = Totals()(sums, gather<Totals>(products, x, dy));
    });
    sums = reduce(sums);
    collect(total, sums, rstd);
    if (a.dx)
      each_piece<2>(pipeline, [&](const auto& x, const auto& dy, const auto& at) {
        store<T>(slope(a, x, dy, w, rstd, sums), a.dx, at);
      });
  }
  auto* of_rows = shared_memory<Totals::Value>();
  copies_done();  // the last one's zeros too
  __syncthreads();
  if (threadIdx.x == 0) of_rows[threadIdx.y] = total;
  __syncthreads();
  if (threadIdx.x == 0 && threadIdx.y == 0 && (!Tile::kSpread || cluster_rank() == 0)) {
    for (int y = 1; y < int(blockDim.y); ++y) total = Totals()(total, of_rows[y]);
    put(a, total, Tile::group());
  }
}

template <class T, class Tile>
__global__ void __launch_bounds__(kTileThreads) backward_long_kernel(PolyNormBackward a) {
  await_previous();
  RowReduce<Totals> reduce;
  Totals::Value total{};
  const auto w = weights(a.w);
  for (int64_t row = blockIdx.x; row < a.rows; row += a.partials) {
    const Place whole = Tile::template place<T>(a.x, row, a.rows, a.cols);
    const auto rstd = inverse_roots_of(a, row);
    Totals::Value sums{};
    for_each_place<Tile>(whole, [&](const Place& at) {
      sums = Totals()(sums, gather<Totals>(products, load<T, Tile>(a.x, at), load<T, Tile>(a.dy, at)));
    });
    sums = reduce(sums);
    collect(total, sums, rstd);
    if (a.dx)
      for_each_place<Tile>(whole, [&](const Place& at) {
        store<T>(slope(a, load<T, Tile>(a.x, at), load<T, Tile>(a.dy, at), w, rstd, sums), a.dx, at);
      });
  }
  if (threadIdx.x == 0) put(a, total, blockIdx.x);
}

}  // namespace

LIGER_REGISTER(poly_norm_forward, [](const PolyNormForward& a, Stream s) {
  dispatch(a.dtype, [&]<class T>() {
    const Memory memory{{a.x, (const void*)a.y}, {}};
    constexpr int kPieces = 4, kWidth = 16 / sizeof(T) * kPieces;
    const Threads block = Threads{.few = 128, .most = 512}.with(Pipeline<T, Piece<T, Fit::Whole>, 1, kPieces>::kBytes);
    if (dispatch_tile<T, kWidth, kWidth, true>(a.cols, block, memory, [&]<class Tile>(Tiling t) {
          using In = Piece<T, Tile::kFit>;
          launch(forward_kernel<T, In, kPieces>,
                 grid_of<RowsOf<T, In, 1, kPieces>>(t, a.rows, forward_registers(In::kFit)), s, a);
        }))
      return;
    dispatch_walk<T, 16>(a.cols, memory,
                         [&]<class Tile>(Tiling t) { launch(forward_long_kernel<T, Tile>, t.grid(a.rows), s, a); });
  });
});
LIGER_REGISTER(poly_norm_backward, [](const PolyNormBackward& a, Stream s) {
  if (a.rows == 0) return;
  dispatch(a.dtype, [&]<class T>() {
    const Memory memory{{a.dy, a.x, (const void*)a.dx}, {}};
    constexpr int kPieces = 2, kWidth = 16 / sizeof(T) * kPieces;
    const Threads block =
        Threads{.few = 512, .most = kTileThreads}.with(Pipeline<T, Piece<T, Fit::Whole>, 2, kPieces>::kBytes);
    if (dispatch_tile<T, kWidth, kWidth, true>(a.cols, block, memory, [&]<class Tile>(Tiling t) {
          using In = Piece<T, Tile::kFit>;
          launch(backward_kernel<T, In, kPieces>, t.grid(a.partials, Pipeline<T, In, 2, kPieces>::bytes(t.threads)), s,
                 a);
        }))
      return;
    dispatch_walk<T, 8>(a.cols, memory,
                        [&]<class Tile>(Tiling t) { launch(backward_long_kernel<T, Tile>, t.grid(a.partials), s, a); });
  });
});

}  // namespace liger::cuda::poly_norm
