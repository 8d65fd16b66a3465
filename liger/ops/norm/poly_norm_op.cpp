#include "liger/ops/norm/poly_norm.h"
#include "liger/core/torch/operator.h"
#include "liger/ops.h"

namespace liger {
namespace op::poly_norm {

Arguments check(const char* op, const Tensor& x, const Tensor& w, const Tensor& b) {
  return Arguments(op, "x", x).vector("weight", w, 3, Type::Kernels).count("bias", b, 1, Type::Kernels);
}

struct Definition {
  static constexpr Name kName = "poly_norm";
  static constexpr std::array kInputs{"x", "weight", "bias", "eps"}, kAll{"y", "rstd"},
      kSaved{"x", "weight", "bias", "rstd"}, kGradients{"dx", "dw", "db"};

  /// (y, rstd [..., 3]).
  static std::tuple<Tensor, Tensor> forward(const Tensor& x_, const Tensor& w_, const Tensor& b, double eps) {
    check("poly_norm", x_, w_, b);
    const Tensor x = x_.contiguous(), w = w_.contiguous(), y = output(at::empty_symint(x.sym_sizes(), x.options())),
                 rstd = empty_stat(x, 3);
    if (x.is_meta() || rows(x) == 0) return {y, rstd};
    PolyNormForward a{.x = data(x), .w = numbers(w), .b = numbers(b), .y = y.data_ptr(), .rstd = data<float>(rstd)};
    a.rows = rows(x), a.cols = cols(x), a.dtype = dtype_of(x), a.eps = float(eps);
    run(poly_norm_forward, x, a);
    return {y, rstd};
  }

  /// (dx, dw, db).
  static std::tuple<Tensor, Tensor, Tensor> backward(const Tensor& dy_, const Tensor& x_, const Tensor& w_,
                                                     const Tensor& b, const Tensor& rstd_, bool with_dx, bool with_dw,
                                                     bool with_db) {
    check("poly_norm_backward", x_, w_, b).like("dy", dy_).count("rstd", rstd_, 3 * sym_rows(x_));
    const Tensor x = x_.contiguous(), dy = dy_.contiguous(), w = w_.contiguous(), rstd = rstd_.contiguous(),
                 dx = with_dx ? output(at::empty_symint(x.sym_sizes(), x.options())) : at::empty({0}, x.options());
    if (x.is_meta() || rows(x) == 0)
      return {dx, or_empty(zeros_if(with_dw, w), w.options()), or_empty(zeros_if(with_db, b), b.options())};
    // Sums of four numbers cost no registers: twice as many blocks share an SM as where there is one a column.
    const int64_t partials = std::min(rows(x), 2 * partial_count(x));
    const Tensor dw = empty_partials(x, partials, 3), db = empty_partials(x, partials, 1);
    PolyNormBackward a{.dy = data(dy), .x = data(x), .w = numbers(w), .rstd = data<float>(rstd)};
    a.dx = with_dx ? dx.data_ptr() : nullptr, a.dw = data<float>(dw), a.db = data<float>(db);
    a.rows = rows(x), a.cols = cols(x), a.partials = partials, a.dtype = dtype_of(x);
    run(poly_norm_backward, x, a);
    Totals totals;
    const Tensor dw_sum = with_dw ? totals.of(dw, w) : at::empty({0}, w.options()),
                 db_sum = with_db ? totals.of(db, b) : at::empty({0}, b.options());
    totals.run();
    return {dx, dw_sum, db_sum};
  }
};

}  // namespace op::poly_norm

Tensor poly_norm(const Tensor& x, const Tensor& w, const Tensor& b, double eps) {
  return call<op::poly_norm::Definition>(x, w, b, eps);
}

LIGER_OPERATORS(poly_norm, r) { Operator<op::poly_norm::Definition>::describe(r); }

}  // namespace liger
