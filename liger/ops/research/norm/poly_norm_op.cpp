#include "liger/ops/research/norm/poly_norm.h"
#include "liger/core/torch/operator.h"
#include "liger/research.h"
#include "liger/ops/norm/norm_op.h"

namespace liger {
namespace op {

struct PolyNorm {
  static constexpr Name kName = "poly_norm";
  struct Inputs {
    Tensor x, weight, bias;
    double eps;
    LIGER_FIELDS(x, weight, bias, eps)
  };
  using Results = norm::WithRstd;  // rstd [..., 3]
  struct Saved {
    Tensor x, weight, bias, rstd;
    LIGER_FIELDS(x, weight, bias, rstd)
  };
  using Upstream = Dy;
  template <class T>
  using Gradients = norm::OfWeightAndBias<T>;

  static Arguments check(const char* op, const auto& in) {
    return Arguments(op, "x", in.x)
        .vector("weight", in.weight, 3, Type::Kernels)
        .count("bias", in.bias, 1, Type::Kernels);
  }

  static Results forward(const Inputs& in) {
    check("poly_norm", in);
    const Tensor x = in.x.contiguous(), w = in.weight.contiguous(),
                 y = output(at::empty_symint(x.sym_sizes(), x.options())), rstd = empty_stat(x, 3);
    if (x.is_meta() || rows(x) == 0) return {y, rstd};
    PolyNormForward a{
        .x = data(x), .w = numbers(w), .b = numbers(in.bias), .y = y.data_ptr(), .rstd = data<float>(rstd)};
    a.rows = rows(x), a.cols = cols(x), a.dtype = dtype_of(x), a.eps = float(in.eps);
    run(poly_norm_forward, x, a);
    return {y, rstd};
  }

  static Saved save(const Inputs& in, const Results& out) { return {in.x, in.weight, in.bias, out.rstd}; }

  static Gradients<Tensor> backward(const Upstream& up, const Saved& s, const Gradients<bool>& wanted) {
    check("poly_norm_backward", s).like("dy", up.dy).count("rstd", s.rstd, 3 * sym_rows(s.x));
    const Tensor x = s.x.contiguous(), dy = up.dy.contiguous(), w = s.weight.contiguous(), rstd = s.rstd.contiguous(),
                 dx = wanted.dx ? output(at::empty_symint(x.sym_sizes(), x.options())) : Tensor();
    if (x.is_meta() || rows(x) == 0) return {dx, zeros_if(wanted.dw, w), zeros_if(wanted.db, s.bias)};
    // Sums of four numbers cost no registers: twice as many blocks share an SM as where there is one a column.
    const int64_t partials = std::min(rows(x), 2 * partial_count(x));
    const Tensor dw = empty_partials(x, partials, 3), db = empty_partials(x, partials, 1);
    PolyNormBackward a{.dy = data(dy), .x = data(x), .w = numbers(w), .rstd = data<float>(rstd)};
    a.dx = data<void>(dx), a.dw = data<float>(dw), a.db = data<float>(db);
    a.rows = rows(x), a.cols = cols(x), a.partials = partials, a.dtype = dtype_of(x);
    run(poly_norm_backward, x, a);
    Totals totals;
    const Gradients<Tensor> d{dx, wanted.dw ? totals.of(dw, w) : Tensor(),
                              wanted.db ? totals.of(db, s.bias) : Tensor()};
    totals.run();
    return d;
  }
};

}  // namespace op

Tensor poly_norm(const Tensor& x, const Tensor& w, const Tensor& b, double eps) {
  return Operator<op::PolyNorm>::public_op(x, w, b, eps);
}

LIGER_OPERATORS(poly_norm, Operator<op::PolyNorm>)

}  // namespace liger
