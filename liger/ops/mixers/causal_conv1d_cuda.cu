#include "liger/ops/mixers/causal_conv1d.h"
#include "liger/core/cuda/dispatch.h"
#include "liger/core/cuda/math.cuh"
#include "liger/core/cuda/pack.cuh"

namespace liger::cuda::causal_conv1d {
namespace {

constexpr int kLanes = 32;

/// What a thread holds at once of a matrix [tokens, channels] of one batch row: kTokens tokens of kChannels channels,
/// in packs of neighbouring channels, or, of one channel, of neighbouring tokens.
template <class T, int kChannels_, int kTokens_, bool kChannelsLast_>
struct Tile {
  static constexpr int kChannels = kChannels_, kTokens = kTokens_;
  static constexpr bool kChannelsLast = kChannelsLast_;
  static constexpr int kWidth = kChannelsLast ? kChannels : 16 / int(sizeof(T)), kPacks = kTokens * kChannels / kWidth,
                       kPackTokens = kTokens / kPacks;
  static_assert(kChannelsLast || kChannels == 1);
  using Values = Pack<T, kWidth>;
  /// Results of a token may come so many tokens later: those of tiles begin where a pack does.
  static constexpr int delay(int taps) { return kChannelsLast ? taps - 1 : kTokens; }

  T* first;      // of token 0
  int64_t step;  // from a token to the next, where channels are neighbours
  int channels;  // that there are
  bool whole;    // every pack lies at a multiple of its size

  __device__ Tile(const void* matrix, int64_t batch_stride, int64_t row_stride, int64_t row, int64_t channel,
                  int64_t all, bool whole)
      : first(static_cast<T*>(const_cast<void*>(matrix)) + row * batch_stride +
              channel * (kChannelsLast ? 1 : row_stride)),
        step(kChannelsLast ? row_stride : 1),
        channels(int(min(int64_t(kChannels), all - channel))),
        whole(whole) {}

  /// The tokens from t on that come before `end`; the others are 0.
  __device__ void load(int t, int end, Values (&packs)[kPacks]) const {
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const int token = t + p * kPackTokens, n = kChannelsLast ? (token < end) * channels : end - token;
      const T* from = first + token * step;
      if (whole && n >= kWidth) {
        packs[p] = Values::read(from);
      } else {
        float f[kWidth];
#pragma unroll
        for (int j = 0; j < kWidth; ++j) f[j] = j < n ? float(from[j]) : 0;
        packs[p] = Values::from_float(f);
      }
    }
  }

  __device__ static void to_float(const Values (&packs)[kPacks], float (*to)[kChannels]) {
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      float f[kWidth];
      packs[p].to_float(f);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) to[p * kPackTokens + (kChannelsLast ? 0 : j)][kChannelsLast ? j : 0] = f[j];
    }
  }

  /// One token, which there is.
  __device__ void load_token(int t, float (&to)[kChannels]) const {
    const T* from = first + t * step;
    if (kChannelsLast && whole) return Values::read(from).to_float(to);
#pragma unroll
    for (int j = 0; j < kChannels; ++j) to[j] = j < channels ? float(from[j]) : 0;
  }

  /// Pack p of the tokens from t on, of which [begin, end) are wanted.
  __device__ void store(int p, int t, int begin, int end, const float (*values)[kChannels]) const {
    const int token = t + p * kPackTokens;
    const int from = kChannelsLast ? 0 : max(0, begin - token),
              to = kChannelsLast ? (token >= begin && token < end) * channels : min(kWidth, end - token);
    float f[kWidth];
#pragma unroll
    for (int j = 0; j < kWidth; ++j) f[j] = values[kChannelsLast ? 0 : j][kChannelsLast ? j : 0];
    T* into = first + token * step;
    if (whole && from == 0 && to == kWidth) {
      Values::from_float(f).write(into);
    } else {
#pragma unroll
      for (int j = 0; j < kWidth; ++j)
        if (j >= from && j < to) into[j] = T(f[j]);
    }
  }
};

/// The taps of a thread's channels, w[i] that of the token i before, and their bias.
template <int kTaps, int kChannels>
struct Taps {
  float w[kTaps][kChannels] = {}, bias[kChannels] = {};

  __device__ Taps(const CausalConv1d& a, int64_t channel, int channels) {
#pragma unroll
    for (int c = 0; c < kChannels; ++c) {
      if (c >= channels) continue;
      if (a.bias.of) bias[c] = number(a.bias, channel + c);
#pragma unroll
      for (int i = 0; i < kTaps; ++i)
        if (i < a.width) w[i][c] = number(a.w, (channel + c) * a.width + a.width - 1 - i);
    }
  }

  /// z of a token: `at` is its place among the tokens before and after it.
  __device__ void sum(const float (*at)[kChannels], int reach, float (&z)[kChannels]) const {
#pragma unroll
    for (int c = 0; c < kChannels; ++c) z[c] = bias[c];
#pragma unroll
    for (int i = kTaps - 1; i >= 0; --i)
      if (i <= reach) {
#pragma unroll
        for (int c = 0; c < kChannels; ++c) z[c] = fmaf(w[i][c], (at - i)[0][c], z[c]);
      }
  }
};

/// The tokens that a thread is at, with the kTaps − 1 before them.
template <class T, class Tile, int kTaps>
struct Window {
  static constexpr int kTokens = Tile::kTokens, kChannels = Tile::kChannels;
  float x[kTaps - 1 + kTokens][kChannels];
  int reach[kTokens];

  __device__ Window(const CausalConv1d& a, const Tile& tile, int begin) {
#pragma unroll
    for (int i = 1; i < kTaps; ++i) {
      float (&to)[kChannels] = x[kTaps - 1 - i];
      if (i < a.width && begin >= i) {
        tile.load_token(begin - i, to);
      } else {
#pragma unroll
        for (float& v : to) v = 0;
      }
    }
  }

  __device__ const float (*at(int k) const)[kChannels] { return x + kTaps - 1 + k; }

  __device__ void take(const typename Tile::Values (&packs)[Tile::kPacks], const int (&reach_)[kTokens]) {
    Tile::to_float(packs, x + kTaps - 1);
#pragma unroll
    for (int k = 0; k < kTokens; ++k) reach[k] = reach_[k];
  }

  __device__ void advance() {
#pragma unroll
    for (int i = 0; i < kTaps - 1; ++i)
#pragma unroll
      for (int c = 0; c < kChannels; ++c) x[i][c] = x[i + kTokens][c];
  }
};

/// How far the tokens from t on reach that come before `end`; −1 for the others.
template <int kTokens>
__device__ void load_reach(const CausalConv1d& a, int64_t row, int t, int end, int (&to)[kTokens]) {
#pragma unroll
  for (int k = 0; k < kTokens; ++k) to[k] = t + k < end ? reach(a, row, t + k) : -1;
}

/// y.
/// A thread walks along a strip of tokens for its channels, and holds the tokens before; those that come next are
/// under way meanwhile. The lanes of a warp have neighbouring channels and the same strip, so that where a document
/// begins is the same for all of them. The limit is memory: x is read once, y written once.
template <class T, class Tile, int kTaps>
__global__ void __launch_bounds__(256, 2)
    forward_kernel(CausalConv1dForward a, TokenStrips strips, unsigned across, bool whole) {
  await_previous();
  constexpr int kTokens = Tile::kTokens, kChannels = Tile::kChannels;
  const int64_t strip = int64_t(blockIdx.x / across) * blockDim.y + threadIdx.y,
                channel = int64_t(blockIdx.x % across * kLanes + threadIdx.x) * kChannels;
  if (strip >= strips.count || channel >= a.channels) return;
  const int64_t row = strips.row(strip);
  const int begin = int(strips.begin(strip)), end = int(strips.end(strip));
  const int64_t out_row = Tile::kChannelsLast ? a.channels : a.time;
  const Tile x(a.x, a.batch_stride, a.row_stride, row, channel, a.channels, whole),
      y(a.y, a.channels * a.time, out_row, row, channel, a.channels, whole);
  const Taps<kTaps, kChannels> taps(a, channel, x.channels);
  Window<T, Tile, kTaps> window(a, x, begin);
  typename Tile::Values next[Tile::kPacks];
  int reach[kTokens];
  x.load(begin, end, next), load_reach(a, row, begin, end, reach);
#pragma unroll 1
  for (int t = begin; t < end; t += kTokens) {
    window.take(next, reach);
    x.load(t + kTokens, end, next), load_reach(a, row, t + kTokens, end, reach);
#pragma unroll
    for (int p = 0; p < Tile::kPacks; ++p) {
      float out[Tile::kPackTokens][kChannels];
#pragma unroll
      for (int j = 0; j < Tile::kPackTokens; ++j) {
        const int k = p * Tile::kPackTokens + j;
        taps.sum(window.at(k), window.reach[k], out[j]);
#pragma unroll
        for (float& v : out[j]) v = window.reach[k] < 0 ? 0 : a.silu ? SiLU::value<Math<T>>(v) : v;
      }
      y.store(p, t, begin, end, out);
    }
    window.advance();
  }
}

/// dx, and a partial sum of dw and dbias.
/// As forward; a block has some strips of a partial sum, which its threads walk along one after another, up to
/// kTaps − 1 tokens past their ends, whose z they compute again. The sums meet in shared memory. The limit is memory: x
/// and dy are read once, dx is written once.
template <class T, class Tile, int kTaps, int kRows>
__global__ void __launch_bounds__(kLanes* kRows, 384 / (kLanes * kRows))
    backward_kernel(CausalConv1dBackward a, TokenStrips strips, unsigned across, bool whole) {
  await_previous();
  constexpr int kTokens = Tile::kTokens, kChannels = Tile::kChannels, kDelay = Tile::delay(kTaps),
                kBlock = kLanes * kChannels;
  const int64_t partial = blockIdx.x / across, first = int64_t(blockIdx.x % across) * kBlock,
                channel = first + threadIdx.x * kChannels;
  const int64_t each = ceil_div(strips.count, a.partials), last = min(strips.count, (partial + 1) * each);
  const int64_t out_row = Tile::kChannelsLast ? a.channels : a.time;
  // As dw has them, and then dbias. A thread's own, to which it adds those of each strip: the error of a sum does not
  // grow with the number of tokens.
  __shared__ float of_rows[kRows][kBlock * (kTaps + 1)];
  for (int i = int(threadIdx.x); i < kBlock * (kTaps + 1); i += kLanes) of_rows[threadIdx.y][i] = 0;
  __syncthreads();
  if (channel < a.channels) {
    const Taps<kTaps, kChannels> taps(a, channel, int(min(int64_t(kChannels), a.channels - channel)));
#pragma unroll 1
    for (int64_t strip = partial * each + threadIdx.y; strip < last; strip += kRows) {
      const int64_t row = strips.row(strip);
      const int begin = int(strips.begin(strip)), end = int(strips.end(strip)),
                stop = min(end + a.width - 1, int(a.time));
      const Tile x(a.x, a.batch_stride, a.row_stride, row, channel, a.channels, whole),
          dy(a.dy, a.channels * a.time, out_row, row, channel, a.channels, whole),
          dx(a.dx, a.channels * a.time, out_row, row, channel, a.channels, whole);
      Window<T, Tile, kTaps> window(a, x, begin);
      float sums[kDelay + kTokens][kChannels] = {};  // of dx, from token t − kDelay on
      float dw[kTaps][kChannels] = {}, dbias[kChannels] = {};
      typename Tile::Values next_x[Tile::kPacks], next_dy[Tile::kPacks];
      int reach[kTokens];
      const auto load = [&](int t) {
        x.load(t, stop, next_x), dy.load(t, stop, next_dy), load_reach(a, row, t, stop, reach);
      };
      load(begin);
#pragma unroll 1
      for (int t = begin; t < end + kDelay; t += kTokens) {
        window.take(next_x, reach);
        float dz[kTokens][kChannels];
        Tile::to_float(next_dy, dz);
        load(t + kTokens);
#pragma unroll
        for (int k = 0; k < kTokens; ++k) {
          const int reach_k = window.reach[k];
          if (reach_k < 0) continue;
          if (a.silu) {
            float z[kChannels];
            taps.sum(window.at(k), reach_k, z);
#pragma unroll
            for (int c = 0; c < kChannels; ++c) dz[k][c] *= SiLU::derivative<Math<T>>(z[c]);
          }
#pragma unroll
          for (int i = 0; i < kTaps; ++i)
            if (i <= reach_k) {
#pragma unroll
              for (int c = 0; c < kChannels; ++c)
                sums[kDelay + k - i][c] = fmaf(taps.w[i][c], dz[k][c], sums[kDelay + k - i][c]);
            }
          if (t + k >= end) continue;
#pragma unroll
          for (int c = 0; c < kChannels; ++c) dbias[c] += dz[k][c];
          if (!a.dw) continue;
#pragma unroll
          for (int i = 0; i < kTaps; ++i)
            if (i <= reach_k) {
#pragma unroll
              for (int c = 0; c < kChannels; ++c) dw[i][c] = fmaf(dz[k][c], (window.at(k) - i)[0][c], dw[i][c]);
            }
        }
        if (a.dx)
#pragma unroll
          for (int p = 0; p < Tile::kPacks; ++p) dx.store(p, t - kDelay, begin, end, sums + p * Tile::kPackTokens);
        window.advance();
#pragma unroll
        for (int j = 0; j < kDelay + kTokens; ++j)
#pragma unroll
          for (int c = 0; c < kChannels; ++c) sums[j][c] = j < kDelay ? sums[j + kTokens][c] : 0;
      }
#pragma unroll
      for (int c = 0; c < kChannels; ++c) {
        const int mine = int(threadIdx.x) * kChannels + c;
#pragma unroll
        for (int i = 0; i < kTaps; ++i)
          if (i < a.width) of_rows[threadIdx.y][mine * a.width + a.width - 1 - i] += dw[i][c];
        of_rows[threadIdx.y][kBlock * kTaps + mine] += dbias[c];
      }
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

/// Strips of as many tokens as leave `wanted` of them: the longer, the fewer tokens are read by two threads.
TokenStrips strips_of(const CausalConv1d& a, int64_t most, int64_t wanted) {
  while (most > 8 && a.batch * ceil_div(a.time, most) < wanted) most /= 2;
  return TokenStrips(a, most);
}

/// Whether all matrices have whole packs of kWidth.
template <class Tile>
bool whole_packs(const CausalConv1d& a, std::initializer_list<const void*> pointers) {
  constexpr int64_t kWidth = Tile::kWidth, kBytes = sizeof(typename Tile::Values);
  for (const void* p : pointers)
    if (reinterpret_cast<uintptr_t>(p) % kBytes != 0) return false;
  return (Tile::kChannelsLast ? a.channels : a.time) % kWidth == 0 && a.row_stride % kWidth == 0 &&
         a.batch_stride % kWidth == 0;
}

/// f.operator()<T, Tile, kTaps>() with tiles of which a thread has up to kBytes. Few channels: a thread holds each
/// one's taps and the tokens before, so that more tokens are under way in as many registers.
template <int kBytes, class F>
void dispatch_tiles(const CausalConv1d& a, F f) {
  dispatch(a.dtype, [&]<class T>() {
    const auto of_taps = [&]<int kTaps>(std::integral_constant<int, kTaps>) {
      constexpr int kChannels = 16 / kTaps, kTokens = std::min(8, kBytes / (kChannels * int(sizeof(T))));
      if (a.channels_last) f.template operator()<T, Tile<T, kChannels, kTokens, true>, kTaps>();
      else f.template operator()<T, Tile<T, 1, 8, false>, kTaps>();
    };
    if (a.width <= 4) of_taps(std::integral_constant<int, 4>());
    else of_taps(std::integral_constant<int, CausalConv1d::kMostTaps>());
  });
}

}  // namespace

LIGER_REGISTER(causal_conv1d_forward, [](const CausalConv1dForward& a, Stream s) {
  dispatch_tiles<32>(a, [&]<class T, class Tile, int kTaps>() {
    constexpr int kRows = 8;
    const int64_t across = ceil_div(a.channels, int64_t(kLanes * Tile::kChannels));
    const TokenStrips strips = strips_of(a, 32, ceil_div(4 * multiprocessors(current_device()), across) * kRows);
    const Grid grid{.blocks = across * ceil_div(strips.count, kRows), .threads = dim3(kLanes, kRows)};
    launch(forward_kernel<T, Tile, kTaps>, grid, s, a, strips, unsigned(across), whole_packs<Tile>(a, {a.x, a.y}));
  });
});
LIGER_REGISTER(causal_conv1d_backward, [](const CausalConv1dBackward& a, Stream s) {
  dispatch_tiles<32>(a, [&]<class T, class Tile, int kTaps>() {
    constexpr int kRows = 4;
    const int64_t across = ceil_div(a.channels, int64_t(kLanes * Tile::kChannels));
    const TokenStrips strips = strips_of(a, 64, a.partials * kRows);
    const Grid grid{.blocks = across * a.partials, .threads = dim3(kLanes, kRows)};
    launch(backward_kernel<T, Tile, kTaps, kRows>, grid, s, a, strips, unsigned(across),
           whole_packs<Tile>(a, {a.x, a.dy, a.dx}));
  });
});

}  // namespace liger::cuda::causal_conv1d
