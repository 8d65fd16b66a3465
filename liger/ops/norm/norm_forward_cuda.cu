#include "liger/ops/norm/norm.cuh"

namespace liger::cuda::norm {
namespace {

/// A piece of the row that is normalised, for Added written as the second result: in flight first, then there.
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

/// Vectors that all rows share, as they lie in memory.
template <class W, class Tile, Norm kNorm>
struct Vectors {
  static constexpr int kCount = biased(kNorm) ? 2 : 1;
  Raw<W, Tile> of[kCount];

  Vectors() = default;
  template <class At>
  __device__ Vectors(const NormForward& a, const At& at) {
    of[0] = fetch_loose<W, Tile>(a.w, at.vector(a.w));
    if constexpr (biased(kNorm)) {
      of[1] = fetch_loose<W, Tile>(a.b, at.vector(a.b));
      if (!a.w)
        for (auto& pack : of[0].packs) pack = pack.filled(W(1.f));
    }
  }

  __device__ const Raw<W, Tile>& w() const { return of[0]; }
  __device__ const Raw<W, Tile>& b() const { return of[kCount - 1]; }
};

/// x̂ · w rounded to T, as the reference does it. kUsual: what most modulated rows ask for, Llama's casting, no offset,
/// a weight, a shift, and all in T.
template <class T, class W, Norm kNorm, bool kUsual, class Tile>
__device__ Raw<T, Tile> product(const NormForward& a, const Tile& xhat, const Raw<W, Tile>& w) {
  if constexpr (std::is_same_v<T, W> && sizeof(T) == 2 && Tile::kWidth > 1)
    // Two 16-bit numbers multiply exactly in a float, so that this rounds once either way.
    if (kUsual || (a.casting == Casting::Llama && a.offset == 0 && a.w)) return packed<T>(xhat) * w;
  return packed<T>(weighted<T, kNorm>(xhat, to_tile(w) + (a.w ? a.offset : 1), a.casting));
}

/// What a row's product is modulated by, as it lies in memory; floats beside 16-bit rows are fetched when they are
/// needed. by: where it lies.
template <class T, class Tile, Norm kNorm, bool kUsual>
struct Modulation {
  Raw<T, Tile> scale, shift;

  Modulation() = default;
  template <class At>
  __device__ Modulation(const NormForward& a, const At& by) : scale{}, shift{} {
    if (!kUsual && a.modulation_dtype != a.dtype) return;
    scale = fetch_loose<T, Tile>(a.scale, by);
    if (kUsual || a.shift) shift = fetch_loose<T, Tile>(a.shift, by);
  }

  template <class At>
  __device__ Raw<T, Tile> operator()(const NormForward& a, const Raw<T, Tile>& n, const At& by) const {
    if (kUsual || a.modulation_dtype == a.dtype) return applied(n, scale, shift);
    return applied(n, fetch_loose<float, Tile>(a.scale, by),
                   a.shift ? fetch_loose<float, Tile>(a.shift, by) : Raw<float, Tile>{});
  }

 private:
  template <class M>
  __device__ static Raw<T, Tile> applied(const Raw<T, Tile>& n, const Raw<M, Tile>& scale, const Raw<M, Tile>& shift) {
    return packed<T>(Tile::map([](float n, float scale, float shift) { return fmaf(n, scale + 1, shift); }, to_tile(n),
                               to_tile(scale), to_tile(shift)));
  }
};

template <class T, class Tile, Norm kNorm, bool kUsual>
  requires(!modulated(kNorm))
struct Modulation<T, Tile, kNorm, kUsual> {
  Modulation() = default;
  template <class At>
  __device__ Modulation(const NormForward&, const At&) {}
  template <class At>
  __device__ const Raw<T, Tile>& operator()(const NormForward&, const Raw<T, Tile>& n, const At&) const {
    return n;
  }
};

/// What a piece of a row meets. (The modulation is a base, for it may be empty.)
template <class T, class W, class Tile, Norm kNorm, bool kUsual>
struct Beside : Modulation<T, Tile, kNorm, kUsual> {
  using Modulation = norm::Modulation<T, Tile, kNorm, kUsual>;
  Vectors<W, Tile, kNorm> vectors;

  Beside() = default;
  template <class At>
  __device__ Beside(const NormForward& a, const At& at, const At& by) : Modulation(a, by), vectors(a, at) {}
  __device__ Modulation& modulation() { return *this; }
  __device__ const Modulation& modulation() const { return *this; }
};

/// by: where the row's modulation lies, as at does.
template <class T, class W, Norm kNorm, bool kUsual, class Tile, class At>
__device__ void output(const NormForward& a, const Tile& x, const Beside<T, W, Tile, kNorm, kUsual>& beside,
                       const At& by, Stats stats, const At& at) {
  const float alpha = tanh_of(kNorm) ? number(a.alpha) : 0;
  const Tile xhat = normalised<T, Tile, kNorm>(x, stats, alpha);
  if constexpr (biased(kNorm))
    store<T>(Tile::map([](float x, float w, float b) { return fmaf(x, w, b); }, xhat, to_tile(beside.vectors.w()),
                       to_tile(beside.vectors.b())),
             a.y, at);
  else store<T>(beside.modulation()(a, product<T, W, kNorm, kUsual>(a, xhat, beside.vectors.w()), by), a.y, at);
}

/// sum / cols; rounded once where it shows.
template <class T>
__device__ float mean_of(float sum, const NormForward& a) {
  return sizeof(T) == 2 ? sum * a.inv_cols : sum / a.cols;
}

/// 1 / sqrt(sum / cols + eps), to a float's last place where that shows: all of a row, and of its gradient, is off by
/// as much.
template <class T>
__device__ float inverse_root(float squares, const NormForward& a) {
  const float rstd = rsqrtf(mean_of<T>(squares, a) + a.eps);
  return a.casting == Casting::None ? round_to<T>(rstd) : rstd;
}

__device__ inline float inverse_root(const CarriedSum::Value& squares, const NormForward& a) {
  const float mean = squares.v[0] / a.cols,
              of_mean = (fmaf(-mean, float(a.cols), squares.v[0]) + squares.rest) / a.cols;
  const auto square = CarriedSum()({{mean}, of_mean}, {{a.eps}, 0});
  const float v = square.v[0], root = rsqrtf(v), v_root = v * root;
  const float left =
      fmaf(-v_root, root, 1.f) - fmaf(fmaf(v, root, -v_root), root, square.rest * root * root);  // 1 - square · root²
  return left == left ? fmaf(.5f * root, left, root)
                      : root;  // a step of Newton's, but where the square is 0 or infinite
}

template <Norm kNorm>
__device__ void keep(const NormForward& a, Stats stats, int64_t row) {
  if (threadIdx.x > 0 || row >= a.rows || tanh_of(kNorm)) return;
  a.rstd[row] = stats.rstd;
  if (centred(kNorm)) a.mean[row] = stats.mean;
}

/// Σ (x − about), and Σ (x − about)² with what it was rounded by.
struct CarriedMoments {
  struct Value {
    float v[1];
    CarriedSum::Value squares;
  };
  static __device__ Value identity() { return {}; }
  __device__ Value operator()(const Value& a, const Value& b) const {
    return {{a.v[0] + b.v[0]}, CarriedSum()(a.squares, b.squares)};
  }
  __device__ static Value shuffle(const Value& v, int lane) {
    return {{__shfl_xor_sync(~0u, v.v[0], lane)}, CarriedSum::shuffle(v.squares, lane)};
  }
};

/// What a row is made of. Of 16-bit numbers one pass tells mean and variance: the mean square less the mean's. Where
/// the variance is less than a part of the latter, which multiplies a float's rounding, or squares overflow, a second
/// pass tells it, about the mean.
template <class T, Norm kNorm>
struct Statistics {
  static constexpr bool kOnce = centred(kNorm) && sizeof(T) == 2;
  static constexpr float kPart = 1.f / 64;
  using Parts = std::conditional_t<sizeof(T) == 2, Sums<kOnce ? 2 : 1>,
                                   std::conditional_t<centred(kNorm), CarriedMoments, CarriedSum>>;

  /// each calls f(x, at) for each piece of the row that a thread has.
  template <class Reduce, class Each>
  static __device__ Stats of(const NormForward& a, Reduce& reduce, Each each) {
    typename Parts::Value s{};
    float mean = 0;
    if constexpr (tanh_of(kNorm)) return {};
    if constexpr (kOnce) {
      each([&](const auto& x, const auto&) { s = Parts()(s, {sum(x), sum(x * x)}); });
      s = reduce(s);
      mean = s.v[0] * a.inv_cols;
      float squares = fmaf(-mean, s.v[0], s.v[1]);
      const bool again = !(squares >= kPart * mean * s.v[0] && squares < INFINITY);
      if (__ballot_sync(
              ~0u, again)) {  // rows of a warp, if it has several, wait for one another; warps of a row are of one mind
        s = {};
        each([&](const auto& x, const auto& at) { s = Parts()(s, moments(x, mean, at)); });
        s = reduce(s);
        const float d = s.v[0] * a.inv_cols;
        if (again) mean += d, squares = fmaxf(0, s.v[1] - s.v[0] * d);
      }
      return {mean, inverse_root<T>(squares, a)};
    } else if constexpr (centred(kNorm)) {
      each([&](const auto& x, const auto&) { s.v[0] += sum(x); });
      mean = mean_of<T>(reduce(s).v[0], a), s = {};
      each([&](const auto& x, const auto& at) {
        const auto about_mean = moments(x, mean, at);
        s.v[0] += about_mean.v[0], s.squares.v[0] += about_mean.v[1];
      });
      s = reduce(s);
      const float d =
          mean_of<T>(s.v[0], a);  // what the rounding of the sum has left: a constant row's deviations are 0
      return {mean + d, inverse_root(CarriedSum()(s.squares, {{-s.v[0] * d}, 0}), a)};
    } else {
      each([&](const auto& x, const auto&) { s.v[0] += sum(x * x); });
      s = reduce(s);
      if constexpr (sizeof(T) == 2) return {mean, inverse_root<T>(s.v[0], a)};
      else return {mean, inverse_root(s, a)};
    }
  }
};

/// Where a block keeps its rows and the vectors that they share: those in registers, but beside a pipeline where rows
/// begin anywhere, which they do not (what is laid out for one row fits all), and one after another, late, where they
/// would take too many registers of a row's. A row over a cluster lies in shared memory, where its vectors are few
/// enough for several blocks an SM; where not, in a pipeline of rows that share them. kResident: beside a pipeline in
/// any case, with the modulation that a row shares with the next ones.
template <class T, class W, class Tile, Norm kNorm, bool kUsual, bool kResident, int kPieces>
struct Forward {
  static constexpr bool kSpread = Tile::kFit == Fit::Spread, kWide = sizeof(W) > sizeof(T);
  static constexpr Keep kKeep = kResident                             ? Keep::Walking
                                : Tile::kFit == Fit::Whole            ? Keep::Registers
                                : kSpread && !biased(kNorm) && !kWide ? Keep::Shared
                                                                      : Keep::Walking;
  static constexpr bool kLate =
      kKeep == Keep::Registers ? biased(kNorm) || modulated(kNorm) || kWide : kKeep == Keep::Shared && modulated(kNorm);
  // Misaligned rows over a cluster, one block an SM: two, in a pipeline each, would leave L1, through which
  // rows come, 20 KiB. Two vectors or matrices leave room for one anyway, and spill with 64 (layer_norm of 32767
  // columns: 118 us, and 76 without).
  static constexpr bool kAlone = Tile::kFit == Fit::SpreadEdged;
  static constexpr bool kMore =
      kAlone || (kNorm == Norm::Added && !kResident) || (modulated(kNorm) && kResident && !kUsual);
  static constexpr int kRegisters = kKeep == Keep::Shared                                     ? 48
                                    : (kSpread && !kResident) || (kAlone && modulated(kNorm)) ? 112
                                    : kMore                                                   ? 80
                                                                                              : 64;
  using Beside = norm::Beside<T, W, Tile, kNorm, kUsual>;
  struct alignas(16) OfEdge : norm::Beside<T, W, cuda::Tile<1, 1>, kNorm, kUsual> {};
  static constexpr int kBeside = kPieces * int(sizeof(Beside)) / 16;  // resident packs, before an OfEdge
  using Rows = RowsOf<T, Tile, kNorm == Norm::Added ? 2 : 1, kPieces, kKeep, kResident ? kBeside + Tile::kEdged : 0>;

  static __device__ Rows rows(const NormForward& a) {
    if constexpr (kNorm == Norm::Added) return Rows(Tile::row(), Tile::step(), a.rows, a.cols, a.x, a.residual);
    else return Rows(Tile::row(), Tile::step(), a.rows, a.cols, a.x);
  }
  /// Resident in shared memory.
  static __device__ Beside& beside(const Rows& rows, int piece) { return rows.template resident<Beside>(piece); }
  static __device__ OfEdge& beside_edge(const Rows& rows) { return rows.template resident<OfEdge>(kBeside); }
};

/// kPieces packs of a row a thread.
template <class T, class W, class Tile, Norm kNorm, bool kUsual, bool kResident, int kPieces>
__global__ void __maxnreg__((Forward<T, W, Tile, kNorm, kUsual, kResident, kPieces>::kRegisters))
    forward_kernel(NormForward a) {
  await_previous();
  using Forward = norm::Forward<T, W, Tile, kNorm, kUsual, kResident, kPieces>;
  using Beside = typename Forward::Beside;
  constexpr bool kLate = Forward::kLate;
  const int64_t first = Tile::row();
  auto rows = Forward::rows(a);
  using Statistics = norm::Statistics<T, kNorm>;
  RowReduce<typename Statistics::Parts, Tile::kSpread> reduce;
  int64_t modulation = 0, next_from = 0;  // the present row's, and the first row of the next
  const auto by = [&](const auto& at) { return at.of(modulation, a.modulations); };
  constexpr int kHeld = kResident ? 1 : kLate ? 2 : kPieces;  // pieces in registers
  Beside held[kHeld];
  const auto hold = [&](int piece) {
    if (piece < kPieces) held[piece % kHeld].vectors = {a, rows.at(piece)};
  };
  if constexpr (kResident) {
    for_each_piece<kPieces>([&](int piece) { Forward::beside(rows, piece).vectors = {a, rows.at(piece)}; });
    if (rows.edge >= 0) Forward::beside_edge(rows).vectors = {a, rows.edge_at()};
  } else if constexpr (!kLate) {
    for_each_piece<kPieces>(hold);
  }
#pragma unroll 1
  for (int64_t row = first; !Forward::Rows::kWalks || row - threadIdx.y < a.rows; row += Tile::step()) {
    rows.advance();
    if constexpr (kNorm == Norm::Added)
      for_each_piece<kPieces>([&](int piece) {
        const auto s = packed<T>(to_tile(rows.get(0, piece)) + to_tile(rows.get(1, piece)));
        store<T>(s, a.s, rows.at(piece)), rows.put(s, 0, piece);
      });
    if constexpr (kNorm == Norm::Added && kResident)
      if (rows.has_edge())
        rows.put_edge((rows.get_edge(0) + rows.get_edge(1)).v[0], 0), store<T>(rows.get_edge(0), a.s, rows.edge_at());
    if constexpr (kLate) hold(0);
    const Stats stats = Statistics::of(a, reduce, [&](auto f) { each_piece<1>(rows, f); });
    if (modulated(kNorm) &&
        row >= next_from) {  // a division, and what begins otherwise than x's rows do: both cost much
      modulation = modulation_of<kNorm>(a, row), next_from = (modulation + 1) * a.per_modulation;
      if constexpr (kResident) {
        for_each_piece<kPieces>(
            [&](int piece) { Forward::beside(rows, piece).modulation() = {a, by(rows.at(piece))}; });
        if (rows.has_edge()) Forward::beside_edge(rows).modulation() = {a, by(rows.edge_at())};
      }
    }
    rows.again();
    for_each_piece<kPieces>([&](int piece) {
      const auto at = rows.at(piece);
      if constexpr (kResident) held[0] = Forward::beside(rows, piece);
      if constexpr (kLate) {
        held[piece % kHeld].modulation() = {a, by(at)};
        hold(piece + 1);  // before a store, which loads do not overtake
      }
      output<T, W, kNorm, kUsual>(a, to_tile(rows.get(0, piece)), held[piece % kHeld], by(at), stats, at);
    });
    if constexpr (kResident)
      if (const auto at = rows.edge_at(); rows.has_edge())
        output<T, W, kNorm, kUsual>(a, rows.get_edge(0), Forward::beside_edge(rows), by(at), stats, at);
    keep<kNorm>(a, stats, row);
    if constexpr (!Forward::Rows::kWalks) break;
  }
}

/// The longest are read again for each pass, from a cache.
template <class T, class W, class Tile, Norm kNorm>
__global__ void __launch_bounds__(kTileThreads) forward_long_kernel(NormForward a) {
  await_previous();
  const Place row = Tile::template place<T>(a.x, blockIdx.x, a.rows, a.cols);
  using Statistics = norm::Statistics<T, kNorm>;
  RowReduce<typename Statistics::Parts> reduce;
  const Stats stats = Statistics::of(a, reduce, [&](auto f) {
    for_each_place<Tile>(row, [&](const Place& at) { f(Input<T, Tile, kNorm>(a, at).get(a, at), at); });
  });
  for_each_place<Tile>(row, [&](const Place& at) {
    const Input<T, Tile, kNorm> input(a, at);
    const Place by = at.of(modulation_of<kNorm>(a, at.row), a.modulations);
    output<T, W, kNorm, false>(a, input.get(a, at), Beside<T, W, Tile, kNorm, false>(a, at, by), by, stats, at);
  });
  keep<kNorm>(a, stats, row.row);
}

}  // namespace

LIGER_REGISTER(norm_forward, [](const NormForward& a, Stream s) {
  dispatch_args(a, [&]<class T, class W, Norm kOne>() {
    constexpr Norm kNorm = kOne == Norm::Each ? Norm::Modulated : kOne;  // which are one here
    const Memory memory{{a.x, a.residual, (const void*)a.s, (const void*)a.y}, {a.w, a.b, a.scale, a.shift}};
    constexpr int kVec = 16 / sizeof(T);
    // kLasting: for rows that keep their modulation in shared memory from one to the next.
    const auto in_tiles = [&]<bool kUsual, bool kLasting>() {
      using Spread = Forward<T, W, Piece<T, Fit::Spread>, kNorm, kUsual, kLasting, 4>;
      const bool several = kLasting || (Spread::kKeep == Keep::Shared && a.cols % kVec == 0 &&
                                        a.cols <= 256 * kTileCluster * kVec * 4);  // blocks of a cluster's on an SM
      const Threads block = Threads{.few = 128, .most = 512, .spread = several ? 256 : 512}.with(Spread::Rows::kBytes);
      return dispatch_tile<T, kVec * 4, kVec * 2, true>(a.cols, block, memory, [&]<class Tile>(Tiling t) {
        constexpr bool kFewer =
            Tile::kFit ==
            Fit::SpreadEdged;  // threads, of more pieces: layer_norm of 32767 columns took 98 us with two, 87 with four
        constexpr int kPieces = kFewer ? 4 : Tile::kItems / kVec;
        if (kFewer) t.threads.x = (t.threads.x / 2 + 31) / 32 * 32;
        if (Statistics<T, kNorm>::kOnce && t.threads.x > 32)
          t.threads.y = 1;  // a row decides for itself whether it needs a second pass
        constexpr bool kResident = Tile::kEdged || kLasting;
        using Forward = norm::Forward<T, W, Piece<T, Tile::kFit>, kNorm, kUsual, kResident, kPieces>;
        if (Forward::Rows::bytes(t.threads) > shared_bytes_of_block()) return false;
        const Grid grid = grid_of<typename Forward::Rows>(t, a.rows, Forward::kRegisters);
        if (kLasting && (Tile::kEdged || a.per_modulation * t.cluster < 3 * grid.blocks))
          return false;  // a block would hardly meet a modulation again
        launch(forward_kernel<T, W, Piece<T, Tile::kFit>, kNorm, kUsual, kResident, kPieces>, grid, s, a);
        return true;
      });
    };
    // What most modulated rows ask for, known beforehand, saves branches in each piece, 2 % of the time (16384x4096),
    // and registers, which spilled at odd widths: a third. Long rows with a modulation that many share have it in
    // shared memory: 2 % at 8192 columns, 9 at 16384, 14 at 49152; slower at 4096, and not timed of floats.
    if constexpr (modulated(kNorm) && std::is_same_v<T, W>)
      if (a.casting == Casting::Llama && a.offset == 0 && a.w && a.shift && a.modulation_dtype == a.dtype) {
        if constexpr (sizeof(T) == 2)
          if (a.cols >= 8192 && in_tiles.template operator()<true, true>()) return;
        if (in_tiles.template operator()<true, false>()) return;
      }
    if (in_tiles.template operator()<false, false>()) return;
    dispatch_walk<T, 16>(a.cols, memory, [&]<class Tile>(Tiling t) {
      launch(forward_long_kernel<T, W, Tile, kNorm>, t.grid(a.rows), s, a);
    });
  });
});

}  // namespace liger::cuda::norm
