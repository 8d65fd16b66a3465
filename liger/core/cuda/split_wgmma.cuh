#pragma once
// Products of floats as sums of bfloat16 terms (split.cuh) by a warpgroup of Hopper's: the tiles that wgmma reads, and
// their products. These are in flight from products_issued() on, and may be read after await_products() and hold().
#include "liger/core/cuda/split.cuh"
#include "liger/core/cuda/wgmma.cuh"

namespace liger::cuda::split {

/// A matrix in shared memory as kTerms planes of panels of 64 columns, rows of 128 bytes whose chunks of 16 lie at
/// chunk ^ row % 8 (Layout of wgmma.cuh). It begins at a multiple of 1024 bytes. Boxes of the Tensor Memory Accelerator
/// are its panels.
template <int terms, int rows, int cols>
struct SwizzledTile {
  static constexpr int kTerms = terms, kPanels = cols / 64, kPanel = rows * 64, kPlane = kPanels * kPanel,
                       kBytes = terms * kPlane * 2;
  static_assert(rows % 8 == 0 && cols % 64 == 0);
  bfloat16* numbers;

  __device__ static SwizzledTile at_front(char*& shared) {
    const SwizzledTile tile{reinterpret_cast<bfloat16*>(shared)};
    shared += kBytes;
    return tile;
  }
  __device__ bfloat16* at(int row, int col, int term = 0) const {
    return numbers + term * kPlane + col / 64 * kPanel + row * 64 + ((col % 64 / 8) ^ row % 8) * 8 + col % 8;
  }
  /// As Tile's; r is a multiple of 8, c of 16, down and right are less than 16.
  __device__ unsigned address(unsigned from, int term, int r, int c, int down, int right) const {
    return from + 2 * (term * kPlane + c / 64 * kPanel + r * 64) + 128 * down +
           ((c % 64 / 8 + right / 8) ^ down % 8) * 16;
  }
  /// What wgmma reads from row r and column c on, multiples of 8 and 16.
  __device__ uint64_t matrix(int term, int r, int c) const {
    return matrix_from(numbers + term * kPlane + c / 64 * kPanel + r * 64, c % 64 / 8, 2 * kPanel);
  }
};

/// sums += left · right for kColumns columns from n on; of right, rows k to k + 15. kAlongK: the tile has right's
/// columns as rows. Each warp has its own left operand; it must not change while products are in flight.
template <bool kAlongK, int kColumns, int kA, class Tile>
__device__ void group_multiply(float (*sums)[4], const Left<kA>& left, const Tile& right, int k, int n) {
#pragma unroll
  for (int b = 0; b < Tile::kTerms; ++b)
#pragma unroll
    for (int a = 0; a < kA; ++a)
      if (counts(a, b, kA, Tile::kTerms))
        cuda::multiply_add<kAlongK ? Layout::AlongK : Layout::AcrossK, kColumns>(
            sums, left.of[a], right.matrix(b, kAlongK ? n : k, kAlongK ? k : n));
}

/// The same with a left operand of a tile, whose rows are the sums' 64, or with kTransposed its columns; its k begin at
/// left_k.
template <bool kTransposed, bool kAlongK, int kColumns, class LeftTile, class Tile>
__device__ void group_multiply(float (*sums)[4], const LeftTile& left, int left_k, const Tile& right, int k, int n) {
#pragma unroll
  for (int b = 0; b < Tile::kTerms; ++b)
#pragma unroll
    for (int a = 0; a < LeftTile::kTerms; ++a)
      if (counts(a, b, LeftTile::kTerms, Tile::kTerms))
        cuda::multiply_add<bfloat16, kTransposed ? Layout::AcrossK : Layout::AlongK,
                           kAlongK ? Layout::AlongK : Layout::AcrossK, kColumns>(
            sums, left.matrix(a, kTransposed ? left_k : 0, kTransposed ? 0 : left_k),
            right.matrix(b, kAlongK ? n : k, kAlongK ? k : n));
}

/// Writes a panel that left operands were made of to rows from `row` on of a tile.
template <int kTerms, int n, class Tile>
__device__ void put_rows(const Left<kTerms> (&left)[n], const Tile& tile, int row) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int k = 0; k < n; ++k)
#pragma unroll
    for (int t = 0; t < kTerms; ++t)
      store_matrices<false>(tile.at(row + lane % 16, 16 * k + lane / 16 * 8, t), left[k].of[t]);
}

/// Writes its transpose, as terms: to columns from `col` on.
template <int kCols, class Tile>
__device__ void put_transposed(const Panel<kCols>& panel, const Tile& tile, int col) {
  constexpr int kTerms = Tile::kTerms;
  const int lane = threadIdx.x % 32, row = lane / 16 * 8 + lane % 8;
#pragma unroll
  for (int k = 0; k < kCols / 16; ++k) {
    const auto left = panel.template left<kTerms>(k);
#pragma unroll
    for (int t = 0; t < kTerms; ++t) store_matrices<true>(tile.at(16 * k + row, col + lane / 8 % 2 * 8, t), left.of[t]);
  }
}

/// Left operands are made before the products that follow.
template <int kTerms, int n>
__device__ void begin_products(Left<kTerms> (&left)[n]) {
#pragma unroll
  for (auto& of : left)
#pragma unroll
    for (auto& term : of.of)
#pragma unroll
      for (unsigned& word : term) forget(word);
  products_begin();
}

}  // namespace liger::cuda::split
