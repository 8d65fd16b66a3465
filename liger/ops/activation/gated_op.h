#pragma once
#include "liger/core/torch/op.h"
#include "liger/ops.h"
#include "liger/ops/activation/gated.h"

/// What the family shares: the table's rows by number, and the gates on tensors.
namespace liger::op::gated {

/// Raises ValueError for a number that is no row of the table.
Activation parse(const char* op, int64_t activation);

/// Raises ValueError for what is no row of the table, or for options that SiLU alone has.
GateForm form(const char* op, int64_t activation, double multiplier, const GateOptions& options,
              bool interleaved = false);

/// c = g(a) · u(b); c may be a or b. Of an interleaved form both are in a, and b is not read.
void run_forward(const Tensor& a, const Tensor& b, const Tensor& c, const GateForm& form);

/// (da, db), whose rows are d_stride elements apart; they may be a and b.
void run_backward(const Tensor& dc, const Tensor& a, const Tensor& b, const Tensor& da, const Tensor& db,
                  int64_t d_stride, const GateForm& form);

}  // namespace liger::op::gated
