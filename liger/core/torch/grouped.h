#pragma once
#include "liger/core/torch/op.h"

namespace liger {

/// out[r] = x[r] w[g] for the rows r of each group g, of which ends[g] [groups] int32 is the number of rows of groups 0
/// to g: x [rows, in], w [groups, in, out]. Rows behind the last group are undefined.
Tensor grouped(const Tensor& x, const Tensor& w, const Tensor& ends);

/// out[g] = Σ a[r]ᵀ b[r] over the rows r of each group g: [groups, columns of a, columns of b].
Tensor grouped_outer(const Tensor& a, const Tensor& b, const Tensor& ends);

}  // namespace liger
