#include "liger/core/torch/operator.h"
#include "liger/ops/norm/norm_op.h"
#include "liger/ops.h"

namespace liger {
namespace op::layer_norm {

struct Definition {
  static constexpr Name kName = "layer_norm";
  static constexpr std::array kInputs{"x", "weight", "bias", "eps"}, kAll{"y", "mean", "rstd"},
      kSaved{"x", "weight", "bias", "mean", "rstd"}, kGradients{"dx", "dw", "db"};

  /// (y, mean, rstd).
  static std::tuple<Tensor, Tensor, Tensor> forward(const Tensor& x, const OptTensor& w, const OptTensor& b,
                                                    double eps) {
    const auto out = norm::forward("layer_norm", Norm::Layer, {.x = x, .w = w, .b = b}, eps);
    return {out.y, out.mean, out.rstd};
  }

  /// (dx, dw, db).
  static std::tuple<Tensor, Tensor, Tensor> backward(const Tensor& dy, const Tensor& x, const OptTensor& w,
                                                     const OptTensor& b, const Tensor& mean, const Tensor& rstd,
                                                     bool with_dx, bool with_dw, bool with_db) {
    const auto d = norm::backward("layer_norm_backward", Norm::Layer, dy, {}, {.x = x, .w = w, .b = b}, mean, rstd,
                                  {.x = with_dx, .w = with_dw, .b = with_db});
    return {or_empty(d.x, x.options()), or_empty(d.w, x.options()), or_empty(d.b, x.options())};
  }
};

}  // namespace op::layer_norm

Tensor layer_norm(const Tensor& x, const OptTensor& w, const OptTensor& b, double eps) {
  return call<op::layer_norm::Definition>(x, w, b, eps);
}

LIGER_OPERATORS(layer_norm, r) { Operator<op::layer_norm::Definition>::describe(r); }

}  // namespace liger
