#include "liger/core/torch/operator.h"
#include "liger/ops/norm/norm_op.h"
#include "liger/ops.h"

namespace liger {
namespace op {

struct DyT {
  static constexpr Name kName = "dyt";
  struct Inputs {
    Tensor x, alpha, weight;
    OptTensor bias;
    LIGER_FIELDS(x, alpha, weight, bias)
  };
  using Saved = Inputs;
  using Upstream = Dy;
  template <class T>
  struct Gradients {
    T dx, dalpha, dw, db;
    LIGER_FIELDS(dx, dalpha, dw, db)
  };

  static norm::Inputs as_norm(const Inputs& in) { return {.x = in.x, .w = in.weight, .b = in.bias, .alpha = in.alpha}; }

  static Tensor forward(const Inputs& in) { return norm::forward("dyt", Norm::Tanh, as_norm(in), 0).y; }

  static Saved save(const Inputs& in, const Tensor&) { return in; }

  static Gradients<Tensor> backward(const Upstream& up, const Saved& in, const Gradients<bool>& wanted) {
    const auto d = norm::backward("dyt_backward", Norm::Tanh, up.dy, {}, as_norm(in), {}, {},
                                  {.x = wanted.dx, .w = wanted.dw, .b = wanted.db, .alpha = wanted.dalpha});
    return {d.x, d.alpha, d.w, d.b};
  }
};

}  // namespace op

Tensor dyt(const Tensor& x, const Tensor& alpha, const Tensor& w, const OptTensor& b) {
  return Operator<op::DyT>::public_op(x, alpha, w, b);
}

LIGER_OPERATORS(dyt, Operator<op::DyT>)

}  // namespace liger
