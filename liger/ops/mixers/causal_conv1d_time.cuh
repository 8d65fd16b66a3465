#pragma once
// Where tokens are neighbours in memory: a warp walks along them, each lane with the next ones.
#include "liger/ops/mixers/causal_conv1d.cuh"

namespace liger::cuda::causal_conv1d::time_last {

constexpr int kTokens = 8, kWarpTokens = kLanes * kTokens, kChannels = 2;
/// Backward's tokens of a warp that are its own: the last lane only makes dz for the lane before.
constexpr int kOwnTokens = kWarpTokens - kTokens;

template <class T, bool kWhole>
using MatrixOf = Matrix<T, kChannels, false, kWhole>;
/// A lane's tokens before its own, as packs hold them.
template <int kTaps>
constexpr int kPacked = kTaps <= 5 ? 4 : 8;

/// Where the documents of a lane's tokens begin.
struct Starts {
  int of[kTokens];

  template <bool kWhole>
  __device__ void load(const CausalConv1d& a, int64_t row, int t) {
    const int32_t* from = a.starts + row * a.time + t;
    if (kWhole && a.starts && t + kTokens <= a.time) {
#pragma unroll
      for (int k = 0; k < kTokens; k += 4) {
        const int4 four = *reinterpret_cast<const int4*>(from + k);
        of[k] = four.x, of[k + 1] = four.y, of[k + 2] = four.z, of[k + 3] = four.w;
      }
    } else {
#pragma unroll
      for (int k = 0; k < kTokens; ++k) of[k] = a.starts && t + k < a.time ? from[k] : 0;
    }
  }
  /// Whether one of the warp's tokens may reach less than kBefore tokens; t is a lane's first.
  __device__ bool edges(const CausalConv1d& a, int t, int kBefore) const {
    bool found = a.width <= kBefore || t < kBefore;
    if (a.starts) {
      unsigned latest = 0;  // that of a token in no document is larger than any other
#pragma unroll
      for (const int start : of) latest = max(latest, unsigned(start));
      found |= latest > unsigned(t - kBefore);
    }
    return __ballot_sync(~0u, found) != 0;
  }
};

/// The strips of a share, one after another.
struct Walk {
  int64_t row;
  int begin, left;
  int64_t of_x, of_dense;  // where the batch row begins in x, and in what has no gaps

  __device__ Walk(const CausalConv1d& a, const TokenStrips& strips, int64_t share, int64_t shares)
      : row(strips.row(strips.of_share(share, shares))),
        begin(int(strips.begin(strips.of_share(share, shares)))),
        left(int(strips.of_share(share + 1, shares) - strips.of_share(share, shares))) {
    find(a);
  }
  __device__ void next(const CausalConv1d& a, const TokenStrips& strips) {
    --left, begin += int(strips.tokens);
    if (begin >= strips.per_row * strips.tokens) begin = 0, ++row, find(a);
  }
  /// A lane's first token.
  __device__ int token() const { return begin + int(threadIdx.x) * kTokens; }

 private:
  __device__ void find(const CausalConv1d& a) { of_x = row * a.batch_stride, of_dense = row * a.channels * a.time; }
};

/// The tokens of a strip that a lane loads ahead.
template <class T, int kTaps, bool kWhole>
struct Tile {
  using M = MatrixOf<T, kWhole>;
  static constexpr int kBefore = kTaps - 1, kPacked = time_last::kPacked<kTaps>;
  typename M::template Packs<kPacked> before;
  typename M::template Packs<kTokens> x;
  Starts starts;

  /// x: the first batch row's.
  __device__ void load(const CausalConv1d& a, const M& x_, const Walk& walk) {
    if (walk.left <= 0) return;
    const M from = x_.further(walk.of_x);
    const int t = walk.token();
    from.template load<kPacked>(t - kPacked, int(a.time), before);
    from.template load<kTokens>(t, int(a.time), x);
    starts.load<kWhole>(a, walk.row, t);
  }
  /// x from the token −kBefore on.
  __device__ void to_float(float (*to)[kChannels]) const {
    float f[kPacked][kChannels];
    before.to_float(f);
#pragma unroll
    for (int k = 0; k < kBefore; ++k)
#pragma unroll
      for (int c = 0; c < kChannels; ++c) to[k][c] = f[kPacked - kBefore + k][c];
    x.to_float(to + kBefore);
  }
};

/// y.
/// A warp walks along the strips of a share for its channels; the next ones are loaded meanwhile. A lane
/// reads the tokens before its own, too, which the lane before it has brought to the L1 cache. The limit is memory: x
/// is read once, y written once.
template <class T, int kTaps, bool kSilu, bool kWhole, int kRows>
__global__ void __launch_bounds__(kLanes* kRows, 640 / (kLanes * kRows))
    forward_kernel(CausalConv1dForward a, TokenStrips strips, int64_t shares, unsigned across) {
  await_previous();
  constexpr int kBefore = kTaps - 1;
  const int64_t share = blockIdx.x / across, channel = (int64_t(blockIdx.x % across) * kRows + threadIdx.y) * kChannels;
  if (channel >= a.channels) return;
  using M = MatrixOf<T, kWhole>;
  const M x(a.x, a.row_stride, channel, a.channels), y(a.y, a.time, channel, a.channels);
  const Taps<kTaps, kChannels> taps(a, channel, std::type_identity<T>());
  Walk walk(a, strips, share, shares);
  Tile<T, kTaps, kWhole> next;
  next.load(a, x, walk);
#pragma unroll 1
  while (walk.left > 0) {
    const M into = y.further(walk.of_dense);
    const int t = walk.token();
    float window[kBefore + kTokens][kChannels];
    next.to_float(window);
    const Starts starts = next.starts;
    walk.next(a, strips);
    next.load(a, x, walk);
    with_edges(starts.edges(a, t, kBefore), [&](auto edges) {
      constexpr bool kEdges = decltype(edges)::value;
      int reach[kTokens];
      if constexpr (kEdges)
#pragma unroll
        for (int k = 0; k < kTokens; ++k) reach[k] = liger::reach(starts.of[k], t + k, a.width);
      float results[kTokens][kChannels];
      Packs<T, kTokens, kChannels, false> out;
      taps.template y<T, kSilu, kEdges>(window, reach, results), out.from_float(results);
      into.template store<kTokens>(t, 0, int(a.time), out);
    });
  }
}

/// dx, and a partial sum of dw and dbias.
/// As forward; a lane gets dz of the tokens after its own from the next one. The last lane has none: its tokens are
/// those of the first lane in the next strip, but for the last strip of a row. The limit is memory: x and dy are read
/// once, dx is written once.
template <class T, int kTaps, bool kSilu, bool kWhole, int kRows>
__global__ void __launch_bounds__(kLanes* kRows, (sizeof(T) == 2 && kTaps <= 5 ? 512 : 384) / (kLanes * kRows))
    backward_kernel(CausalConv1dBackward a, TokenStrips strips, unsigned across) {
  await_previous();
  constexpr int kBefore = kTaps - 1;
  const int64_t partial = blockIdx.x / across,
                channel = (int64_t(blockIdx.x % across) * kRows + threadIdx.y) * kChannels;
  const int lane = int(threadIdx.x);
  if (channel >= a.channels) return;
  using M = MatrixOf<T, kWhole>;
  const M x(a.x, a.row_stride, channel, a.channels), dy(a.dy, a.time, channel, a.channels),
      dx(a.dx, a.time, channel, a.channels);
  const Taps<kTaps, kChannels> taps(a, channel, std::type_identity<T>());
  Sums<kTaps, kChannels> sums;
  Walk walk(a, strips, partial, a.partials);
  Tile<T, kTaps, kWhole> next;
  Packs<T, kTokens, kChannels, false> next_dy;
  const auto load = [&] {
    next.load(a, x, walk);
    if (walk.left > 0) dy.further(walk.of_dense).template load<kTokens>(walk.token(), int(a.time), next_dy);
  };
  load();
#pragma unroll 1
  while (walk.left > 0) {
    const M into = dx.further(walk.of_dense);
    const int t = walk.token();
    const bool own = lane < kLanes - 1 || walk.begin + kWarpTokens >= a.time;
    float window[kBefore + kTokens][kChannels], dz[kTokens + kBefore][kChannels];
    next.to_float(window), next_dy.to_float(dz);
    const Starts starts = next.starts;
    walk.next(a, strips);
    load();
    with_edges(starts.edges(a, t, kBefore), [&](auto edges) {
      constexpr bool kEdges = decltype(edges)::value;
      int reach[kTokens + kBefore];
      if constexpr (kEdges)
#pragma unroll
        for (int k = 0; k < kTokens; ++k) reach[k] = liger::reach(starts.of[k], t + k, a.width);
      taps.template dz<T, kSilu, kEdges, kTokens>(window, reach, dz);
#pragma unroll
      for (int k = 0; k < kBefore; ++k) {
        if (kEdges) reach[kTokens + k] = __shfl_sync(~0u, reach[k], (lane + 1) % kLanes);
#pragma unroll
        for (int c = 0; c < kChannels; ++c) {
          const float after = __shfl_sync(~0u, dz[k][c], (lane + 1) % kLanes);
          dz[kTokens + k][c] = lane < kLanes - 1 ? after : 0;
        }
      }
      if (own) sums.template add<kEdges, kTokens>(window, reach, dz);
      float results[kTokens][kChannels];
      Packs<T, kTokens, kChannels, false> out;
      taps.template dx<kEdges>(dz, reach, results), out.from_float(results);
      if (own && a.dx) into.template store<kTokens>(t, 0, int(a.time), out);
    });
  }
#pragma unroll
  for (int c = 0; c < kChannels; ++c) {
    const auto write = [&](float* to, float sum) {
#pragma unroll
      for (int other = kLanes / 2; other > 0; other /= 2) sum += __shfl_xor_sync(~0u, sum, other);
      if (to && lane == 0 && channel + c < a.channels) *to = sum;
    };
    const int64_t at = partial * a.channels + channel + c;
#pragma unroll
    for (int i = 0; i < kTaps; ++i)
      if (i < a.width) write(a.dw ? a.dw + at * a.width + a.width - 1 - i : nullptr, sums.dw[i][c]);
    write(a.dbias ? a.dbias + at : nullptr, sums.dbias[c]);
  }
}

}  // namespace liger::cuda::causal_conv1d::time_last
