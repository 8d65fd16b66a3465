#include "liger/core/cuda/staged_rows.cuh"
#include "liger/ops/norm/poly_norm.h"

namespace liger::cuda::poly_norm {
namespace {

using Powers = Sums<3>;  // of x³, x², x
using Totals = Sums<4>;  // S₃, S₂, S₁ and Σ dy

/// The sum of f(x, …) over the elements of some packs. What lies behind a row's end is 0, and adds nothing.
template <class S, class Vec, class F, class... Vecs>
__device__ void gather(typename S::Value& sums, F f, const Vec& x, const Vecs&... more) {
  unrolled<Vec::kWidth>([&](int i) { sums = S()(sums, f(x.v[i], more.v[i]...)); });
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

template <class Vec>
__device__ Vec output(const Vec& x, const Powers::Value& k, float b) {
  return Vec::map([=](float x) { return ((k.v[0] * x + k.v[1]) * x + k.v[2]) * x + b; }, x);
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

/// What is one for a row in its way back.
struct Slope {
  Powers::Value k;  // w_i · r_i
  float c3, c2, c1;

  __device__ Slope(const Powers::Value& w, const Powers::Value& rstd, const Totals::Value& sums, int64_t cols)
      : k(factors(w, rstd.v)) {
    const float *r = rstd.v, inv_cols = 1.f / cols;
    c3 = 3 * k.v[0] * r[0] * r[0] * sums.v[0] * inv_cols, c2 = 2 * k.v[1] * r[1] * r[1] * sums.v[1] * inv_cols,
    c1 = k.v[2] * r[2] * r[2] * sums.v[2] * inv_cols;
  }

  template <class Vec>
  __device__ Vec dx(const Vec& x, const Vec& dy) const {
    return Vec::map(
        [this](float x, float dy) {
          const float x2 = x * x;
          return dy * (3 * k.v[0] * x2 + 2 * k.v[1] * x + k.v[2]) - ((c3 * x2 + c2) * x2 + c1) * x;
        },
        x, dy);
  }
};

/// Adds to dw and db what a row does.
__device__ inline void collect(Totals::Value& total, Totals::Value sums, const Powers::Value& rstd) {
  for (int p = 0; p < 3; ++p) sums.v[p] *= rstd.v[p];
  total = Totals()(total, sums);
}

__device__ inline void put(const PolyNormBackward& a, const Totals::Value& total, int64_t index) {
  for (int p = 0; p < 3; ++p) a.dw[index * 3 + p] = total.v[p];
  a.db[index] = total.v[3];
}

constexpr int kThreads = 512, kBackwardThreads = 1024;

/// y and each row's three roots.
/// A block has blockDim.y rows, or a cluster one; a thread has Layout's packs of a row, in registers. The limit is
/// memory: x is read once.
template <class T, class Layout>
__global__ void __launch_bounds__(kThreads, 2) forward_kernel(PolyNormForward a) {
  await_previous();
  constexpr int kPacks = Layout::kPacks;
  const int64_t row = Layout::row();
  using Row = typename Layout::template Row<T>;
  const int64_t cols = row < a.rows ? a.cols : 0;
  const Row in(a.x, row, a.cols, cols), out(a.y, row, a.cols, cols);
  typename Row::Pack x[kPacks];
  const auto each = [&](auto f) {
    unrolled<kPacks>([&](int p) {
      if (const int k = Layout::pack(p); k < in.packs()) f(p, k);
    });
  };
  each([&](int p, int k) { x[p] = in.load(k, T(0)); });
  Powers::Value sums{};
  each([&](int p, int) { gather<Powers>(sums, powers, to_vec(x[p])); });
  RowReduce<Powers, Layout::kSpread> reduce;
  const auto rstd = inverse_roots<T>(reduce(sums), a), factor = factors(weights(a.w), rstd.v);
  const float b = number(a.b);
  each([&](int p, int k) { out.store(k, packed<T>(output(to_vec(x[p]), factor, b)), in); });
  keep(a, rstd, row);
}

/// The same for longer rows, which are read again, from a cache.
template <class T>
__global__ void __launch_bounds__(kLongRowThreads) forward_long_kernel(PolyNormForward a) {
  await_previous();
  const Row<T> x(a.x, blockIdx.x, a.cols, a.cols), y(a.y, blockIdx.x, a.cols, a.cols);
  Powers::Value sums{};
  for_each_pack_of(x, [&](int k) { gather<Powers>(sums, powers, to_vec(x.load(k, T(0)))); });
  RowReduce<Powers> reduce;
  const auto rstd = inverse_roots<T>(reduce(sums), a), k = factors(weights(a.w), rstd.v);
  const float b = number(a.b);
  for_each_pack_of(x, [&](int i) { y.store(i, packed<T>(output(to_vec(x.load(i, T(0))), k, b)), x); });
  keep(a, rstd, blockIdx.x);
}

/// dx, and the sums over rows of dw and db.
/// A block, or a cluster, makes one partial sum and walks along its rows, which come through stages of shared memory
/// and are read there twice. The limit is memory.
template <class T, class Layout>
__global__ void __launch_bounds__(kBackwardThreads) backward_kernel(PolyNormBackward a) {
  await_previous();
  constexpr int kPacks = Layout::kPacks;
  RowReduce<Totals, Layout::kSpread> reduce;
  Totals::Value total{};
  StagedRows<T, Layout> rows(Layout::row(), Layout::row(), Layout::step(), a.rows, a.rows, a.cols, 2, a.x, a.dy);
  const auto w = weights(a.w);
  auto next = inverse_roots_of(a, Layout::row());
  for (int64_t row = Layout::row(); row - threadIdx.y < a.rows; row += Layout::step()) {
    const auto rstd = next;
    rows.advance();
    next = inverse_roots_of(a, row + Layout::step());
    Totals::Value sums{};
    unrolled<kPacks>([&](int p) {
      if (rows.has(p)) gather<Totals>(sums, products, rows.get(0, p), rows.get(1, p));
    });
    sums = reduce(sums);
    collect(total, sums, rstd);
    if (!a.dx) continue;
    const Slope slope(w, rstd, sums, a.cols);
    unrolled<kPacks>([&](int p) {
      if (rows.has(p))
        typename Layout::template Row<T>(a.dx, row, a.cols, a.cols)
            .store(Layout::pack(p), packed<T>(slope.dx(rows.get(0, p), rows.get(1, p))), rows.like);
    });
  }
  auto* of_rows = shared_memory<Totals::Value>();
  copies_done();
  __syncthreads();
  if (threadIdx.x == 0) of_rows[threadIdx.y] = total;
  __syncthreads();
  if (threadIdx.x == 0 && threadIdx.y == 0 && (!Layout::kSpread || cluster_rank() == 0)) {
    for (int y = 1; y < int(blockDim.y); ++y) total = Totals()(total, of_rows[y]);
    put(a, total, Layout::group());
  }
}

/// The same for longer rows, which are read again, from a cache.
template <class T>
__global__ void __launch_bounds__(kLongRowThreads) backward_long_kernel(PolyNormBackward a) {
  await_previous();
  RowReduce<Totals> reduce;
  Totals::Value total{};
  const auto w = weights(a.w);
  for (int64_t row = blockIdx.x; row < a.rows; row += a.partials) {
    const Row<T> x(a.x, row, a.cols, a.cols), dy(a.dy, row, a.cols, a.cols), dx(a.dx, row, a.cols, a.cols);
    const auto x_of = [&](int k) { return to_vec(x.load(k, T(0))); };
    const auto dy_of = [&](int k) { return to_vec(dy.load(k, T(0), x)); };
    const auto rstd = inverse_roots_of(a, row);
    Totals::Value sums{};
    for_each_pack_of(x, [&](int k) { gather<Totals>(sums, products, x_of(k), dy_of(k)); });
    sums = reduce(sums);
    collect(total, sums, rstd);
    const Slope slope(w, rstd, sums, a.cols);
    if (a.dx) for_each_pack_of(x, [&](int k) { dx.store(k, packed<T>(slope.dx(x_of(k), dy_of(k))), x); });
  }
  if (threadIdx.x == 0) put(a, total, blockIdx.x);
}

}  // namespace

LIGER_REGISTER(poly_norm_forward, [](const PolyNormForward& a, Stream s) {
  dispatch(a.dtype, [&]<class T>() {
    const auto in_registers = [&]<class Layout>(const RowThreads& t) {
      launch(forward_kernel<T, Layout>, t.of_rows(a.rows), s, a);
    };
    const Threads block{.few = 128, .most = kThreads, .spread = 256};
    if (whole_packs<T>(a.cols, {a.x, a.y}) && dispatch_layout<T, 4, true, true>(a.cols, block, in_registers)) return;
    launch(forward_long_kernel<T>, {.blocks = a.rows, .threads = kLongRowThreads}, s, a);
  });
});
LIGER_REGISTER(poly_norm_backward, [](const PolyNormBackward& a, Stream s) {
  if (a.rows == 0) return;
  dispatch(a.dtype, [&]<class T>() {
    constexpr int kPacks = 2, kBytes = 2 * 2 * kPacks * 16;  // of shared memory a thread
    const auto in_registers = [&]<class Layout>(const RowThreads& t) {
      launch(backward_kernel<T, Layout>, t.grid(a.partials, StagedRows<T, Layout>::bytes(t.threads, 2, 2)), s, a);
    };
    const int most = std::min(kBackwardThreads, shared_bytes_of_block() / kBytes / 32 * 32);
    const Threads block{.few = 512, .most = most, .spread = most};
    if (whole_packs<T>(a.cols, {a.dy, a.x, a.dx}) &&
        dispatch_layout<T, kPacks, true, true>(a.cols, block, in_registers))
      return;
    launch(backward_long_kernel<T>, {.blocks = a.partials, .threads = kLongRowThreads}, s, a);
  });
});

}  // namespace liger::cuda::poly_norm
