#pragma once
// Neighbouring elements of a row: as they lie in memory, and as floats.
#include <initializer_list>
#include "liger/core/cuda/launch.h"

namespace liger::cuda {

inline bool aligned16(std::initializer_list<const void*> pointers) {
  for (auto p : pointers)
    if (reinterpret_cast<uintptr_t>(p) % 16 != 0) return false;
  return true;
}

/// How many elements of T lie between the 16-byte boundary before p and p.
template <class T>
__host__ __device__ inline int misalignment(const void* p) {
  return int(reinterpret_cast<uintptr_t>(p) % 16 / sizeof(T));
}

/// f(i) for each i below n.
template <int n, class F>
__device__ void unrolled(F f) {
#pragma unroll
  for (int i = 0; i < n; ++i) f(i);
}

template <class T>
__device__ float round_to(float v) {
  return float(T(v));
}

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
    Pack p;
    if constexpr (kPairs) {
#pragma unroll
      for (int j = 0; j < kWidth / 2; ++j) p.words[j] = multiply_words<T>(a.words[j], b.words[j]);
    } else {
#pragma unroll
      for (int j = 0; j < kWidth; ++j) p.words[j] = T(float(a.words[j]) * float(b.words[j]));
    }
    return p;
  }

 private:
  __device__ static unsigned bits(unsigned word) { return word; }
  __device__ static unsigned bits(float word) { return __float_as_uint(word); }
};

/// kWidth floats of a thread, with arithmetic element by element.
template <int kWidth_>
struct Vec {
  static constexpr int kWidth = kWidth_;
  float v[kWidth] = {};

  /// f(a, b, …) element by element.
  template <class F, class... Vecs>
  __device__ static Vec map(F f, const Vecs&... in) {
    Vec t;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) t.v[i] = f(in.v[i]...);
    return t;
  }

  __device__ friend Vec operator*(const Vec& a, const Vec& b) {
    return map([](float x, float y) { return x * y; }, a, b);
  }
  __device__ friend Vec operator+(const Vec& a, const Vec& b) {
    return map([](float x, float y) { return x + y; }, a, b);
  }
  __device__ friend Vec operator*(const Vec& a, float s) {
    return map([s](float x) { return x * s; }, a);
  }
  __device__ friend Vec operator+(const Vec& a, float s) {
    return map([s](float x) { return x + s; }, a);
  }
};

template <class T, int kWidth>
__device__ Vec<kWidth> to_vec(const Pack<T, kWidth>& pack) {
  Vec<kWidth> t;
  pack.to_float(t.v);
  return t;
}

template <class T, int kWidth>
__device__ Pack<T, kWidth> packed(const Vec<kWidth>& t) {
  return Pack<T, kWidth>::from_float(t.v);
}

template <class T, int kWidth>
__device__ Vec<kWidth> round_to(const Vec<kWidth>& t) {
  return to_vec(packed<T>(t));
}

template <int kWidth>
__device__ float sum(const Vec<kWidth>& t) {
  float s = 0;
#pragma unroll
  for (int i = 0; i < kWidth; ++i) s += t.v[i];
  return s;
}

}  // namespace liger::cuda
