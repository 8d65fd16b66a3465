#pragma once
#include "liger/core/cuda/launch.h"

namespace liger::cuda {

/// kWidth neighbours of a row, read and written in one access, in registers of as many bytes.
template <class T, int kWidth_>
struct alignas(sizeof(T) * kWidth_ < 16 ? sizeof(T) * kWidth_ : 16) Pack {
  static constexpr int kWidth = kWidth_;
  static constexpr bool kPairs = sizeof(T) == 2 && kWidth > 1;
  std::conditional_t<kPairs, unsigned, T> words[kPairs ? kWidth / 2 : kWidth];

  __device__ void to_float(float* f) const {
    if constexpr (kPairs) {
#pragma unroll
      for (int j = 0; j < kWidth; j += 2) {
        const float2 pair = to_floats<T>(words[j / 2]);
        f[j] = pair.x, f[j + 1] = pair.y;
      }
    } else {
#pragma unroll
      for (int j = 0; j < kWidth; ++j) f[j] = float(words[j]);
    }
  }

  __device__ static Pack from_float(const float* f) {
    Pack p;
    if constexpr (kPairs) {
#pragma unroll
      for (int j = 0; j < kWidth; j += 2) p.words[j / 2] = to_word<T>(f[j], f[j + 1]);
    } else {
#pragma unroll
      for (int j = 0; j < kWidth; ++j) p.words[j] = T(f[j]);
    }
    return p;
  }

  __device__ static Pack filled(T v) {
    float f[kWidth];
    for (float& each : f) each = float(v);
    return from_float(f);
  }

  __device__ static Pack read(const void* p) { return *static_cast<const Pack*>(p); }

  /// To global memory.
  __device__ void write(void* p) const {
    if constexpr (sizeof(Pack) % 16 != 0) *static_cast<Pack*>(p) = *this;
    else
#pragma unroll
      for (int i = 0; i < int(sizeof(Pack) / 16); ++i)
        store16(static_cast<uint4*>(p) + i,
                {bits(words[4 * i]), bits(words[4 * i + 1]), bits(words[4 * i + 2]), bits(words[4 * i + 3])});
  }

  /// The product of each pair, rounded once.
  __device__ friend Pack operator*(const Pack& a, const Pack& b) {
    static_assert(kPairs);
    Pack p;
#pragma unroll
    for (int j = 0; j < kWidth / 2; ++j) p.words[j] = multiply_words<T>(a.words[j], b.words[j]);
    return p;
  }

 private:
  __device__ static unsigned bits(unsigned word) { return word; }
  __device__ static unsigned bits(float word) { return __float_as_uint(word); }
};

}  // namespace liger::cuda
