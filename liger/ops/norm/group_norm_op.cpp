#include "liger/ops/norm/norm_op.h"
#include "liger/ops.h"

namespace liger {
namespace op::group_norm {

/// (y, mean, rstd).
std::tuple<Tensor, Tensor, Tensor> forward(const Tensor& x, const OptTensor& w, const OptTensor& b, int64_t groups, double eps) {
  const auto out = norm::forward("group_norm", Norm::Group, {.x = x, .w = w, .b = b, .groups = groups}, eps);
  return {out.y, out.mean, out.rstd};
}

Tensor inference(const Tensor& x, const OptTensor& w, const OptTensor& b, int64_t groups, double eps) { return std::get<0>(forward(x, w, b, groups, eps)); }

/// (dx, dw, db).
std::tuple<Tensor, Tensor, Tensor> backward(const Tensor& dy, const Tensor& x, const OptTensor& w, const OptTensor& b, const Tensor& mean, const Tensor& rstd, int64_t groups, bool with_dx,
                                            bool with_dw, bool with_db) {
  const auto d = norm::backward("group_norm", Norm::Group, dy, {}, {.x = x, .w = w, .b = b, .groups = groups}, mean, rstd, {.x = with_dx, .w = with_dw, .b = with_db});
  return {d.x, d.w, d.b};
}

constexpr Op<"liger::group_norm", inference> public_op;
constexpr Op<"liger::group_norm_forward", forward> forward_op;
constexpr Op<"liger::group_norm_backward", backward> backward_op;

struct Autograd : torch::autograd::Function<Autograd> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const OptTensor& w, const OptTensor& b, int64_t groups, double eps) {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    auto [y, mean, rstd] = forward_op(x, w, b, groups, eps);
    ctx->save_for_backward({x, value_or_undefined(w), value_or_undefined(b), mean, rstd});
    ctx->saved_data["attrs"] = std::make_tuple(groups, wants_grad(x), wants_grad(w), wants_grad(b));
    return y;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const auto [groups, with_dx, with_dw, with_db] = ctx->saved_data["attrs"].to<std::tuple<int64_t, bool, bool, bool>>();
    auto [dx, dw, db] = backward_op(grads[0], saved[0], optional(saved[1]), optional(saved[2]), saved[3], saved[4], groups, with_dx, with_dw, with_db);
    return {dx, dw, db, {}, {}};
  }
};

}  // namespace op::group_norm

Tensor group_norm(const Tensor& x, const OptTensor& w, const OptTensor& b, int64_t groups, double eps) { return op::group_norm::public_op(x, w, b, groups, eps); }

TORCH_LIBRARY_FRAGMENT(liger, m) {
  m.def("group_norm(Tensor x, Tensor? weight, Tensor? bias, int groups, float eps) -> Tensor");
  m.def("group_norm_forward(Tensor x, Tensor? weight, Tensor? bias, int groups, float eps) -> (Tensor y, Tensor mean, Tensor rstd)");
  m.def("group_norm_backward(Tensor dy, Tensor x, Tensor? weight, Tensor? bias, Tensor mean, Tensor rstd, int groups, bool with_dx, bool with_dw, bool with_db) "
        "-> (Tensor dx, Tensor dw, Tensor db)");
}
LIGER_IMPL(group_norm, m) {
  m.impl("group_norm", op::group_norm::inference);
  m.impl("group_norm_forward", op::group_norm::forward);
  m.impl("group_norm_backward", op::group_norm::backward);
}
TORCH_LIBRARY_IMPL(liger, Autograd, m) {
  m.impl("group_norm", differentiated<op::group_norm::Autograd, 3>(op::group_norm::public_op));
  refuse_derivative(m, {"group_norm_forward", "group_norm_backward"});
}

}  // namespace liger
