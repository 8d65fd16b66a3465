#include "liger/core/torch/operator.h"
#include "liger/ops/norm/norm_op.h"
#include "liger/ops.h"

namespace liger {
namespace op::modulated_rms_norm {

struct Definition {
  static constexpr Name kName = "modulated_rms_norm";
  static constexpr std::array kInputs{"x", "weight", "scale", "shift", "eps", "offset", "casting"}, kAll{"y", "rstd"},
      kSaved{"x", "weight", "scale", "shift", "rstd", "offset", "casting"}, kGradients{"dx", "dw", "dscale", "dshift"};

  static std::tuple<Tensor, Tensor> forward(const Tensor& x, const OptTensor& w, const Tensor& scale,
                                            const OptTensor& shift, double eps, double offset, int64_t casting) {
    const auto out = norm::forward("modulated_rms_norm", Norm::Modulated,
                                   {.x = x, .w = w, .scale = scale, .shift = shift}, eps, {offset, casting});
    return {out.y, out.rstd};
  }

  /// (dx, dw, dscale, dshift).
  static std::tuple<Tensor, Tensor, Tensor, Tensor> backward(const Tensor& dy, const Tensor& x, const OptTensor& w,
                                                             const Tensor& scale, const OptTensor& shift,
                                                             const Tensor& rstd, double offset, int64_t casting,
                                                             bool with_dx, bool with_dw, bool with_dscale,
                                                             bool with_dshift) {
    const auto d = norm::backward(
        "modulated_rms_norm_backward", Norm::Modulated, dy, {}, {.x = x, .w = w, .scale = scale, .shift = shift}, {},
        rstd, {.x = with_dx, .w = with_dw, .scale = with_dscale, .shift = with_dshift}, {offset, casting});
    return {or_empty(d.x, x.options()), or_empty(d.w, x.options()), or_empty(d.scale, x.options()),
            or_empty(d.shift, x.options())};
  }
};

}  // namespace op::modulated_rms_norm

Tensor modulated_rms_norm(const Tensor& x, const OptTensor& w, const Tensor& scale, const OptTensor& shift, double eps,
                          double offset, Casting casting) {
  return call<op::modulated_rms_norm::Definition>(x, w, scale, shift, eps, offset, int64_t(casting));
}

LIGER_OPERATORS(modulated_rms_norm, r) { Operator<op::modulated_rms_norm::Definition>::describe(r); }

}  // namespace liger
