#include "liger/core/torch/operator.h"
#include "liger/ops/norm/norm_op.h"
#include "liger/functions/norm.h"

namespace liger {
namespace op {

struct ModulatedRMSNorm {
  static constexpr Name kName = "modulated_rms_norm";
  struct Inputs {
    Tensor x;
    OptTensor weight;
    Tensor scale;
    OptTensor shift;
    double eps;
    norm::Rounding rounding;
    LIGER_FIELDS(x, weight, scale, shift, eps, rounding)
  };
  using Results = norm::WithRstd;
  struct Saved {
    Tensor x;
    OptTensor weight;
    Tensor scale;
    OptTensor shift;
    Tensor rstd;
    norm::Rounding rounding;
    LIGER_FIELDS(x, weight, scale, shift, rstd, rounding)
  };
  using Upstream = Dy;
  template <class T>
  struct Gradients {
    T dx, dw, dscale, dshift;
    LIGER_FIELDS(dx, dw, dscale, dshift)
  };

  static Results forward(const Inputs& in) {
    const auto out = norm::forward(
        "modulated_rms_norm", {.x = in.x, .w = in.weight, .scale = in.scale, .shift = in.shift}, in.eps, in.rounding);
    return {out.y, out.rstd};
  }

  static Saved save(const Inputs& in, const Results& out) {
    return {in.x, in.weight, in.scale, in.shift, out.rstd, in.rounding};
  }

  static Gradients<Tensor> backward(const Upstream& up, const Saved& s, const Gradients<bool>& wanted) {
    const auto d = norm::backward(
        "modulated_rms_norm_backward", up.dy, {}, {.x = s.x, .w = s.weight, .scale = s.scale, .shift = s.shift}, {},
        s.rstd, {.x = wanted.dx, .w = wanted.dw, .scale = wanted.dscale, .shift = wanted.dshift}, s.rounding);
    return {d.x, d.w, d.scale, d.shift};
  }
};

}  // namespace op

Tensor modulated_rms_norm(const Tensor& x, const OptTensor& w, const Tensor& scale, const OptTensor& shift, double eps,
                          double offset, Casting casting) {
  return Operator<op::ModulatedRMSNorm>::public_op(x, w, scale, shift, eps, offset, casting);
}

LIGER_OPERATORS(modulated_rms_norm, Operator<op::ModulatedRMSNorm>)

}  // namespace liger
