#pragma once
#include "liger/core/cuda/tile.cuh"

namespace liger::cuda {

/// f(piece) for each of kPieces.
template <int kPieces, class F>
__device__ void for_each_piece(F f) {
#pragma unroll
  for (int piece = 0; piece < kPieces; ++piece) f(piece);
}

/// Rows of kMatrices matrices on their way to shared memory: the next kDepth - 1 come while a block works on one, which all its passes find
/// there, with zeros beside it. A thread has kPieces pieces of a row, a pack each, and meets no others, so that no barrier is needed; beside
/// them it can keep kShelf packs of its own. All rows that threadIdx.y walks along begin alike between two 16-byte boundaries.
template <class T, class Tile, int kMatrices, int kPieces, int kShelf = 0, int kDepth = 2>
struct Ring {
  static constexpr int kWidth = Tile::kWidth;
  using Pack = cuda::Pack<T, kWidth>;
  static_assert(Tile::kItems == kWidth && sizeof(Pack) == 16);
  static constexpr int kStage = kMatrices * kPieces, kStages = kDepth * kStage;  // packs
  static constexpr int kBytes = ((kStages + kShelf) | 1) * int(sizeof(Pack));    // of shared memory a thread; neighbours' begin in different banks
  int64_t row, step, rows, cols, begin;  // begin: of this thread's first pack of the row, in elements
  const void* matrices[kMatrices];       // nothing comes where null
  int shift, column, stage = kStages - kStage;  // column: of that pack

  /// Sends for row `first` and those behind it; the rows are every step-th from there on.
  template <class... Pointers>
  __device__ Ring(int64_t first, int64_t step, int64_t rows, int64_t cols, Pointers... of) : row(first - step), step(step), rows(rows), cols(cols), matrices{of...} {
    shift = Tile::template place<T>(matrices[0], first, rows, cols).shift;
    column = Tile::column(0, Place(0, 0, 0, shift));
    begin = row * cols + column;
    for (int ahead = 1; ahead < kDepth; ++ahead) fetch(ahead);
  }

  /// Where a piece of any row of threadIdx.y lies.
  __device__ Place at(int piece, int64_t row) const { return {row, rows, cols, shift, piece * Tile::covered()}; }
  /// Where one of the present row does.
  __device__ Place at(int piece) const {
    Place place(row, rows, cols, shift, piece * Tile::covered());
    place.begin = begin - column + place.from;
    return place;
  }

  /// The next row is this one now; the one that fits where the last one was is sent for.
  __device__ void turn() {
    await_copies(kDepth - 2);
    row += step, begin += step * cols, stage = later(1);
    if (Tile::kFit == Fit::Peeled && threadIdx.x == 0)
#pragma unroll
      for (int m = 0; m < kMatrices; ++m) *slot(stage, m, 0) = slot(stage, m, 0)->from(shift);
    if (Tile::kFit == Fit::Peeled && row + 1 == rows) complete();
    fetch(kDepth - 1);
  }

  __device__ Raw<T, Tile> get(int matrix, int piece) const { return {*slot(stage, matrix, piece)}; }
  __device__ void put(const Raw<T, Tile>& raw, int matrix, int piece) { *slot(stage, matrix, piece) = raw.packs[0]; }

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
    const bool last = Tile::kFit == Fit::Peeled && next + 1 == rows;
    const int left = next < rows ? int(cols) - column : 0, to = later(ahead);
#pragma unroll
    for (int m = 0; m < kMatrices; ++m) {
      if (!matrices[m]) continue;
      const T* from = pinned(static_cast<const T*>(matrices[m]) + begin + ahead * step * cols);
      for_each_piece<kPieces>([&](int piece) {
        const int there = left - piece * Tile::covered();
        const int count = last && there < kWidth ? 0 : Tile::kFit == Fit::Peeled ? max(0, min(there, kWidth)) : there > 0 ? kWidth : 0;
        copy_async16(slot(to, m, piece), from + piece * Tile::covered(), count * int(sizeof(T)));
      });
    }
    close_copies();
  }

  /// What fetch leaves out: the matrices' last pack, behind which there may be nothing.
  __device__ void complete() {
#pragma unroll 1
    for (int piece = 0; piece < kPieces; ++piece) {
      const int first = piece * Tile::covered(), left = int(cols) - column - first;
#pragma unroll 1
      for (int m = 0; m < kMatrices && left > 0 && left < kWidth; ++m)
#pragma unroll 1
        for (int j = 0; matrices[m] && j < left; ++j)
          if (column + first + j >= 0) reinterpret_cast<T*>(slot(stage, m, piece))[j] = static_cast<const T*>(matrices[m])[begin + first + j];
    }
  }

  __device__ static Pack* pack(int i) { return shared_memory<Pack>() + Tile::thread() * (kBytes / int(sizeof(Pack))) + i; }
  __device__ static Pack* slot(int stage, int matrix, int piece) { return pack(stage + matrix * kPieces + piece); }
};

/// One pack a thread.
template <class T, Fit kFit>
using Piece = Tile<16 / sizeof(T), 16 / sizeof(T), kFit>;

}  // namespace liger::cuda
