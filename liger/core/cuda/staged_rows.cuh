#pragma once
// Rows in flight to shared memory, while a block works on the ones before them.
#include "liger/core/cuda/row_layout.cuh"

namespace liger::cuda {

/// Rows of two or three [rows, cols] matrices, in which they lie alike between 16-byte boundaries: a thread's rows
/// first, first + step, … below `end`. They come in `stages` stages of shared memory: the present one, and the next
/// ones, which come meanwhile. A thread copies the packs that it reads, so that no barrier is needed.
template <class T, class Layout>
class StagedRows {
 public:
  static constexpr int kMost = 3, kPacks = Layout::kPacks, kWidth = cuda::Row<T>::kWidth;
  using Row = typename Layout::template Row<T>;
  using Pack = typename Row::Pack;

  /// Bytes of shared memory that a block needs.
  static int bytes(dim3 threads, int matrices, int stages) {
    return int(stages * matrices * kPacks * threads.x * threads.y * sizeof(Pack));
  }

  /// Rows begin as row `like` does. The third matrix may be null.
  __device__ StagedRows(int64_t like, int64_t first, int64_t step, int64_t end, int64_t rows, int64_t cols, int stages,
                        const void* a, const void* b, const void* c = nullptr)
      : like(a, like, cols, cols),
        row_(first - step),
        step_(step),
        end_(end),
        rows_(rows),
        cols_(cols),
        ahead_(first * cols + this->like.column(Layout::pack(0))),
        packs_(int(blockDim.x * blockDim.y)),
        stage_packs_((c ? 3 : 2) * kPacks * packs_),
        all_packs_(stages * stage_packs_),
        stages_(stages),
        present_(all_packs_ - stage_packs_),
        matrices_{static_cast<const T*>(a), static_cast<const T*>(b), static_cast<const T*>(c)} {
    unrolled<kPacks>([&](int p) {
      const int k = Layout::pack(p);
      has_ |= unsigned(k < this->like.packs()) << p;
      parted_ |= unsigned(k < this->like.packs() && !this->like.whole(k)) << p;
    });
    for (int ahead = 1; ahead < stages; ++ahead) send(ahead);
  }

  const Row like;  // where rows begin and end

  /// The next row is the present one now; another is sent for, to where the last one was.
  __device__ void advance() {
    await_copies(stages_ - 2);
    row_ += step_, present_ = later(1);
    send(stages_ - 1);
  }

  /// Whether the present row has this thread's p-th pack.
  __device__ bool has(int p) const { return row_ < end_ && (has_ >> p & 1); }

  /// That pack of a matrix, with zeros for what is not the row's.
  __device__ Vec<kWidth> get(int matrix, int p) const {
    Vec<kWidth> v = to_vec(*at(present_, matrix, p));
    if (!Layout::kAligned && (parted_ >> p & 1)) {
      const int k = Layout::pack(p);
      unrolled<kWidth>([&](int i) { v.v[i] = i >= like.begin(k) && i < like.end(k) ? v.v[i] : 0; });
    }
    return v;
  }

  /// f(k, a, b) for each pack k of the present row that this thread has, of the first two matrices.
  template <class F>
  __device__ void each(F f) const {
    unrolled<kPacks>([&](int p) {
      if (has(p)) f(Layout::pack(p), get(0, p), get(1, p));
    });
  }

  /// Writes pack k of the present row of another such matrix.
  __device__ void store(void* y, int k, const Vec<kWidth>& v) const {
    Row(y, row_, cols_, cols_).store(k, packed<T>(v), like);
  }

  /// The shared memory behind the stages.
  template <class V>
  __device__ V* behind() const {
    return reinterpret_cast<V*>(shared_memory<Pack>() + all_packs_);
  }

 private:
  /// The first pack of the stage of a row that comes so many later.
  __device__ int later(int rows) const {
    const int stage = present_ + rows * stage_packs_;
    return stage < all_packs_ ? stage : stage - all_packs_;
  }
  __device__ Pack* at(int stage, int matrix, int p) const {
    return shared_memory<Pack>() + int(threadIdx.y * blockDim.x + threadIdx.x) + stage + (matrix * kPacks + p) * packs_;
  }

  /// Sends for the row that comes so many later; ahead_ is where it begins.
  __device__ void send(int ahead) {
    const int64_t row = row_ + ahead * step_;
    const int stage = later(ahead);
    if (row < end_) {
      send(row, 0, stage), send(row, 1, stage);
      if (matrices_[2]) send(row, 2, stage);
    }
    ahead_ += step_ * cols_;
    close_copies();
  }

  /// A pack that is in part the row's is copied as a whole where the matrix has all of it.
  __device__ void send(int64_t row, int matrix, int stage) const {
    unrolled<kPacks>([&](int p) {
      if (!(has_ >> p & 1)) return;
      const int64_t element = ahead_ + p * int(blockDim.x) * kWidth;
      if (Layout::kAligned || !(parted_ >> p & 1) || (element >= 0 && element + kWidth <= rows_ * cols_))
        copy_async16(at(stage, matrix, p), matrices_[matrix] + element);
      else *at(stage, matrix, p) = Row(matrices_[matrix], row, cols_, cols_).load(Layout::pack(p), T(0));
    });
  }

  int64_t row_, step_, end_, rows_, cols_, ahead_;  // ahead_: elements before this thread's first pack
  int packs_, stage_packs_, all_packs_, stages_, present_;
  unsigned has_ = 0, parted_ = 0;  // a bit per pack: whether rows have it, and not as a whole
  const T* matrices_[kMost];
};

/// Rows of two such matrices that are too long for that: each pass reads them again, from a cache.
template <class T>
class StagedRows<T, RowLayout<0, false>> {
 public:
  using Row = cuda::Row<T>;
  static int bytes(dim3, int, int) { return 0; }

  __device__ StagedRows(int64_t, int64_t first, int64_t step, int64_t, int64_t, int64_t cols, int, const void* a,
                        const void* b)
      : row_(first - step), step_(step), cols_(cols), a_(a), b_(b) {}
  __device__ void advance() { row_ += step_; }

  template <class F>
  __device__ void each(F f) const {
    const Row a = row_of(a_), b = row_of(b_);
    for_each_pack_of(a, [&](int k) { f(k, to_vec(a.load(k, T(0))), to_vec(b.load(k, T(0), a))); });
  }
  __device__ void store(void* y, int k, const Vec<Row::kWidth>& v) const {
    row_of(y).store(k, packed<T>(v), row_of(a_));
  }

 private:
  __device__ Row row_of(const void* matrix) const { return Row(matrix, row_, cols_, cols_); }

  int64_t row_, step_, cols_;
  const void *a_, *b_;
};

}  // namespace liger::cuda
