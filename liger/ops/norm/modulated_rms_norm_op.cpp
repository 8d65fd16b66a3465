#include "liger/ops/norm/norm_op.h"
#include "liger/ops.h"

namespace liger {
namespace op::modulated_rms_norm {

std::tuple<Tensor, Tensor> forward(const Tensor& x, const OptTensor& w, const Tensor& scale, const OptTensor& shift,
                                   double eps, double offset, int64_t casting) {
  const auto out = norm::forward("modulated_rms_norm", Norm::Modulated,
                                 {.x = x, .w = w, .scale = scale, .shift = shift}, eps, {offset, casting});
  return {out.y, out.rstd};
}

Tensor inference(const Tensor& x, const OptTensor& w, const Tensor& scale, const OptTensor& shift, double eps,
                 double offset, int64_t casting) {
  return std::get<0>(forward(x, w, scale, shift, eps, offset, casting));
}

/// (dx, dw, dscale, dshift).
std::tuple<Tensor, Tensor, Tensor, Tensor> backward(const Tensor& dy, const Tensor& x, const OptTensor& w,
                                                    const Tensor& scale, const OptTensor& shift, const Tensor& rstd,
                                                    double offset, int64_t casting, bool with_dx, bool with_dw,
                                                    bool with_dscale, bool with_dshift) {
  const auto d = norm::backward(
      "modulated_rms_norm_backward", Norm::Modulated, dy, {}, {.x = x, .w = w, .scale = scale, .shift = shift}, {},
      rstd, {.x = with_dx, .w = with_dw, .scale = with_dscale, .shift = with_dshift}, {offset, casting});
  return {or_empty(d.x, x.options()), or_empty(d.w, x.options()), or_empty(d.scale, x.options()),
          or_empty(d.shift, x.options())};
}

constexpr Op<"liger::modulated_rms_norm", inference> public_op;
constexpr Op<"liger::modulated_rms_norm_forward", forward> forward_op;
constexpr Op<"liger::modulated_rms_norm_backward", backward> backward_op;

struct Autograd {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const OptTensor& w, const Tensor& scale,
                        const OptTensor& shift, double eps, double offset, int64_t casting) {
    auto [y, rstd] = forward_op(x, w, scale, shift, eps, offset, casting);
    ctx->save_for_backward({x, value_or_undefined(w), scale, value_or_undefined(shift), rstd});
    ctx->saved_data["attrs"] =
        std::make_tuple(offset, casting, wants_grad(x), wants_grad(w), wants_grad(scale), wants_grad(shift));
    return y;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const auto [offset, casting, with_dx, with_dw, with_dscale, with_dshift] =
        ctx->saved_data["attrs"].to<std::tuple<double, int64_t, bool, bool, bool, bool>>();
    auto [dx, dw, dscale, dshift] = backward_op(grads[0], saved[0], optional(saved[1]), saved[2], optional(saved[3]),
                                                saved[4], offset, casting, with_dx, with_dw, with_dscale, with_dshift);
    return {if_wanted(with_dx, dx),
            if_wanted(with_dw, dw),
            if_wanted(with_dscale, dscale),
            if_wanted(with_dshift, dshift),
            {},
            {},
            {}};
  }
};

}  // namespace op::modulated_rms_norm

Tensor modulated_rms_norm(const Tensor& x, const OptTensor& w, const Tensor& scale, const OptTensor& shift, double eps,
                          double offset, Casting casting) {
  return op::modulated_rms_norm::public_op(x, w, scale, shift, eps, offset, int64_t(casting));
}

TORCH_LIBRARY_FRAGMENT(liger, m) {
  m.def(
      "modulated_rms_norm(Tensor x, Tensor? weight, Tensor scale, Tensor? shift, float eps, float offset, int casting) "
      "-> Tensor");
  m.def(
      "modulated_rms_norm_forward(Tensor x, Tensor? weight, Tensor scale, Tensor? shift, float eps, float offset, int "
      "casting) -> (Tensor y, Tensor rstd)");
  m.def(
      "modulated_rms_norm_backward(Tensor dy, Tensor x, Tensor? weight, Tensor scale, Tensor? shift, Tensor rstd, "
      "float offset, int casting, bool with_dx, "
      "bool with_dw, bool with_dscale, bool with_dshift) -> (Tensor dx, Tensor dw, Tensor dscale, Tensor dshift)");
}
LIGER_IMPL(modulated_rms_norm, m) {
  m.impl("modulated_rms_norm", op::modulated_rms_norm::inference);
  m.impl("modulated_rms_norm_forward", op::modulated_rms_norm::forward);
  m.impl("modulated_rms_norm_backward", op::modulated_rms_norm::backward);
}
TORCH_LIBRARY_IMPL(liger, Autograd, m) {
  m.impl("modulated_rms_norm", differentiated<op::modulated_rms_norm::Autograd, 4>(op::modulated_rms_norm::public_op));
  refuse_derivative(m, {"modulated_rms_norm_forward", "modulated_rms_norm_backward"});
}

}  // namespace liger
