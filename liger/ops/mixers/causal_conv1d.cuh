#pragma once
// What the kernels of both layouts share: packs of a matrix [tokens, channels], and the formulas on a tile of it.
#include "liger/core/cuda/dispatch.h"
#include "liger/core/cuda/math.cuh"
#include "liger/core/cuda/pack.cuh"
#include "liger/ops/mixers/causal_conv1d.h"

namespace liger::cuda::causal_conv1d {

constexpr int kLanes = CausalConv1dBackward::kLanes;

/// kTokens tokens of kChannels channels as they lie in memory: packs of neighbouring channels, or of neighbouring
/// tokens.
template <class T, int kTokens_, int kChannels_, bool kChannelsLast>
struct Packs {
  static constexpr int kTokens = kTokens_, kChannels = kChannels_;
  static constexpr int kWidth = kChannelsLast ? kChannels : std::min(kTokens, 16 / int(sizeof(T))),
                       kCount = kTokens * kChannels / kWidth, kPackTokens = kChannelsLast ? 1 : kWidth;
  using Values = Pack<T, kWidth>;
  static constexpr int token(int p, int j = 0) { return kChannelsLast ? p : p * kWidth % kTokens + j; }
  static constexpr int channel(int p, int j = 0) { return kChannelsLast ? j : p * kWidth / kTokens; }

  Values of[kCount];

  __device__ void to_float(float (*to)[kChannels]) const {
#pragma unroll
    for (int p = 0; p < kCount; ++p) {
      float f[kWidth];
      of[p].to_float(f);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) to[token(p, j)][channel(p, j)] = f[j];
    }
  }
  __device__ void from_float(const float (*values)[kChannels]) {
#pragma unroll
    for (int p = 0; p < kCount; ++p) {
      float f[kWidth];
#pragma unroll
      for (int j = 0; j < kWidth; ++j) f[j] = values[token(p, j)][channel(p, j)];
      of[p] = Values::from_float(f);
    }
  }
};

/// A matrix [tokens, channels], from a thread's first channel on. kWhole: every pack lies at a multiple of its size and
/// has all its tokens and channels or none, and steps between tokens take 31 bits.
template <class T, int kChannels, bool kChannelsLast, bool kWhole>
struct Matrix {
  template <int kTokens>
  using Packs = causal_conv1d::Packs<T, kTokens, kChannels, kChannelsLast>;

  using Element = T;
  char* first;
  std::conditional_t<kWhole, int, int64_t> token_step;  // in bytes, as the other
  int64_t channel_step;
  int channels;  // that there are, up to kChannels

  /// row_stride: from a token to the next where channels are neighbours, else from a channel to the next.
  __device__ Matrix(const void* matrix, int64_t row_stride, int64_t channel, int64_t all)
      : token_step((kChannelsLast ? row_stride : 1) * sizeof(T)),
        channel_step((kChannelsLast ? 1 : row_stride) * sizeof(T)),
        channels(int(max(int64_t(0), min(int64_t(kChannels), all - channel)))) {
    first = static_cast<char*>(const_cast<void*>(matrix)) + channel * channel_step;
  }

  __device__ T* at(int token, int channel = 0) const {
    char* p = kChannelsLast ? first + int64_t(token) * token_step : first + channel * channel_step;
    return reinterpret_cast<T*>(p) + (kChannelsLast ? channel : token);
  }
  /// The matrix of another batch row, so many elements further.
  __device__ Matrix further(int64_t elements) const {
    Matrix m = *this;
    m.first += elements * int64_t(sizeof(T));
    return m;
  }
  /// Whether the first channel of a pack is one of the matrix.
  __device__ bool has(int channel) const { return kChannelsLast ? channels > 0 : channel < channels; }

  /// The tokens from t on that are neither before 0 nor at `end` or after it; the others are 0.
  template <int kTokens>
  __device__ void load(int t, int end, Packs<kTokens>& to) const {
    using P = Packs<kTokens>;
    using Values = typename P::Values;
    if constexpr (kWhole) {
      if (t >= 0 && t + kTokens <= end && channels == kChannels) {
#pragma unroll
        for (int p = 0; p < P::kCount; ++p) to.of[p] = Values::read(at(t + P::token(p), P::channel(p)));
      } else {
#pragma unroll
        for (int p = 0; p < P::kCount; ++p) {
          const int token = t + P::token(p);
          to.of[p] = Values::filled(T(0.f));
          if (token >= 0 && token < end && has(P::channel(p))) to.of[p] = Values::read(at(token, P::channel(p)));
        }
      }
    } else {
#pragma unroll
      for (int p = 0; p < P::kCount; ++p) {
        float f[P::kWidth];
#pragma unroll
        for (int j = 0; j < P::kWidth; ++j) {
          const int token = t + P::token(p, j), channel = P::channel(p, j);
          f[j] = token >= 0 && token < end && channel < channels ? float(*at(token, channel)) : 0;
        }
        to.of[p] = Values::from_float(f);
      }
    }
  }

  /// The tokens from t on, of which [begin, end) are wanted.
  template <int kTokens>
  __device__ void store(int t, int begin, int end, const Packs<kTokens>& from) const {
    using P = Packs<kTokens>;
    if constexpr (kWhole) {
      if (t >= begin && t + kTokens <= end && channels == kChannels) {
#pragma unroll
        for (int p = 0; p < P::kCount; ++p) from.of[p].write(at(t + P::token(p), P::channel(p)));
      } else {
#pragma unroll
        for (int p = 0; p < P::kCount; ++p) {
          const int token = t + P::token(p);
          if (token >= begin && token < end && has(P::channel(p))) from.of[p].write(at(token, P::channel(p)));
        }
      }
    } else {
      float values[kTokens][kChannels];
      from.to_float(values);
#pragma unroll
      for (int k = 0; k < kTokens; ++k)
#pragma unroll
        for (int c = 0; c < kChannels; ++c)
          if (t + k >= begin && t + k < end && c < channels) *at(t + k, c) = T(values[k][c]);
    }
  }
};

/// The taps of a thread's channels, w[i] that of the token i before, and their bias. In what follows, x has the
/// kTaps − 1 tokens before a tile and then the tile's. `reach` says how far each token of a tile reaches; it is read
/// only where that is not kTaps − 1 for all of them (kEdges).
template <int kTaps, int kChannels>
struct Taps {
  static constexpr int kBefore = kTaps - 1;
  float w[kTaps][kChannels] = {}, bias[kChannels] = {};

  /// T: x's type, which w and bias have unless they are float.
  template <class T>
  __device__ Taps(const CausalConv1d& a, int64_t channel, std::type_identity<T>) {
    a.w.dtype == DType::F32 ? load<float>(a, channel) : load<T>(a, channel);
    if (a.bias.of) a.bias.dtype == DType::F32 ? load_bias<float>(a, channel) : load_bias<T>(a, channel);
  }

  /// z of token k of a tile.
  template <bool kEdges>
  __device__ void sum(const float (*x)[kChannels], int k, int reach, float (&z)[kChannels]) const {
#pragma unroll
    for (int c = 0; c < kChannels; ++c) z[c] = bias[c];
#pragma unroll
    for (int i = kBefore; i >= 0; --i)
      if (!kEdges || i <= reach) {
#pragma unroll
        for (int c = 0; c < kChannels; ++c) z[c] = fmaf(w[i][c], x[kBefore + k - i][c], z[c]);
      }
  }

  template <class T, bool kSilu, bool kEdges, int kTokens>
  __device__ void y(const float (*x)[kChannels], const int* reach, float (&y)[kTokens][kChannels]) const {
#pragma unroll
    for (int k = 0; k < kTokens; ++k) {
      sum<kEdges>(x, k, kEdges ? reach[k] : 0, y[k]);
#pragma unroll
      for (float& v : y[k]) v = kEdges && reach[k] < 0 ? 0 : kSilu ? SiLU::value<Math<T>>(v) : v;
    }
  }

  /// dz, in the place of dy.
  template <class T, bool kSilu, bool kEdges, int kTokens>
  __device__ void dz(const float (*x)[kChannels], const int* reach, float (*d)[kChannels]) const {
#pragma unroll
    for (int k = 0; k < kTokens; ++k) {
      if constexpr (kSilu) {
        float z[kChannels];
        sum<kEdges>(x, k, kEdges ? reach[k] : 0, z);
#pragma unroll
        for (int c = 0; c < kChannels; ++c) d[k][c] *= SiLU::derivative<Math<T>>(z[c]);
      }
      if (kEdges && reach[k] < 0)
#pragma unroll
        for (float& v : d[k]) v = 0;
    }
  }

  /// dx of the first kTokens tokens of dz, which goes kTaps − 1 tokens further.
  template <bool kEdges, int kTokens>
  __device__ void dx(const float (*dz)[kChannels], const int* reach, float (&dx)[kTokens][kChannels]) const {
#pragma unroll
    for (int k = 0; k < kTokens; ++k)
#pragma unroll
      for (int i = 0; i < kTaps; ++i)
#pragma unroll
        for (int c = 0; c < kChannels; ++c) {
          if (i == 0) dx[k][c] = w[0][c] * dz[k][c];
          else if (!kEdges || i <= reach[k + i]) dx[k][c] = fmaf(w[i][c], dz[k + i][c], dx[k][c]);
        }
  }

 private:
  // All loads are issued before the first result is used: what is not there is read from a place that is, and is 0.
  template <class W>
  __device__ void load(const CausalConv1d& a, int64_t channel) {
#pragma unroll
    for (int c = 0; c < kChannels; ++c) {
      const W* of = static_cast<const W*>(a.w.of) + min(channel + c, a.channels - 1) * a.width + a.width - 1;
#pragma unroll
      for (int i = 0; i < kTaps; ++i) w[i][c] = float(of[-min(i, a.width - 1)]);
    }
#pragma unroll
    for (int c = 0; c < kChannels; ++c)
#pragma unroll
      for (int i = 0; i < kTaps; ++i)
        if (i >= a.width || channel + c >= a.channels) w[i][c] = 0;
  }
  template <class W>
  __device__ void load_bias(const CausalConv1d& a, int64_t channel) {
#pragma unroll
    for (int c = 0; c < kChannels; ++c)
      bias[c] = float(static_cast<const W*>(a.bias.of)[min(channel + c, a.channels - 1)]);
  }
};

/// A thread's sums of dw and dbias.
template <int kTaps, int kChannels>
struct Sums {
  float dw[kTaps][kChannels] = {}, dbias[kChannels] = {};

  template <bool kEdges, int kTokens>
  __device__ void add(const float (*x)[kChannels], const int* reach, const float (*dz)[kChannels]) {
#pragma unroll
    for (int k = 0; k < kTokens; ++k) {
#pragma unroll
      for (int c = 0; c < kChannels; ++c) dbias[c] += dz[k][c];
#pragma unroll
      for (int i = 0; i < kTaps; ++i)
        if (!kEdges || i <= reach[k]) {
#pragma unroll
          for (int c = 0; c < kChannels; ++c) dw[i][c] = fmaf(dz[k][c], x[kTaps - 1 + k - i][c], dw[i][c]);
        }
    }
  }
};

/// f(edges), as a constant. All lanes of a warp have the same.
template <class F>
__device__ void with_edges(bool edges, F f) {
  if (edges) f(std::true_type());
  else f(std::false_type());
}

}  // namespace liger::cuda::causal_conv1d
