#pragma once
#include "liger/core/cuda/tile.cuh"

namespace liger::cuda {

/// f(piece) for each of kPieces.
template <int kPieces, class F>
__device__ void for_each_piece(F f) {
#pragma unroll
  for (int piece = 0; piece < kPieces; ++piece) f(piece);
}

/// Rows of kMatrices matrices on their way to shared memory: the next one comes while a block works on one, which all its passes find
/// there, with zeros beside it. A thread has kPieces pieces of a row, a pack each, and meets no others, so that no barrier is needed. All
/// rows that threadIdx.y walks along begin alike between two 16-byte boundaries.
template <class T, class Tile, int kMatrices, int kPieces>
struct Ring {
  static constexpr int kWidth = Tile::kWidth;
  using Pack = cuda::Pack<T, kWidth>;
  static_assert(Tile::kItems == kWidth);
  int64_t rows, cols;
  const void* matrices[kMatrices];  // nothing comes where null
  int shift, stage = 0;

  static constexpr int kBytes = 2 * kMatrices * kPieces * int(sizeof(Pack));  // of shared memory a thread

  /// Sends for row `first`.
  template <class... Pointers>
  __device__ Ring(int64_t first, int64_t rows, int64_t cols, Pointers... of) : rows(rows), cols(cols), matrices{of...} {
    shift = Tile::template place<T>(matrices[0], first, rows, cols).shift;
    fetch(first);
  }

  __device__ Place place(int64_t row, int piece) const { return {row, rows, cols, shift, piece * Tile::covered()}; }

  /// `row`, sent for last, is this one now; row `next` is sent for.
  __device__ void turn(int64_t row, int64_t next) {
    copies_done();
    stage ^= 1;
    if (Tile::kFit == Fit::Peeled && threadIdx.x == 0)
#pragma unroll
      for (int m = 0; m < kMatrices; ++m)
        for (int j = 0; j < shift; ++j) reinterpret_cast<T*>(slot(stage, m, 0))[j] = T(0.f);
    if (Tile::kFit == Fit::Peeled && row + 1 == rows) complete(row);
    fetch(next);
  }

  __device__ Raw<T, Tile> get(int matrix, int piece) const { return {*slot(stage, matrix, piece)}; }
  __device__ void put(const Raw<T, Tile>& raw, int matrix, int piece) { *slot(stage, matrix, piece) = raw.packs[0]; }

 private:
  __device__ void fetch(int64_t row) {
    // In 32 bits, and a row's address once: this is done for every pack.
    const bool last = Tile::kFit == Fit::Peeled && row + 1 == rows;
    const int first = Tile::column(0, {0, 0, 0, shift}), left = row < rows ? int(cols) - first : 0;
#pragma unroll
    for (int m = 0; m < kMatrices; ++m) {
      if (!matrices[m]) continue;
      const T* from = static_cast<const T*>(matrices[m]) + (row * cols + first);
      for_each_piece<kPieces>([&](int piece) {
        const int there = left - piece * Tile::covered();
        const int count = last && there < kWidth ? 0 : Tile::kFit == Fit::Peeled ? max(0, min(there, kWidth)) : there > 0 ? kWidth : 0;
        copy_async16(slot(stage ^ 1, m, piece), from + piece * Tile::covered(), count * int(sizeof(T)));
      });
    }
  }

  /// What fetch leaves out: the matrices' last pack, behind which there may be nothing.
  __device__ void complete(int64_t row) {
#pragma unroll 1
    for (int piece = 0; piece < kPieces; ++piece) {
      const int64_t at = int64_t(piece) * Tile::covered() + Tile::column(0, place(row, piece)), left = cols - at;
#pragma unroll 1
      for (int m = 0; m < kMatrices && left > 0 && left < kWidth; ++m)
#pragma unroll 1
        for (int j = 0; matrices[m] && j < left; ++j)
          if (at + j >= 0) reinterpret_cast<T*>(slot(stage, m, piece))[j] = static_cast<const T*>(matrices[m])[row * cols + at + j];
    }
  }

  __device__ static Pack* slot(int stage, int matrix, int piece) {
    return shared_memory<Pack>() + ((stage * kMatrices + matrix) * kPieces + piece) * Tile::threads() + Tile::thread();
  }
};

/// Vectors that a block's rows share, in shared memory as the rows lie there, after kAfter bytes a thread: each has its own packs.
template <class T, class Tile, int kVectors, int kPieces, int kAfter>
struct Shelf {
  using Pack = cuda::Pack<T, Tile::kWidth>;
  static constexpr int kBytes = kVectors * kPieces * int(sizeof(Pack));
  __device__ static void put(const Raw<T, Tile>& raw, int vector, int piece) { *slot(vector, piece) = raw.packs[0]; }
  __device__ static Raw<T, Tile> get(int vector, int piece) { return {*slot(vector, piece)}; }

 private:
  __device__ static Pack* slot(int vector, int piece) {
    return reinterpret_cast<Pack*>(shared_memory<char>() + kAfter * Tile::threads()) + (vector * kPieces + piece) * Tile::threads() + Tile::thread();
  }
};

/// One pack a thread.
template <class T, Fit kFit>
using Piece = Tile<16 / sizeof(T), 16 / sizeof(T), kFit>;

}  // namespace liger::cuda
