#pragma once
#include <optional>
#include "liger/core/grouped_gemm.h"
#include "liger/core/torch/op.h"

namespace liger {

/// What is added to a product of grouped rows, as in GroupedRows.
struct GroupedTerms {
  OptTensor bias = {};     // [groups, out] without gaps
  Tensor low = {};         // [rows, rank] without gaps, undefined where there is none
  Tensor low_matrix = {};  // [groups, rank, out]
};

/// out[r] = x[r] w[g] + low[r] low_matrix[g] + bias[g] for the rows r of each group g, of which ends[g] [groups] int32
/// is the number of rows of groups 0 to g: x [rows, in], w [groups, in, out]. Rows behind the last group are undefined.
/// The product is rounded before the bias comes; where grouped_rows does not make it, before the second product, too.
Tensor grouped(const Tensor& x, const Tensor& w, const Tensor& ends, const GroupedTerms& terms = {});

/// What grouped_rows is given for that, all but `out`; nothing where the product is not its to make. `terms` then holds
/// the second matrix in the layout that the kernel reads, perhaps a copy, until the kernel is launched.
std::optional<GroupedRows> grouped_by_kernel(const Tensor& x, const Tensor& w, const Tensor& ends, GroupedTerms& terms);

/// The group of each of so many rows, the last one for rows behind it: [rows] int32.
Tensor groups_of_rows(const Tensor& ends, int64_t rows);

/// out[g] = Σ a[r]ᵀ b[r] over the rows r of each group g: [groups, columns of a, columns of b].
Tensor grouped_outer(const Tensor& a, const Tensor& b, const Tensor& ends);

/// out[g] = Σ rows[r] over the rows r of each group g, summed in float: [groups, cols].
Tensor grouped_sum(const Tensor& rows, const Tensor& ends);

}  // namespace liger
