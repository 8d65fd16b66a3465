#pragma once
#include "liger/core/torch/op.h"
#include "liger/ops/loss/cross_entropy.h"
#include "liger/ops/loss/options.h"

namespace liger::op::cross_entropy {

/// The options as schemas carry them; empty lists stand for the defaults.
CrossEntropyOptions unpack(at::IntArrayRef flags, at::ArrayRef<double> scales);
std::vector<int64_t> flags(const CrossEntropyOptions&);
std::vector<double> scales(const CrossEntropyOptions&);

/// (loss, z_loss, accuracy, predicted); all but the loss are undefined unless asked for.
using Results = std::tuple<Tensor, Tensor, Tensor, Tensor>;

/// A batch of labels on its way through rows of logits that come in one or several chunks.
class Batch {
 public:
  /// Checks the labels and sums what the losses are divided by. Logits are [rows, cols]; the loss gets `dtype`.
  Batch(const Tensor& target, const OptTensor& class_weight, const OptTensor& normalizer, int64_t cols, const CrossEntropyOptions&, at::ScalarType dtype);

  /// The rows [begin, begin + x's rows) of the batch, chunk by chunk in their order. dx may be undefined, or x; upstream is one factor a row
  /// of the batch, or undefined.
  void run_rows(const Tensor& x, const Tensor& dx, int64_t begin, const Tensor& upstream);

  /// What the cross entropy is divided by, a float scalar.
  Tensor divisor() const { return stats_[0]; }

  /// How many labels are not ignored; waits for the device.
  int64_t valid() const;

  /// When all rows have been run.
  Results results(at::ScalarType z_loss_dtype) const;

 private:
  CrossEntropyOptions options_;
  int64_t rows_, cols_;
  Tensor target_, class_weight_;
  bool reduced_;
  at::ScalarType dtype_;
  Tensor stats_;  // CrossEntropySums, then of each row the loss and, if wanted, the z-loss and whether the prediction is correct
  Tensor loss_, z_loss_, accuracy_, predicted_;

  static constexpr int kSums = sizeof(CrossEntropySums) / sizeof(float);
  CrossEntropySums* sums() const { return static_cast<CrossEntropySums*>(stats_.data_ptr()); }
  /// Of the rows' losses, z-losses (1) and correct predictions (2); undefined unless wanted.
  Tensor of_rows(int which) const;
  float* of_rows(int which, int64_t begin) const;
};

/// What Meta returns for them.
Results empty_results(const Tensor& target, const CrossEntropyOptions&, at::ScalarType loss_dtype, at::ScalarType z_loss_dtype, const at::TensorOptions&);

/// Labels [rows] of an integer type, as the kernels read them.
void check_target(const char* op, const Tensor& target, const c10::SymInt& rows, c10::Device device);
void check_options(const char* op, const CrossEntropyOptions&, const OptTensor& class_weight, const c10::SymInt& cols);

}  // namespace liger::op::cross_entropy
