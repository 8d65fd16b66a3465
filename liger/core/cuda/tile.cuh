#pragma once
#include <initializer_list>
#include "liger/core/cuda/dispatch.h"
#include "liger/core/cuda/reduce.cuh"

namespace liger::cuda {

/// kWidth neighbours of a row, read and written in one access, in registers of as many bytes.
template <class T, int kWidth>
struct alignas(sizeof(T) * kWidth < 16 ? sizeof(T) * kWidth : 16) Pack {
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
};

/// A row held in registers by threadIdx.x, kItems floats a thread; columns past the end are 0.
template <int kItems_, int kWidth_>
struct Tile {
  static constexpr int kItems = kItems_, kWidth = kWidth_;
  float v[kItems] = {};

  __device__ static int column(int i) { return (i / kWidth * int(blockDim.x) + int(threadIdx.x)) * kWidth + i % kWidth; }

  /// f(a, b, …) item by item.
  template <class F, class... Tiles>
  __device__ static Tile map(F f, const Tiles&... in) {
    Tile t;
#pragma unroll
    for (int i = 0; i < kItems; ++i) t.v[i] = f(in.v[i]...);
    return t;
  }

  __device__ friend Tile operator*(const Tile& a, const Tile& b) { return map([](float x, float y) { return x * y; }, a, b); }
  __device__ friend Tile operator+(const Tile& a, const Tile& b) { return map([](float x, float y) { return x + y; }, a, b); }
  __device__ friend Tile operator-(const Tile& a, const Tile& b) { return map([](float x, float y) { return x - y; }, a, b); }
  __device__ friend Tile operator*(const Tile& a, float s) { return map([s](float x) { return x * s; }, a); }
  __device__ friend Tile operator+(const Tile& a, float s) { return map([s](float x) { return x + s; }, a); }
};

/// A tile as it lies in memory: what is fetched ahead takes no more registers than its bytes.
template <class T, class Tile>
struct Raw { Pack<T, Tile::kWidth> packs[Tile::kItems / Tile::kWidth]; };

/// Row `row` of a [*, cols] matrix of T; nothing where `row` is not below `rows`.
template <class T, class Tile>
__device__ Raw<T, Tile> fetch(const void* matrix, int64_t row, int64_t rows, int64_t cols) {
  constexpr int kWidth = Tile::kWidth;
  const T* p = static_cast<const T*>(matrix) + row * cols;
  Raw<T, Tile> raw{};
#pragma unroll
  for (int i = 0; i < Tile::kItems; i += kWidth)
    if (const int c = Tile::column(i); c < cols && row < rows) raw.packs[i / kWidth] = *reinterpret_cast<const Pack<T, kWidth>*>(p + c);
  return raw;
}

template <class T, class Tile>
__device__ Tile unpack(const Raw<T, Tile>& raw) {
  Tile t;
#pragma unroll
  for (int i = 0; i < Tile::kItems; i += Tile::kWidth) raw.packs[i / Tile::kWidth].to_float(t.v + i);
  return t;
}

template <class T, class Tile>
__device__ Tile load(const void* matrix, int64_t row, int64_t rows, int64_t cols) {
  return unpack(fetch<T, Tile>(matrix, row, rows, cols));
}

template <class T, class Tile>
__device__ void store(const Tile& t, void* matrix, int64_t row, int64_t rows, int64_t cols) {
  constexpr int kWidth = Tile::kWidth;
  T* p = static_cast<T*>(matrix) + row * cols;
#pragma unroll
  for (int i = 0; i < Tile::kItems; i += kWidth)
    if (const int c = Tile::column(i); c < cols && row < rows) *reinterpret_cast<Pack<T, kWidth>*>(p + c) = Pack<T, kWidth>::from_float(t.v + i);
}

template <class T>
__device__ float round_to(float v) { return float(T(v)); }

template <class T, class Tile>
__device__ Tile round_to(const Tile& t) {
  Tile rounded;
#pragma unroll
  for (int i = 0; i < Tile::kItems; i += Tile::kWidth) Pack<T, Tile::kWidth>::from_float(t.v + i).to_float(rounded.v + i);
  return rounded;
}

/// Σ over the row, known to every thread of the row.
template <class Tile>
__device__ float row_sum(const Tile& t, RowReduce<Sum>& reduce) {
  float s = 0;
#pragma unroll
  for (int i = 0; i < Tile::kItems; ++i) s += t.v[i];
  return reduce(s);
}

inline bool aligned16(std::initializer_list<const void*> pointers) {
  for (auto p : pointers)
    if (reinterpret_cast<uintptr_t>(p) % 16 != 0) return false;
  return true;
}

inline constexpr int kTileThreads = 1024;

/// Calls f.operator()<Tile>(threads) where a tile of kItems a thread covers rows of `cols`; threads.y rows go to a block of about
/// `block` threads. Accesses take 16 bytes where all rows are aligned to them. False where the rows are too long.
template <class T, int kItems, class F>
bool dispatch_tile(int64_t cols, int block, std::initializer_list<const void*> pointers, F&& f) {
  constexpr int kVec = 16 / sizeof(T);
  const int64_t need = (cols + kItems - 1) / kItems;
  if (need > kTileThreads) return false;
  unsigned x = 1;
  while (x < need && x < 32) x *= 2;
  if (x < need) x = unsigned(need + 31) / 32 * 32;
  // Below a warp a row needs a partner: __shfl_xor_sync wants whole warps.
  const dim3 threads(x, std::max(1u, unsigned(block) / x));
  if (cols % kVec == 0 && aligned16(pointers)) f.template operator()<Tile<kItems, kVec>>(threads);
  else f.template operator()<Tile<kItems, 1>>(threads);
  return true;
}

}  // namespace liger::cuda
