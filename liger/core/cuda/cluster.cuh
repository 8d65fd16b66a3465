#pragma once
// Rows that several passes of a kernel read: over a cluster of blocks (Clusters), or in the registers of a block's
// threads (ShortRows). All threads of a row call the same, in this order:
//
//   begin ──> pass ────> again …            begin   sends for the row
//         └─> replace ─> again_replaced …   pass    reads it for the first time
//                                           replace does, and puts other values in its place, if replaces()
//                                           again, again_replaced  read what is kept, as often as wanted
//
// A kernel that has called begin and leaves without pass or replace calls copies_done(). `State` is a thread's own.
#include "liger/core/cuda/stream.cuh"

namespace liger::cuda {

/// A row of each of kMatrices matrices, seen as the packs of the first; `outside` stands for what is not the row's.
template <class T, int kMatrices>
struct RowSet {
  using Pack = typename Row<T>::Pack;
  struct Packs {
    Pack of[kMatrices];
  };
  using Value = std::conditional_t<kMatrices == 1, Pack, Packs>;
  Row<T> of[kMatrices];
  T outside;

  __device__ static Pack& pack(Value& v, int m) {
    if constexpr (kMatrices == 1) return v;
    else return v.of[m];
  }

  __device__ Value load(int k) const {
    Value v;
#pragma unroll
    for (int m = 0; m < kMatrices; ++m) pack(v, m) = of[m].load(k, outside, of[0]);
    return v;
  }
  __device__ Value blank() const {
    Value v;
#pragma unroll
    for (int m = 0; m < kMatrices; ++m) pack(v, m) = Pack::filled(outside);
    return v;
  }
};

/// A cluster of blocks on each row. A block has its part of it in shared memory for further passes, where that fits;
/// where not, it loads again.
template <class T, int kMatrices = 1>
struct Clusters {
  static constexpr int kThreads = 256;
  /// Blocks of a multiprocessor: one loads while another reduces and a third stores; and where nothing is stored.
  static constexpr int kBlocks = 3, kBlocksReading = 5;
  /// Of a row, that a block keeps: 2^15 elements of 16 bits, at any alignment.
  static constexpr int kKeptBytes = 66 * 1024;
  /// Of shared memory, of a block: so much, three times, leaves 60 KiB to L1; more, 28.
  static constexpr int kNearBytes = 196 * 1024 / 3 / 128 * 128 - 1024;
  static constexpr int kMost = 8;       // blocks on a row
  static constexpr int kEnough = 4096;  // blocks for all multiprocessors: more are not needed where nothing is kept
  static constexpr int kGroups = 4;     // of copies to shared memory, which are worked on as they come
  static constexpr int kBatch = 4;      // packs of a thread in such a group, where they may be replaced
  using RowSet = cuda::RowSet<T, kMatrices>;
  using Value = typename RowSet::Value;
  int64_t rows;
  int blocks, packs_per_block;  // blocks: on a row
  bool kept;

  /// aligned: all rows begin at 16-byte boundaries. keep: there are further passes.
  Clusters(int64_t rows, int64_t cols, bool aligned, bool keep = true) : rows(rows) {
    constexpr int kLine = 8;  // packs of a cache line, which only one block touches
    const int64_t packs = Row<T>::packs(cols, aligned);
    int64_t most = has_clusters() ? kMost : 1;
    if (!keep) most = std::min(most, ceil_div(kEnough, std::max<int64_t>(1, rows)));
    blocks = int(std::clamp<int64_t>(ceil_div(packs * kMatrices * 16, kKeptBytes), 1, most));
    packs_per_block = int(ceil_div(packs, blocks * kLine) * kLine);
    kept = keep && packs_per_block * kMatrices * 16 <= std::min(kKeptBytes, shared_bytes_of_block());
  }

  Grid grid() const {
    return {.blocks = rows * blocks,
            .threads = kThreads,
            .shared_bytes = kept ? packs_per_block * kMatrices * 16 : 0,
            .cluster = blocks};
  }

  __device__ int64_t row() const { return blockIdx.x / blocks; }
  /// The first thread on the row, and the block that it is in.
  __device__ bool first() const { return leads() && threadIdx.x == 0; }
  __device__ bool leads() const { return rank() == 0; }
  /// Whether pack k of the row is this thread's.
  __device__ bool mine(int k) const {
    const int i = k - rank() * packs_per_block;
    return i >= 0 && i < packs_per_block && i % kThreads == int(threadIdx.x);
  }

  struct State {
    float notes[kGroups];  // see replace
  };

  /// Sends for the row's first packs, before it is known whether it is wanted.
  __device__ void begin(State&, const RowSet& x) const {
    if (kept) send(Part(*this, x), x, 0);
  }

  /// f(k, values) for this thread's packs of the row, n at once, kThreads apart from k on. What is left over comes one
  /// at a time or, with kFill, together with blanks. After begin.
  template <int n, bool kFill, class F>
  __device__ void pass(State&, const RowSet& x, F f) const {
    const Part part(*this, x);
    if (!kept)
      return for_each_batch<n, kFill>(part.begin, part.end, kThreads, [&](int k) { return x.load(k); }, x.blank(), f);
    each_group(part, x, [&](int group) {
      for_each_batch<n, kFill>(part.first(group), part.first(group + 1), kThreads, part, x.blank(), f);
    });
  }

  /// Whether what is kept of a row may be replaced.
  __device__ bool replaces() const { return kept && packs_per_block <= kGroups * kBatch * kThreads; }

  /// As pass where that may be, once: f(values) puts what is to be kept in the values' place, and returns a note that
  /// goes with it.
  template <class F>
  __device__ void replace(State& state, const RowSet& x, F f) const {
    static_assert(kMatrices == 1);
    const Part part(*this, x);
    each_group(part, x, [&](int group) {
      const int end = part.first(group + 1);
      for_each_batch<kBatch, true>(part.first(group), end, kThreads, part, x.blank(), [&](int k, auto& values) {
        const float note = f(values);
#pragma unroll
        for (int i = 0; i < kBatch; ++i)
          if (k + i * kThreads < end) part.at(0, k + i * kThreads) = values[i];
#pragma unroll
        for (int g = 0; g < kGroups; ++g)
          if (g == group) state.notes[g] = note;
      });
    });
  }

  /// Once more, what is left over one at a time.
  template <int n, class F>
  __device__ void again(const State&, const RowSet& x, F f) const {
    const Part part(*this, x);
    if (kept) for_each_batch<n, false>(part.begin, part.end, kThreads, part, {}, f);
    else for_each_batch<n, false>(part.begin, part.end, kThreads, [&](int k) { return x.load(k); }, {}, f);
  }

  /// Again after replace: f(k, what was kept, its note).
  template <class F>
  __device__ void again_replaced(const State& state, const RowSet& x, F f) const {
    const Part part(*this, x);
#pragma unroll 1
    for (int group = 0; group < kGroups; ++group) {
      float note = state.notes[0];
#pragma unroll
      for (int g = 1; g < kGroups; ++g)
        if (g == group) note = state.notes[g];
      for_each_batch<kBatch, false>(part.first(group), part.first(group + 1), kThreads, part, {},
                                    [&](int k, auto& values) { f(k, values, note); });
    }
  }

  /// Op over all threads on the row, or those of this block, kBuffers = 1: once. What is kept leaves such slots little
  /// room.
  template <class Op, int kBuffers = 1>
  using Reduce = RowReduce<Op, true, true, kThreads / 32, kBuffers>;
  template <class Op, bool kShort = false>
  using ReduceBlock = RowReduce<Op, false, kShort, kThreads / 32, 1>;

 private:
  __device__ int rank() const { return blocks > 1 ? cluster_rank() : 0; }

  /// What this block has of a row: packs [begin, end).
  struct Part {
    int begin, end, a_group, packs_per_block;
    __device__ Part(const Clusters& c, const RowSet& x) : packs_per_block(c.packs_per_block) {
      const int packs = x.of[0].packs();
      begin = min(c.rank() * c.packs_per_block, packs), end = min(begin + c.packs_per_block, packs);
      a_group = ceil_div(c.packs_per_block, kGroups * kThreads) * kThreads;
    }
    __device__ int first(int group) const { return min(begin + group * a_group, end); }
    /// Where pack k of matrix m is kept.
    __device__ auto& at(int m, int k) const {
      return shared_memory<typename RowSet::Pack>()[m * packs_per_block + k - begin];
    }
    __device__ Value operator()(int k) const {
      Value v;
#pragma unroll
      for (int m = 0; m < kMatrices; ++m) RowSet::pack(v, m) = at(m, k);
      return v;
    }
  };

  /// f(group) for each group of packs when it has come.
  template <class F>
  __device__ void each_group(const Part& part, const RowSet& x, F f) const {
    for (int group = 1; group < kGroups; ++group) send(part, x, group);
#pragma unroll 1
    for (int group = 0; group < kGroups; ++group) {
      await_copies(kGroups - 1 - group);
      f(group);
    }
  }

  __device__ void send(const Part& part, const RowSet& x, int group) const {
    const bool near = shared_bytes_here() <= kNearBytes;
    for (int k = part.first(group) + threadIdx.x, end = part.first(group + 1); k < end; k += kThreads)
#pragma unroll
      for (int m = 0; m < kMatrices; ++m) x.of[m].copy(k, x.outside, x.of[0], &part.at(m, k), near);
    close_copies();
  }
};

/// As Clusters, for rows that the registers of a block's threads hold, several of the short ones on a block.
template <class T, int kMatrices = 1>
struct ShortRows {
  static constexpr int kThreads = 384, kBlocks = 3, kBlocksReading = 3;
  static constexpr int kLoads = 4 / kMatrices;
  using RowSet = cuda::RowSet<T, kMatrices>;
  using Value = typename RowSet::Value;
  int64_t rows;
  unsigned x, y;  // threads on a row, rows on a block

  /// aligned: all rows begin at 16-byte boundaries. alone: rows do not all pass as many barriers.
  ShortRows(int64_t rows, int64_t cols, bool aligned, bool alone) : rows(rows), x(alone ? 32 : 1) {
    const unsigned need = unsigned(ceil_div(Row<T>::packs(cols, aligned), kLoads));
    while (x < need && x < 32) x *= 2;
    if (x < need) x = round_up(need, 32);
    y = alone && x > 32 ? 1 : kThreads / x;
  }
  static bool fit(int64_t cols, bool aligned) { return Row<T>::packs(cols, aligned) <= kThreads * kLoads; }
  Grid grid() const { return {.blocks = ceil_div(rows, y), .threads = {x, y}}; }

  __device__ int64_t row() const { return int64_t(blockIdx.x) * blockDim.y + threadIdx.y; }
  __device__ bool first() const { return threadIdx.x == 0; }
  __device__ static constexpr bool leads() { return true; }
  __device__ bool mine(int k) const { return k % int(blockDim.x) == int(threadIdx.x); }

  struct State {
    Value values[kLoads];
    float note;
  };

  __device__ void begin(State& state, const RowSet& x) const {
    each(x, [&](int k, int u) { state.values[u] = x.load(k); });
  }

  template <int, bool, class F>
  __device__ void pass(State& state, const RowSet& x, F f) const {
    again<1>(state, x, f);
  }

  template <int, class F>
  __device__ void again(const State& state, const RowSet& x, F f) const {
    each(x, [&](int k, int u) {
      Value values[1] = {state.values[u]};
      f(k, values);
    });
  }

  __device__ static constexpr bool replaces() { return true; }

  template <class F>
  __device__ void replace(State& state, const RowSet& x, F f) const {
    Value values[kLoads];
#pragma unroll
    for (Value& value : values) value = x.blank();
    each(x, [&](int, int u) { values[u] = state.values[u]; });
    state.note = f(values);
#pragma unroll
    for (int u = 0; u < kLoads; ++u) state.values[u] = values[u];
  }

  template <class F>
  __device__ void again_replaced(const State& state, const RowSet& x, F f) const {
    again<1>(state, x, [&](int k, auto& values) { f(k, values, state.note); });
  }

  template <class Op, int kBuffers = 1>
  using Reduce = RowReduce<Op, false, false, kThreads / 32, kBuffers>;
  template <class Op, bool kShort = false>
  using ReduceBlock = RowReduce<Op, false, kShort, kThreads / 32, 1>;

 private:
  /// f(k, which of this thread's it is) for this thread's packs of the row. None, where there is no such row.
  template <class F>
  __device__ void each(const RowSet& x, F f) const {
    if (row() >= rows) return;
#pragma unroll
    for (int u = 0; u < kLoads; ++u)
      if (const int k = u * blockDim.x + threadIdx.x; k < x.of[0].packs()) f(k, u);
  }
};

/// f(rows), with the one of the two that suits rows of kMatrices matrices, whose first is [rows, cols], `stride`
/// elements apart. alone, keep: see them.
template <class T, int kMatrices, class F>
void dispatch_kept_rows(const void* matrix, int64_t rows, int64_t cols, int64_t stride, bool alone, bool keep, F f) {
  const bool aligned = aligned16({matrix}) && stride % Row<T>::kWidth == 0;
  if (ShortRows<T, kMatrices>::fit(cols, aligned)) f(ShortRows<T, kMatrices>(rows, cols, aligned, alone));
  else f(Clusters<T, kMatrices>(rows, cols, aligned, keep));
}

}  // namespace liger::cuda
