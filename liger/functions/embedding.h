#pragma once
#include <ATen/core/Tensor.h>

namespace liger {

/// Rows ids of weight [classes, n]: the result is [*ids, n], in weight's dtype. ids int64 or int32. The gradient of
/// weight is summed in float, in a fixed order, and is 0 for the row padding_idx. An id outside [0, classes) is an
/// error: c10::IndexError on the CPU, a device assertion on CUDA. As torch::embedding.
at::Tensor embedding(const at::Tensor& weight, const at::Tensor& ids, int64_t padding_idx = -1);

}  // namespace liger
