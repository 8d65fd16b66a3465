#pragma once
#include "liger/core/torch/operator.h"
#include "liger/functions/loss.h"
#include "liger/ops/loss/cross_entropy.h"

namespace liger::op::cross_entropy {

/// A batch of labels on its way through rows of logits that come in one or several chunks.
class Batch {
 public:
  /// Checks the labels and sums what the losses are divided by. Logits are [rows, cols]; the loss gets `dtype`. scaled:
  /// gradients are multiplied by gradient_scale().
  Batch(const Tensor& target, const OptTensor& class_weight, const OptTensor& normalizer, int64_t cols,
        const CrossEntropyOptions&, at::ScalarType dtype, bool scaled = false);

  /// The rows [begin, begin + x's rows) of the batch, chunk by chunk in their order. dx may be undefined, or x;
  /// upstream is one factor a row of the batch, or undefined.
  void run_rows(const Tensor& x, const Tensor& dx, int64_t begin, const Tensor& upstream);

  /// A float scalar.
  Tensor gradient_scale() const;

  /// How many labels are not ignored; waits for the device.
  int64_t valid() const;

  /// When all rows have been run; those that are not asked for are undefined.
  CrossEntropyResult results(at::ScalarType z_loss_dtype) const;

 private:
  CrossEntropyOptions options_;
  int64_t rows_, cols_;
  Tensor target_, class_weight_;
  bool reduced_;
  at::ScalarType dtype_;
  /// CrossEntropySums, then what is summed over rows: the losses and, if wanted, z-losses and correct predictions.
  Tensor stats_;
  Tensor loss_, z_loss_, accuracy_, predicted_;  // totals, or of each row

  static constexpr int kSums = sizeof(CrossEntropySums) / sizeof(float);
  CrossEntropySums* sums() const { return static_cast<CrossEntropySums*>(stats_.data_ptr()); }
  /// Of the rows' losses, z-losses (1) and correct predictions (2) from row `begin`; null unless wanted.
  float* of_rows(int which, int64_t begin) const;
};

/// What Meta returns for them.
CrossEntropyResult empty_results(const Tensor& target, const CrossEntropyOptions&, at::ScalarType loss_dtype,
                                 at::ScalarType z_loss_dtype, const at::TensorOptions&);

/// What an operator returned, less the empty tensors in the place of results that are not asked for.
CrossEntropyResult asked_for(CrossEntropyResult, const CrossEntropyOptions&);

/// Raises ValueError for options that are none. An infinite softcap is none.
CrossEntropyOptions checked(const char* op, CrossEntropyOptions, const c10::SymInt& classes);

}  // namespace liger::op::cross_entropy
