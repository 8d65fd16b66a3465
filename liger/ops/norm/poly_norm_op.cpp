#include "liger/ops/norm/poly_norm.h"
#include "liger/core/torch/op.h"
#include "liger/ops.h"

namespace liger {
namespace op::poly_norm {

Arguments check(const char* op, const Tensor& x, const Tensor& w, const Tensor& b) {
  return Arguments(op, "x", x).vector("weight", w, 3, Type::Kernels).count("bias", b, 1, Type::Kernels);
}

/// (y, rstd [..., 3]).
std::tuple<Tensor, Tensor> forward(const Tensor& x_, const Tensor& w_, const Tensor& b_, double eps) {
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
std::tuple<Tensor, Tensor, Tensor> backward(const Tensor& dy_, const Tensor& x_, const Tensor& w_, const Tensor& b,
                                            const Tensor& rstd_, bool with_dx, bool with_dw, bool with_db) {
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

Tensor inference(const Tensor& x, const Tensor& w, const Tensor& b, double eps) {
  return std::get<0>(forward(x, w, b, eps));
}

constexpr Op<"liger::poly_norm", inference> public_op;
constexpr Op<"liger::poly_norm_forward", forward> forward_op;
constexpr Op<"liger::poly_norm_backward", backward> backward_op;

struct Autograd {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& w, const Tensor& b, double eps) {
    auto [y, rstd] = forward_op(x, w, b, eps);
    ctx->save_for_backward({x, w, b, rstd});
    ctx->saved_data["wants"] = std::make_tuple(wants_grad(x), wants_grad(w), wants_grad(b));
    return y;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const auto [with_dx, with_dw, with_db] = ctx->saved_data["wants"].to<std::tuple<bool, bool, bool>>();
    auto [dx, dw, db] = backward_op(grads[0], saved[0], saved[1], saved[2], saved[3], with_dx, with_dw, with_db);
    return {if_wanted(with_dx, dx), if_wanted(with_dw, dw), if_wanted(with_db, db), {}};
  }
};

}  // namespace op::poly_norm

Tensor poly_norm(const Tensor& x, const Tensor& w, const Tensor& b, double eps) {
  return op::poly_norm::public_op(x, w, b, eps);
}

TORCH_LIBRARY_FRAGMENT(liger, m) {
  m.def("poly_norm(Tensor x, Tensor weight, Tensor bias, float eps) -> Tensor");
  m.def("poly_norm_forward(Tensor x, Tensor weight, Tensor bias, float eps) -> (Tensor y, Tensor rstd)");
  m.def(
      "poly_norm_backward(Tensor dy, Tensor x, Tensor weight, Tensor bias, Tensor rstd, bool with_dx, bool with_dw, "
      "bool with_db) -> (Tensor dx, Tensor dw, Tensor db)");
}
LIGER_IMPL(poly_norm, m) {
  m.impl("poly_norm", op::poly_norm::inference);
  m.impl("poly_norm_forward", op::poly_norm::forward);
  m.impl("poly_norm_backward", op::poly_norm::backward);
}
TORCH_LIBRARY_IMPL(liger, Autograd, m) {
  m.impl("poly_norm", differentiated<op::poly_norm::Autograd, 3>(op::poly_norm::public_op));
  refuse_derivative(m, {"poly_norm_forward", "poly_norm_backward"});
}

}  // namespace liger
