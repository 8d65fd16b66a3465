#include "liger/ops/norm/norm_op.h"
#include "liger/ops.h"

namespace liger {
namespace op::layer_norm {

/// (y, mean, rstd).
std::tuple<Tensor, Tensor, Tensor> forward(const Tensor& x, const OptTensor& w, const OptTensor& b, double eps) {
  const auto out = norm::forward("layer_norm", Norm::Layer, {.x = x, .w = w, .b = b}, eps);
  return {out.y, out.mean, out.rstd};
}

Tensor inference(const Tensor& x, const OptTensor& w, const OptTensor& b, double eps) {
  return std::get<0>(forward(x, w, b, eps));
}

/// (dx, dw, db).
std::tuple<Tensor, Tensor, Tensor> backward(const Tensor& dy, const Tensor& x, const OptTensor& w, const OptTensor& b,
                                            const Tensor& mean, const Tensor& rstd, bool with_dx, bool with_dw,
                                            bool with_db) {
  const auto d = norm::backward("layer_norm_backward", Norm::Layer, dy, {}, {.x = x, .w = w, .b = b}, mean, rstd,
                                {.x = with_dx, .w = with_dw, .b = with_db});
  return {or_empty(d.x, x.options()), or_empty(d.w, x.options()), or_empty(d.b, x.options())};
}

constexpr Op<"liger::layer_norm", inference> public_op;
constexpr Op<"liger::layer_norm_forward", forward> forward_op;
constexpr Op<"liger::layer_norm_backward", backward> backward_op;

struct Autograd {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const OptTensor& w, const OptTensor& b, double eps) {
    auto [y, mean, rstd] = forward_op(x, w, b, eps);
    ctx->save_for_backward({x, value_or_undefined(w), value_or_undefined(b), mean, rstd});
    ctx->saved_data["wants"] = std::make_tuple(wants_grad(x), wants_grad(w), wants_grad(b));
    return y;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const auto [with_dx, with_dw, with_db] = ctx->saved_data["wants"].to<std::tuple<bool, bool, bool>>();
    auto [dx, dw, db] = backward_op(grads[0], saved[0], optional(saved[1]), optional(saved[2]), saved[3], saved[4],
                                    with_dx, with_dw, with_db);
    return {if_wanted(with_dx, dx), if_wanted(with_dw, dw), if_wanted(with_db, db), {}};
  }
};

}  // namespace op::layer_norm

Tensor layer_norm(const Tensor& x, const OptTensor& w, const OptTensor& b, double eps) {
  return op::layer_norm::public_op(x, w, b, eps);
}

TORCH_LIBRARY_FRAGMENT(liger, m) {
  m.def("layer_norm(Tensor x, Tensor? weight, Tensor? bias, float eps) -> Tensor");
  m.def(
      "layer_norm_forward(Tensor x, Tensor? weight, Tensor? bias, float eps) -> (Tensor y, Tensor mean, Tensor rstd)");
  m.def(
      "layer_norm_backward(Tensor dy, Tensor x, Tensor? weight, Tensor? bias, Tensor mean, Tensor rstd, bool with_dx, "
      "bool with_dw, bool with_db) "
      "-> (Tensor dx, Tensor dw, Tensor db)");
}
LIGER_IMPL(layer_norm, m) {
  m.impl("layer_norm", op::layer_norm::inference);
  m.impl("layer_norm_forward", op::layer_norm::forward);
  m.impl("layer_norm_backward", op::layer_norm::backward);
}
TORCH_LIBRARY_IMPL(liger, Autograd, m) {
  m.impl("layer_norm", differentiated<op::layer_norm::Autograd, 3>(op::layer_norm::public_op));
  refuse_derivative(m, {"layer_norm_forward", "layer_norm_backward"});
}

}  // namespace liger
