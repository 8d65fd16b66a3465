#include "liger/core/cuda/math.cuh"
#include "liger/core/cuda/tile.cuh"
#include "liger/ops/norm/norm.h"

namespace liger::cuda::norm {
namespace {

constexpr bool centred(Norm n) { return n == Norm::Layer || n == Norm::Group; }
constexpr bool tanh_of(Norm n) { return n == Norm::Tanh; }
constexpr bool biased(Norm n) { return centred(n) || tanh_of(n); }
/// Whether the reference may round before the weight is multiplied.
constexpr bool casts(Norm n) { return !biased(n); }

/// Backward of Modulated keeps three column sums: fewer threads, that they stay in registers.
constexpr int most_threads(Norm n) { return n == Norm::Modulated ? 512 : kTileThreads; }

/// What a row is made of.
struct Stats { float mean, rstd; };

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

template <class T, class Tile, Norm kNorm>
__device__ Tile normalised(const Tile& x, Stats stats, float alpha) {
  if constexpr (tanh_of(kNorm)) return Tile::map([=](float v) { return Math<T>::tanh(alpha * v); }, x);
  if constexpr (centred(kNorm)) return (x + -stats.mean) * stats.rstd;
  return x * stats.rstd;
}

/// The columns at `at` of scale or shift, in the row that the one at `at` shares with others.
template <class T, class Tile, class Args>
__device__ Tile modulation(const Args& a, const void* m, Place at) {
  const int64_t row = at.row / (a.rows / a.modulations);
  at.rows = at.row < at.rows ? a.modulations : 0, at.row = row;
  return a.modulation_dtype == DType::F32 ? load<float, Tile>(m, at) : load<T, Tile>(m, at);
}

/// w or b at a row's columns, as it lies in memory until it is used.
template <class W, class Tile, Norm kNorm>
struct Vector {
  std::conditional_t<kNorm == Norm::Group, Tile, Raw<W, Tile>> held;

  template <class Args>
  __device__ Vector(const Args& a, const void* v, const Place& at) {
    if constexpr (kNorm != Norm::Group) {
      held = fetch<W, Tile>(v, at.vector(v));
    } else if (v) {
      const W* channel = static_cast<const W*>(v) + at.row % a.groups * (a.cols / a.spatial);
#pragma unroll
      for (int i = 0; i < Tile::kItems; ++i)
        if (const int64_t c = Tile::column(i, at) + at.from; c >= 0 && c < a.cols && at.row < a.rows) held.v[i] = float(channel[unsigned(c) / unsigned(a.spatial)]);
    }
  }

  __device__ Tile get(const Place& at) const {
    if constexpr (kNorm == Norm::Group) return held;
    else return unpack(held, at);
  }
};

/// x̂ · w as the reference rounds it; w has its offset.
template <class T, Norm kNorm, class Tile>
__device__ Tile weighted(Tile xhat, Tile w, Casting casting) {
  if (casts(kNorm) && casting != Casting::Gemma) xhat = round_to<T>(xhat);
  if (casts(kNorm) && casting == Casting::None) w = round_to<T>(w);
  return xhat * w;
}

template <class T, class W, Norm kNorm, class Tile>
__device__ void output(const NormForward& a, const Tile& x, const Tile& w, Stats stats, const Place& at) {
  const float alpha = tanh_of(kNorm) ? *a.alpha : 0;
  Tile y = weighted<T, kNorm>(normalised<T, Tile, kNorm>(x, stats, alpha), w, a.casting);
  if constexpr (biased(kNorm)) y = y + Vector<W, Tile, kNorm>(a, a.b, at).get(at);
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
  const Vector<W, Tile, kNorm> w(a, a.w, at);
  const Tile x = input.get(a, at);
  Stats stats{};
  if constexpr (centred(kNorm)) stats.mean = reduce(sum(x)) / a.cols;
  if constexpr (!tanh_of(kNorm)) stats.rstd = inverse_root<T>(reduce(centred(kNorm) ? squares(x, stats.mean, at) : sum(x * x)), a);
  output<T, W, kNorm>(a, x, w.get(at) + (a.w ? a.offset : 1), stats, at);
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
    const Vector<W, Tile, kNorm> w(a, a.w, at);
    output<T, W, kNorm>(a, input.get(a, at), w.get(at) + (a.w ? a.offset : 1), stats, at);
  }
  keep<kNorm>(a, stats, at.row);
}

/// A share's rows: every step-th from first on, within its modulation or group; the block's next row lies `next` further.
struct Walk {
  int64_t first, end, step, next;
  bool own;                // every row has a modulation of its own

  template <Norm kNorm>
  static __device__ Walk of(const NormBackward& a, int64_t share) {
    const bool own = kNorm == Norm::Modulated && a.modulations == a.rows;
    const int64_t sets = kNorm == Norm::Group ? a.groups : kNorm == Norm::Modulated && !own ? a.modulations : 1, shares = a.shares / sets;
    const int64_t set = share / shares, first = share % shares * blockDim.y, step = shares * blockDim.y;
    if (kNorm == Norm::Group) return {set + first * sets, a.rows, step * sets, sets, false};
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
    columns.dw = columns.dw + dn * (casts(kNorm) && a.casting != Casting::Gemma ? round_to<T>(xhat) : xhat);
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
  const Vector<W, Tile, kNorm> w(a, a.w, at);
  auto next_x = fetch<T, Tile, true>(a.x, at), next_dy = fetch<T, Tile, true>(a.dy, at);
  for (int64_t first = walk.first; first < walk.end; first += walk.step) {
    Backward<T, Tile, kNorm> b{.a = a, .x = unpack(next_x, at), .dy = unpack(next_dy, at), .w = w.get(at) + plus, .stats = stats_of<kNorm>(a, at), .alpha = alpha};
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
      return Backward<T, Tile, kNorm>{.a = a, .x = load<T, Tile>(a.x, at), .dy = load<T, Tile>(a.dy, at), .w = Vector<W, Tile, kNorm>(a, a.w, at).get(at) + plus,
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

/// f.operator()<T, W, kNorm>().
template <class Args, class F>
void dispatch_args(const Args& a, F&& f) {
  dispatch_weighted(a.dtype, a.w_dtype, [&]<class T, class W>() {
    dispatch_norm(a.norm, [&]<Norm kNorm>() { f.template operator()<T, W, kNorm>(); });
  });
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
