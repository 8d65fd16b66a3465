#include "liger/ops/activation/activate.h"
#include "liger/ops/activation/gated_op.h"
#include "liger/ops.h"

namespace liger {
namespace op::activate {

Tensor forward(const Tensor& x_, int64_t activation) {
  Arguments("activate", "x", x_);
  const Activation act = gated::parse("activate", activation);
  const Tensor y = output(at::empty_symint(x_.sym_sizes(), x_.options()));
  if (y.is_meta()) return y;
  const Tensor x = x_.contiguous();
  run(activate_forward, x,
      {.x = data(x), .y = y.data_ptr(), .count = x.numel(), .dtype = dtype_of(x), .activation = act});
  return y;
}

Tensor backward(const Tensor& dy_, const Tensor& x_, int64_t activation) {
  Arguments("activate_backward", "x", x_).like("dy", dy_);
  const Tensor dx = output(at::empty_symint(x_.sym_sizes(), x_.options()));
  if (dx.is_meta()) return dx;
  const Tensor dy = dy_.contiguous(), x = x_.contiguous();
  run(activate_backward, x,
      {.dy = data(dy),
       .x = data(x),
       .dx = dx.data_ptr(),
       .count = x.numel(),
       .dtype = dtype_of(x),
       .activation = gated::parse("activate", activation)});
  return dx;
}

constexpr Op<"liger::activate", forward> public_op;
constexpr Op<"liger::activate_forward", forward> forward_op;
constexpr Op<"liger::activate_backward", backward> backward_op;

struct Autograd {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, int64_t activation) {
    ctx->save_for_backward({x});
    ctx->saved_data["activation"] = activation;
    return forward_op(x, activation);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    return {backward_op(grads[0], ctx->get_saved_variables()[0], ctx->saved_data["activation"].toInt()), {}};
  }
};

}  // namespace op::activate

Tensor activate(const Tensor& x, Activation activation) { return op::activate::public_op(x, int64_t(activation)); }

TORCH_LIBRARY_FRAGMENT(liger, m) {
  m.def("activate(Tensor x, int activation) -> Tensor");
  m.def("activate_forward(Tensor x, int activation) -> Tensor");
  m.def("activate_backward(Tensor dy, Tensor x, int activation) -> Tensor");
}
LIGER_IMPL(activate, m) {
  m.impl("activate", op::activate::forward);
  m.impl("activate_forward", op::activate::forward);
  m.impl("activate_backward", op::activate::backward);
}
TORCH_LIBRARY_IMPL(liger, Autograd, m) {
  m.impl("activate", differentiated<op::activate::Autograd, 1>(op::activate::public_op));
  refuse_derivative(m, {"activate_forward", "activate_backward"});
}

}  // namespace liger
