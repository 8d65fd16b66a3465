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
  static std::tuple<Tensor, Tensor> forward(const Tensor& x_, const Tensor& w_, const Tensor& b_, double eps) {
    check("poly_norm", x_, w_, b_);
    const Tensor x = x_.contiguous(), y = output(at::empty_symint(x.sym_sizes(), x.options()));
    auto shape = c10::SymDimVector(x.sym_sizes());
    shape.back() = 3;
    const Tensor rstd = at::empty_symint(shape, x.options().dtype(at::kFloat));
    if (x.is_meta() || rows(x) == 0) return {y, rstd};
    const Tensor w = w_.contiguous();
    run(poly_norm_forward, x,
        {.x = data(x),
         .w = numbers(w),
         .b = numbers(b_),
         .y = y.data_ptr(),
         .rstd = data<float>(rstd),
         .rows = rows(x),
         .cols = cols(x),
         .dtype = dtype_of(x),
         .eps = float(eps)});
    return {y, rstd};
  }

  /// (dx, dw, db).
  static std::tuple<Tensor, Tensor, Tensor> backward(const Tensor& dy_, const Tensor& x_, const Tensor& w_,
                                                     const Tensor& b, const Tensor& rstd_, bool with_dx, bool with_dw,
                                                     bool with_db) {
    check("poly_norm_backward", x_, w_, b).like("dy", dy_).count("rstd", rstd_, 3 * sym_rows(x_));
    const Tensor x = x_.contiguous(), dy = dy_.contiguous(), rstd = rstd_.contiguous(),
                 dx = with_dx ? output(at::empty_symint(x.sym_sizes(), x.options())) : at::empty({0}, x.options());
    const auto zeros = [](bool wanted, const Tensor& like) {
      return wanted ? at::zeros_like(like) : at::empty({0}, like.options());
    };
    if (x.is_meta() || rows(x) == 0) return {dx, zeros(with_dw, w_), zeros(with_db, b)};
    // Sums of four numbers cost no registers: twice as many blocks share an SM as where there is one a column.
    const int64_t partials = std::min(rows(x), 2 * partial_count(x));
    const Tensor w = w_.contiguous(), dw = empty_partials(x, partials, 3), db = empty_partials(x, partials, 1);
    run(poly_norm_backward, x,
        {.dy = data(dy),
         .x = data(x),
         .w = numbers(w),
         .rstd = data<float>(rstd),
         .dx = with_dx ? dx.data_ptr() : nullptr,
         .dw = data<float>(dw),
         .db = data<float>(db),
         .rows = rows(x),
         .cols = cols(x),
         .partials = partials,
         .dtype = dtype_of(x)});
    Totals totals;
    const Tensor dw_sum = with_dw ? totals.of(dw, w_) : at::empty({0}, w.options()),
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
