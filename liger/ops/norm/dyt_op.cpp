#include "liger/ops/norm/norm_op.h"
#include "liger/ops.h"

namespace liger {
namespace op::dyt {

Tensor forward(const Tensor& x, const Tensor& alpha, const Tensor& w, const OptTensor& b) {
  return norm::forward("dyt", Norm::Tanh, {.x = x, .w = w, .b = b, .alpha = alpha}, 0).y;
}

/// (dx, dalpha, dw, db).
std::tuple<Tensor, Tensor, Tensor, Tensor> backward(const Tensor& dy, const Tensor& x, const Tensor& alpha,
                                                    const Tensor& w, const OptTensor& b, bool with_dx, bool with_dalpha,
                                                    bool with_dw, bool with_db) {
  const auto d = norm::backward("dyt_backward", Norm::Tanh, dy, {}, {.x = x, .w = w, .b = b, .alpha = alpha}, {}, {},
                                {.x = with_dx, .w = with_dw, .b = with_db, .alpha = with_dalpha});
  return {or_empty(d.x, x.options()), or_empty(d.alpha, x.options()), or_empty(d.w, x.options()),
          or_empty(d.b, x.options())};
}

constexpr Op<"liger::dyt", forward> public_op;
constexpr Op<"liger::dyt_forward", forward> forward_op;
constexpr Op<"liger::dyt_backward", backward> backward_op;

struct Autograd {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& alpha, const Tensor& w,
                        const OptTensor& b) {
    ctx->save_for_backward({x, alpha, w, value_or_undefined(b)});
    ctx->saved_data["wants"] = std::make_tuple(wants_grad(x), wants_grad(alpha), wants_grad(w), wants_grad(b));
    return forward_op(x, alpha, w, b);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const auto [with_dx, with_dalpha, with_dw, with_db] =
        ctx->saved_data["wants"].to<std::tuple<bool, bool, bool, bool>>();
    auto [dx, dalpha, dw, db] =
        backward_op(grads[0], saved[0], saved[1], saved[2], optional(saved[3]), with_dx, with_dalpha, with_dw, with_db);
    return {if_wanted(with_dx, dx), if_wanted(with_dalpha, dalpha), if_wanted(with_dw, dw), if_wanted(with_db, db)};
  }
};

}  // namespace op::dyt

Tensor dyt(const Tensor& x, const Tensor& alpha, const Tensor& w, const OptTensor& b) {
  return op::dyt::public_op(x, alpha, w, b);
}

TORCH_LIBRARY_FRAGMENT(liger, m) {
  m.def("dyt(Tensor x, Tensor alpha, Tensor weight, Tensor? bias) -> Tensor");
  m.def("dyt_forward(Tensor x, Tensor alpha, Tensor weight, Tensor? bias) -> Tensor");
  m.def(
      "dyt_backward(Tensor dy, Tensor x, Tensor alpha, Tensor weight, Tensor? bias, bool with_dx, bool with_dalpha, "
      "bool with_dw, bool with_db) "
      "-> (Tensor dx, Tensor dalpha, Tensor dw, Tensor db)");
}
LIGER_IMPL(dyt, m) {
  m.impl("dyt", op::dyt::forward);
  m.impl("dyt_forward", op::dyt::forward);
  m.impl("dyt_backward", op::dyt::backward);
}
TORCH_LIBRARY_IMPL(liger, Autograd, m) {
  m.impl("dyt", differentiated<op::dyt::Autograd, 4>(op::dyt::public_op));
  refuse_derivative(m, {"dyt_forward", "dyt_backward"});
}

}  // namespace liger
