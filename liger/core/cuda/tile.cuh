#pragma once
#include <algorithm>
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

/// How a row meets the threads that hold it.
enum class Fit : int8_t {
  Whole,    // every row begins at a 16-byte boundary and ends at one
  Spread,   // as Whole, in the registers of all blocks of a cluster
  Peeled,   // rows begin anywhere: the first thread's pack begins at the boundary before the row
};

/// Where a piece of a row lies: from column `from` on in row `row` of [rows, cols]; nothing where row is not below rows. shift says how
/// many elements of the first pack come before the row, for Peeled tiles.
struct Place {
  int64_t row, rows, cols;
  int shift = 0;
  int64_t from = 0;
  /// The same columns of a vector that all rows share.
  __device__ Place vector(bool present) const { return {0, present ? 1 : 0, cols, shift, from}; }
  /// The first column that counts: those of the first pack that come before `from` belong to it, where they are the row's.
  __device__ int first() const { return from > 0 ? -shift : 0; }
};

/// How many elements of T lie between the 16-byte boundary before p and p.
template <class T>
__host__ __device__ inline int misalignment(const void* p) { return int(reinterpret_cast<uintptr_t>(p) % 16 / sizeof(T)); }

/// A row held in registers by threadIdx.x, kItems floats a thread; columns past the end are 0.
template <int kItems_, int kWidth_, Fit kFit_ = Fit::Whole>
struct Tile {
  static constexpr int kItems = kItems_, kWidth = kWidth_;
  static constexpr Fit kFit = kFit_;
  static constexpr bool kSpread = kFit == Fit::Spread;
  float v[kItems] = {};

  __device__ static int column(int i, const Place& at) {
    const int c = (i / kWidth * int(blockDim.x) + int(threadIdx.x)) * kWidth + i % kWidth;
    if (kSpread) return c + cluster_rank() * int(blockDim.x) * kItems;
    return kFit == Fit::Peeled ? c - at.shift : c;
  }

  /// How many columns one pass covers, and which of the grid's groups of rows is this block's.
  __device__ static int covered() { return int(blockDim.x) * kItems; }
  __device__ static int64_t group() { return kSpread ? blockIdx.x / cluster_size() : blockIdx.x; }

  /// Where row `row` of a matrix lies.
  template <class T>
  __device__ static Place place(const void* matrix, int64_t row, int64_t rows, int64_t cols) {
    return {row, rows, cols, kFit == Fit::Peeled ? misalignment<T>(static_cast<const T*>(matrix) + row * cols) : 0};
  }

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

/// The kWidth elements that begin `start` elements after the first of two packs, 0 < start < kWidth.
template <class T, int kWidth>
__device__ Pack<T, kWidth> joined(const Pack<T, kWidth>& a, const Pack<T, kWidth>& b, int start) {
  constexpr bool kPairs = Pack<T, kWidth>::kPairs;
  constexpr int n = kPairs ? kWidth / 2 : kWidth;  // words of a pack
  using Word = std::remove_reference_t<decltype(a.words[0])>;
  std::remove_const_t<Word> w[2 * n];
#pragma unroll
  for (int i = 0; i < n; ++i) w[i] = a.words[i], w[n + i] = b.words[i];
#pragma unroll
  for (int by = n / 2; by > 0; by /= 2) {
    const bool move = start & (kPairs ? 2 * by : by);
#pragma unroll
    for (int i = 0; i + by < 2 * n; ++i) w[i] = move ? w[i + by] : w[i];
  }
  Pack<T, kWidth> joined;
#pragma unroll
  for (int i = 0; i < n; ++i) {
    if constexpr (kPairs) joined.words[i] = start & 1 ? w[i] >> 16 | w[i + 1] << 16 : w[i];
    else joined.words[i] = w[i];
  }
  return joined;
}

/// A tile as it lies in memory: what is fetched ahead takes no more registers than its bytes.
template <class T, class Tile>
struct Raw { Pack<T, Tile::kWidth> packs[Tile::kItems / Tile::kWidth]; };

/// The row at `at`. What is fetched ahead of its use must not be behind a branch, which would hold up what the thread does meanwhile; what
/// is needed at once had better be (measured on an H200: a fifth of a norm's backward, a tenth of its forward).
template <class T, class Tile, bool kAhead = false>
__device__ Raw<T, Tile> fetch(const void* matrix, const Place& at) {
  constexpr int kWidth = Tile::kWidth;
  using Pack = cuda::Pack<T, kWidth>;
  const T* p = static_cast<const T*>(matrix) + at.row * at.cols + at.from;
  const int n = int(at.cols - at.from);
  Raw<T, Tile> raw{};
  if (!kAhead && at.row >= at.rows) return raw;
  const bool present = !kAhead || at.row < at.rows;
  if constexpr (Tile::kFit != Fit::Peeled) {
#pragma unroll
    for (int i = 0; i < Tile::kItems; i += kWidth)
      if (const int c = Tile::column(i, at); c < n && present) raw.packs[i / kWidth] = *reinterpret_cast<const Pack*>(p + c);
    return raw;
  }
  // A pack that reaches into the neighbouring rows is read in whole where there are such rows, and masked when it is unpacked.
  const int low = -int(min(int64_t(kWidth), at.row * at.cols + at.from)), high = n + int(min(int64_t(kWidth), (at.rows - 1 - at.row) * at.cols));
  const int start = misalignment<T>(p - at.shift);  // of this matrix's row against the one that the packs are laid out for
#pragma unroll
  for (int i = 0; i < Tile::kItems; i += kWidth) {
    const int c = Tile::column(i, at);
    auto& pack = raw.packs[i / kWidth];
    const bool mine = present && c + kWidth > 0 - at.shift * (at.from > 0) && c < n;
    const bool whole = mine && start == 0 && c >= low && c + kWidth <= high;
    if (whole) pack = *reinterpret_cast<const Pack*>(p + c);
    if (whole || !mine) continue;
    if (start > 0 && sizeof(Pack) == 16 && c - start >= low && c - start + 2 * kWidth <= high) {
      const auto* packs = reinterpret_cast<const Pack*>(p + c - start);
      pack = joined(packs[0], packs[1], start);
    } else {
      float f[kWidth];
#pragma unroll
      for (int j = 0; j < kWidth; ++j) f[j] = c + j >= at.first() && c + j < n ? float(p[c + j]) : 0;
      pack = Pack::from_float(f);
    }
  }
  return raw;
}

template <class T, class Tile>
__device__ Tile unpack(const Raw<T, Tile>& raw, const Place& at) {
  constexpr int kWidth = Tile::kWidth;
  const int n = int(at.cols) - int(at.from);
  Tile t;
#pragma unroll
  for (int i = 0; i < Tile::kItems; i += kWidth) {
    raw.packs[i / kWidth].to_float(t.v + i);
    if (const int c = Tile::column(i, at); Tile::kFit == Fit::Peeled && (c < at.first() || c + kWidth > n)) {
#pragma unroll
      for (int j = 0; j < kWidth; ++j)
        if (c + j < at.first() || c + j >= n) t.v[i + j] = 0;
    }
  }
  return t;
}

template <class T, class Tile>
__device__ Tile load(const void* matrix, const Place& at) { return unpack(fetch<T, Tile>(matrix, at), at); }

template <class T, class Tile>
__device__ void store(const Tile& t, void* matrix, const Place& at) {
  constexpr int kWidth = Tile::kWidth;
  T* p = static_cast<T*>(matrix) + at.row * at.cols + at.from;
  const int n = int(at.cols) - int(at.from);
#pragma unroll
  for (int i = 0; i < Tile::kItems; i += kWidth) {
    const int c = Tile::column(i, at);
    if (at.row < at.rows && (Tile::kFit != Fit::Peeled ? c < n : misalignment<T>(p + c) == 0 && c >= at.first() && c + kWidth <= n)) {
      *reinterpret_cast<Pack<T, kWidth>*>(p + c) = Pack<T, kWidth>::from_float(t.v + i);
    } else if (Tile::kFit == Fit::Peeled && at.row < at.rows) {
#pragma unroll
      for (int j = 0; j < kWidth; ++j)
        if (c + j >= at.first() && c + j < n) p[c + j] = T(t.v[i + j]);
    }
  }
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

/// Σ over a thread's part of the row.
template <class Tile>
__device__ float sum(const Tile& t) {
  float s = 0;
#pragma unroll
  for (int i = 0; i < Tile::kItems; ++i) s += t.v[i];
  return s;
}

/// Σ (t − mean)² over a thread's part of the row.
template <class Tile>
__device__ float squares(const Tile& t, float mean, const Place& at) {
  float s = 0;
#pragma unroll
  for (int i = 0; i < Tile::kItems; ++i)
    if (const int c = Tile::column(i, at); c >= at.first() && c < at.cols - at.from) s += (t.v[i] - mean) * (t.v[i] - mean);
  return s;
}

inline bool aligned16(std::initializer_list<const void*> pointers) {
  for (auto p : pointers)
    if (reinterpret_cast<uintptr_t>(p) % 16 != 0) return false;
  return true;
}

inline constexpr int kTileThreads = 1024, kTileCluster = 8;

/// How a kernel on tiles is launched: threads.y rows a block, or `cluster` blocks a row.
struct Tiling {
  dim3 threads;
  int cluster;
  Grid grid(int64_t groups, int shared_bytes = 0) const { return {.blocks = groups * cluster, .threads = threads, .shared_bytes = shared_bytes, .cluster = cluster}; }
  int64_t groups(int64_t rows) const { return (rows + threads.y - 1) / threads.y; }
};

/// Threads of a block: about as many as short rows get, and as many as a row gets.
struct Threads { int few, most; };

/// Calls f.operator()<Tile>(tiling) where tiles of kItems a thread cover rows of `cols`, longer ones spread over a cluster if kSpread.
/// False where the rows are too long.
template <class T, int kItems, bool kSpread, class F>
bool dispatch_tile(int64_t cols, Threads block, std::initializer_list<const void*> pointers, F&& f) {
  constexpr int kVec = 16 / sizeof(T);
  const bool whole = cols % kVec == 0 && aligned16(pointers);
  const int64_t need = (cols + (whole ? 0 : kVec - 1) + kItems - 1) / kItems;
  if constexpr (kSpread) {
    if (whole && need > block.most && need <= block.most * kTileCluster && has_clusters()) {
      int cluster = 2;
      while (cluster * block.most < need) cluster *= 2;
      f.template operator()<Tile<kItems, kVec, Fit::Spread>>(Tiling{unsigned((need + cluster * 32 - 1) / (cluster * 32) * 32), cluster});
      return true;
    }
  }
  if (need > block.most) return false;
  unsigned x = 1;
  while (x < need && x < 32) x *= 2;
  if (x < need) x = unsigned(need + 31) / 32 * 32;
  // Below a warp a row needs a partner: __shfl_xor_sync wants whole warps.
  const Tiling tiling{dim3(x, std::max(1u, unsigned(block.few) / x)), 1};
  if (whole) f.template operator()<Tile<kItems, kVec>>(tiling);
  else f.template operator()<Tile<kItems, kVec, Fit::Peeled>>(tiling);
  return true;
}

/// As dispatch_tile, for kernels that walk along a row of any length, kItems a thread at once.
template <class T, int kItems, class F>
void dispatch_walk(int64_t cols, std::initializer_list<const void*> pointers, F&& f) {
  constexpr int kVec = 16 / sizeof(T);
  const Tiling tiling{unsigned(std::clamp<int64_t>(cols / (kItems * 4) / 32 * 32, 256, kTileThreads)), 1};
  if (cols % kVec == 0 && aligned16(pointers)) f.template operator()<Tile<kItems, kVec>>(tiling);
  else f.template operator()<Tile<kItems, kVec, Fit::Peeled>>(tiling);
}

}  // namespace liger::cuda
