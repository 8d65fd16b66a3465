#include "liger/core/torch/operator.h"
#include "liger/ops.h"
#include "liger/ops/norm/norm_op.h"

namespace liger {
namespace op::rms_norm {

struct Definition {
  static constexpr Name kName = "rms_norm";
  static constexpr std::array kInputs{"x", "weight", "eps", "offset", "casting"}, kAll{"y", "rstd"},
      kSaved{"x", "weight", "rstd", "offset", "casting"}, kGradients{"dx", "dw"};

  static std::tuple<Tensor, Tensor> forward(const Tensor& x, const OptTensor& w, double eps, double offset,
                                            int64_t casting) {
    const auto out = norm::forward("rms_norm", Norm::Rms, {.x = x, .w = w}, eps, {offset, casting});
    return {out.y, out.rstd};
  }

  static std::tuple<Tensor, Tensor> backward(const Tensor& dy, const Tensor& x, const OptTensor& w, const Tensor& rstd,
                                             double offset, int64_t casting, bool with_dx, bool with_dw) {
    const auto d = norm::backward("rms_norm_backward", Norm::Rms, dy, {}, {.x = x, .w = w}, {}, rstd,
                                  {with_dx, with_dw}, {offset, casting});
    return {or_empty(d.x, x.options()), or_empty(d.w, x.options())};
  }
};

}  // namespace op::rms_norm

Tensor rms_norm(const Tensor& x, const OptTensor& w, double eps, double offset, Casting casting) {
  return call<op::rms_norm::Definition>(x, w, eps, offset, int64_t(casting));
}

LIGER_OPERATORS(rms_norm, r) { Operator<op::rms_norm::Definition>::describe(r); }

}  // namespace liger
