#pragma once
#include "liger/core/torch/operator.h"
#include "liger/ops/norm/norm.h"

namespace liger::op::norm {

/// A norm's inputs, in the names of liger/ops/norm/norm.h; those that it does not use stay empty.
struct Inputs {
  Tensor x;
  OptTensor w, b, residual, scale, shift;
  bool centred = false;
  const char* x_name = "x";  // the operator's, for error messages
};
struct Outputs {
  Tensor y, s, mean, rstd;
};
struct Rounding {
  double offset = 0;
  int64_t casting = int64_t(Casting::Gemma);
  LIGER_FIELDS(offset, casting)
};

/// The format (EightBit) in which linear layers read y, whose rows are then made at once (core/torch/eight_bit.h); −1
/// for none.
struct ReadIn {
  int64_t eight_bit = -1;
  LIGER_OPTIONS(eight_bit)
};

/// `name` is the operator's, for error messages.
Outputs forward(const char* name, const Inputs& inputs, double eps, Rounding rounding = {}, ReadIn read_in = {});

/// Which gradients are wanted; the others stay undefined.
struct Wants {
  bool x, w, b = false, scale = false, shift = false;
};
struct Gradients {
  Tensor x, w, b, scale, shift;
};

/// inputs.x is what was normalised: s where there was a residual, which gets the same gradient.
Gradients backward(const char* name, const Tensor& dy, const OptTensor& ds, const Inputs& inputs, const Tensor& mean,
                   const Tensor& rstd, Wants wants, Rounding rounding = {});

/// The results and gradients of operators that several norms share.
struct WithRstd {
  Tensor y, rstd;
  LIGER_FIELDS(y, rstd)
};
struct WithMoments {
  Tensor y, mean, rstd;
  LIGER_FIELDS(y, mean, rstd)
};
template <class T>
struct OfWeight {
  T dx, dw;
  LIGER_FIELDS(dx, dw)
};
template <class T>
struct OfWeightAndBias {
  T dx, dw, db;
  LIGER_FIELDS(dx, dw, db)
};

}  // namespace liger::op::norm
