#include "liger/core/torch/operator.h"
#include "liger/research.h"
#include "liger/ops/research/norm/dyt.h"

namespace liger {
namespace op {

struct DyT {
  static constexpr Name kName = "dyt";
  struct Inputs {
    Tensor x, alpha, weight;
    OptTensor bias;
    LIGER_FIELDS(x, alpha, weight, bias)
  };
  using Saved = Inputs;
  using Upstream = Dy;
  template <class T>
  struct Gradients {
    T dx, dalpha, dw, db;
    LIGER_FIELDS(dx, dalpha, dw, db)
  };

  /// The inputs as kernels read them, checked: weight and bias have one dtype.
  struct Operands {
    Arguments arguments;
    Tensor x, w, b;
    Numbers alpha;

    Operands(const char* op, const Inputs& in)
        : arguments(op, "x", in.x), x(in.x.contiguous()), w(in.weight.contiguous()), b(contiguous(in.bias)) {
      arguments.vector("weight", in.weight, in.x.sym_size(-1))
          .vector("bias", in.bias, in.x.sym_size(-1))
          .count("alpha", in.alpha, 1, Type::Kernels);
      if (b.defined() && w.scalar_type() != b.scalar_type()) w = w.to(at::kFloat), b = b.to(at::kFloat);
      if (!x.is_meta()) alpha = numbers(in.alpha);
    }
    bool empty() const { return x.is_meta() || rows(x) == 0; }
  };

  static Tensor forward(const Inputs& inputs) {
    const Operands in("dyt", inputs);
    const Tensor y = output(at::empty_symint(in.x.sym_sizes(), in.x.options()));
    if (in.empty()) return y;
    run(dyt_forward, in.x,
        {.x = data(in.x),
         .alpha = in.alpha,
         .w = data(in.w),
         .b = data(in.b),
         .y = y.data_ptr(),
         .rows = rows(in.x),
         .cols = cols(in.x),
         .dtype = dtype_of(in.x),
         .w_dtype = dtype_of(in.w)});
    return y;
  }

  static Saved save(const Inputs& in, const Tensor&) { return in; }

  static Gradients<Tensor> backward(const Upstream& up, const Saved& saved, const Gradients<bool>& wanted) {
    const Operands in("dyt_backward", saved);
    in.arguments.like("dy", up.dy).present("with_db", wanted.db, "bias", saved.bias);
    const Tensor dy = up.dy.contiguous(),
                 dx = wanted.dx ? output(at::empty_symint(in.x.sym_sizes(), in.x.options())) : Tensor();
    if (in.empty())
      return {dx, zeros_if(wanted.dalpha, saved.alpha), zeros_if(wanted.dw, saved.weight),
              zeros_if(wanted.db, saved.bias)};
    const int64_t partials = partial_count(in.x);
    const auto sums = [&](bool wanted, int64_t n) { return wanted ? empty_partials(in.x, partials, n) : Tensor(); };
    const Tensor dw = sums(wanted.dw, cols(in.x)), db = sums(wanted.db, cols(in.x)), dalpha = sums(wanted.dalpha, 1);
    run(dyt_backward, in.x,
        {.dy = data(dy),
         .x = data(in.x),
         .alpha = in.alpha,
         .w = data(in.w),
         .dx = data<void>(dx),
         .dw = data<float>(dw),
         .db = data<float>(db),
         .dalpha = data<float>(dalpha),
         .rows = rows(in.x),
         .cols = cols(in.x),
         .partials = partials,
         .dtype = dtype_of(in.x),
         .w_dtype = dtype_of(in.w)});
    Totals totals;
    Gradients<Tensor> d{dx, {}, {}, {}};
    if (wanted.dalpha) d.dalpha = totals.of(dalpha, saved.alpha);
    if (wanted.dw) d.dw = totals.of(dw, saved.weight);
    if (wanted.db) d.db = totals.of(db, *saved.bias);
    totals.run();
    return d;
  }
};

}  // namespace op

Tensor dyt(const Tensor& x, const Tensor& alpha, const Tensor& w, const OptTensor& b) {
  return Operator<op::DyT>::public_op(x, alpha, w, b);
}

LIGER_OPERATORS(dyt, Operator<op::DyT>)

}  // namespace liger
