#pragma once
#include "liger/core/cuda/tile.cuh"

namespace liger::cuda {

/// One pack a thread.
template <class T, Fit kFit>
using Piece = Tile<16 / sizeof(T), 16 / sizeof(T), kFit>;

/// f(piece) for each of kPieces.
template <int kPieces, class F>
__device__ void for_each_piece(F f) {
#pragma unroll
  for (int piece = 0; piece < kPieces; ++piece) f(piece);
}

/// Where a thread's piece of a row lies, by what does not change from row to row.
struct PiecePlace : Place {
  int64_t of_thread;       // elements of the matrix before the thread's first piece
  int column;              // of that piece
  bool fits, is_whole;     // whether a row has all of the piece, and this one does

  template <class Tile>
  __device__ int64_t start() const { return of_thread + from; }
  template <class Tile>
  __device__ bool whole(int) const { return is_whole; }
  __device__ PiecePlace of(int64_t row, int64_t rows) const { return {Place::of(row, rows), row * cols + column, column, fits, fits && row < rows}; }
  __device__ PiecePlace vector(bool present) const { return of(0, present); }
};

/// The rows that threadIdx.y walks along, kPieces pieces a thread, a pack each. All begin alike between two 16-byte boundaries.
template <class T, class Tile, int kPieces>
struct RowPieces {
  static constexpr int kWidth = Tile::kWidth;
  using Pack = cuda::Pack<T, kWidth>;
  static_assert(Tile::kItems == kWidth && sizeof(Pack) == 16 && Tile::kFit != Fit::Peeled);
  int64_t row, step, rows, cols, begin;  // begin: of this thread's first piece of the row, in elements
  int shift, column;                     // column: of that piece
  unsigned fits = 0, whole = 0;          // a bit for each piece that belongs to a row in whole, and to the present one

  /// Before row `first`; the rows are every step-th from there on.
  __device__ RowPieces(const void* matrix, int64_t first, int64_t step, int64_t rows, int64_t cols)
      : row(first - step), step(step), rows(rows), cols(cols), shift(Tile::template place<T>(matrix, first, rows, cols).shift), column(Tile::column(0, Place(0, 0, 0, shift))) {
    begin = row * cols + column;
    for_each_piece<kPieces>([&](int piece) { fits |= unsigned(int(cols) - column - piece * Tile::covered() >= kWidth) << piece; });
  }

  __device__ bool has(int piece) const { return fits >> piece & 1; }

  /// The next row is this one now.
  __device__ void next() {
    row += step, begin += step * cols, whole = row < rows ? fits : 0;
  }

  /// Where a piece of the present row lies.
  __device__ PiecePlace at(int piece) const {
    return {Place(row, rows, cols, shift, piece * Tile::covered()), begin, column, bool(fits >> piece & 1), bool(whole >> piece & 1)};
  }
};

/// What a row's tile leaves out where it is Edged, an element a thread: those before the first boundary of 16 bytes and those behind the last. The
/// packs that hold them are sent for as the ring's are, by the row's first two threads; sums over rows of these columns wait here too.
template <class T, int kMatrices, int kDepth>
struct Edges {
  static constexpr int kWidth = 16 / sizeof(T), kMost = 2 * (kWidth - 1);
  using Pack = cuda::Pack<T, kWidth>;
  using Tile = cuda::Tile<1, 1>;
  struct Box {
    Pack packs[kDepth][kMatrices][2];
    float w[kMost], dw[kMost], db[kMost];
  };
  Box* box;
  int cols, shift;
  int head, tail;          // columns before the tile, and behind it

  __device__ Edges(Box* boxes, int64_t cols, int shift, bool here)
      : box(boxes + threadIdx.y), cols(int(cols)), shift(shift), head(here ? min(-shift, int(cols)) : 0), tail(here ? (int(cols) - head) % kWidth : 0) {}

  /// Whether this thread has one, and in which column.
  __device__ bool any() const { return int(threadIdx.x) < head + tail; }
  __device__ int column() const { return int(threadIdx.x) < head ? int(threadIdx.x) : cols - head - tail + int(threadIdx.x); }
  __device__ PiecePlace at(int64_t row, int64_t rows) const { return {Place(row, rows, cols), row * cols + column(), column(), true, row < rows}; }
  __device__ float& w() const { return box->w[threadIdx.x]; }
  __device__ float& dw() const { return box->dw[threadIdx.x]; }
  __device__ float& db() const { return box->db[threadIdx.x]; }

  /// Whether so little of a matrix lies behind a row that there may be none of what its packs hold beside its own: they do not come then.
  __device__ bool late(int64_t row, int64_t rows) const { return (rows - 1 - row) * cols < kWidth; }

  /// Sends for those of a row that begins at `begin`.
  __device__ void fetch(int stage, int matrix, const T* begin) const {
    Pack* to = box->packs[stage][matrix];
    if (threadIdx.x == 0 && head > 0) copy_async16(&to[0], begin - shift - kWidth);
    if (threadIdx.x == 1 && tail > 0) copy_async16(&to[1], begin + cols - tail);
  }

  /// This thread's, of a row whose packs have come, if they are not late.
  __device__ Tile get(int stage, int matrix, const T* begin, bool late) const {
    const int i = int(threadIdx.x);
    const T* packs = reinterpret_cast<const T*>(box->packs[stage][matrix]);
    return {float(late ? begin[column()] : packs[i < head ? kWidth + shift + i : kWidth + i - head])};
  }
};

/// Rows of kMatrices matrices on their way to shared memory: the next kDepth - 1 come while a block works on one, which all its passes find
/// there, with zeros beside it. A thread meets no pieces but its own, so that no barrier is needed; beside them it can keep kShelf packs.
/// kDepth = 1: for blocks that work on one row, several on an SM.
template <class T, class Tile, int kMatrices, int kPieces, int kShelf = 0, int kDepth = 2>
struct Ring : RowPieces<T, Tile, kPieces> {
  using Base = RowPieces<T, Tile, kPieces>;
  using Base::row, Base::step, Base::rows, Base::cols, Base::begin, Base::shift;
  using Pack = typename Base::Pack;
  static constexpr bool kWalks = kDepth > 1;
  static_assert(kWalks || !Tile::kEdged);
  static constexpr int kStage = kMatrices * kPieces, kStages = kDepth * kStage;  // packs
  static constexpr int kThread = (kStages + kShelf) | 1;                         // packs of a thread; neighbours' begin in different banks
  static constexpr int kBytes = kThread * int(sizeof(Pack));                     // of shared memory a thread
  using Edges = cuda::Edges<T, kMatrices, kDepth>;
  static constexpr bool kEdged = Tile::kEdged;
  const void* matrices[kMatrices];       // nothing comes where null
  int stage = kStages - kStage;

  /// Bytes of shared memory of a block.
  static int bytes(dim3 threads) { return int(threads.x * threads.y) * kBytes + (kEdged ? int(threads.y * sizeof(typename Edges::Box)) : 0); }

  /// Sends for row `first` and those behind it.
  template <class... Pointers>
  __device__ Ring(int64_t first, int64_t step, int64_t rows, int64_t cols, const void* matrix, Pointers... more) : Base(matrix, first, step, rows, cols), matrices{matrix, more...} {
    for_each_piece<kPieces>([&](int piece) {  // what no copy fills
      for (int i = piece; !Base::has(piece) && i < kStages; i += kPieces) *pack(i) = {};
    });
    for (int ahead = 1; ahead < kDepth; ++ahead) fetch(ahead);
  }

  /// The next row is this one now; the one that fits where the last one was is sent for.
  __device__ void turn() {
    if constexpr (kWalks) await_copies(kDepth - 2);
    if constexpr (kEdged) __syncwarp();  // two threads' copies are the others' too, and what is sent for now comes where these have read
    Base::next();
    stage = later(1);
    fetch(kDepth - 1);
    if constexpr (!kWalks) copies_done();
  }

  __device__ Edges edges() const {
    return {reinterpret_cast<typename Edges::Box*>(shared_memory<Pack>() + int(blockDim.x * blockDim.y) * kThread), cols, shift, !Tile::kSpread || cluster_rank() == 0};
  }
  /// Whether this thread has one of the present row; it, and where it lies.
  __device__ bool has_edge() const { return edges().any() && row < rows; }
  __device__ PiecePlace edge_at() const { return edges().at(row, rows); }
  __device__ typename Edges::Tile edge(int matrix) const {
    if (!matrices[matrix]) return {};
    return edges().get(stage / kStage, matrix, static_cast<const T*>(matrices[matrix]) + row * cols, edges().late(row, rows));
  }

  __device__ Raw<T, Tile> get(int matrix, int piece) const { return {*slot(stage, matrix, piece)}; }
  __device__ void put(const Raw<T, Tile>& raw, int matrix, int piece) { *slot(stage, matrix, piece) = raw.packs[0]; }
  __device__ void again() {}

  /// What lies on the shelf, the i-th of its kind.
  template <class V>
  __device__ V& shelf(int i) const {
    static_assert(sizeof(V) % sizeof(Pack) == 0);
    return reinterpret_cast<V*>(pack(kStages))[i];
  }

 private:
  /// The stage of a row that comes so many later.
  __device__ int later(int rows) const {
    const int at = stage + rows * kStage;
    return at < kStages ? at : at - kStages;
  }

  __device__ void fetch(int ahead) {
    const int64_t next = row + ahead * step;
    const int to = later(ahead);
    if (next < rows) {
#pragma unroll
      for (int m = 0; m < kMatrices; ++m) {
        if (!matrices[m]) continue;
        const T* from = pinned(static_cast<const T*>(matrices[m]) + begin + ahead * step * cols);
        if constexpr (kEdged)
          if (threadIdx.x < 2 && !edges().late(next, rows)) edges().fetch(to / kStage, m, static_cast<const T*>(matrices[m]) + next * cols);
        for_each_piece<kPieces>([&](int piece) {
          if (Base::has(piece)) copy_async16(slot(to, m, piece), from + piece * Tile::covered());
        });
      }
    } else {
      for (int i = 0; i < kStage; ++i) *pack(to + i) = {};
    }
    close_copies();
  }

  __device__ static Pack* pack(int i) { return shared_memory<Pack>() + Tile::thread() * kThread + i; }
  __device__ static Pack* slot(int stage, int matrix, int piece) { return pack(stage + matrix * kPieces + piece); }
};

/// The same in registers, for blocks that work on one row: several share an SM, and one's row is on its way while another works.
template <class T, class Tile, int kMatrices, int kPieces>
struct Held : RowPieces<T, Tile, kPieces> {
  using Base = RowPieces<T, Tile, kPieces>;
  static_assert(Tile::kFit == Fit::Whole);
  static constexpr bool kWalks = false;
  static int bytes(dim3) { return 0; }
  const void* matrices[kMatrices];
  Raw<T, Tile> packs[kMatrices][kPieces];

  template <class... Pointers>
  __device__ Held(int64_t first, int64_t step, int64_t rows, int64_t cols, const void* matrix, Pointers... more) : Base(matrix, first, step, rows, cols), matrices{matrix, more...} {}

  __device__ void turn() {
    Base::next();
#pragma unroll
    for (int m = 0; m < kMatrices; ++m) for_each_piece<kPieces>([&](int piece) { packs[m][piece] = cuda::fetch<T, Tile>(matrices[m], Base::at(piece)); });
  }

  __device__ const Raw<T, Tile>& get(int matrix, int piece) const { return packs[matrix][piece]; }
  __device__ void put(const Raw<T, Tile>& raw, int matrix, int piece) { packs[matrix][piece] = raw; }
  /// Between two passes: the second unpacks the row again, as floats it would take twice the registers until then.
  __device__ void again() {
    for_each_piece<kPieces>([&](int piece) {
      for (auto& word : packs[0][piece].packs[0].words) forget(word);
    });
  }
};

/// Where a block that only reads its rows again keeps them: many in a ring, or one in registers or, if it is spread over a cluster, shared memory.
enum class Keep : int8_t { Walking, Registers, Shared };
template <class T, class Tile, int kMatrices, int kPieces, Keep kKeep = Tile::kFit == Fit::Whole ? Keep::Registers : Keep::Walking, int kShelf = 0>
using RowsOf = std::conditional_t<kKeep == Keep::Registers, Held<T, Tile, kMatrices, kPieces>, Ring<T, Tile, kMatrices, kPieces, kShelf, kKeep == Keep::Walking ? 2 : 1>>;

template <class Rows>
Grid grid_of(const Tiling& t, int64_t rows, int registers) {
  return Rows::kWalks ? t.walking(rows, registers, Rows::bytes(t.threads)) : t.of_rows(rows, Rows::bytes(t.threads));
}

}  // namespace liger::cuda
