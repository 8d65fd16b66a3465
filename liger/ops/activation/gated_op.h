#pragma once
#include "liger/core/torch/eight_bit.h"
#include "liger/functions/activation.h"
#include "liger/ops/activation/gated.h"

/// What the family shares: the table's rows by number, and the gates on tensors.
namespace liger::op::gated {

/// Raises ValueError for a number that is no row of the table.
Activation parse(const char* op, int64_t activation);

/// Raises ValueError for what is no row of the table, or for options that SiLU alone has.
GateForm form(const char* op, int64_t activation, double multiplier, const GateOptions& options,
              bool interleaved = false);

/// Where a kernel may write rows in 8 bits beside a result.
struct Bytes {
  RowBytes to;
  const float* factors[2] = {};  // of da and db, per column
};

/// c = g(a) · u(b); c may be a or b. Of an interleaved form both are in a, and b is not read. Returns whether `bytes`,
/// those of c, have been written.
bool run_forward(const Tensor& a, const Tensor& b, const Tensor& c, const GateForm& form, const Bytes* bytes = nullptr);

/// (da, db), whose rows are d_stride elements apart; they may be a and b. Returns whether `bytes`, those of both side
/// by side, have been written. c, where it is defined, is written too, and not in 8 bits: it may be dc.
bool run_backward(const Tensor& dc, const Tensor& a, const Tensor& b, const Tensor& da, const Tensor& db,
                  int64_t d_stride, const GateForm& form, const Bytes* bytes = nullptr, const Tensor& c = {});

}  // namespace liger::op::gated
