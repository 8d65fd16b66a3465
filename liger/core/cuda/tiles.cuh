#pragma once
// What kernels on Hopper's tensor cores share that have tiles of 128 x 256 sums, two warpgroups 64 x 256 each, and a
// third warpgroup that copies operands to a ring of stages ahead of them.
#include "liger/core/cuda/pack.cuh"
#include "liger/core/cuda/wgmma.cuh"

namespace liger::cuda {

/// Where a tile is, counted in tiles.
struct TileAt {
  int row, column;
};
/// Tiles of neighbouring blocks share operands in the L2 cache: 16 tiles along the rows, then those of the next column,
/// and so on.
__device__ inline TileAt tile_at(int tile, int row_tiles, int column_tiles) {
  constexpr int kPanel = 16;
  const int panel = tile / (column_tiles * kPanel), in_panel = tile - panel * column_tiles * kPanel,
            width = min(kPanel, row_tiles - panel * kPanel);
  return {panel * kPanel + in_panel % width, in_panel / width};
}

/// Where in a ring of stages a warp is.
template <int kStages>
struct RingStage {
  int at = 0, parity = 0;
  __device__ void next() {
    if (++at == kStages) at = 0, parity ^= 1;
  }
};

/// A warpgroup's 64 x 256 sums as rows of 16-bit numbers, by way of its 16 KiB of shared memory, in which 128 sums of a
/// row are 256 bytes.
///   word(c, i)   sums[c][i] and the next (multiply_add), in one word
///   row_at(row)  where the tile's columns begin in global memory in one of the 64 rows; null: the row is not stored
///   columns      of the tile that are stored, a multiple of 8
template <class Word, class RowAt>
__device__ void store_tile(uint4* staging, int group, int thread, int columns, Word word, RowAt row_at) {
  const int lane = thread % 32, warp = thread / 32;
#pragma unroll
  for (int from = 0; from < 256; from += 128) {
    if (from >= columns) break;
    await_threads(1 + group, 128);
#pragma unroll
    for (int i = 0; i < 16; i += 2) {
      const int row = 16 * warp + lane % 16, chunk = i + lane / 16, c = from / 8 + i;
      store_matrices<false>(&staging[row * 16 + (chunk ^ row % 8)],
                            {word(c, 0), word(c, 2), word(c + 1, 0), word(c + 1, 2)});
    }
    await_threads(1 + group, 128);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int row = 8 * i + thread / 16, chunk = thread % 16, column = from + 8 * chunk;
      if (auto* to = row_at(row); to && column < columns) store16(to + column, staging[row * 16 + (chunk ^ row % 8)]);
    }
  }
}

}  // namespace liger::cuda
