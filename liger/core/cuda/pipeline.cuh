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
  int64_t of_thread;    // elements of the matrix before the thread's first piece
  int column;           // of that piece
  bool fits, is_whole;  // whether a row has all of the piece, and this one does

  template <class Tile, class T>
  __device__ T* in(T* matrix) const {
    return matrix + of_thread + int(from);
  }
  template <class Tile>
  __device__ bool whole(int) const {
    return is_whole;
  }
  __device__ PiecePlace of(int64_t row, int64_t rows) const {
    return {Place::of(row, rows), row * cols + column, column, fits, fits && row < rows};
  }
  __device__ PiecePlace vector(bool present) const { return of(0, present); }
};

/// The rows that threadIdx.y walks along, kPieces pieces a thread, a pack each. All begin alike between two 16-byte
/// boundaries.
template <class T, class Tile, int kPieces>
struct RowPieces {
  static constexpr int kWidth = Tile::kWidth, kCount = kPieces;
  using Pack = cuda::Pack<T, kWidth>;
  static_assert(Tile::kItems == kWidth && sizeof(Pack) == 16 && Tile::kFit != Fit::Peeled);
  // Of such long rows there are fewer than 2^31, and registers are scarce: what waits on the stack instead comes
  // through a cache that rows stream through. One such value in each row costs a tenth of all the time and more.
  using Row = std::conditional_t<Tile::kFit == Fit::SpreadEdged, int, int64_t>;
  Row row, step, rows;
  int64_t cols, begin;           // begin: of this thread's first piece of the row, in elements
  int shift, column;             // column: of that piece
  unsigned fits = 0, whole = 0;  // a bit for each piece that belongs to a row in whole, and to the present one

  /// Before row `first`; the rows are every step-th from there on.
  __device__ RowPieces(const void* matrix, int64_t first, int64_t step, int64_t rows, int64_t cols)
      : row(Row(first - step)),
        step(Row(step)),
        rows(Row(rows)),
        cols(cols),
        shift(Tile::template place<T>(matrix, first, rows, cols).shift),
        column(Tile::column(0, Place(0, 0, 0, shift))) {
    begin = int64_t(row) * cols + column;
    for_each_piece<kPieces>(
        [&](int piece) { fits |= unsigned(int(cols) - column - piece * Tile::covered() >= kWidth) << piece; });
  }

  __device__ bool has(int piece) const { return fits >> piece & 1; }

  /// The next row is this one now.
  __device__ void next() { row += step, begin += step * cols, whole = row < rows ? fits : 0; }

  /// Where a piece of the present row lies.
  __device__ PiecePlace at(int piece) const {
    return {Place(row, rows, cols, shift, piece * Tile::covered()), begin, column, bool(fits >> piece & 1),
            bool(whole >> piece & 1)};
  }
};

/// Rows of kMatrices matrices in flight to shared memory: the next kDepth - 1 come while a block works on one, which
/// all its passes find there, with zeros beside it. A thread meets no pieces but its own, so that no barrier is needed;
/// beside them kResident packs of a thread stay there. kDepth = 1: for blocks that work on one row, several on an SM.
/// What the tile leaves out where it is Edged comes too, an element a thread: those before the first boundary of 16
/// bytes and those behind the last.
template <class T, class Tile, int kMatrices, int kPieces, int kResident = 0, int kDepth = 2>
struct Pipeline : RowPieces<T, Tile, kPieces> {
  using Base = RowPieces<T, Tile, kPieces>;
  using Base::row, Base::step, Base::rows, Base::cols, Base::begin, Base::shift, Base::column;
  using Pack = typename Base::Pack;
  static constexpr bool kWalks = kDepth > 1, kEdged = Tile::kEdged;
  static_assert(kWalks || !kEdged);
  static constexpr int kStage = kMatrices * kPieces, kStages = kDepth * kStage;  // packs
  static constexpr int kThread = (kStages + kResident) | 1;   // packs of a thread; neighbours' begin in different banks
  static constexpr int kBytes = kThread * int(sizeof(Pack));  // of shared memory a thread
  static constexpr int kEdge = 2 * (Base::kWidth - 1);        // elements that a row's tile leaves out, at most
  using Word = std::conditional_t<sizeof(T) == 2, unsigned, float>;
  const void* matrices[kMatrices];  // nothing comes where a third one is null
  int stage = kStages - kStage;
  int edge = -1;  // the column of that which is this thread's; less than 0: none

  /// Bytes of shared memory of a block.
  static int bytes(dim3 threads) {
    return int(threads.x * threads.y) * kBytes + (kEdged ? int(threads.y) * kDepth * kMatrices * kEdge * 4 : 0);
  }

  /// Sends for row `first` and those behind it.
  template <class... Pointers>
  __device__ Pipeline(int64_t first, int64_t step, int64_t rows, int64_t cols, const void* matrix, Pointers... more)
      : Base(matrix, first, step, rows, cols), matrices{matrix, more...} {
    for_each_piece<kPieces>([&](int piece) {  // what no copy fills
      for (int i = piece; !Base::has(piece) && i < kStages; i += kPieces) *pack(i) = {};
    });
    if (kEdged && (!Tile::kSpread || cluster_rank() == 0)) {
      const int i = int(threadIdx.x), head = min(-shift, int(cols)), tail = (int(cols) - head) % Base::kWidth;
      if (i < head + tail) edge = i < head ? i : int(cols) - head - tail + i;
    }
    for (int ahead = 1; ahead < kDepth; ++ahead) fetch(ahead);
  }

  /// The next row is this one now; the one that fits where the last one was is sent for.
  __device__ void advance() {
    if constexpr (kWalks) await_copies(kDepth - 2);
    Base::next();
    stage = later(1);
    fetch(kDepth - 1);
    if constexpr (!kWalks) copies_done();
  }

  __device__ Raw<T, Tile> get(int matrix, int piece) const { return {*slot(stage, matrix, piece)}; }
  __device__ void put(const Raw<T, Tile>& raw, int matrix, int piece) { *slot(stage, matrix, piece) = raw.packs[0]; }
  __device__ void again() {}

  /// Whether this thread has any of what the present row's tile leaves out; that of a matrix, and where it lies.
  __device__ bool has_edge() const { return kEdged && edge >= 0 && row < rows; }
  __device__ cuda::Tile<1, 1> get_edge(int matrix) const {
    const Word word = *edge_word(stage, matrix);
    if constexpr (sizeof(T) == 2) return {to_floats<T>(second_half() ? word >> 16 : word).x};
    else return {word};
  }
  __device__ void put_edge(float v, int matrix) {
    if constexpr (sizeof(T) == 2) *edge_word(stage, matrix) = to_word<T>(v, v);
    else *edge_word(stage, matrix) = v;
  }
  __device__ PiecePlace edge_at() const {
    return {Place(row, rows, cols), begin + (edge - column), edge, true, row < rows};
  }

  /// What stays in shared memory beside the stages, the i-th of its kind.
  template <class V>
  __device__ V& resident(int i) const {
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
    const int to = later(ahead);
    if (row + ahead * step < rows) {
#pragma unroll
      for (int m = 0; m < kMatrices; ++m) {
        // Two are always there. Measured: misaligned rows take 3 % less without the branch, others up to 8 %
        // more.
        if ((m > 1 || !kEdged) && !matrices[m]) continue;
        const T* from = pinned(static_cast<const T*>(matrices[m]) + begin + ahead * step * cols);
        if (kEdged && edge >= 0) fetch_edge(edge_word(to, m), from + (edge - column), row + ahead * step + 1 == rows);
        for_each_piece<kPieces>([&](int piece) {
          if (Base::has(piece)) copy_async16(slot(to, m, piece), from + piece * Tile::covered());
        });
      }
    } else {
      for (int i = 0; i < kStage; ++i) *pack(to + i) = {};
    }
    close_copies();
  }

  /// The word that has the element, but for one with nothing behind it in the matrix.
  __device__ void fetch_edge(Word* to, const T* from, bool last_row) const {
    if (sizeof(T) == 4 || second_half() || !last_row || edge + 1 < int(cols)) copy_async4(to, from - second_half());
    else if constexpr (sizeof(T) == 2) *to = *reinterpret_cast<const uint16_t*>(from);
  }

  __device__ static Pack* pack(int i) { return shared_memory<Pack>() + Tile::thread() * kThread + i; }
  __device__ static Pack* slot(int stage, int matrix, int piece) { return pack(stage + matrix * kPieces + piece); }

  /// The four bytes in which this thread's element is in flight, and whether it is the last two.
  __device__ static Word* edge_word(int stage, int matrix) {
    Word* words = reinterpret_cast<Word*>(shared_memory<Pack>() + int(blockDim.x * blockDim.y) * kThread);
    return words + (int(threadIdx.y) * kEdge + int(threadIdx.x)) * (kDepth * kMatrices) +
           (unsigned(stage) / kPieces + matrix);
  }
  __device__ int second_half() const { return sizeof(T) == 2 ? (shift + edge) & 1 : 0; }
};

/// The same in registers, for blocks that work on one row: several share an SM, and one's row is in flight while
/// another works.
template <class T, class Tile, int kMatrices, int kPieces>
struct Held : RowPieces<T, Tile, kPieces> {
  using Base = RowPieces<T, Tile, kPieces>;
  static_assert(Tile::kFit == Fit::Whole);
  static constexpr bool kWalks = false, kEdged = false;
  static int bytes(dim3) { return 0; }
  const void* matrices[kMatrices];
  Raw<T, Tile> packs[kMatrices][kPieces];

  template <class... Pointers>
  __device__ Held(int64_t first, int64_t step, int64_t rows, int64_t cols, const void* matrix, Pointers... more)
      : Base(matrix, first, step, rows, cols), matrices{matrix, more...} {}

  __device__ void advance() {
    Base::next();
#pragma unroll
    for (int m = 0; m < kMatrices; ++m)
      for_each_piece<kPieces>([&](int piece) { packs[m][piece] = cuda::fetch<T, Tile>(matrices[m], Base::at(piece)); });
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

/// f(of each of the first kMatrices matrices, where it lies) for each piece of a thread's present row, and for what the
/// tile leaves out.
template <int kMatrices, class Rows, class F>
__device__ void each_piece(const Rows& rows, F f) {
  [&]<int... m>(std::integer_sequence<int, m...>) {
    for_each_piece<Rows::kCount>([&](int piece) { f(to_tile(rows.get(m, piece))..., rows.at(piece)); });
    if constexpr (Rows::kEdged)
      if (rows.has_edge()) f(rows.get_edge(m)..., rows.edge_at());
  }(std::make_integer_sequence<int, kMatrices>());
}

/// Where a block that only reads its rows again keeps them: many in a pipeline, or one in registers or, if it is spread
/// over a cluster, shared memory.
enum class Keep : int8_t { Walking, Registers, Shared };
template <class T, class Tile, int kMatrices, int kPieces,
          Keep kKeep = Tile::kFit == Fit::Whole ? Keep::Registers : Keep::Walking, int kResident = 0>
using RowsOf = std::conditional_t<kKeep == Keep::Registers, Held<T, Tile, kMatrices, kPieces>,
                                  Pipeline<T, Tile, kMatrices, kPieces, kResident, kKeep == Keep::Walking ? 2 : 1>>;

template <class Rows>
Grid grid_of(const Tiling& t, int64_t rows, int registers) {
  return Rows::kWalks ? t.walking(rows, registers, Rows::bytes(t.threads)) : t.of_rows(rows, Rows::bytes(t.threads));
}

}  // namespace liger::cuda
