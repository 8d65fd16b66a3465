#include "liger/ops/activation/xielu.h"
#include "liger/core/torch/operator.h"
#include "liger/functions/activation.h"

namespace liger {
namespace op {

struct XIELU {
  static constexpr Name kName = "xielu";
  struct Inputs {
    Tensor x, alpha_p, alpha_n, beta, eps;
    LIGER_FIELDS(x, alpha_p, alpha_n, beta, eps)
  };
  using Saved = Inputs;
  using Upstream = Dy;
  template <class T>
  struct Gradients {
    T dx, dalpha_p, dalpha_n;
    LIGER_FIELDS(dx, dalpha_p, dalpha_n)
  };

  static Arguments check(const char* op, const Inputs& in) {
    return Arguments(op, "x", in.x)
        .count("alpha_p", in.alpha_p, 1, Type::Kernels)
        .count("alpha_n", in.alpha_n, 1, Type::Kernels)
        .count("beta", in.beta, 1, Type::Kernels)
        .count("eps", in.eps, 1, Type::Kernels);
  }

  static Tensor forward(const Inputs& in) {
    check("xielu", in);
    const Tensor y = output(at::empty_symint(in.x.sym_sizes(), in.x.options()));
    if (y.is_meta()) return y;
    const Tensor x = in.x.contiguous();
    XIELUForward a{.x = data(x)};
    a.alpha_p = numbers(in.alpha_p), a.alpha_n = numbers(in.alpha_n), a.beta = numbers(in.beta);
    a.eps = numbers(in.eps), a.y = y.data_ptr(), a.count = x.numel(), a.dtype = dtype_of(x);
    run(xielu_forward, x, a);
    return y;
  }

  static Saved save(const Inputs& in, const Tensor&) { return in; }

  static Gradients<Tensor> backward(const Upstream& up, const Saved& in, const Gradients<bool>& wanted) {
    check("xielu_backward", in).like("dy", up.dy);
    const Tensor dx = output(at::empty_symint(in.x.sym_sizes(), in.x.options()));
    if (dx.is_meta() || in.x.numel() == 0)
      return {dx, zeros_if(wanted.dalpha_p, in.alpha_p), zeros_if(wanted.dalpha_n, in.alpha_n)};
    const Tensor x = in.x.contiguous(), dy = up.dy.contiguous();
    // Two numbers a block cost no registers: twice as many blocks share an SM as where there is a sum for each column.
    const int64_t partials = 2 * element_partial_count(x);
    const Tensor dp = empty_partials(x, partials, 1), dn = empty_partials(x, partials, 1);
    XIELUBackward a{.dy = data(dy), .x = data(x)};
    a.alpha_p = numbers(in.alpha_p), a.alpha_n = numbers(in.alpha_n), a.beta = numbers(in.beta);
    a.eps = numbers(in.eps), a.dx = dx.data_ptr(), a.dalpha_p = data<float>(dp), a.dalpha_n = data<float>(dn);
    a.count = x.numel(), a.partials = partials, a.dtype = dtype_of(x);
    run(xielu_backward, x, a);
    Totals totals;
    const Gradients<Tensor> d{dx, wanted.dalpha_p ? totals.of(dp, in.alpha_p) : Tensor(),
                              wanted.dalpha_n ? totals.of(dn, in.alpha_n) : Tensor()};
    totals.run();
    return d;
  }
};

}  // namespace op

Tensor xielu(const Tensor& x, const Tensor& alpha_p, const Tensor& alpha_n, const Tensor& beta, const Tensor& eps) {
  return Operator<op::XIELU>::public_op(x, alpha_p, alpha_n, beta, eps);
}

LIGER_OPERATORS(xielu, Operator<op::XIELU>)

}  // namespace liger
