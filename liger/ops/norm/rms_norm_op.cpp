#include "liger/ops/norm/norm_op.h"
#include "liger/ops.h"

namespace liger {
namespace op::rms_norm {

std::tuple<Tensor, Tensor> forward(const Tensor& x, const OptTensor& w, double eps, double offset, int64_t casting) {
  const auto out = norm::forward("rms_norm", Norm::Rms, {.x = x, .w = w}, eps, {offset, casting});
  return {out.y, out.rstd};
}

/// (dx, dw); what is not asked for is empty.
std::tuple<Tensor, Tensor> backward(const Tensor& dy, const Tensor& x, const OptTensor& w, const Tensor& rstd,
                                    double offset, int64_t casting, bool with_dx, bool with_dw) {
  const auto d = norm::backward("rms_norm_backward", Norm::Rms, dy, {}, {.x = x, .w = w}, {}, rstd, {with_dx, with_dw},
                                {offset, casting});
  return {or_empty(d.x, x.options()), or_empty(d.w, x.options())};
}

Tensor inference(const Tensor& x, const OptTensor& w, double eps, double offset, int64_t casting) {
  return std::get<0>(forward(x, w, eps, offset, casting));
}

constexpr Op<"liger::rms_norm", inference> public_op;
constexpr Op<"liger::rms_norm_forward", forward> forward_op;
constexpr Op<"liger::rms_norm_backward", backward> backward_op;

struct Autograd {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const OptTensor& w, double eps, double offset,
                        int64_t casting) {
    auto [y, rstd] = forward_op(x, w, eps, offset, casting);
    ctx->save_for_backward({x, value_or_undefined(w), rstd});
    ctx->saved_data["attrs"] = std::make_tuple(offset, casting, wants_grad(x), wants_grad(w));
    return y;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const auto [offset, casting, with_dx, with_dw] =
        ctx->saved_data["attrs"].to<std::tuple<double, int64_t, bool, bool>>();
    auto [dx, dw] = backward_op(grads[0], saved[0], optional(saved[1]), saved[2], offset, casting, with_dx, with_dw);
    return {if_wanted(with_dx, dx), if_wanted(with_dw, dw), {}, {}, {}};
  }
};

}  // namespace op::rms_norm

Tensor rms_norm(const Tensor& x, const OptTensor& w, double eps, double offset, Casting casting) {
  return op::rms_norm::public_op(x, w, eps, offset, int64_t(casting));
}

TORCH_LIBRARY_FRAGMENT(liger, m) {
  m.def("rms_norm(Tensor x, Tensor? weight, float eps, float offset, int casting) -> Tensor");
  m.def("rms_norm_forward(Tensor x, Tensor? weight, float eps, float offset, int casting) -> (Tensor y, Tensor rstd)");
  m.def(
      "rms_norm_backward(Tensor dy, Tensor x, Tensor? weight, Tensor rstd, float offset, int casting, bool with_dx, "
      "bool with_dw) -> (Tensor dx, Tensor dw)");
}
LIGER_IMPL(rms_norm, m) {
  m.impl("rms_norm", op::rms_norm::inference);
  m.impl("rms_norm_forward", op::rms_norm::forward);
  m.impl("rms_norm_backward", op::rms_norm::backward);
}
TORCH_LIBRARY_IMPL(liger, Autograd, m) {
  m.impl("rms_norm", differentiated<op::rms_norm::Autograd, 2>(op::rms_norm::public_op));
  refuse_derivative(m, {"rms_norm_forward", "rms_norm_backward"});
}

}  // namespace liger
