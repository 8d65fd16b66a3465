#pragma once
// Rows that the registers of a block's threads, or of a cluster's, hold:
//
//   host    dispatch_layout, dispatch_rows   choose a RowLayout: the packs of a thread, the threads and blocks of a row
//   kernel  HeldRow                          loads a row of each matrix once
//           each, row_sums                   read it, as often as wanted; RowReduce between them, by all its threads
//           store, row_map                   write the same row of another matrix
//           sum_over_rows                    adds up by column what a block's rows have, once, at the end
#include <algorithm>
#include "liger/core/cuda/stream.cuh"

namespace liger::cuda {

/// A row that begins and ends at 16-byte boundaries: Row (stream.cuh) with nothing to look after.
template <class T>
struct AlignedRow {
  static constexpr int kWidth = Row<T>::kWidth, shift = 0;
  using Pack = typename Row<T>::Pack;
  template <class L>
  using PackLike = cuda::Pack<T, AlignedRow<L>::kWidth>;
  T* first;
  int n;

  __device__ AlignedRow(const void* matrix, int64_t row, int64_t stride, int64_t cols)
      : first(static_cast<T*>(const_cast<void*>(matrix)) + row * stride), n(int(cols)) {}
  __device__ int packs() const { return n / kWidth; }
  __device__ static int column(int k) { return k * kWidth; }
  __device__ static constexpr bool whole(int) { return true; }
  __device__ static constexpr int begin(int) { return 0; }
  __device__ static constexpr int end(int) { return kWidth; }

  __device__ Pack load(int k, T outside) const { return load(k, outside, *this); }
  template <class L>
  __device__ PackLike<L> load(int k, T, const AlignedRow<L>& like) const {
    return PackLike<L>::read(first + like.column(k));
  }
  template <class L>
  __device__ void store(int k, const PackLike<L>& pack, const AlignedRow<L>& like) const {
    pack.write(first + like.column(k));
  }
};

/// Thread threadIdx.x has the packs threadIdx.x, threadIdx.x + blockDim.x, … of a row (stream.cuh), kPacks of them;
/// threadIdx.y tells the rows of a block apart. kSpread: each block of a cluster has a part of the row, in the order of
/// their ranks. kPacks = 0: the rows are too long for that; a block walks along each, and reads it again, from a cache,
/// in each pass.
template <int kPacks_, bool kAligned_, bool kSpread_ = false>
struct RowLayout {
  static constexpr int kPacks = kPacks_;
  static constexpr bool kAligned = kAligned_, kSpread = kSpread_;
  template <class T>
  using Row = std::conditional_t<kAligned, AlignedRow<T>, cuda::Row<T>>;

  /// Which of the grid's blocks, or clusters, this is, of how many.
  __device__ static unsigned group() { return kSpread ? blockIdx.x / cluster_size() : blockIdx.x; }
  __device__ static unsigned groups() { return kSpread ? gridDim.x / cluster_size() : gridDim.x; }
  /// This thread's first row, and the distance to the next where a block works on several.
  __device__ static int64_t row() { return int64_t(group()) * blockDim.y + threadIdx.y; }
  __device__ static int64_t step() { return int64_t(groups()) * blockDim.y; }
  /// Which pack of a row is this thread's p-th.
  __device__ static int pack(int p) {
    return int(threadIdx.x) + (p + (kSpread ? cluster_rank() * kPacks : 0)) * int(blockDim.x);
  }
};

/// A row that several passes of a kernel read, or rows of several matrices side by side: in registers, as they came, or
/// as RowLayout<0> has them.
template <class T, class Layout, int kMatrices = 1>
class HeldRow {
 public:
  using Row = typename Layout::template Row<T>;

  /// Row `row` of [rows, cols] matrices; behind the last one, an empty row.
  template <class... Matrix>
  __device__ HeldRow(int64_t row, int64_t rows, int64_t cols, const Matrix*... matrices)
      : rows_{Row(matrices, row, cols, row < rows ? cols : 0)...}, row_(row), cols_(cols) {
    unrolled<Layout::kPacks>([&](int p) {
      if (const int k = Layout::pack(p); k < like().packs())
        unrolled<kMatrices>([&](int m) { packs_[p][m] = rows_[m].load(k, T(0), like()); });
    });
  }

  /// The row of the first matrix.
  __device__ const Row& like() const { return rows_[0]; }

  /// f(k, vector, …) for each pack k that this thread has, with a vector of each matrix.
  template <class F>
  __device__ void each(F f) const {
    [&]<int... m>(std::integer_sequence<int, m...>) {
      if constexpr (Layout::kPacks == 0)
        for_each_pack_of(like(), [&](int k) { f(k, to_vec(rows_[m].load(k, T(0), like()))...); });
      unrolled<Layout::kPacks>([&](int p) {
        if (const int k = Layout::pack(p); k < like().packs()) f(k, to_vec(packs_[p][m])...);
      });
    }(std::make_integer_sequence<int, kMatrices>());
  }

  /// Writes pack k of the same row of another matrix.
  __device__ void store(void* y, int k, const Vec<Row::kWidth>& v) const {
    Row(y, row_, cols_, cols_).store(k, packed<T>(v), like());
  }

 private:
  Row rows_[kMatrices];
  int64_t row_, cols_;
  typename Row::Pack packs_[std::max(1, Layout::kPacks)][kMatrices];
};

/// Σ of each of the n numbers that f(x, …) gives, over the elements of a row, or of rows side by side, that this thread
/// has. What lies behind a row's end is 0, and must add nothing.
template <int n, class HeldRows, class F>
__device__ typename Sums<n>::Value row_sums(const HeldRows& rows, F f) {
  typename Sums<n>::Value sums{};
  rows.each([&](int, const auto& x, const auto&... more) {
    unrolled<std::remove_cvref_t<decltype(x)>::kWidth>([&](int i) {
      const std::array<float, n> terms = f(x.v[i], more.v[i]...);
      unrolled<n>([&](int j) { sums.v[j] += terms[j]; });
    });
  });
  return sums;
}

/// y = f(x, …) for those elements; y: a matrix that has this row where they do.
template <class HeldRows, class F>
__device__ void row_map(const HeldRows& rows, void* y, F f) {
  rows.each([&](int k, const auto& x, const auto&... more) { rows.store(y, k, x.map(f, x, more...)); });
}

/// Adds up what the rows of a block have summed by column, in a fixed order: the threads of threadIdx.y = 0 have the
/// totals. All threads of the block call this; it uses blockDim.y / 2 · blockDim.x · n · kWidth floats of shared
/// memory.
template <int n, int kWidth>
__device__ void sum_over_rows(Vec<kWidth> (&sums)[n]) {
  const int y = int(threadIdx.y);
  const auto slot = [](int y, int i) -> float& {
    return shared_memory<float>()[(y * n * kWidth + i) * int(blockDim.x) + int(threadIdx.x)];
  };
  for (int half = int(blockDim.y) / 2; half > 0; half /= 2) {
    __syncthreads();
    if (y >= half && y < 2 * half)
      unrolled<n * kWidth>([&](int i) { slot(y - half, i) = sums[i / kWidth].v[i % kWidth]; });
    __syncthreads();
    if (y < half) unrolled<n * kWidth>([&](int i) { sums[i / kWidth].v[i % kWidth] += slot(y, i); });
  }
}

/// Threads of a block: about as many as short rows get, at most as many as a longer row gets, and as the part of one
/// that a cluster shares.
struct Threads {
  int few, most, spread = most;
};

/// The threads of a block and the blocks of a cluster that share a row.
struct RowThreads {
  static constexpr int kMostBlocks = 8;  // of a cluster
  dim3 threads;
  int cluster = 1;

  /// For rows that so many threads share; on the blocks of a cluster where those of one are not enough. None where they
  /// are not enough either.
  static RowThreads of(int64_t need, Threads block) {
    if (need > block.most) {
      if (!has_clusters() || need > kMostBlocks * block.spread) return {};
      int cluster = 2;
      while (cluster * block.spread < need) cluster *= 2;
      return {dim3(unsigned(ceil_div(need, cluster * 32) * 32)), cluster};
    }
    unsigned x = 1;
    while (x < need && x < 32) x *= 2;
    if (x < need) x = unsigned(round_up(need, 32));
    unsigned y = 1;  // rows: a warp exchanges values as a whole, so that it never has less than 32 threads
    while (y * 2 * x <= unsigned(block.few)) y *= 2;
    return {dim3(x, y)};
  }
  explicit operator bool() const { return threads.x * threads.y >= 32; }

  /// `groups` blocks, or clusters.
  Grid grid(int64_t groups, int shared_bytes = 0) const {
    return {.blocks = groups * cluster, .threads = threads, .shared_bytes = shared_bytes, .cluster = cluster};
  }
  Grid of_rows(int64_t rows, int shared_bytes = 0) const { return grid(ceil_div(rows, threads.y), shared_bytes); }
};

/// Whether rows of `cols` elements of T begin and end at 16-byte boundaries.
template <class T>
bool whole_packs(int64_t cols, std::initializer_list<const void*> pointers) {
  return cols % Row<T>::kWidth == 0 && aligned16(pointers);
}

/// Calls f.operator()<RowLayout>(threads) where kPacks packs a thread hold rows of `cols`: in a block or, with kSpread,
/// a cluster. kAligned: the rows are whole_packs. False where none does.
template <class T, int kPacks, bool kAligned, bool kSpread, class F>
bool dispatch_layout(int64_t cols, Threads block, F&& f) {
  const RowThreads t = RowThreads::of(ceil_div(Row<T>::packs(cols, kAligned), kPacks), block);
  if (!t || (!kSpread && t.cluster > 1)) return false;
  if constexpr (kSpread)
    if (t.cluster > 1) return f.template operator()<RowLayout<kPacks, kAligned, true>>(t), true;
  return f.template operator()<RowLayout<kPacks, kAligned>>(t), true;
}

/// The same for rows of any length and alignment: where kPacks packs a thread do not hold them as whole_packs, f gets
/// RowLayout<0>. Calls f.operator()<T, RowLayout>(threads).
template <int kPacks, class F>
void dispatch_rows(DType dtype, int64_t cols, std::initializer_list<const void*> pointers, Threads block, F&& f) {
  dispatch(dtype, [&]<class T>() {
    const auto of_type = [&]<class Layout>(const RowThreads& t) { f.template operator()<T, Layout>(t); };
    if (!whole_packs<T>(cols, pointers) || !dispatch_layout<T, kPacks, true, true>(cols, block, of_type))
      of_type.template operator()<RowLayout<0, false>>(RowThreads{dim3(unsigned(block.most))});
  });
}

}  // namespace liger::cuda
