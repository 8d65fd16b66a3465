#include "liger/core/torch/operator.h"
#include "liger/ops/activation/activate.h"
#include "liger/ops/activation/gated_op.h"
#include "liger/ops.h"

namespace liger {
namespace op::activate {

struct Definition {
  static constexpr Name kName = "activate";
  static constexpr std::array kInputs{"x", "activation"}, kAll{"y"}, kSaved{"x", "activation"}, kGradients{"dx"};

  static Tensor forward(const Tensor& x_, int64_t activation) {
    Arguments("activate", "x", x_);
    const Activation act = gated::parse("activate", activation);
    const Tensor y = output(at::empty_symint(x_.sym_sizes(), x_.options()));
    if (y.is_meta()) return y;
    const Tensor x = x_.contiguous();
    run(activate_forward, x,
        {.x = data(x), .y = y.data_ptr(), .count = x.numel(), .dtype = dtype_of(x), .activation = act});
    return y;
  }

  static Tensor backward(const Tensor& dy_, const Tensor& x_, int64_t activation) {
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
};

}  // namespace op::activate

Tensor activate(const Tensor& x, Activation activation) {
  return call<op::activate::Definition>(x, int64_t(activation));
}

LIGER_OPERATORS(activate, r) { Operator<op::activate::Definition>::describe(r); }

}  // namespace liger
