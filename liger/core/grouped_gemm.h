#pragma once
#include "liger/core/kernel.h"

namespace liger {

/// Rows sorted by group, and for each group a matrix, and what may be added to the product: the product of other rows,
/// few numbers wide, with a second matrix, as an adapter of low rank has them, and a bias.
///   out[r] = x[r] matrix[g] + low[r] low_matrix[g] + bias[g]   for the rows r of each group g
/// Products of 16-bit numbers, summed in float, and rounded before the bias comes. Rows behind the last group are
/// neither read nor written.
struct GroupedRows {
  const void* x;       // [rows, depth]
  const void* matrix;  // [groups, depth, cols], one of its last two dimensions contiguous
  void* out;           // [rows, cols]
  const int* ends;     // [groups]: the number of rows of groups 0 to g
  int64_t rows, groups, depth, cols;
  int64_t x_stride, matrix_stride;  // from one row to the next; of the matrices: along the dimension not contiguous
  int64_t group_stride;
  bool along_depth;  // whether the matrix is contiguous along depth
  DType dtype;
  const void* bias;              // [groups, cols], may be null
  const void *low, *low_matrix;  // [rows, rank], [groups, rank, cols], the latter as the matrix is; without gaps
  int64_t rank;                  // 0: there are none
};

///   out[g] = Σ a[r]ᵀ b[r]     over the rows r of each group g, zeros for a group without rows
struct GroupedOuter {
  const void *a, *b;  // [rows, cols_a], [rows, cols_b]
  void* out;          // [groups, cols_a, cols_b]
  const int* ends;    // [groups]
  int64_t rows, groups, cols_a, cols_b;
  int64_t a_stride, b_stride;
  DType dtype;
};

/// What the kernels take, of a backend that has them: at most so many groups, and 16-bit numbers, pointers and strides
/// of multiples of 16 bytes.
inline constexpr int64_t kGroupedMost = 704;

/// Whether the current device is one that a backend's kernels for groups run on.
struct HasGrouped {
  bool* yes;
};

// Of Hopper alone: other devices and backends have none.
inline constinit Kernel<HasGrouped> has_grouped{"has_grouped"};
inline constinit Kernel<GroupedRows> grouped_rows{"grouped_rows"};
inline constinit Kernel<GroupedOuter> grouped_outer_products{"grouped_outer_products"};

}  // namespace liger
