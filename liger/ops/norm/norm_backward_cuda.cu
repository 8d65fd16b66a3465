#include "liger/ops/norm/norm.cuh"

namespace liger::cuda::norm {
namespace {

/// Backward of Modulated keeps three column sums: fewer threads, that they stay in registers.
constexpr int most_threads(Norm n) { return n == Norm::Modulated ? 512 : kTileThreads; }

/// A share's rows: every step-th from first on, within its modulation or group; the block's next row lies `next` further.
struct Walk {
  int64_t first, end, step, next;
  bool own;                // every row has a modulation of its own

  template <Norm kNorm>
  static __device__ Walk of(const NormBackward& a, int64_t share) {
    const bool own = kNorm == Norm::Modulated && a.modulations == a.rows;
    const int64_t sets = kNorm == Norm::Modulated && !own ? a.modulations : 1, shares = a.shares / sets;
    const int64_t set = share / shares, first = share % shares * blockDim.y, step = shares * blockDim.y;
    const int64_t rows = a.rows / sets;
    return {set * rows + first, (set + 1) * rows, step, 1, own};
  }
};

/// The sums over a share's rows, column by column.
template <class Tile>
struct Columns { Tile dw, db, dalpha, dscale, dshift; };

/// One row's way back, or a piece of it: first `project`, whose sums over the row `finish` needs.
template <class T, class Tile, Norm kNorm>
struct Backward {
  using Projections = Sums<centred(kNorm) ? 2 : 1>;
  const NormBackward& a;
  Tile x, dy, w, xhat, g;
  Stats stats;
  float alpha;

  __device__ typename Projections::Value project(bool own, const Place& at, Columns<Tile>& columns) {
    xhat = normalised<T, Tile, kNorm>(x, stats, alpha);
    Tile dn = dy;
    if constexpr (kNorm == Norm::Modulated) {
      dn = dy * (modulation<T, Tile>(a, a.scale, at) + 1);
      const Tile n = round_to<T>(weighted<T, kNorm>(xhat, w, a.casting));
      if (own) {
        const auto put = [&](const Tile& t, void* to) {
          if (!to) return;
          a.modulation_dtype == DType::F32 ? store<float>(t, to, at) : store<T>(t, to, at);
        };
        put(dy * n, a.dscale), put(dy, a.dshift);
      } else {
        columns.dscale = columns.dscale + dy * n, columns.dshift = columns.dshift + dy;
      }
    }
    g = dn * w;
    columns.dw = columns.dw + dn * (!biased(kNorm) && a.casting != Casting::Gemma ? round_to<T>(xhat) : xhat);
    if constexpr (biased(kNorm)) columns.db = columns.db + dy;
    typename Projections::Value sums{};
    if constexpr (!tanh_of(kNorm)) sums.v[0] = sum(g * xhat);
    if constexpr (centred(kNorm)) sums.v[1] = sum(g);
    return sums;
  }

  __device__ void finish(const typename Projections::Value& sums, const Place& at, Columns<Tile>& columns) {
    Tile dx;
    if constexpr (tanh_of(kNorm)) {
      const Tile slope = Tile::map([](float t, float g) { return (1 - t * t) * g; }, xhat, g);
      columns.dalpha = columns.dalpha + x * slope;
      dx = slope * alpha;
    } else {
      const float onto = sums.v[0] / a.cols, mean = centred(kNorm) ? sums.v[centred(kNorm)] / a.cols : 0, rstd = stats.rstd;
      dx = Tile::map([=](float g, float xhat) { return rstd * (g - mean - xhat * onto); }, g, xhat);
    }
    if (kNorm == Norm::Added && a.ds) dx = dx + load<T, Tile>(a.ds, at);
    if (a.dx) store<T>(dx, a.dx, at);
  }
};

template <Norm kNorm>
__device__ Stats stats_of(const NormBackward& a, const Place& at) {
  if (tanh_of(kNorm) || at.row >= at.rows) return {};
  return {centred(kNorm) ? a.mean[at.row] : 0, a.rstd[at.row]};
}

/// f(column sum, where its shares go) for those that are wanted.
template <Norm kNorm, class Tile, class F>
__device__ void each_column_sum(const NormBackward& a, bool own, Columns<Tile>& c, F f) {
  f(c.dw, a.dw);
  if constexpr (biased(kNorm)) f(c.db, a.db);
  if constexpr (tanh_of(kNorm)) f(c.dalpha, a.dalpha);
  if constexpr (kNorm == Norm::Modulated) {
    if (!own) f(c.dscale, static_cast<float*>(a.dscale)), f(c.dshift, static_cast<float*>(a.dshift));
  }
}

constexpr int backward_registers(Norm n, Fit fit) { return n == Norm::Modulated ? 128 : fit == Fit::Peeled ? 56 : 64; }

/// A share keeps its column sums in registers and fetches its next row while it works on one.
template <class T, class W, class Tile, Norm kNorm>
__global__ void __maxnreg__(backward_registers(kNorm, Tile::kFit)) backward_kernel(NormBackward a) {
  const float plus = a.w ? a.offset : 1, alpha = tanh_of(kNorm) ? *a.alpha : 0;
  const int64_t share = Tile::group();
  const Walk walk = Walk::of<kNorm>(a, share);
  RowReduce<typename Backward<T, Tile, kNorm>::Projections, Tile::kSpread> reduce;
  Columns<Tile> columns;
  Place at = Tile::template place<T>(a.x, walk.first + threadIdx.y * walk.next, walk.end, a.cols);
  const auto w = fetch<W, Tile>(a.w, at.vector(a.w));
  auto next_x = fetch<T, Tile, true>(a.x, at), next_dy = fetch<T, Tile, true>(a.dy, at);
  for (int64_t first = walk.first; first < walk.end; first += walk.step) {
    Backward<T, Tile, kNorm> b{.a = a, .x = unpack(next_x, at), .dy = unpack(next_dy, at), .w = unpack(w, at) + plus, .stats = stats_of<kNorm>(a, at), .alpha = alpha};
    const Place here = at;
    at.row += walk.step;
    next_x = fetch<T, Tile, true>(a.x, at), next_dy = fetch<T, Tile, true>(a.dy, at);
    auto sums = b.project(walk.own, here, columns);
    if constexpr (!tanh_of(kNorm)) sums = reduce(sums);
    b.finish(sums, here, columns);
  }
  each_column_sum<kNorm>(a, walk.own, columns, [&](Tile& part, float* shares) {
    if (!shares) return;
    // The rows of a block are added in turn, so that a block is one share.
    float* sum = shared_memory<float>();
    for (int y = 1; y < int(blockDim.y); ++y) {
      if (int(threadIdx.y) == y) store<float>(part, sum, at.vector(true));
      __syncthreads();
      if (threadIdx.y == 0) part = part + load<float, Tile>(sum, at.vector(true));
      __syncthreads();
    }
    if (threadIdx.y == 0) store<float>(part, shares, {share, a.shares, a.cols, at.shift});
  });
  reduce.finish();
}

/// As forward_long_kernel; the column sums grow in memory.
template <class T, class W, class Tile, Norm kNorm>
__global__ void __launch_bounds__(kTileThreads) backward_long_kernel(NormBackward a) {
  const float plus = a.w ? a.offset : 1, alpha = tanh_of(kNorm) ? *a.alpha : 0;
  const Walk walk = Walk::of<kNorm>(a, blockIdx.x);
  RowReduce<typename Backward<T, Tile, kNorm>::Projections> reduce;
  for (int64_t row = walk.first; row < walk.end; row += walk.step) {
    Place at = Tile::template place<T>(a.x, row, walk.end, a.cols);
    const int64_t end = a.cols + at.shift;
    const auto piece = [&] {
      return Backward<T, Tile, kNorm>{.a = a, .x = load<T, Tile>(a.x, at), .dy = load<T, Tile>(a.dy, at), .w = load<W, Tile>(a.w, at.vector(a.w)) + plus,
                                      .stats = stats_of<kNorm>(a, at), .alpha = alpha};
    };
    using Projections = typename Backward<T, Tile, kNorm>::Projections;
    typename Projections::Value sums{};
    for (at.from = 0; at.from < end && !tanh_of(kNorm); at.from += Tile::covered()) {
      Columns<Tile> unused;
      sums = Projections()(sums, piece().project(walk.own, at, unused));
    }
    sums = reduce(sums);
    for (at.from = 0; at.from < end; at.from += Tile::covered()) {
      Columns<Tile> columns;
      auto b = piece();
      b.project(walk.own, at, columns);
      b.finish(sums, at, columns);
      each_column_sum<kNorm>(a, walk.own, columns, [&](Tile& part, float* shares) {
        if (!shares) return;
        const Place share{blockIdx.x, a.shares, a.cols, at.shift, at.from};
        if (row != walk.first) part = part + load<float, Tile>(shares, share);
        store<float>(part, shares, share);
      });
    }
  }
}

}  // namespace

LIGER_REGISTER(norm_backward, [](const NormBackward& a, Stream s) {
  if (a.rows == 0) return;
  dispatch_args(a, [&]<class T, class W, Norm kNorm>() {
    const auto in_registers = [&]<class Tile>(Tiling t) {
      launch(backward_kernel<T, W, Tile, kNorm>, t.grid(a.shares, t.threads.y > 1 ? int(a.cols * sizeof(float)) : 0), s, a);
    };
    const auto pointers = {a.dy, a.ds, a.x, a.w, a.scale, (const void*)a.dx, (const void*)a.dw, (const void*)a.db, (const void*)a.dalpha, (const void*)a.dscale, (const void*)a.dshift};
    // One pack a thread leaves room to fetch the next row ahead.
    constexpr Threads block{.few = 512, .most = most_threads(kNorm)};
    if (!dispatch_tile<T, 16 / sizeof(T), true>(a.cols, block, pointers, in_registers) && !dispatch_tile<T, 8, true>(a.cols, block, pointers, in_registers))
      dispatch_walk<T, 8>(a.cols, pointers, [&]<class Tile>(Tiling t) { launch(backward_long_kernel<T, W, Tile, kNorm>, t.grid(a.shares), s, a); });
  });
});

}  // namespace liger::cuda::norm
