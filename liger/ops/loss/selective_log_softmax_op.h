#pragma once
#include "liger/core/torch/op.h"

namespace liger::op::selective_log_softmax {

/// Log-probabilities, entropies and what backward needs of them (stats [rows, 3]), all float, of logits x [rows, classes], whose rows lie x_stride elements
/// apart. ids [rows], int64. An id that is neither a class nor ignore_index raises IndexError on the CPU and is a device assertion on CUDA.
void run_rows(const Tensor& x, int64_t x_stride, const Tensor& ids, const Tensor& logp, const Tensor& entropy, const Tensor& stats, double temperature,
              int64_t ignore_index);

/// dx [rows, classes], which may be x, for upstream gradients [rows], float.
void run_backward(const Tensor& x, int64_t x_stride, const Tensor& ids, const Tensor& dlogp, const Tensor& dentropy, const Tensor& stats, const Tensor& dx,
                  double temperature, int64_t ignore_index);

}  // namespace liger::op::selective_log_softmax
