#pragma once
#include <algorithm>
#include <climits>
#include <initializer_list>
#include <numeric>
#include "liger/core/cuda/async_copy.cuh"
#include "liger/core/cuda/dispatch.h"
#include "liger/core/cuda/pack.cuh"
#include "liger/core/cuda/reduce.cuh"

namespace liger::cuda {

/// How a row meets the threads that hold it.
enum class Fit : int8_t {
  Whole,   // every row begins at a 16-byte boundary and ends at one
  Spread,  // as Whole, in the registers of all blocks of a cluster
  Peeled,  // misaligned rows: the first thread's pack begins at the boundary before the row
  Edged,   // misaligned rows: the first thread's pack begins at the first boundary in the row; what is before it,
           // and behind the last, is not the tile's
  SpreadEdged,
};
constexpr bool edged(Fit fit) { return fit == Fit::Edged || fit == Fit::SpreadEdged; }
constexpr bool spread(Fit fit) { return fit == Fit::Spread || fit == Fit::SpreadEdged; }

/// Where a piece of a row lies: from column `from` on in row `row` of [rows, cols]. shift says how many elements of the
/// first pack come before the row, for Peeled tiles.
struct Place {
  int64_t row, rows, cols, from;
  int64_t begin;  // elements of the matrix before it
  int left;       // columns of the row from there on
  int shift;      // for Edged ones less than 0: elements of the row before the first pack
  static constexpr int kNone =
      INT_MIN / 2;  // where there is no such row: less than what a first pack may have before `from`

  __device__ Place(int64_t row, int64_t rows, int64_t cols, int shift = 0, int64_t from = 0)
      : row(row),
        rows(rows),
        cols(cols),
        from(from),
        begin(row * cols + from),
        left(row >= rows             ? kNone
             : cols - from < INT_MAX ? int(cols - from)
                                     : INT_MAX),
        shift(shift) {}
  __device__ Place at(int64_t from) const { return {row, rows, cols, shift, from}; }
  /// The same columns in a row of another matrix, and of a vector that all rows share.
  __device__ Place of(int64_t row, int64_t rows) const { return {row, rows, cols, shift, from}; }
  __device__ Place vector(bool present) const { return of(0, present); }
  /// The first column that counts: those of the first pack that come before `from` belong to it, where they are the
  /// row's.
  __device__ int first() const { return from > 0 ? -shift : 0; }
  /// Whether a pack that reaches past the row's end may reach past the matrix: a pack has up to 8 elements, and a row
  /// at least one.
  __device__ bool last() const { return row + 8 >= rows; }

  /// Where this thread's first pack is in a matrix.
  template <class Tile, class T>
  __device__ T* in(T* matrix) const {
    return matrix + begin + Tile::column(0, *this);
  }
  /// Whether all of the pack at item i belongs to the row.
  template <class Tile>
  __device__ bool whole(int i) const {
    const int c = Tile::column(i, *this);
    return Tile::kFit == Fit::Peeled || Tile::kEdged ? c >= first() && c + Tile::kWidth <= left : c < left;
  }
};

/// How many elements of T lie between the 16-byte boundary before p and p.
template <class T>
__host__ __device__ inline int misalignment(const void* p) {
  return int(reinterpret_cast<uintptr_t>(p) % 16 / sizeof(T));
}

/// A row held in registers by threadIdx.x, kItems floats a thread; columns past the end are 0.
template <int kItems_, int kWidth_, Fit kFit_ = Fit::Whole>
struct Tile {
  static constexpr int kItems = kItems_, kWidth = kWidth_;
  static constexpr Fit kFit = kFit_;
  static constexpr bool kSpread = spread(kFit), kEdged = edged(kFit);
  float v[kItems] = {};

  __device__ static int column(int i, const Place& at) {
    const int c = (i / kWidth * int(blockDim.x) + int(threadIdx.x)) * kWidth + i % kWidth +
                  (kSpread ? cluster_rank() * int(blockDim.x) * kItems : 0);
    return kFit == Fit::Peeled || kEdged ? c - at.shift : c;
  }

  /// How far a thread's packs are apart.
  __device__ static int apart() { return int(blockDim.x) * kWidth; }

  /// How many columns one pass covers; which of the grid's blocks, or clusters, this is, of how many.
  __device__ static int covered() { return int(blockDim.x) * kItems * (kSpread ? cluster_size() : 1); }
  __device__ static unsigned group() { return kSpread ? blockIdx.x / cluster_size() : blockIdx.x; }
  __device__ static unsigned groups() { return kSpread ? gridDim.x / cluster_size() : gridDim.x; }
  __device__ static int thread() { return int(threadIdx.y * blockDim.x + threadIdx.x); }
  /// The first row of this thread, and how far it is to the next one where a block walks along them.
  __device__ static int64_t row() { return int64_t(group()) * blockDim.y + threadIdx.y; }
  __device__ static int64_t step() { return int64_t(groups()) * blockDim.y; }

  /// Where row `row` of a matrix lies.
  template <class T>
  __device__ static Place place(const void* matrix, int64_t row, int64_t rows, int64_t cols) {
    const int before = kFit == Fit::Peeled || kEdged ? misalignment<T>(static_cast<const T*>(matrix) + row * cols) : 0;
    return Place(row, rows, cols, kEdged && before > 0 ? before - kWidth : before);
  }

  /// f(a, b, …) item by item.
  template <class F, class... Tiles>
  __device__ static Tile map(F f, const Tiles&... in) {
    Tile t;
#pragma unroll
    for (int i = 0; i < kItems; ++i) t.v[i] = f(in.v[i]...);
    return t;
  }

  __device__ friend Tile operator*(const Tile& a, const Tile& b) {
    return map([](float x, float y) { return x * y; }, a, b);
  }
  __device__ friend Tile operator+(const Tile& a, const Tile& b) {
    return map([](float x, float y) { return x + y; }, a, b);
  }
  __device__ friend Tile operator-(const Tile& a, const Tile& b) {
    return map([](float x, float y) { return x - y; }, a, b);
  }
  __device__ friend Tile operator*(const Tile& a, float s) {
    return map([s](float x) { return x * s; }, a);
  }
  __device__ friend Tile operator+(const Tile& a, float s) {
    return map([s](float x) { return x + s; }, a);
  }
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
struct Raw {
  static constexpr int kPacks = Tile::kItems / Tile::kWidth;
  Pack<T, Tile::kWidth> packs[kPacks];

  __device__ friend Raw operator*(const Raw& a, const Raw& b) {
    Raw product;
#pragma unroll
    for (int i = 0; i < kPacks; ++i) product.packs[i] = a.packs[i] * b.packs[i];
    return product;
  }
};

template <class T, class Tile>
__device__ Raw<T, Tile> packed(const Tile& t) {
  Raw<T, Tile> raw;
#pragma unroll
  for (int i = 0; i < Tile::kItems; i += Tile::kWidth)
    raw.packs[i / Tile::kWidth] = Pack<T, Tile::kWidth>::from_float(t.v + i);
  return raw;
}

/// As floats, with what a row's first and last pack hold of its neighbours.
template <class T, class Tile>
__device__ Tile to_tile(const Raw<T, Tile>& raw) {
  Tile t;
#pragma unroll
  for (int i = 0; i < Tile::kItems; i += Tile::kWidth) raw.packs[i / Tile::kWidth].to_float(t.v + i);
  return t;
}

/// The row at `at` of a matrix that begins as the one the tile was laid out for, between two 16-byte boundaries. A
/// row's first and last pack are read in whole; what they hold of the neighbours is masked when they are unpacked.
template <class T, class Tile, class At>
__device__ Raw<T, Tile> fetch(const void* matrix, const At& at) {
  constexpr int kWidth = Tile::kWidth;
  const T* p = pinned(at.template in<Tile>(static_cast<const T*>(matrix)));
  Raw<T, Tile> raw{};
#pragma unroll
  for (int i = 0; i < Tile::kItems; i += kWidth, p += Tile::apart()) {
    const int c = Tile::column(i, at);
    if (Tile::kFit == Fit::Peeled && at.last() && c < at.left && c + kWidth > at.left) {
      float f[kWidth];
#pragma unroll
      for (int j = 0; j < kWidth; ++j) f[j] = c + j >= at.first() && c + j < at.left ? float(p[j]) : 0;
      raw.packs[i / kWidth] = Pack<T, kWidth>::from_float(f);
    } else if (Tile::kFit == Fit::Peeled ? c < at.left : at.template whole<Tile>(i)) {
      raw.packs[i / kWidth] = Pack<T, kWidth>::read(p);
    }
  }
  return raw;
}

/// As fetch, from a matrix that may begin anywhere, or of another type: two packs for one. None is touched that holds
/// nothing of the row, or reaches past the matrix.
template <class T, class Tile, class At>
__device__ Raw<T, Tile> fetch_loose(const void* matrix, const At& at) {
  constexpr int kWidth = Tile::kWidth;
  using Pack = cuda::Pack<T, kWidth>;
  const T* p = static_cast<const T*>(matrix) + at.begin;
  const int n = at.left, start = misalignment<T>(p - at.shift);
  if ((Tile::kFit != Fit::Peeled && !Tile::kEdged) || (start == 0 && sizeof(Pack) == 16))
    return fetch<T, Tile>(matrix, at);
  Raw<T, Tile> raw{};
#pragma unroll
  for (int i = 0; i < Tile::kItems; i += kWidth) {
    const int c = Tile::column(i, at), cut = c + kWidth - start;  // what the first of two packs has ends there
    auto& pack = raw.packs[i / kWidth];
    if (c >= n || (Tile::kEdged && !at.template whole<Tile>(i))) continue;
    if (sizeof(Pack) == 16 && (cut + kWidth <= n || !at.last())) {
      pack = joined(cut > at.first() ? Pack::read(p + c - start) : Pack(),
                    cut < n ? Pack::read(p + c - start + kWidth) : Pack(), start);
    } else {
      float f[kWidth];
#pragma unroll
      for (int j = 0; j < kWidth; ++j) f[j] = c + j >= at.first() && c + j < n ? float(p[c + j]) : 0;
      pack = Pack::from_float(f);
    }
  }
  return raw;
}

/// With zeros for what a first and a last pack hold of the row's neighbours.
template <class T, class Tile, class At>
__device__ Tile unpack(const Raw<T, Tile>& raw, const At& at) {
  constexpr int kWidth = Tile::kWidth;
  Tile t = to_tile(raw);
#pragma unroll
  for (int i = 0; i < Tile::kItems; i += kWidth)
    if (Tile::kFit == Fit::Peeled && !at.template whole<Tile>(i)) {
#pragma unroll
      for (int j = 0; j < kWidth; ++j)
        if (const int c = Tile::column(i, at) + j; c < at.first() || c >= at.left) t.v[i + j] = 0;
    }
  return t;
}

template <class T, class Tile>
__device__ Tile load(const void* matrix, const Place& at) {
  return unpack(fetch<T, Tile>(matrix, at), at);
}
template <class T, class Tile, class At>
__device__ Tile load_loose(const void* matrix, const At& at) {
  return unpack(fetch_loose<T, Tile>(matrix, at), at);
}

/// Writes the row at `at` of a matrix that begins as the tile's own does, or with kLoose anywhere.
template <class T, bool kLoose = false, class Tile, class At>
__device__ void store(const Raw<T, Tile>& raw, void* matrix, At at) {
  constexpr int kWidth = Tile::kWidth;
  using Pack = cuda::Pack<T, kWidth>;
  constexpr bool kPeeled = Tile::kFit == Fit::Peeled;
  if (kPeeled) forget(at.shift);
  T* p = pinned(at.template in<Tile>(static_cast<T*>(matrix)));
  const bool aligned = !kLoose || !(kPeeled || Tile::kEdged) || (misalignment<T>(p) == 0 && sizeof(Pack) == 16);
#pragma unroll
  for (int i = 0; i < Tile::kItems; i += kWidth, p += Tile::apart()) {
    const int c = Tile::column(i, at);
    if (aligned && at.template whole<Tile>(i)) {
      raw.packs[i / kWidth].write(p);
    } else if (kPeeled ? c < at.left : Tile::kEdged && at.template whole<Tile>(i)) {
      float f[kWidth];
      raw.packs[i / kWidth].to_float(f);
#pragma unroll
      for (int j = 0; j < kWidth; ++j)
        if (c + j >= at.first() && c + j < at.left) p[j] = T(f[j]);
    }
  }
}

template <class T, bool kLoose = false, class Tile, class At>
__device__ void store(const Tile& t, void* matrix, const At& at) {
  store<T, kLoose>(packed<T>(t), matrix, at);
}

/// f(at) for each piece of a row that is longer than a tile.
template <class Tile, class F>
__device__ void for_each_place(const Place& row, F f) {
  for (int64_t from = 0; from < row.cols + row.shift; from += Tile::covered()) f(row.at(from));
}

template <class T>
__device__ float round_to(float v) {
  return float(T(v));
}

template <class T, class Tile>
__device__ Tile round_to(const Tile& t) {
  return to_tile(packed<T>(t));
}

/// Σ over a thread's part of the row.
template <class Tile>
__device__ float sum(const Tile& t) {
  float s = 0;
#pragma unroll
  for (int i = 0; i < Tile::kItems; ++i) s += t.v[i];
  return s;
}

/// Σ (t − about) and Σ (t − about)² over a thread's part of the row.
template <class Tile, class At>
__device__ Sums<2>::Value moments(const Tile& t, float about, const At& at) {
  Sums<2>::Value s{};
  const auto add = [&](float v) {
    const float d = v - about;
    s.v[0] += d, s.v[1] += d * d;
  };
#pragma unroll
  for (int i = 0; i < Tile::kItems; i += Tile::kWidth) {
    if (at.template whole<Tile>(i)) {
#pragma unroll
      for (int j = 0; j < Tile::kWidth; ++j) add(t.v[i + j]);
    } else if (Tile::kFit == Fit::Peeled) {
#pragma unroll
      for (int j = 0; j < Tile::kWidth; ++j)
        if (const int c = Tile::column(i, at) + j; c >= at.first() && c < at.left) add(t.v[i + j]);
    }
  }
  return s;
}

inline bool aligned16(std::initializer_list<const void*> pointers) {
  for (auto p : pointers)
    if (reinterpret_cast<uintptr_t>(p) % 16 != 0) return false;
  return true;
}

/// What a kernel reads and writes: `rows` as the tiles are laid out, where it is not null, `loose` by the functions of
/// that name.
struct Memory {
  std::initializer_list<const void*> rows, loose;
  bool aligned() const { return aligned16(rows) && aligned16(loose); }
  /// Whether all rows begin alike between two 16-byte boundaries.
  bool alike() const {
    const void* first = nullptr;
    for (auto p : rows) {
      if (!first) first = p;
      if (p && misalignment<char>(p) != misalignment<char>(first)) return false;
    }
    return true;
  }
};

inline constexpr int kTileThreads = 1024, kTileCluster = 8;

/// How a kernel on tiles is launched: threads.y rows a block, or `cluster` blocks a row.
struct Tiling {
  dim3 threads;
  int cluster;
  int alike = 1;  // rows that are a multiple of so many apart begin alike between two 16-byte boundaries

  /// `groups` blocks, or clusters.
  Grid grid(int64_t groups, int shared_bytes = 0) const {
    return {.blocks = groups * cluster, .threads = threads, .shared_bytes = shared_bytes, .cluster = cluster};
  }

  /// One for each threads.y of so many rows.
  Grid of_rows(int64_t rows, int shared_bytes = 0) const {
    return grid((rows + threads.y - 1) / threads.y, shared_bytes);
  }

  /// As many as fit on the device with so many registers a thread and bytes of shared memory, or as few as take no more
  /// turns to walk along the rows, by a step after which they begin alike.
  Grid walking(int64_t rows, int registers, int shared) const {
    const int count = int(threads.x * threads.y);
    const int64_t groups = of_rows(rows).blocks / cluster,
                  blocks = std::min(shared_bytes() / (shared + 2048), 65536 / (registers * count));
    const int64_t most = std::max<int64_t>(1, blocks * clusters_at_once(cluster) / alike) * alike;
    const int64_t turns = ceil_div(groups, most), a_turn = ceil_div(groups, turns);
    return grid(turns > 1 ? ceil_div(a_turn, alike) * alike : a_turn, shared);
  }
};

/// Threads of a block: about as many as short rows get, as many as a row of whole packs gets, and as many as its part
/// of a longer one gets.
struct Threads {
  int few, most, spread = most;
  /// Those, or as many as find so many bytes of shared memory each.
  Threads with(int bytes) const {
    const int fit = shared_bytes_of_block() / bytes / 32 * 32;
    return {few, std::min(most, fit), std::min(spread, fit)};
  }
};

/// Calls f.operator()<Tile>(tiling) where tiles of kItems a thread cover rows of `cols`, of kEdged where rows begin
/// anywhere, by so many more threads (0: none of these); longer ones are spread over a cluster if kSpread. False where
/// the rows are too long, or begin differently in one matrix and another, or f returns it.
template <class T, int kItems, int kEdged, bool kSpread, class F>
bool dispatch_tile(int64_t cols, Threads block, const Memory& memory, F&& f) {
  static_assert(kEdged <= kItems);
  constexpr int kVec = 16 / sizeof(T);
  const bool whole = cols % kVec == 0 && memory.aligned();
  if (!whole && (kEdged == 0 || !memory.alike())) return false;
  const auto call = [&]<Fit kWhole, Fit kAnywhere>(const Tiling& tiling) {
    const auto as = [&]<class Tile>() {
      if constexpr (std::is_void_v<decltype(f.template operator()<Tile>(tiling))>)
        return f.template operator()<Tile>(tiling), true;
      else return f.template operator()<Tile>(tiling);
    };
    if constexpr (kEdged > 0)
      if (!whole) return as.template operator()<Tile<kEdged, kVec, kAnywhere>>();
    return as.template operator()<Tile<kItems, kVec, kWhole>>();
  };
  const int items = whole ? kItems : kEdged, alike = int(kVec / std::gcd(cols, int64_t(kVec)));
  const int most = std::min(kTileThreads, block.most * kItems / items),
            spread = std::min(kTileThreads, block.spread * kItems / items);
  const int64_t need = ceil_div(cols / kVec * kVec, items);
  if constexpr (kSpread) {
    if (need > most && need <= spread * kTileCluster && has_clusters()) {
      int cluster = 2;
      while (cluster * spread < need) cluster *= 2;
      return call.template operator()<Fit::Spread, Fit::SpreadEdged>(
          Tiling{unsigned((need + cluster * 32 - 1) / (cluster * 32) * 32), cluster, alike});
    }
  }
  if (need > most) return false;
  unsigned x = whole ? 1 : 16;  // an edge has up to 14 elements
  while (x < need && x < 32) x *= 2;
  if (x < need) x = unsigned(need + 31) / 32 * 32;
  // Below a warp a row needs a partner: __shfl_xor_sync wants whole warps.
  unsigned y = 1;
  while (y * 2 * x <= unsigned(block.few)) y *= 2;
  return call.template operator()<Fit::Whole, Fit::Edged>(Tiling{dim3(x, y), 1, alike});
}

/// As dispatch_tile, for kernels that walk along a row of any length, kItems a thread at once; element by element where
/// rows begin differently.
template <class T, int kItems, class F>
void dispatch_walk(int64_t cols, const Memory& memory, F&& f) {
  constexpr int kVec = 16 / sizeof(T);
  const Tiling tiling{unsigned(std::clamp<int64_t>(cols / (kItems * 4) / 32 * 32, 256, kTileThreads)), 1};
  if (cols % kVec == 0 && memory.aligned()) f.template operator()<Tile<kItems, kVec>>(tiling);
  else if (memory.alike()) f.template operator()<Tile<kItems, kVec, Fit::Peeled>>(tiling);
  else f.template operator()<Tile<kItems, 1>>(tiling);
}

}  // namespace liger::cuda
