#pragma once
#include "liger/core/torch/eight_bit.h"
#include "liger/functions/linear.h"
#include "liger/ops/linear/eight_bit.h"

/// Products with frozen weights in 8 bits.
namespace liger::op::linear {

/// What weights are multiplied with: a matrix, and its rows in 8 bits, which are made once for all layers that read
/// them.
class Factor {
 public:
  /// `made`: its rows in 8 bits, where something else has made them. Without rows, all weights must be in that format.
  explicit Factor(Tensor rows, const EightBitRows& made = {}) : rows_(std::move(rows)) {
    if (made.rows.defined()) made_[int(made.format)] = made;
  }
  const Tensor& rows() const { return rows_; }
  const EightBitRows& in(EightBit format) const;

 private:
  Tensor rows_;
  mutable EightBitRows made_[2];  // by format
};

/// A layer's weight as a matrix of x's dtype.
Tensor whole(const AdaptedLinear& layer, at::ScalarType dtype);

/// The format that products of rows like x with these layers' weights are made in, if all are made in one of 8 bits.
std::optional<EightBit> format_of_products(const Tensor& x, at::ArrayRef<const AdaptedLinear*> layers);

/// Writes the bytes of some rows, of matrices side by side whose columns have factors, or none.
void write_bytes(const RowBytes& to, at::ArrayRef<Tensor> parts, at::ArrayRef<Tensor> factors = {});

/// y = x weightᵀ + bias + scale · low bᵀ by products of 8-bit numbers. Returns false, and does nothing, where the
/// layer's weight is not in 8 bits, or where no kernel takes it.
bool multiply(const Tensor& y, const Factor& x, const AdaptedLinear& layer, const Tensor& low, const Tensor& b);

/// dx = Σ dyᵢ weightᵢ + low a in the same way, for layers whose weights are all in one format of 8 bits: the scales of
/// the weights' rows are factors of dy's columns before dy is rounded, so that forward and backward read the same
/// numbers. `low` may be undefined. `made`: those rows in 8 bits, where something else has made them; the transposed
/// weights are then written over dy.
bool multiply_transposed(const Tensor& dx, at::ArrayRef<Tensor> dy, at::ArrayRef<const AdaptedLinear*> layers,
                         const Tensor& low, const Tensor& a, const EightBitRows& made = {});

}  // namespace liger::op::linear
