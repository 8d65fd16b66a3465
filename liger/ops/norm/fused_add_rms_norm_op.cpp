#include "liger/core/torch/operator.h"
#include "liger/ops/norm/norm_op.h"
#include "liger/ops.h"

namespace liger {
namespace op::fused_add_rms_norm {

using Pair = std::tuple<Tensor, Tensor>;

/// (y, s, rstd).
std::tuple<Tensor, Tensor, Tensor> forward(const Tensor& x, const Tensor& residual, const OptTensor& w, double eps,
                                           double offset, int64_t casting) {
  const auto out =
      norm::forward("fused_add_rms_norm", Norm::Added, {.x = x, .w = w, .residual = residual}, eps, {offset, casting});
  return {out.y, out.s, out.rstd};
}

Pair inference(const Tensor& x, const Tensor& residual, const OptTensor& w, double eps, double offset,
               int64_t casting) {
  auto [y, s, rstd] = forward(x, residual, w, eps, offset, casting);
  return {y, s};
}

/// (dx, dw): x's gradient is the residual's too.
Pair backward(const Tensor& dy, const OptTensor& ds, const Tensor& s, const OptTensor& w, const Tensor& rstd,
              double offset, int64_t casting, bool with_dx, bool with_dw) {
  const auto d = norm::backward("fused_add_rms_norm_backward", Norm::Added, dy, ds, {.x = s, .w = w}, {}, rstd,
                                {with_dx, with_dw}, {offset, casting});
  return {or_empty(d.x, s.options()), or_empty(d.w, s.options())};
}

constexpr Op<"liger::fused_add_rms_norm", inference> public_op;
constexpr Op<"liger::fused_add_rms_norm_forward", forward> forward_op;
constexpr Op<"liger::fused_add_rms_norm_backward", backward> backward_op;

struct Autograd {
  static variable_list forward(AutogradContext* ctx, const Tensor& x, const Tensor& residual, const OptTensor& w,
                               double eps, double offset, int64_t casting) {
    auto [y, s, rstd] = forward_op(x, residual, w, eps, offset, casting);
    ctx->save_for_backward({s, value_or_undefined(w), rstd});
    ctx->saved_data["attrs"] = std::make_tuple(offset, casting, wants_grad(x), wants_grad(residual), wants_grad(w));
    ctx->set_materialize_grads(false);
    return {y, s};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const auto [offset, casting, with_dx, with_dresidual, with_dw] =
        ctx->saved_data["attrs"].to<std::tuple<double, int64_t, bool, bool, bool>>();
    Tensor d = grads[1], dw;
    if (grads[0].defined())
      std::tie(d, dw) = backward_op(grads[0], optional(grads[1]), saved[0], optional(saved[1]), saved[2], offset,
                                    casting, with_dx || with_dresidual, with_dw);
    return {if_wanted(with_dx, d), if_wanted(with_dresidual, d), if_wanted(with_dw, dw), {}, {}, {}};
  }
};

}  // namespace op::fused_add_rms_norm

std::tuple<Tensor, Tensor> fused_add_rms_norm(const Tensor& x, const Tensor& residual, const OptTensor& w, double eps,
                                              double offset, Casting casting) {
  return op::fused_add_rms_norm::public_op(x, residual, w, eps, offset, int64_t(casting));
}

LIGER_OPERATORS(fused_add_rms_norm, r) {
  using namespace op::fused_add_rms_norm;
  const Names inputs{"x", "residual", "weight", "eps", "offset", "casting"};
  r.add<Autograd, 3>(public_op, inputs, {"y", "s"});
  r.add(forward_op, inputs, {"y", "s", "rstd"});
  r.add(backward_op, {"dy", "ds", "s", "weight", "rstd", "offset", "casting", "with_dx", "with_dw"}, {"dx", "dw"});
}

}  // namespace liger
