#pragma once
#include "liger/core/torch/op.h"
#include "liger/ops/loss/cross_entropy.h"
#include "liger/ops/loss/options.h"

namespace liger::op::cross_entropy {

/// The options as schemas carry them.
CrossEntropyOptions unpack(at::IntArrayRef flags, at::ArrayRef<double> scales);
std::vector<int64_t> flags(const CrossEntropyOptions&);
std::vector<double> scales(const CrossEntropyOptions&);

/// (loss, z_loss, accuracy, predicted); accuracy and predicted are empty unless asked for.
using Results = std::tuple<Tensor, Tensor, Tensor, Tensor>;

/// A batch of labels on its way through rows of logits that come in one or several chunks.
class Batch {
 public:
  /// Checks the labels and sums what the losses are divided by. Logits are [rows, cols] of `logits` options.
  Batch(const Tensor& target, const OptTensor& class_weight, const OptTensor& normalizer, int64_t cols, const CrossEntropyOptions&);

  /// The rows [begin, begin + x's rows) of the batch. dx may be undefined, or x; upstream is one factor a row of the batch, or undefined.
  void run_rows(const Tensor& x, const Tensor& dx, int64_t begin, const Tensor& upstream);

  /// What the cross entropy was divided by, a float scalar.
  Tensor divisor() const { return stats_[0]; }

  Results results(at::ScalarType loss_dtype, at::ScalarType z_loss_dtype);

 private:
  const CrossEntropyOptions options_;
  const int64_t rows_, cols_;
  const Tensor target_, class_weight_;
  Tensor of_row(int i) const { return stats_.narrow(0, kNorm + i * rows_, rows_); }

  static constexpr int kNorm = 4;  // numbers of CrossEntropyNorm
  Tensor stats_, predicted_;       // stats: those, then of each row loss, z-loss and, if wanted, correct
};

/// What Meta returns for them.
Results empty_results(const Tensor& target, const CrossEntropyOptions&, at::ScalarType loss_dtype, at::ScalarType z_loss_dtype, const at::TensorOptions&);

/// Labels [rows] of an integer type, as the kernels read them.
void check_target(const char* op, const Tensor& target, const c10::SymInt& rows, c10::Device device);
void check_options(const char* op, const CrossEntropyOptions&, const OptTensor& class_weight, const c10::SymInt& cols);

}  // namespace liger::op::cross_entropy
