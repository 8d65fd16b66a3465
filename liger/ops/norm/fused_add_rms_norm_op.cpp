#include "liger/core/torch/operator.h"
#include "liger/ops/norm/norm_op.h"
#include "liger/functions/norm.h"

namespace liger {
namespace op {

struct FusedAddRMSNorm {
  static constexpr Name kName = "fused_add_rms_norm";
  struct Inputs {
    Tensor x, residual;
    OptTensor weight;
    double eps;
    norm::Rounding rounding;
    LIGER_FIELDS(x, residual, weight, eps, rounding)
  };
  using Options = norm::ReadIn;
  struct Results {
    Tensor y, s, rstd;
    LIGER_FIELDS(y, s, rstd)
  };
  struct Saved {
    Tensor s;
    OptTensor weight;
    Tensor rstd;
    norm::Rounding rounding;
    LIGER_FIELDS(s, weight, rstd, rounding)
  };
  struct Upstream {
    Tensor dy;
    OptTensor ds;
    LIGER_FIELDS(dy, ds)
  };
  template <class T>
  using Gradients = norm::OfWeight<T>;
  static constexpr std::array kGradientOf{0, 0, 1};  // x's gradient is the residual's too

  static Results forward(const Inputs& in, const Options& read_in) {
    const auto out = norm::forward("fused_add_rms_norm", {.x = in.x, .w = in.weight, .residual = in.residual}, in.eps,
                                   in.rounding, read_in);
    return {out.y, out.s, out.rstd};
  }

  static Saved save(const Inputs& in, const Results& out) { return {out.s, in.weight, out.rstd, in.rounding}; }

  static Gradients<Tensor> backward(const Upstream& up, const Saved& saved, const Gradients<bool>& wanted) {
    const auto d =
        norm::backward("fused_add_rms_norm_backward", up.dy, up.ds, {.x = saved.s, .w = saved.weight, .x_name = "s"},
                       {}, saved.rstd, {.x = wanted.dx, .w = wanted.dw}, saved.rounding);
    return {d.x, d.w};
  }

  /// Where only the sum is used, its gradient is passed on.
  static Gradients<Tensor> differentiate(const Upstream& up, const Saved& saved, const Gradients<bool>& wanted) {
    if (!up.dy.defined()) return {value_or_undefined(up.ds), {}};
    return as_fields<Gradients<Tensor>>(Operator<FusedAddRMSNorm>::backward_op(up, saved, wanted));
  }
};

}  // namespace op

std::tuple<Tensor, Tensor> fused_add_rms_norm(const Tensor& x, const Tensor& residual, const OptTensor& w, double eps,
                                              double offset, Casting casting) {
  return Operator<op::FusedAddRMSNorm>::public_op(x, residual, w, eps, offset, casting, -1);
}

LIGER_OPERATORS(fused_add_rms_norm, Operator<op::FusedAddRMSNorm>)

}  // namespace liger
