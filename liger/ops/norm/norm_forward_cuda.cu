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

/// Vectors that all rows share, as they lie in memory.
template <class W, class Tile, Norm kNorm>
struct Vectors {
  static constexpr int kCount = biased(kNorm) ? 2 : 1;
  Raw<W, Tile> of[kCount];

  Vectors() = default;
  __device__ Vectors(const NormForward& a, const Place& at) {
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

/// x̂ · w rounded to T, as the reference does it.
template <class T, class W, Norm kNorm, class Tile>
__device__ Raw<T, Tile> product(const NormForward& a, const Tile& xhat, const Raw<W, Tile>& w) {
  if constexpr (std::is_same_v<T, W> && sizeof(T) == 2 && Tile::kWidth > 1)
    // Two 16-bit numbers multiply exactly in a float, so that this rounds once either way.
    if (a.casting == Casting::Llama && a.offset == 0 && a.w) return packed<T>(xhat) * w;
  return packed<T>(weighted<T, kNorm>(xhat, to_tile(w) + (a.w ? a.offset : 1), a.casting));
}

/// What a row's product is modulated by, on its way as it lies in memory; floats beside 16-bit rows are fetched when they are needed.
template <class T, class Tile, Norm kNorm>
struct Modulation {
  Place by;
  Raw<T, Tile> scale, shift{};

  __device__ Modulation(const NormForward& a, const Place& at) : by(of_modulation(a, at)) {
    if (a.modulation_dtype != a.dtype) return;
    scale = fetch_loose<T, Tile>(a.scale, by);
    if (a.shift) shift = fetch_loose<T, Tile>(a.shift, by);
  }

  __device__ Raw<T, Tile> operator()(const NormForward& a, const Raw<T, Tile>& n) const {
    if (a.modulation_dtype == a.dtype) return of(n, scale, shift);
    return of(n, fetch_loose<float, Tile>(a.scale, by), a.shift ? fetch_loose<float, Tile>(a.shift, by) : Raw<float, Tile>{});
  }

 private:
  template <class M>
  __device__ static Raw<T, Tile> of(const Raw<T, Tile>& n, const Raw<M, Tile>& scale, const Raw<M, Tile>& shift) {
    return packed<T>(Tile::map([](float n, float scale, float shift) { return fmaf(n, scale + 1, shift); }, to_tile(n), to_tile(scale), to_tile(shift)));
  }
};

template <class T, class Tile, Norm kNorm>
  requires(!modulated(kNorm))
struct Modulation<T, Tile, kNorm> {
  __device__ Modulation(const NormForward&, const Place&) {}
  __device__ const Raw<T, Tile>& operator()(const NormForward&, const Raw<T, Tile>& n) const { return n; }
};

template <class T, class W, Norm kNorm, class Tile>
__device__ void output(const NormForward& a, const Tile& x, const Vectors<W, Tile, kNorm>& shared, const Modulation<T, Tile, kNorm>& modulation, Stats stats, const Place& at) {
  const float alpha = tanh_of(kNorm) ? number(a.alpha) : 0;
  const Tile xhat = normalised<T, Tile, kNorm>(x, stats, alpha);
  if constexpr (biased(kNorm)) store<T>(Tile::map([](float x, float w, float b) { return fmaf(x, w, b); }, xhat, to_tile(shared.w()), to_tile(shared.b())), a.y, at);
  else store<T>(modulation(a, product<T, W, kNorm>(a, xhat, shared.w())), a.y, at);
}

/// sum / cols; rounded once where it shows.
template <class T>
__device__ float mean_of(float sum, const NormForward& a) { return sizeof(T) == 2 ? sum * a.a_col : sum / a.cols; }

template <class T>
__device__ float inverse_root(float squares, const NormForward& a) {
  const float rstd = rsqrtf(mean_of<T>(squares, a) + a.eps);
  return a.casting == Casting::None ? round_to<T>(rstd) : rstd;
}

template <Norm kNorm>
__device__ void keep(const NormForward& a, Stats stats, int64_t row) {
  if (threadIdx.x > 0 || row >= a.rows || tanh_of(kNorm)) return;
  a.rstd[row] = stats.rstd;
  if (centred(kNorm)) a.mean[row] = stats.mean;
}

/// About the mean of a row: that of its first pack. The sums of differences from it tell mean and variance in one pass: where it is d off the
/// mean, so are the pack's elements on average, and they alone make d² at most n / kWidth times the variance. That is by how much the
/// subtraction multiplies a float's rounding, which 16-bit results do not show.
template <class T, Fit kFit>
struct Pilot {
  static constexpr int kWidth = 16 / sizeof(T);
  Pack<T, kWidth> pack{};
  bool whole = true;

  __device__ Pilot(const NormForward& a, int64_t row) {
    if (row >= a.rows) return;
    const T* p = static_cast<const T*>(a.x) + row * a.cols;
    const int shift = kFit == Fit::Peeled ? misalignment<T>(p) : 0, first = shift ? kWidth - shift : 0;
    whole = kFit != Fit::Peeled || first + kWidth <= a.cols;
    if (whole) pack = Pack<T, kWidth>::read(p + first);
    else pack.words[0] = *reinterpret_cast<const uint16_t*>(p);
  }

  __device__ float value() const {
    float f[kWidth];
    pack.to_float(f);
    const float first = f[0];
#pragma unroll
    for (int n = kWidth / 2; n > 0; n /= 2)
#pragma unroll
      for (int j = 0; j < n; ++j) f[j] += f[j + n];
    return whole ? f[0] / kWidth : first;
  }
};

/// What a row is made of.
template <class T, Norm kNorm, Fit kFit>
struct Statistics {
  static constexpr bool kPilot = centred(kNorm) && sizeof(T) == 2;
  struct Nothing { __device__ Nothing(const NormForward&, int64_t) {} };
  using Ahead = std::conditional_t<kPilot, Pilot<T, kFit>, Nothing>;
  using Parts = Sums<kPilot ? 2 : 1>;

  /// each_piece calls f(x, at) for each piece of the row that a thread has.
  template <class Reduce, class Pieces>
  static __device__ Stats of(const NormForward& a, Reduce& reduce, const Ahead& ahead, Pieces each_piece) {
    typename Parts::Value s{};
    float mean = 0;
    if constexpr (tanh_of(kNorm)) return {};
    if constexpr (kPilot) {
      const float about = ahead.value();
      each_piece([&](const auto& x, const Place& at) { s = Parts()(s, moments(x, about, at)); });
      s = reduce(s);
      const float d = s.v[0] * a.a_col;
      return {about + d, inverse_root<T>(fmaxf(0, s.v[1] - s.v[0] * d), a)};
    }
    if constexpr (centred(kNorm)) {
      each_piece([&](const auto& x, const Place&) { s.v[0] += sum(x); });
      mean = mean_of<T>(reduce(s).v[0], a), s = {};
    }
    each_piece([&](const auto& x, const Place& at) { s.v[0] += centred(kNorm) ? moments(x, mean, at).v[1] : sum(x * x); });
    return {mean, inverse_root<T>(reduce(s).v[0], a)};
  }
};

/// What a thread has of a row: much, so that few threads reduce it; less where it has modulations too.
template <class T, class W, Norm kNorm>
inline constexpr int kItems = 64 / std::max(sizeof(T), sizeof(W)) / (modulated(kNorm) ? 2 : 1);

/// Few registers, so that enough blocks share an SM: one loads while another reduces and a third stores.
constexpr int forward_registers(int bytes_w) { return bytes_w == 2 ? 80 : 64; }

template <class T, class W, class Tile, Norm kNorm>
__global__ void __maxnreg__(forward_registers(sizeof(W))) forward_kernel(NormForward a) {
  await_previous();
  const Place at(Tile::row(), a.rows, a.cols);
  const Input<T, Tile, kNorm> input(a, at);
  const Vectors<W, Tile, kNorm> shared(a, at);
  const Modulation<T, Tile, kNorm> modulation(a, at);
  using Statistics = norm::Statistics<T, kNorm, Tile::kFit>;
  const typename Statistics::Ahead ahead(a, at.row);
  RowReduce<typename Statistics::Parts> reduce;
  const Tile x = input.get(a, at);
  const Stats stats = Statistics::of(a, reduce, ahead, [&](auto f) { f(x, at); });
  output<T, W, kNorm>(a, x, shared, modulation, stats, at);
  keep<kNorm>(a, stats, at.row);
}

/// Registers hold what rows meet, but where rows begin anywhere: there many blocks share an SM instead.
constexpr int ring_registers(Fit fit) { return fit == Fit::Peeled ? 56 : 112; }

/// What forward_ring_kernel has in shared memory: rows on their way; and on the shelf vectors, where rows begin anywhere, which those do not:
/// what is laid out for one row of a thread fits all.
template <class T, class W, class Tile, Norm kNorm, int kPieces>
struct ForwardShared {
  using Vectors = norm::Vectors<W, Tile, kNorm>;
  static constexpr bool kShelf = Tile::kFit == Fit::Peeled;
  using Ring = cuda::Ring<T, Tile, kNorm == Norm::Added ? 2 : 1, kPieces, kShelf ? kPieces * int(sizeof(Vectors)) / 16 : 0>;

  static __device__ Ring rows(const NormForward& a) {
    if constexpr (kNorm == Norm::Added) return Ring(Tile::row(), Tile::step(), a.rows, a.cols, a.x, a.residual);
    else return Ring(Tile::row(), Tile::step(), a.rows, a.cols, a.x);
  }
};

/// Longer rows and those that begin anywhere, kPieces packs a thread: the next one is on its way to shared memory meanwhile, from where each
/// pass takes what it needs.
template <class T, class W, class Tile, Norm kNorm, int kPieces>
__global__ void __maxnreg__(ring_registers(Tile::kFit)) forward_ring_kernel(NormForward a) {
  await_previous();
  using Shared = ForwardShared<T, W, Tile, kNorm, kPieces>;
  using Vectors = norm::Vectors<W, Tile, kNorm>;
  const int64_t first = Tile::row();
  auto ring = Shared::rows(a);
  using Statistics = norm::Statistics<T, kNorm, Tile::kFit>;
  RowReduce<typename Statistics::Parts, Tile::kSpread> reduce;
  Vectors held[Shared::kShelf ? 1 : kPieces];
  for_each_piece<kPieces>([&](int piece) {
    const Vectors vectors(a, ring.at(piece, first));
    if constexpr (Shared::kShelf) ring.template shelf<Vectors>(piece) = vectors;
    else held[piece] = vectors;
  });
  typename Statistics::Ahead next(a, first);
#pragma unroll 1
  for (int64_t row = first; row - threadIdx.y < a.rows; row += Tile::step()) {
    const auto ahead = next;
    ring.turn();
    next = {a, row + Tile::step()};
    if constexpr (kNorm == Norm::Added) for_each_piece<kPieces>([&](int piece) {
        const auto s = packed<T>(to_tile(ring.get(0, piece)) + to_tile(ring.get(1, piece)));
        store<T>(s, a.s, ring.at(piece)), ring.put(s, 0, piece);
      });
    const Stats stats = Statistics::of(a, reduce, ahead, [&](auto f) {
      for_each_piece<kPieces>([&](int piece) { f(to_tile(ring.get(0, piece)), ring.at(piece)); });
    });
    for_each_piece<kPieces>([&](int piece) {
      const Place at = ring.at(piece);
      Vectors vectors;
      if constexpr (Shared::kShelf) vectors = ring.template shelf<Vectors>(piece);
      else vectors = held[piece];
      output<T, W, kNorm>(a, to_tile(ring.get(0, piece)), vectors, {a, at}, stats, at);
    });
    keep<kNorm>(a, stats, row);
  }
}

/// The longest are read again for each pass, from a cache.
template <class T, class W, class Tile, Norm kNorm>
__global__ void __launch_bounds__(kTileThreads) forward_long_kernel(NormForward a) {
  await_previous();
  const Place row = Tile::template place<T>(a.x, blockIdx.x, a.rows, a.cols);
  using Statistics = norm::Statistics<T, kNorm, Tile::kFit>;
  RowReduce<typename Statistics::Parts> reduce;
  const Stats stats = Statistics::of(a, reduce, {a, row.row}, [&](auto f) {
    for_each_place<Tile>(row, [&](const Place& at) { f(Input<T, Tile, kNorm>(a, at).get(a, at), at); });
  });
  for_each_place<Tile>(row, [&](const Place& at) {
    const Input<T, Tile, kNorm> input(a, at);
    const Vectors<W, Tile, kNorm> shared(a, at);
    output<T, W, kNorm>(a, input.get(a, at), shared, {a, at}, stats, at);
  });
  keep<kNorm>(a, stats, row.row);
}

}  // namespace

LIGER_REGISTER(norm_forward, [](const NormForward& a, Stream s) {
  dispatch_args(a, [&]<class T, class W, Norm kOne>() {
    constexpr Norm kNorm = kOne == Norm::Each ? Norm::Modulated : kOne;  // which are one here
    const Memory memory{{a.x, a.residual, (const void*)a.s, (const void*)a.y}, {a.w, a.b, a.scale, a.shift}};
    constexpr int kVec = 16 / sizeof(T);
    // A second matrix fills the registers of a longer row's threads with loads; where there is one alone, shared memory keeps more on their way.
    const int most = kNorm == Norm::Added ? 512 : 8192 / kItems<T, W, kNorm>;
    if (dispatch_tile<T, kItems<T, W, kNorm>, 0, false>(a.cols, {.few = 128, .most = most}, memory, [&]<class Tile>(Tiling t) {
          launch(forward_kernel<T, W, Tile, kNorm>, t.of_rows(a.rows), s, a);
        }))
      return;
    const Threads block = Threads{.few = 128, .most = 512}.with(ForwardShared<T, W, Piece<T, Fit::Whole>, kNorm, 4>::Ring::kBytes);
    if (dispatch_tile<T, kVec * 4, kVec * 3, true>(a.cols, block, memory, [&]<class Tile>(Tiling t) {
          using In = Piece<T, Tile::kFit>;
          constexpr int kPieces = Tile::kItems / kVec;
          launch(forward_ring_kernel<T, W, In, kNorm, kPieces>, t.walking(a.rows, ring_registers(In::kFit), ForwardShared<T, W, In, kNorm, kPieces>::Ring::kBytes), s, a);
        }))
      return;
    dispatch_walk<T, 16>(a.cols, memory, [&]<class Tile>(Tiling t) { launch(forward_long_kernel<T, W, Tile, kNorm>, t.grid(a.rows), s, a); });
  });
});

}  // namespace liger::cuda::norm
