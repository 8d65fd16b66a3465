#pragma once
#include "liger/core/torch/op.h"
#include "liger/ops.h"
#include "liger/ops/linear/eight_bit.h"

/// Products with frozen weights in 8 bits.
namespace liger::op::linear {

/// Rows in 8 bits, each with its scale.
struct EightBitRows {
  Tensor rows, scale;  // uint8 [rows, cols] and float [rows]
};

/// What weights are multiplied with: a matrix, and its rows in 8 bits, which are made once for all layers that read
/// them.
class Factor {
 public:
  explicit Factor(Tensor rows) : rows_(std::move(rows)) {}
  const Tensor& rows() const { return rows_; }
  const EightBitRows& in(EightBit format) const;

 private:
  Tensor rows_;
  mutable EightBitRows made_[2];  // by format
};

/// A layer's weight as a matrix of x's dtype.
Tensor whole(const AdaptedLinear& layer, at::ScalarType dtype);

/// y = x weightᵀ + bias + scale · low bᵀ by products of 8-bit numbers. Returns false, and does nothing, where the
/// layer's weight is not in 8 bits, or where no kernel takes it.
bool multiply(const Tensor& y, const Factor& x, const AdaptedLinear& layer, const Tensor& low, const Tensor& b);

/// dx = Σ dyᵢ weightᵢ + low a in the same way, for layers whose weights are all in one format of 8 bits: the scales of
/// the weights' rows are factors of dy's columns before dy is rounded, so that forward and backward read the same
/// numbers. `low` may be undefined.
bool multiply_transposed(const Tensor& dx, at::ArrayRef<Tensor> dy, at::ArrayRef<const AdaptedLinear*> layers,
                         const Tensor& low, const Tensor& a);

}  // namespace liger::op::linear
