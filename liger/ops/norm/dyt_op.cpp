#include "liger/core/torch/operator.h"
#include "liger/ops/norm/norm_op.h"
#include "liger/ops.h"

namespace liger {
namespace op::dyt {

struct Definition {
  static constexpr Name kName = "dyt";
  static constexpr std::array kInputs{"x", "alpha", "weight", "bias"}, kAll{"y"},
      kSaved{"x", "alpha", "weight", "bias"}, kGradients{"dx", "dalpha", "dw", "db"};

  static Tensor forward(const Tensor& x, const Tensor& alpha, const Tensor& w, const OptTensor& b) {
    return norm::forward("dyt", Norm::Tanh, {.x = x, .w = w, .b = b, .alpha = alpha}, 0).y;
  }

  /// (dx, dalpha, dw, db).
  static std::tuple<Tensor, Tensor, Tensor, Tensor> backward(const Tensor& dy, const Tensor& x, const Tensor& alpha,
                                                             const Tensor& w, const OptTensor& b, bool with_dx,
                                                             bool with_dalpha, bool with_dw, bool with_db) {
    const auto d = norm::backward("dyt_backward", Norm::Tanh, dy, {}, {.x = x, .w = w, .b = b, .alpha = alpha}, {}, {},
                                  {.x = with_dx, .w = with_dw, .b = with_db, .alpha = with_dalpha});
    return {or_empty(d.x, x.options()), or_empty(d.alpha, x.options()), or_empty(d.w, x.options()),
            or_empty(d.b, x.options())};
  }
};

}  // namespace op::dyt

Tensor dyt(const Tensor& x, const Tensor& alpha, const Tensor& w, const OptTensor& b) {
  return call<op::dyt::Definition>(x, alpha, w, b);
}

LIGER_OPERATORS(dyt, r) { Operator<op::dyt::Definition>::describe(r); }

}  // namespace liger
