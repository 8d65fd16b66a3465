#include "liger/core/torch/operator.h"
#include "liger/functions/norm.h"
#include "liger/ops/norm/norm_op.h"

namespace liger {
namespace op {

struct RMSNorm {
  static constexpr Name kName = "rms_norm";
  struct Inputs {
    Tensor x;
    OptTensor weight;
    double eps;
    norm::Rounding rounding;
    LIGER_FIELDS(x, weight, eps, rounding)
  };
  using Options = norm::ReadIn;
  using Results = norm::WithRstd;
  struct Saved {
    Tensor x;
    OptTensor weight;
    Tensor rstd;
    norm::Rounding rounding;
    LIGER_FIELDS(x, weight, rstd, rounding)
  };
  using Upstream = Dy;
  template <class T>
  using Gradients = norm::OfWeight<T>;

  static Results forward(const Inputs& in, const Options& read_in) {
    const auto out = norm::forward("rms_norm", {.x = in.x, .w = in.weight}, in.eps, in.rounding, read_in);
    return {out.y, out.rstd};
  }

  static Saved save(const Inputs& in, const Results& out) { return {in.x, in.weight, out.rstd, in.rounding}; }

  static Gradients<Tensor> backward(const Upstream& up, const Saved& s, const Gradients<bool>& wanted) {
    const auto d = norm::backward("rms_norm_backward", up.dy, {}, {.x = s.x, .w = s.weight}, {}, s.rstd,
                                  {.x = wanted.dx, .w = wanted.dw}, s.rounding);
    return {d.x, d.w};
  }
};

}  // namespace op

Tensor rms_norm(const Tensor& x, const OptTensor& w, double eps, double offset, Casting casting) {
  return Operator<op::RMSNorm>::public_op(x, w, eps, offset, casting, -1);
}

LIGER_OPERATORS(rms_norm, Operator<op::RMSNorm>)

}  // namespace liger
