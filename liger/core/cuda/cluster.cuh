#pragma once
#include "liger/core/cuda/stream.cuh"

namespace liger::cuda {

/// A cluster of blocks on each row of a matrix. What a block has loaded of its row, a Value a pack, stays in its shared memory for further
/// passes, where that fits; where not, they load again.
template <class T, class Value = typename Row<T>::Pack>
struct Clusters {
  static constexpr int kThreads = 384, kBlocks = 3;  // three blocks an SM: one loads while another reduces and a third stores
  static constexpr int kKeptBytes = 66 * 1024;       // of a row that one block keeps: 2^15 elements of 16 bits, at any alignment
  static constexpr int kMost = 8;                    // blocks on a row
  static constexpr int kLoads = 64 / sizeof(Value);  // a thread's in flight
  static constexpr int kGroups = 4;                  // of copies to shared memory
  int64_t rows;
  int blocks, share;                                 // blocks on a row, packs of a block
  bool kept;

  /// keep: there are further passes.
  Clusters(int64_t rows, int64_t cols, bool keep = true) : rows(rows) {
    const int64_t packs = cols / Row<T>::kWidth + 2;  // as many as a row of any alignment touches
    blocks = int(std::clamp<int64_t>((packs * int64_t(sizeof(Value)) + kKeptBytes - 1) / kKeptBytes, 1, has_clusters() ? kMost : 1));
    share = int((packs + blocks - 1) / blocks);
    kept = keep && share * int64_t(sizeof(Value)) <= kKeptBytes;
  }

  Grid grid() const {
    return {.blocks = rows * blocks, .threads = kThreads, .shared_bytes = kept ? int(share * sizeof(Value)) : 0, .cluster = blocks};
  }

  __device__ int64_t row() const { return blockIdx.x / blocks; }
  /// The first thread on the row.
  __device__ bool first() const { return rank() == 0 && threadIdx.x == 0; }

  struct Kept {};          // nothing of a thread's own

  /// f(k, load(k)) for this block's packs of a row of so many. Single packs to be kept are sent for at once, by load.copy, in groups that
  /// are worked on as they come.
  template <class Load, class F>
  __device__ void pass(Kept&, int packs, const Load& load, F f) const {
    const Part part(*this, packs);
    if constexpr (sizeof(Value) == 16)
      if (kept) {
        const int threads = blockDim.x, a_group = (part.end - part.begin + kGroups * threads - 1) / (kGroups * threads) * threads;
        const auto each = [&](int group, auto g) {
          const int begin = part.begin + group * a_group, end = min(begin + a_group, part.end);
          for (int k = begin + int(threadIdx.x); k < end; k += threads) g(k, part.values[k - part.begin]);
        };
        for (int group = 0; group < kGroups; ++group) each(group, [&](int k, Value& v) { load.copy(k, &v); }), close_copies();
#pragma unroll 1
        for (int group = 0; group < kGroups; ++group) await_copies(kGroups - 1 - group), each(group, f);
        return;
      }
    for_each_load<kLoads>(part.begin, part.end, load, [&](int k, const Value& v) {
      if (kept) part.values[k - part.begin] = v;
      f(k, v);
    });
  }

  /// The same once more.
  template <class Load, class F>
  __device__ void again(const Kept&, int packs, const Load& load, F f) const {
    const Part part(*this, packs);
    if (kept)
      for (int k = part.begin + threadIdx.x; k < part.end; k += blockDim.x) f(k, part.values[k - part.begin]);
    else
      for_each_load<kLoads / 2>(part.begin, part.end, load, f);
  }

  /// Op over all threads on the row.
  template <class Op> using Reduce = RowReduce<Op, true>;

 private:
  __device__ int rank() const { return blocks > 1 ? cluster_rank() : 0; }

  struct Part {
    int begin, end;
    Value* values;
    __device__ Part(const Clusters& c, int packs) {
      begin = min(c.rank() * c.share, packs), end = min(begin + c.share, packs);
      values = shared_memory<Value>();
    }
  };
};

/// As Clusters, for rows that the registers of a block's threads hold, several of the short ones on a block.
template <class T, class Value = typename Row<T>::Pack>
struct ShortRows {
  static constexpr int kThreads = 384, kBlocks = 3;
  static constexpr int kLoads = 64 / sizeof(Value);
  int64_t rows;
  unsigned x, y;           // threads on a row, rows on a block

  /// aligned: all rows begin at 16-byte boundaries. alone: rows do not all pass as many barriers.
  ShortRows(int64_t rows, int64_t cols, bool aligned, bool alone) : rows(rows), x(alone ? 32 : 1) {
    const unsigned need = unsigned((packs(cols, aligned) + kLoads - 1) / kLoads);
    while (x < need && x < 32) x *= 2;
    if (x < need) x = (need + 31) / 32 * 32;
    y = alone && x > 32 ? 1 : kThreads / x;
  }
  static int64_t packs(int64_t cols, bool aligned) { return (cols + Row<T>::kWidth - 1) / Row<T>::kWidth + !aligned; }
  static bool fit(int64_t cols, bool aligned) { return packs(cols, aligned) <= kThreads * kLoads; }
  Grid grid() const { return {.blocks = (rows + y - 1) / y, .threads = {x, y}}; }

  __device__ int64_t row() const { return int64_t(blockIdx.x) * blockDim.y + threadIdx.y; }

  struct Kept { Value values[kLoads]; };

  template <class Load, class F>
  __device__ void pass(Kept& kept, int packs, Load load, F f) const {
    each(packs, [&](int k, int u) { kept.values[u] = load(k); });
    again(kept, packs, load, f);
  }

  template <class Load, class F>
  __device__ void again(const Kept& kept, int packs, Load, F f) const {
    each(packs, [&](int k, int u) { f(k, kept.values[u]); });
  }

  template <class Op> using Reduce = RowReduce<Op>;

 private:
  /// f(k, which of this thread's it is) for this thread's packs of a row of so many. None, where there is no such row.
  template <class F>
  __device__ void each(int packs, F f) const {
    if (row() >= rows) return;
#pragma unroll
    for (int u = 0; u < kLoads; ++u)
      if (const int k = u * blockDim.x + threadIdx.x; k < packs) f(k, u);
  }
};

}  // namespace liger::cuda
