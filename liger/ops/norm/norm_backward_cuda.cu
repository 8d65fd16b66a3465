#include "liger/ops/norm/norm.cuh"

namespace liger::cuda::norm {
namespace {

/// Modulated keeps three column sums: fewer threads, that they stay in registers.
constexpr int most_threads(Norm n) { return n == Norm::Modulated ? 512 : kTileThreads; }

/// A share's rows: every step-th from first on, within its modulation.
struct Walk {
  int64_t first, end, step;

  template <Norm kNorm>
  static __device__ Walk of(const NormBackward& a, int64_t share) {
    const int64_t sets = kNorm == Norm::Modulated ? a.modulations : 1, shares = a.shares / sets, rows = a.rows / sets;
    const int64_t set = share / shares;
    return {set * rows + share % shares * blockDim.y, (set + 1) * rows, shares * blockDim.y};
  }
};

/// The sums over a share's rows, column by column.
template <class Tile>
struct Columns { Tile dw, db, dalpha, dscale, dshift; };

/// One row's way back, or a piece of it: first `project`, whose sums over the row `finish` needs, and `collect`. kAhead: scale was fetched
/// ahead; it has x's dtype.
template <class T, class Tile, Norm kNorm, bool kAhead = false>
struct Backward {
  using Projections = Sums<centred(kNorm) ? 2 : 1>;
  const NormBackward& a;
  Tile x, dy, w;
  Stats stats;
  float alpha, a_col;      // 1 / cols
  std::conditional_t<kAhead, Raw<T, Tile>, int> scale{};
  Tile xhat, dn, g;

  __device__ typename Projections::Value project(const Place& at) {
    xhat = normalised<T, Tile, kNorm>(x, stats, alpha);
    dn = dy;
    if constexpr (modulated(kNorm)) {
      const Tile m = [&] {
        if constexpr (kAhead) return to_tile(scale);
        else return modulation<T, Tile>(a, a.scale, at);
      }();
      dn = dy * (m + 1);
    }
    g = dn * w;
    typename Projections::Value sums{};
    if constexpr (!tanh_of(kNorm)) sums.v[0] = sum(g * xhat);
    if constexpr (centred(kNorm)) sums.v[1] = sum(g);
    return sums;
  }

  /// Adds to the sums over rows.
  __device__ void collect(const Place& at, Columns<Tile>& columns) {
    if constexpr (modulated(kNorm)) {
      const Tile n = round_to<T>(weighted<T, kNorm>(xhat, w, a.casting));
      if constexpr (kNorm == Norm::Each) {
        const auto put = [&](const Tile& t, void* to) {
          if (to) !kAhead && a.modulation_dtype == DType::F32 ? store<float, true>(t, to, at) : store<T, true>(t, to, at);
        };
        put(dy, a.dshift), put(dy * n, a.dscale);
      } else {
        columns.dscale = columns.dscale + dy * n, columns.dshift = columns.dshift + dy;
      }
    }
    columns.dw = columns.dw + dn * (!biased(kNorm) && a.casting != Casting::Gemma ? round_to<T>(xhat) : xhat);
    if constexpr (biased(kNorm)) columns.db = columns.db + dy;
    if constexpr (tanh_of(kNorm)) columns.dalpha = columns.dalpha + x * slope();
  }

  __device__ void finish(const typename Projections::Value& sums, const Place& at) {
    Tile dx;
    if constexpr (tanh_of(kNorm)) {
      dx = slope() * alpha;
    } else {
      const float onto = sums.v[0] * a_col, mean = centred(kNorm) ? sums.v[centred(kNorm)] * a_col : 0, rstd = stats.rstd;
      dx = Tile::map([=](float g, float xhat) { return rstd * (g - mean - xhat * onto); }, g, xhat);
    }
    if (kNorm == Norm::Added && a.ds) dx = dx + load<T, Tile>(a.ds, at);
    if (a.dx) store<T>(dx, a.dx, at);
  }

  /// tanh' · g
  __device__ Tile slope() const { return Tile::map([](float t, float g) { return (1 - t * t) * g; }, xhat, g); }
};

template <Norm kNorm>
__device__ Stats stats_of(const NormBackward& a, const Place& at) {
  const bool present = !tanh_of(kNorm) && at.row < at.rows;
  return {present && centred(kNorm) ? a.mean[at.row] : 0, present ? a.rstd[at.row] : 0};
}

/// f(column sum, where its shares go) for those that are wanted.
template <Norm kNorm, class Tile, class F>
__device__ void each_column_sum(const NormBackward& a, Columns<Tile>& c, F f) {
  f(c.dw, a.dw);
  if constexpr (biased(kNorm)) f(c.db, a.db);
  if constexpr (tanh_of(kNorm)) f(c.dalpha, a.dalpha);
  if constexpr (kNorm == Norm::Modulated) f(c.dscale, static_cast<float*>(a.dscale)), f(c.dshift, static_cast<float*>(a.dshift));
}

constexpr int backward_registers(Norm n, Fit fit) { return n == Norm::Modulated ? 128 : fit == Fit::Peeled ? 56 : 64; }

/// A share keeps its column sums in registers and fetches its next row while it works on one.
template <class T, class W, class Tile, Norm kNorm>
__global__ void __maxnreg__(backward_registers(kNorm, Tile::kFit)) backward_kernel(NormBackward a) {
  const float plus = a.w ? a.offset : 1, alpha = tanh_of(kNorm) ? *a.alpha : 0, a_col = a.a_col;
  const int64_t share = blockIdx.x;
  const Walk walk = Walk::of<kNorm>(a, share);
  RowReduce<typename Backward<T, Tile, kNorm>::Projections> reduce;
  constexpr bool kEach = kNorm == Norm::Each;
  Columns<Tile> columns;
  Place at = Tile::template place<T>(a.x, walk.first + threadIdx.y, walk.end, a.cols);
  // As floats where registers allow it, and with zeros beside the row, which the sums rely on.
  constexpr bool kRaw = Tile::kFit == Fit::Peeled || centred(kNorm) || kEach || sizeof(T) == 4;
  const std::conditional_t<kRaw, Raw<W, Tile>, Tile> held = [&] {
    const Tile w = load_loose<W, Tile>(a.w, at.vector(a.w));
    if constexpr (kRaw) return packed<W>(w);
    else return w + plus;
  }();
  const auto weight = [&] {
    if constexpr (kRaw) return to_tile(held) + plus;
    else return held;
  };
  const auto fetch_scale = [&](const Place& at) {
    if constexpr (kEach) return fetch<T, Tile, true>(a.scale, at);
    else return 0;
  };
  auto next_x = fetch<T, Tile, true>(a.x, at), next_dy = fetch<T, Tile, true>(a.dy, at);
  auto next_scale = fetch_scale(at);
  Stats next_stats = stats_of<kNorm>(a, at);
  for (int64_t first = walk.first; first < walk.end; first += walk.step) {
    complete<T>(next_x, a.x, at), complete<T>(next_dy, a.dy, at);
    if constexpr (kEach) complete<T>(next_scale, a.scale, at);
    Backward<T, Tile, kNorm, kEach> b{.a = a, .x = unpack(next_x, at), .dy = unpack(next_dy, at), .w = weight(), .stats = next_stats, .alpha = alpha, .a_col = a_col, .scale = next_scale};
    const Place here = at;
    at.row += walk.step;
    forget(at.shift);
    next_stats = stats_of<kNorm>(a, at);
    next_x = fetch<T, Tile, true>(a.x, at), next_dy = fetch<T, Tile, true>(a.dy, at), next_scale = fetch_scale(at);
    auto sums = b.project(here);
    b.collect(here, columns);
    if constexpr (!tanh_of(kNorm)) sums = reduce(sums);
    b.finish(sums, here);
  }
  each_column_sum<kNorm>(a, columns, [&](Tile& part, float* shares) {
    if (!shares) return;
    // The rows of a block are added in turn, so that a block is one share. They need not begin alike.
    const auto each = [&](int y, auto f) {
#pragma unroll
      for (int i = 0; i < Tile::kItems; ++i)
        if (const int c = Tile::column(i, at); int(threadIdx.y) == y && c >= 0 && c < a.cols)
          f(part.v[i], shared_memory<float>()[Tile::kFit == Fit::Peeled ? c : i * int(blockDim.x) + int(threadIdx.x)]);
      __syncthreads();
    };
    for (int y = 1; y < int(blockDim.y); ++y) each(y, [](float v, float& sum) { sum = v; }), each(0, [](float& v, float sum) { v += sum; });
    if (threadIdx.y == 0) store<float, true>(part, shares, {share, a.shares, a.cols, at.shift});
  });
}

/// As forward_wide_kernel; a share keeps its column sums in registers.
template <class T, class W, class Tile, Norm kNorm, int kPieces>
__global__ void __maxnreg__(backward_registers(kNorm, Tile::kFit)) backward_wide_kernel(NormBackward a) {
  constexpr bool kEach = kNorm == Norm::Each;
  using Backward = norm::Backward<T, Tile, kNorm, kEach>;
  using Projections = typename Backward::Projections;
  const float plus = a.w ? a.offset : 1, alpha = tanh_of(kNorm) ? *a.alpha : 0, a_col = a.a_col;
  const int64_t share = Tile::group();
  const Walk walk = Walk::of<kNorm>(a, share);
  Ring<T, Tile, kEach ? 3 : 2, kPieces> ring{{a.x, a.dy}, walk.end, a.cols};
  if constexpr (kEach) ring.matrices[2] = a.scale;
  RowReduce<Projections, Tile::kSpread> reduce;
  Columns<Tile> columns[kPieces];
  Raw<W, Tile> w[kPieces];
  for_each_piece<kPieces>([&](int piece) { w[piece] = fetch_loose<W, Tile>(a.w, ring.place(0, piece).vector(a.w)); });
  ring.fetch(walk.first);
  Stats next_stats = stats_of<kNorm>(a, ring.place(walk.first, 0));
  for (int64_t row = walk.first; row < walk.end; row += walk.step) {
    const Stats stats = next_stats;
    ring.turn(row + walk.step);
    next_stats = stats_of<kNorm>(a, ring.place(row + walk.step, 0));
    typename Projections::Value sums{};
    const auto each_piece = [&](auto f) {
      for_each_piece<kPieces>([&](int piece) {
        const Place at = ring.place(row, piece);
        Backward b{.a = a, .x = to_tile(ring.get(0, piece)), .dy = to_tile(ring.get(1, piece)), .w = to_tile(w[piece]) + plus, .stats = stats, .alpha = alpha, .a_col = a_col};
        if constexpr (kEach) b.scale = ring.get(2, piece);
        f(b, b.project(at), at, columns[piece]);
      });
    };
    each_piece([&](Backward& b, const auto& projections, const Place& at, Columns<Tile>& columns) {
      sums = Projections()(sums, projections);
      b.collect(at, columns);
    });
    sums = reduce(sums);
    each_piece([&](Backward& b, const auto&, const Place& at, Columns<Tile>&) { b.finish(sums, at); });
  }
  for_each_piece<kPieces>([&](int piece) {
    each_column_sum<kNorm>(a, columns[piece], [&](Tile& part, float* shares) {
      if (shares) store<float, true>(part, shares, {share, a.shares, a.cols, 0, ring.place(0, piece).from});
    });
  });
  reduce.finish();
}

/// As forward_long_kernel; the column sums grow in memory.
template <class T, class W, class Tile, Norm kNorm>
__global__ void __launch_bounds__(kTileThreads) backward_long_kernel(NormBackward a) {
  const float plus = a.w ? a.offset : 1, alpha = tanh_of(kNorm) ? *a.alpha : 0, a_col = a.a_col;
  const Walk walk = Walk::of<kNorm>(a, blockIdx.x);
  RowReduce<typename Backward<T, Tile, kNorm>::Projections> reduce;
  for (int64_t row = walk.first; row < walk.end; row += walk.step) {
    Place at = Tile::template place<T>(a.x, row, walk.end, a.cols);
    const int64_t end = a.cols + at.shift;
    const auto piece = [&] {
      return Backward<T, Tile, kNorm>{.a = a, .x = load<T, Tile>(a.x, at), .dy = load<T, Tile>(a.dy, at), .w = load_loose<W, Tile>(a.w, at.vector(a.w)) + plus,
                                      .stats = stats_of<kNorm>(a, at), .alpha = alpha, .a_col = a_col};
    };
    using Projections = typename Backward<T, Tile, kNorm>::Projections;
    typename Projections::Value sums{};
    for (at.from = 0; at.from < end && !tanh_of(kNorm); at.from += Tile::covered()) {
      sums = Projections()(sums, piece().project(at));
    }
    sums = reduce(sums);
    for (at.from = 0; at.from < end; at.from += Tile::covered()) {
      Columns<Tile> columns;
      auto b = piece();
      b.project(at);
      b.collect(at, columns);
      b.finish(sums, at);
      each_column_sum<kNorm>(a, columns, [&](Tile& part, float* shares) {
        if (!shares) return;
        const Place share{blockIdx.x, a.shares, a.cols, at.shift, at.from};
        if (row != walk.first) part = part + load_loose<float, Tile>(shares, share);
        store<float, true>(part, shares, share);
      });
    }
  }
}

}  // namespace

LIGER_REGISTER(norm_backward, [](const NormBackward& a, Stream s) {
  if (a.rows == 0) return;
  dispatch_args(a, [&]<class T, class W, Norm kNorm>() {
    const auto in_registers = [&]<class Tile>(Tiling t) {
      launch(backward_kernel<T, W, Tile, kNorm>, t.grid(a.shares, t.threads.y > 1 ? int(t.threads.x * Tile::kItems * sizeof(float)) : 0), s, a);
    };
    const Memory memory{{a.dy, a.ds, a.x, (const void*)a.dx, kNorm == Norm::Each && a.modulation_dtype == a.dtype ? a.scale : nullptr}, {a.w, a.scale, (const void*)a.dw, (const void*)a.db, (const void*)a.dalpha, (const void*)a.dscale, (const void*)a.dshift}};
    // One pack a thread leaves room to fetch the next row ahead.
    constexpr Threads block{.few = 512, .most = most_threads(kNorm)};
    if (kNorm != Norm::Each || a.modulation_dtype == a.dtype) {
      constexpr int kVec = 16 / sizeof(T), kPieces = 2;
      if (dispatch_tile<T, kVec, 8, false>(a.cols, block, memory, in_registers)) return;
      if (dispatch_tile<T, kVec * kPieces, 0, true>(a.cols, block, memory, [&]<class Tile>(Tiling t) {
            using In = Piece<T, Tile::kFit>;
            const int bytes = Ring<T, In, kNorm == Norm::Each ? 3 : 2, kPieces>::shared_bytes(t);
            if (bytes > shared_bytes_of_block()) return false;
            launch(backward_wide_kernel<T, W, In, kNorm, kPieces>, t.grid(a.shares, bytes), s, a);
            return true;
          }))
        return;
    }
    dispatch_walk<T, 8>(a.cols, memory, [&]<class Tile>(Tiling t) { launch(backward_long_kernel<T, W, Tile, kNorm>, t.grid(a.shares), s, a); });
  });
});

}  // namespace liger::cuda::norm
