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
  Raw<W, Tile> w, b;

  __device__ Vectors(const NormForward& a, const Place& at) : w(fetch_loose<W, Tile>(a.w, at.vector(a.w))) {
    if constexpr (biased(kNorm)) b = fetch_loose<W, Tile>(a.b, at.vector(a.b));
  }

  __device__ void forget() {
    for_each_word(w, [](auto& word) { cuda::forget(word); });
    if constexpr (biased(kNorm)) for_each_word(b, [](auto& word) { cuda::forget(word); });
  }
};

/// x̂ · w rounded to T, as the reference does it.
template <class T, class W, Norm kNorm, class Tile>
__device__ Raw<T, Tile> product(const NormForward& a, const Tile& xhat, const Raw<W, Tile>& w) {
  if constexpr (std::is_same_v<T, W> && sizeof(T) == 2 && Tile::kWidth > 1)
    // Two 16-bit numbers multiply exactly in a float, so that this rounds once either way.
    if (a.casting == Casting::Llama && a.offset == 0 && a.w) return packed<T>(xhat) * w;
  return packed<T>(weighted<T, kNorm>(xhat, to_tile(w) + (a.w ? a.offset : 1), a.casting));
}

template <class T, class W, Norm kNorm, class Tile>
__device__ void output(const NormForward& a, const Tile& x, const Vectors<W, Tile, kNorm>& shared, Stats stats, const Place& at) {
  const float alpha = tanh_of(kNorm) ? *a.alpha : 0;
  const Tile xhat = normalised<T, Tile, kNorm>(x, stats, alpha);
  if constexpr (biased(kNorm)) {
    Tile y = xhat;
    if (a.w) y = y * to_tile(shared.w);
    store<T>(y + to_tile(shared.b), a.y, at);
  } else {
    const Raw<T, Tile> n = product<T, W, kNorm>(a, xhat, shared.w);
    if constexpr (modulated(kNorm)) {
      Tile y = to_tile(n) * (modulation<T, Tile>(a, a.scale, at) + 1);
      if (a.shift) y = y + modulation<T, Tile>(a, a.shift, at);
      store<T>(y, a.y, at);
    } else {
      store<T>(n, a.y, at);
    }
  }
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

/// What a thread has of a row: much, so that few threads reduce it.
template <class T, class W>
inline constexpr int kItems = 64 / std::max(sizeof(T), sizeof(W));

/// Few registers, so that enough blocks share an SM: one loads while another reduces and a third stores.
constexpr int forward_registers(Norm n, Fit fit, int bytes_w) { return fit == Fit::Whole && bytes_w == 2 ? 80 : bytes_w > 2 || n == Norm::Modulated ? 64 : 56; }

template <class T, class W, class Tile, Norm kNorm>
__global__ void __maxnreg__(forward_registers(kNorm, Tile::kFit, sizeof(W))) forward_kernel(NormForward a) {
  const Rows<Tile> rows;
  Place at = Tile::template place<T>(a.x, rows.first, a.rows, a.cols);
  RowReduce<Sum> reduce;
  Input<T, Tile, kNorm> input(a, at);
  Vectors<W, Tile, kNorm> shared(a, at);
#pragma unroll 1
  for (int i = 0;;) {
    const Tile x = input.get(a, at);
    Stats stats{};
    if constexpr (centred(kNorm)) stats.mean = mean_of<T>(reduce(sum(x)), a);
    if constexpr (!tanh_of(kNorm)) stats.rstd = inverse_root<T>(reduce(centred(kNorm) ? squares(x, stats.mean, at) : sum(x * x)), a);
    output<T, W, kNorm>(a, x, shared, stats, at);
    keep<kNorm>(a, stats, at.row);
    if (++i == rows.kCount) return;
    at.row += rows.step;
    forget(at.shift), shared.forget();
    input = Input<T, Tile, kNorm>(a, at);
  }
}

constexpr int kWideRegisters = 40;

/// Longer rows, kPieces packs a thread: the next one is on its way to shared memory meanwhile, from where each pass takes what it needs.
template <class T, class W, class Tile, Norm kNorm, int kPieces>
__global__ void __maxnreg__(kWideRegisters) forward_wide_kernel(NormForward a) {
  constexpr bool kAdded = kNorm == Norm::Added;
  const int64_t first = Tile::group(), step = gridDim.x / (Tile::kSpread ? cluster_size() : 1);
  Ring<T, Tile, kAdded ? 2 : 1, kPieces> ring{{a.x}, a.rows, a.cols};
  if constexpr (kAdded) ring.matrices[1] = a.residual;
  RowReduce<Sum, Tile::kSpread> reduce;
  ring.fetch(first);
  for (int64_t row = first; row < a.rows; row += step) {
    ring.turn(row + step);
    if constexpr (kAdded) for_each_piece<kPieces>([&](int piece) {
        const auto s = packed<T>(to_tile(ring.get(0, piece)) + to_tile(ring.get(1, piece)));
        store<T>(s, a.s, ring.place(row, piece)), ring.put(s, 0, piece);
      });
    const auto each_piece = [&](auto f) {
      for_each_piece<kPieces>([&](int piece) { f(to_tile(ring.get(0, piece)), ring.place(row, piece)); });
    };
    const auto total = [&](auto f) {
      float s = 0;
      each_piece([&](const Tile& x, const Place& at) { s += f(x, at); });
      return reduce(s);
    };
    Stats stats{};
    if constexpr (centred(kNorm)) stats.mean = mean_of<T>(total([](const Tile& x, const Place&) { return sum(x); }), a);
    if constexpr (!tanh_of(kNorm)) stats.rstd = inverse_root<T>(total([&](const Tile& x, const Place& at) { return squares(x, stats.mean, at); }), a);
    each_piece([&](const Tile& x, const Place& at) { output<T, W, kNorm>(a, x, Vectors<W, Tile, kNorm>(a, at), stats, at); });
    keep<kNorm>(a, stats, row);
  }
  reduce.finish();
}

/// The longest are read again for each pass, from a cache.
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
  if constexpr (centred(kNorm)) stats.mean = mean_of<T>(total([](const Tile& x) { return sum(x); }), a);
  if constexpr (!tanh_of(kNorm)) stats.rstd = inverse_root<T>(total([&](const Tile& x) { return squares(x, stats.mean, at); }), a);
  for (at.from = 0; at.from < end; at.from += Tile::covered()) {
    const Input<T, Tile, kNorm> input(a, at);
    const Vectors<W, Tile, kNorm> shared(a, at);
    output<T, W, kNorm>(a, input.get(a, at), shared, stats, at);
  }
  keep<kNorm>(a, stats, at.row);
}

}  // namespace

LIGER_REGISTER(norm_forward, [](const NormForward& a, Stream s) {
  dispatch_args(a, [&]<class T, class W, Norm kOne>() {
    constexpr Norm kNorm = kOne == Norm::Each ? Norm::Modulated : kOne;  // which are one here
    const Memory memory{{a.x, a.residual, (const void*)a.s, (const void*)a.y}, {a.w, a.b, a.scale, a.shift}};
    constexpr int kVec = 16 / sizeof(T), kPieces = 4;
    // A second matrix fills the registers of a longer row's threads with loads; where there is one alone, shared memory keeps more on their way.
    const int most = kNorm == Norm::Added ? 512 : 8192 / kItems<T, W>;
    if (dispatch_tile<T, kItems<T, W>, 16, false>(a.cols, {.few = 128, .most = most}, memory, [&]<class Tile>(Tiling t) {
          launch(forward_kernel<T, W, Tile, kNorm>, Rows<Tile>::grid(t, a.rows), s, a);
        }))
      return;
    if (dispatch_tile<T, kVec * kPieces, 0, true>(a.cols, {.few = 512, .most = 512}, memory, [&]<class Tile>(Tiling t) {
          using In = Piece<T, Tile::kFit>;
          const int bytes = Ring<T, In, kNorm == Norm::Added ? 2 : 1, kPieces>::shared_bytes(t);
          if (bytes > shared_bytes_of_block()) return false;
          // As many rows at once as fit on the device, then as few as take no more turns.
          const int64_t blocks = std::min(shared_bytes() / (bytes + 2048), 65536 / (kWideRegisters * int(t.threads.x)));
          const int64_t most = std::max<int64_t>(1, blocks * multiprocessors(current_device()) * (t.cluster > 2 ? 15 : 16) / (16 * t.cluster)), turns = (a.rows + most - 1) / most;
          launch(forward_wide_kernel<T, W, In, kNorm, kPieces>, t.grid((a.rows + turns - 1) / turns, bytes), s, a);
          return true;
        }))
      return;
    dispatch_walk<T, 16>(a.cols, memory, [&]<class Tile>(Tiling t) { launch(forward_long_kernel<T, W, Tile, kNorm>, t.grid(a.rows), s, a); });
  });
});

}  // namespace liger::cuda::norm
