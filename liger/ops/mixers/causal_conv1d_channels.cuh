#pragma once
// Where channels are neighbours in memory: a thread walks along the tokens.
#include "liger/ops/mixers/causal_conv1d.cuh"

namespace liger::cuda::causal_conv1d::channels_last {

/// Four channels a thread with their taps, sums and the tokens before; where taps are many, two.
template <int kTaps>
constexpr int kChannels = kTaps <= 4 ? 4 : 2;
template <int kTaps>
constexpr int kBackwardChannels = CausalConv1dBackward::channels_of_block(kTaps) / kLanes;

/// Whether a token of a tile reaches less than the kBefore tokens before it. Lanes look at a token each.
template <int kTokens, int kTaps>
struct Edges {
  static constexpr int kBefore = kTaps - 1;
  static_assert(kBefore <= kTokens && kTokens <= kLanes);
  int next = 0;  // where the document of a lane's token of the next tile starts
  bool here = false;

  __device__ void load(const CausalConv1d& a, int64_t row, int t, int stop) {
    if (!a.starts) return;
    const int token = t + int(threadIdx.x);
    next = int(threadIdx.x) < kTokens && token < stop ? a.starts[row * a.time + token] : 0;
  }
  /// Of the tile at t, or of the one before it.
  __device__ bool take(const CausalConv1d& a, int t) {
    const bool before = here;
    here = a.width < kTaps || t < kBefore;
    // A start of a token in no document is larger than any other.
    if (a.starts) here |= __ballot_sync(~0u, unsigned(next) > unsigned(t + int(threadIdx.x) - kBefore)) != 0;
    return here || before;
  }
};

/// How far the tokens from t on reach; those outside of [0, stop) have no gradient.
template <int kTokens>
__device__ void load_reach(const CausalConv1d& a, int64_t row, int t, int stop, int (&to)[kTokens]) {
#pragma unroll
  for (int k = 0; k < kTokens; ++k) to[k] = t + k >= 0 && t + k < stop ? reach(a, row, t + k) : 0;
}

/// The tokens that a thread walks along in `x`, and the number of those it holds.
template <int kBefore, int kChannels>
__device__ void advance(float (*x)[kChannels], int tokens) {
#pragma unroll
  for (int k = 0; k < kBefore; ++k)
#pragma unroll
    for (int c = 0; c < kChannels; ++c) x[k][c] = x[k + tokens][c];
}

/// x of the tokens before a strip.
template <int kBefore, class M, int kChannels>
__device__ void load_before(const M& x, int begin, float (*to)[kChannels]) {
  typename M::template Packs<kBefore> before;
  x.template load<kBefore>(begin - kBefore, begin, before);
  before.to_float(to);
}

/// y.
/// A thread walks along a strip of tokens for its channels, and holds the tokens before; the next ones are
/// loaded meanwhile. The lanes of a warp have neighbouring channels and the same strip, so that where a document
/// begins is the same for all of them. The limit is memory: x is read once, y written once.
template <class T, int kTaps, bool kSilu, bool kWhole, int kTokens, int kRows>
__global__ void __launch_bounds__(kLanes* kRows, 640 / (kLanes * kRows))
    forward_kernel(CausalConv1dForward a, TokenStrips strips, unsigned across) {
  await_previous();
  constexpr int kBefore = kTaps - 1, kChannels = channels_last::kChannels<kTaps>;
  const int64_t strip = int64_t(blockIdx.x / across) * kRows + threadIdx.y,
                channel = int64_t(blockIdx.x % across * kLanes + threadIdx.x) * kChannels;
  if (strip >= strips.count) return;
  const int64_t row = strips.row(strip);
  const int begin = int(strips.begin(strip)), end = int(strips.end(strip));
  using M = Matrix<T, kChannels, true, kWhole>;
  const M x = M(a.x, a.row_stride, channel, a.channels).further(row * a.batch_stride),
          y = M(a.y, a.channels, channel, a.channels).further(row * a.channels * a.time);
  const Taps<kTaps, kChannels> taps(a, channel, std::type_identity<T>());
  Packs<T, kTokens, kChannels, true> next;
  Edges<kTokens, kTaps> edges_of;
  float window[kBefore + kTokens][kChannels];
  load_before<kBefore>(x, begin, window);
  x.template load<kTokens>(begin, end, next), edges_of.load(a, row, begin, end);
#pragma unroll 1
  for (int t = begin; t < end; t += kTokens) {
    next.to_float(window + kBefore);
    const bool has_edges = edges_of.take(a, t);
    x.template load<kTokens>(t + kTokens, end, next), edges_of.load(a, row, t + kTokens, end);
    with_edges(has_edges, [&](auto edges) {
      constexpr bool kEdges = decltype(edges)::value;
      int reach[kTokens];
      if constexpr (kEdges) load_reach(a, row, t, end, reach);
      float results[kTokens][kChannels];
      Packs<T, kTokens, kChannels, true> out;
      taps.template y<T, kSilu, kEdges>(window, reach, results), out.from_float(results);
      y.template store<kTokens>(t, begin, end, out);
    });
    advance<kBefore>(window, kTokens);
  }
}

/// dx, and a partial sum of dw and dbias. As forward; a block has some strips of a partial sum, which its threads walk
/// along one after another, up to kTaps − 1 tokens past their ends, whose z they compute again. The sums meet in shared
/// memory. The limit is memory: x and dy are read once, dx is written once.
template <class T, int kTaps, bool kSilu, bool kWhole, int kTokens, int kRows>
__global__ void __launch_bounds__(kLanes* kRows, CausalConv1dBackward::kThreadsAtOnce / (kLanes * kRows))
    backward_kernel(CausalConv1dBackward a, TokenStrips strips, unsigned across) {
  await_previous();
  constexpr int kBefore = kTaps - 1, kChannels = kBackwardChannels<kTaps>, kBlock = kLanes * kChannels;
  const int64_t partial = blockIdx.x / across, first = int64_t(blockIdx.x % across) * kBlock,
                channel = first + threadIdx.x * kChannels;
  const int64_t last = strips.of_share(partial + 1, a.partials);
  // As dw has them, and then dbias. A thread's own, to which it adds those of each strip: the error of a sum does not
  // grow with the number of tokens.
  __shared__ float of_rows[kRows][kBlock * (kTaps + 1)];
  for (int i = int(threadIdx.x); i < kBlock * (kTaps + 1); i += kLanes) of_rows[threadIdx.y][i] = 0;
  __syncthreads();
  const Taps<kTaps, kChannels> taps(a, channel, std::type_identity<T>());
#pragma unroll 1
  for (int64_t strip = strips.of_share(partial, a.partials) + threadIdx.y; strip < last; strip += kRows) {
    const int64_t row = strips.row(strip);
    const int begin = int(strips.begin(strip)), end = int(strips.end(strip)), stop = min(end + kBefore, int(a.time)),
              halo = begin + int(round_up(end - begin, kTokens));
    using M = Matrix<T, kChannels, true, kWhole>;
    const int64_t dense = row * a.channels * a.time;
    const M x = M(a.x, a.row_stride, channel, a.channels).further(row * a.batch_stride),
            dy = M(a.dy, a.channels, channel, a.channels).further(dense),
            dx = M(a.dx, a.channels, channel, a.channels).further(dense);
    Packs<T, kTokens, kChannels, true> next_x, next_dy;
    Edges<kTokens, kTaps> edges_of;
    Sums<kTaps, kChannels> sums;
    // x from the tile's token −kBefore on; dz of them too, as dx of a token waits for those after it.
    float window[kBefore + kTokens][kChannels], dz[kBefore + kTokens][kChannels] = {};
    const auto load = [&](int t) {
      x.template load<kTokens>(t, stop, next_x), dy.template load<kTokens>(t, stop, next_dy);
      edges_of.load(a, row, t, stop);
    };
    load_before<kBefore>(x, begin, window);
    load(begin);
#pragma unroll 1
    for (int t = begin; t < max(end + kBefore, halo + 1); t += kTokens) {
      if (t == halo) {
#pragma unroll
        for (int c = 0; c < kChannels; ++c) {
          const int mine = int(threadIdx.x) * kChannels + c;
#pragma unroll
          for (int i = 0; i < kTaps; ++i)
            if (i < a.width) of_rows[threadIdx.y][mine * a.width + a.width - 1 - i] += sums.dw[i][c];
          of_rows[threadIdx.y][kBlock * kTaps + mine] += sums.dbias[c];
        }
      }
      next_x.to_float(window + kBefore), next_dy.to_float(dz + kBefore);
      const bool has_edges = edges_of.take(a, t);
      load(t + kTokens);
      with_edges(has_edges, [&](auto edges) {
        constexpr bool kEdges = decltype(edges)::value;
        int reach[kBefore + kTokens];
        if constexpr (kEdges) load_reach(a, row, t - kBefore, stop, reach);
        taps.template dz<T, kSilu, kEdges, kTokens>(window, reach + kBefore, dz + kBefore);
        sums.template add<kEdges, kTokens>(window, reach + kBefore, dz + kBefore);
        float results[kTokens][kChannels];
        Packs<T, kTokens, kChannels, true> out;
        taps.template dx<kEdges>(dz, reach, results), out.from_float(results);
        if (a.dx) dx.template store<kTokens>(t - kBefore, begin, end, out);
      });
      advance<kBefore>(window, kTokens), advance<kBefore>(dz, kTokens);
    }
  }
  if (!a.dw && !a.dbias) return;
  __syncthreads();
  const int mine = int(threadIdx.y) * kLanes + int(threadIdx.x),
            channels = int(min(int64_t(kBlock), a.channels - first));
  const auto total = [&](float* to, int from, int per_channel) {
    if (!to) return;
    to += (partial * a.channels + first) * per_channel;
    for (int i = mine; i < channels * per_channel; i += kLanes * kRows) {
      float sum = 0;
#pragma unroll
      for (int r = 0; r < kRows; ++r) sum += of_rows[r][from + i];
      to[i] = sum;
    }
  };
  total(a.dw, 0, a.width);
  total(a.dbias, kBlock * kTaps, 1);
}

}  // namespace liger::cuda::causal_conv1d::channels_last
