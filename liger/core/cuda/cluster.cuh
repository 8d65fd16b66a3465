#pragma once
#include "liger/core/cuda/stream.cuh"

namespace liger::cuda {

/// A cluster of blocks on each row of a matrix, or several short rows on a block. What a block has loaded of its row, a Value a pack,
/// stays in its shared memory for further passes, where that fits; where not, they load again.
template <class T, class Value = typename Row<T>::Pack>
struct Clusters {
  static constexpr int kThreads = 384, kBlocks = 3;  // three blocks an SM: one loads while another reduces and a third stores
  static constexpr int kKeptBytes = 66 * 1024;       // of a row that one block keeps: 2^15 elements of 16 bits, at any alignment
  static constexpr int kKeptBlocks = 4, kMost = 8;   // blocks on a row: beyond 4 a second load costs less than the waiting
  static constexpr int kLoads = 64 / sizeof(Value);  // a thread's in flight
  int64_t rows;
  int blocks = 1, share;                             // blocks on a row, packs of a block
  bool kept;
  unsigned x = kThreads, y = 1;                      // threads on a row, rows on a block

  /// keep: there are further passes.
  Clusters(int64_t rows, int64_t cols, bool keep = true) : rows(rows) {
    const int64_t packs = cols / Row<T>::kWidth + 2;  // as many as a row of any alignment touches
    while (has_clusters() && blocks < kMost && packs * int64_t(sizeof(Value)) > int64_t(blocks) * kKeptBytes) blocks *= 2;
    share = int((packs + blocks - 1) / blocks);
    kept = keep && blocks <= kKeptBlocks && share * int64_t(sizeof(Value)) <= kKeptBytes;
  }

  /// Where a row takes at most half a block with kLoads a thread: several on a block, or `alone`, where rows do not all pass as many
  /// barriers, a smaller block.
  Clusters& short_rows(bool alone = false) {
    const unsigned need = (share + kLoads - 1) / kLoads;
    if (need <= kThreads / 2) {
      for (x = alone ? 32 : 1; x < need && x < 32;) x *= 2;
      if (x < need) x = (need + 31) / 32 * 32;
      y = alone ? 1 : kThreads / x;
    }
    return *this;
  }

  Grid grid() const {
    return {.blocks = (rows + y - 1) / y * blocks, .threads = {x, y}, .shared_bytes = kept ? int(y * share * sizeof(Value)) : 0, .cluster = blocks};
  }

  __device__ int64_t row() const { return int64_t(blockIdx.x / blocks) * blockDim.y + threadIdx.y; }
  /// The first thread on the row.
  __device__ bool first() const { return rank() == 0 && threadIdx.x == 0; }

  /// f(k, load(k)) for this block's packs of a row of so many. None, where there is no such row.
  template <class Load, class F>
  __device__ void pass(int packs, Load load, F f) const {
    const Part part(*this, packs);
    for_each_load<kLoads>(part.begin, part.end, load, [&](int k, const Value& v) {
      if (kept) part.values[k - part.begin] = v;
      f(k, v);
    });
  }

  /// The same once more.
  template <class Load, class F>
  __device__ void again(int packs, Load load, F f) const {
    const Part part(*this, packs);
    if (kept)
      for (int k = part.begin + threadIdx.x; k < part.end; k += blockDim.x) f(k, part.values[k - part.begin]);
    else
      for_each_load<kLoads / 2>(part.begin, part.end, load, f);
  }

  /// f(v) for the v of each block on the row, in their order; every thread of a block has the same v.
  template <class V, class F>
  __device__ void exchange(const V& v, F f) const {
    if (blocks == 1) return f(v);
    __shared__ V shown;
    if (threadIdx.x == 0) shown = v;
    cluster_sync();
    for (int other = 0; other < blocks; ++other) f(*of_block(&shown, other));
    cluster_sync();  // a block's shared memory stays until all have read it
  }

  /// Op over all threads on the row.
  template <class Op>
  __device__ typename Op::Value reduce(RowReduce<Op>& in_block, typename Op::Value v) const {
    typename Op::Value all = Op::identity();
    exchange(in_block(v), [&](const typename Op::Value& other) { all = Op()(all, other); });
    return all;
  }

 private:
  __device__ int rank() const { return blocks > 1 ? cluster_rank() : 0; }

  struct Part {
    int begin, end;
    Value* values;
    __device__ Part(const Clusters& c, int packs) {
      begin = min(c.rank() * c.share, packs), end = c.row() < c.rows ? min(begin + c.share, packs) : begin;
      values = shared_memory<Value>() + threadIdx.y * c.share;
    }
  };
};

}  // namespace liger::cuda
