#include "liger/ops/activation/activate_op.h"
#include "liger/ops/activation/gated_op.h"
#include "liger/functions/activation.h"

namespace liger {
namespace op {

void activated::run_forward(const Tensor& x_, const Tensor& y, Activation activation) {
  const Tensor x = x_.contiguous();
  run(activate_forward, x,
      {.x = data(x), .y = y.data_ptr(), .count = x.numel(), .dtype = dtype_of(x), .activation = activation});
}

void activated::run_backward(const Tensor& dy_, const Tensor& x_, const Tensor& dx, Activation activation,
                             const Tensor& y) {
  const Tensor dy = dy_.contiguous(), x = x_.contiguous();
  run(activate_backward, x,
      {.dy = data(dy),
       .x = data(x),
       .dx = dx.data_ptr(),
       .count = x.numel(),
       .dtype = dtype_of(x),
       .activation = activation,
       .y = y.defined() ? y.data_ptr() : nullptr});
}

struct Activate {
  static constexpr Name kName = "activate";
  struct Inputs {
    Tensor x;
    int64_t activation;
    LIGER_FIELDS(x, activation)
  };
  using Saved = Inputs;
  using Upstream = Dy;
  template <class T>
  using Gradients = Dx<T>;

  static Tensor forward(const Inputs& in) {
    Arguments("activate", "x", in.x);
    const Activation act = gated::parse("activate", in.activation);
    const Tensor y = output(at::empty_symint(in.x.sym_sizes(), in.x.options()));
    if (!y.is_meta()) activated::run_forward(in.x, y, act);
    return y;
  }

  static Saved save(const Inputs& in, const Tensor&) { return in; }

  static Tensor backward(const Upstream& up, const Saved& in) {
    Arguments("activate_backward", "x", in.x).like("dy", up.dy);
    const Tensor dx = output(at::empty_symint(in.x.sym_sizes(), in.x.options()));
    if (!dx.is_meta()) activated::run_backward(up.dy, in.x, dx, gated::parse("activate", in.activation));
    return dx;
  }
};

}  // namespace op

Tensor activate(const Tensor& x, Activation activation) { return Operator<op::Activate>::public_op(x, activation); }

LIGER_OPERATORS(activate, Operator<op::Activate>)

}  // namespace liger
