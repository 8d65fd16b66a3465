#include "liger/core/torch/operator.h"
#include "liger/ops.h"
#include "liger/ops/norm/group_norm.h"

namespace liger {
namespace op::group_norm {

/// What both passes are told of x [samples, channels, ...] and the vectors, checked; one element of w and b a channel.
struct Operands {
  Arguments arguments;
  Tensor x, w, b;

  Operands(const char* op, const Tensor& in, const OptTensor& weight, const OptTensor& bias, int64_t groups)
      : arguments(op, "x", in) {
    TORCH_CHECK(in.dim() >= 2, op, ": x must be [N, channels, ...], got ", in.sym_sizes());
    TORCH_CHECK(groups > 0 && in.sym_size(1) % groups == 0, op, ": groups, ", groups,
                ", does not divide the channels of x, ", in.sym_size(1));
    arguments.vector("weight", weight, in.sym_size(1)).vector("bias", bias, in.sym_size(1));
    x = in.contiguous(), w = contiguous(weight), b = contiguous(bias);
    if (w.defined() && b.defined() && w.scalar_type() != b.scalar_type()) w = w.to(at::kFloat), b = b.to(at::kFloat);
  }

  template <class Args>
  Args describe(int64_t groups, const Tensor& mean, const Tensor& rstd) const {
    Args a{};
    a.x = data(x), a.w = data(w), a.mean = data<float>(mean), a.rstd = data<float>(rstd);
    a.samples = x.size(0), a.groups = groups, a.channels = x.size(1) / groups,
    a.spatial = x.numel() / (x.size(0) * x.size(1));
    a.dtype = dtype_of(x), a.w_dtype = dtype_of(w.defined() ? w : b.defined() ? b : x);
    return a;
  }
};

struct Definition {
  static constexpr Name kName = "group_norm";
  static constexpr std::array kInputs{"x", "weight", "bias", "groups", "eps"}, kAll{"y", "mean", "rstd"},
      kSaved{"x", "weight", "bias", "mean", "rstd", "groups"}, kGradients{"dx", "dw", "db"};

  /// (y, mean, rstd).
  static std::tuple<Tensor, Tensor, Tensor> forward(const Tensor& x, const OptTensor& w, const OptTensor& b,
                                                    int64_t groups, double eps) {
    const Operands in("group_norm", x, w, b, groups);
    const Tensor y = output(at::empty_symint(x.sym_sizes(), in.x.options())),
                 mean = at::empty_symint({x.sym_size(0), groups}, x.options().dtype(at::kFloat)),
                 rstd = at::empty_like(mean);
    if (x.is_meta() || x.numel() == 0) return {y, mean, rstd};
    auto a = in.describe<GroupNormForward>(groups, mean, rstd);
    a.b = data(in.b), a.y = y.data_ptr(), a.eps = float(eps);
    run(group_norm_forward, x, a);
    return {y, mean, rstd};
  }

  /// (dx, dw, db).
  static std::tuple<Tensor, Tensor, Tensor> backward(const Tensor& dy_, const Tensor& x, const OptTensor& w,
                                                     const OptTensor& b, const Tensor& mean_, const Tensor& rstd_,
                                                     int64_t groups, bool with_dx, bool with_dw, bool with_db) {
    const Operands in("group_norm_backward", x, w, b, groups);
    in.arguments.like("dy", dy_)
        .count("mean", mean_, x.sym_size(0) * groups)
        .count("rstd", rstd_, x.sym_size(0) * groups)
        .present("with_dw", with_dw, "weight", w)
        .present("with_db", with_db, "bias", b);
    const Tensor dy = dy_.contiguous(), mean = mean_.contiguous(), rstd = rstd_.contiguous();
    const Tensor dx = with_dx ? output(at::empty_symint(x.sym_sizes(), in.x.options())) : Tensor();
    if (x.is_meta() || x.numel() == 0)
      return {or_empty(dx, x.options()), or_empty(zeros_if(with_dw, w), x.options()),
              or_empty(zeros_if(with_db, b), x.options())};
    auto a = in.describe<GroupNormBackward>(groups, mean, rstd);
    const auto partials = [&](bool wanted) {
      return wanted ? at::empty({1, a.samples * a.segments(), x.size(1)}, mean.options()) : Tensor();
    };
    const Tensor dw = partials(with_dw), db = partials(with_db);
    a.dy = data(dy), a.dx = data<void>(dx), a.dw = data<float>(dw), a.db = data<float>(db);
    run(group_norm_backward, x, a);
    Totals totals;
    const Tensor w_gradient = with_dw ? totals.of(dw, *w) : Tensor(),
                 b_gradient = with_db ? totals.of(db, *b) : Tensor();
    totals.run();
    return {or_empty(dx, x.options()), or_empty(w_gradient, x.options()), or_empty(b_gradient, x.options())};
  }
};

}  // namespace op::group_norm

Tensor group_norm(const Tensor& x, const OptTensor& w, const OptTensor& b, int64_t groups, double eps) {
  return call<op::group_norm::Definition>(x, w, b, groups, eps);
}

LIGER_OPERATORS(group_norm, r) { Operator<op::group_norm::Definition>::describe(r); }

}  // namespace liger
