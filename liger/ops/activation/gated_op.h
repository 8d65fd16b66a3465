#pragma once
#include "liger/core/torch/op.h"
#include "liger/ops/activation/gated.h"

/// What the family shares: the table's rows by number, and the gates on tensors.
namespace liger::op::gated {

/// Raises ValueError for a number that is no row of the table.
Activation parse(const char* op, int64_t activation);

/// c = act(m · a) · b; c may be a or b.
void run_forward(const Tensor& a, const Tensor& b, const Tensor& c, Activation activation, double gate_multiplier);

/// (da, db), whose rows are d_stride elements apart; they may be a and b.
void run_backward(const Tensor& dc, const Tensor& a, const Tensor& b, const Tensor& da, const Tensor& db,
                  int64_t d_stride, Activation activation, double gate_multiplier);

}  // namespace liger::op::gated
