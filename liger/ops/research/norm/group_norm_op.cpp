#include "liger/core/torch/operator.h"
#include "liger/research.h"
#include "liger/ops/norm/norm_op.h"
#include "liger/ops/research/norm/group_norm.h"

namespace liger {
namespace op {

/// What both passes are told of x [samples, channels, ...] and the vectors, checked; one element of w and b a channel.
struct GroupNormOperands {
  Arguments arguments;
  Tensor x, w, b;

  GroupNormOperands(const char* op, const Tensor& in, const OptTensor& weight, const OptTensor& bias, int64_t groups)
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

struct GroupNorm {
  static constexpr Name kName = "group_norm";
  struct Inputs {
    Tensor x;
    OptTensor weight, bias;
    int64_t groups;
    double eps;
    LIGER_FIELDS(x, weight, bias, groups, eps)
  };
  using Results = norm::WithMoments;
  struct Saved {
    Tensor x;
    OptTensor weight, bias;
    Tensor mean, rstd;
    int64_t groups;
    LIGER_FIELDS(x, weight, bias, mean, rstd, groups)
  };
  using Upstream = Dy;
  template <class T>
  using Gradients = norm::OfWeightAndBias<T>;

  static Results forward(const Inputs& inputs) {
    const Tensor& x = inputs.x;
    const GroupNormOperands in("group_norm", x, inputs.weight, inputs.bias, inputs.groups);
    const Tensor y = output(at::empty_symint(x.sym_sizes(), in.x.options())),
                 mean = at::empty_symint({x.sym_size(0), inputs.groups}, x.options().dtype(at::kFloat)),
                 rstd = at::empty_like(mean);
    if (x.is_meta() || x.numel() == 0) return {y, mean, rstd};
    auto a = in.describe<GroupNormForward>(inputs.groups, mean, rstd);
    a.b = data(in.b), a.y = y.data_ptr(), a.eps = float(inputs.eps);
    run(group_norm_forward, x, a);
    return {y, mean, rstd};
  }

  static Saved save(const Inputs& in, const Results& out) {
    return {in.x, in.weight, in.bias, out.mean, out.rstd, in.groups};
  }

  static Gradients<Tensor> backward(const Upstream& up, const Saved& s, const Gradients<bool>& wanted) {
    const Tensor& x = s.x;
    const GroupNormOperands in("group_norm_backward", x, s.weight, s.bias, s.groups);
    in.arguments.like("dy", up.dy)
        .count("mean", s.mean, x.sym_size(0) * s.groups)
        .count("rstd", s.rstd, x.sym_size(0) * s.groups)
        .present("with_dw", wanted.dw, "weight", s.weight)
        .present("with_db", wanted.db, "bias", s.bias);
    const Tensor dy = up.dy.contiguous(), mean = s.mean.contiguous(), rstd = s.rstd.contiguous();
    const Tensor dx = wanted.dx ? output(at::empty_symint(x.sym_sizes(), in.x.options())) : Tensor();
    if (x.is_meta() || x.numel() == 0) return {dx, zeros_if(wanted.dw, s.weight), zeros_if(wanted.db, s.bias)};
    auto a = in.describe<GroupNormBackward>(s.groups, mean, rstd);
    const auto partials = [&](bool wanted) {
      return wanted ? at::empty({1, a.samples * a.segments(), x.size(1)}, mean.options()) : Tensor();
    };
    const Tensor dw = partials(wanted.dw), db = partials(wanted.db);
    a.dy = data(dy), a.dx = data<void>(dx), a.dw = data<float>(dw), a.db = data<float>(db);
    run(group_norm_backward, x, a);
    Totals totals;
    const Gradients<Tensor> d{dx, wanted.dw ? totals.of(dw, *s.weight) : Tensor(),
                              wanted.db ? totals.of(db, *s.bias) : Tensor()};
    totals.run();
    return d;
  }
};

}  // namespace op

Tensor group_norm(const Tensor& x, const OptTensor& w, const OptTensor& b, int64_t groups, double eps) {
  return Operator<op::GroupNorm>::public_op(x, w, b, groups, eps);
}

LIGER_OPERATORS(group_norm, Operator<op::GroupNorm>)

}  // namespace liger
