#include "liger/ops/norm/gated_rms_norm.h"
#include "liger/core/torch/operator.h"
#include "liger/functions/norm.h"
#include "liger/ops/norm/norm_op.h"

namespace liger {
namespace op {

struct GatedRMSNorm {
  static constexpr Name kName = "gated_rms_norm";
  struct Inputs {
    Tensor x, gate, weight;
    double eps;
    LIGER_FIELDS(x, gate, weight, eps)
  };
  using Options = GatedNormOptions;
  using Results = norm::WithRstd;  // rstd [..., groups]
  struct Saved {
    Tensor x, gate, weight, rstd;
    LIGER_FIELDS(x, gate, weight, rstd)
  };
  using Upstream = Dy;
  template <class T>
  struct Gradients {
    T dx, dgate, dw;
    LIGER_FIELDS(dx, dgate, dw)
  };

  static Arguments check(const char* op, const auto& in, const Options& o) {
    TORCH_CHECK_VALUE(o.activation == Gate::SiLU || o.activation == Gate::Sigmoid, op,
                      ": activation is 0 (silu) or 1 (sigmoid), not ", int64_t(o.activation));
    TORCH_CHECK_VALUE(o.casting == Casting::Llama || o.casting == Casting::Gemma, op,
                      ": casting is 0 (llama) or 1 (gemma), not ", int64_t(o.casting));
    const auto arguments =
        Arguments(op, "x", in.x).like("gate", in.gate).vector("weight", in.weight, in.x.sym_size(-1));
    TORCH_CHECK(o.groups > 0 && in.x.sym_size(-1) % o.groups == 0, op, ": groups, ", o.groups,
                ", does not divide the columns of x, ", in.x.sym_size(-1));
    return arguments;
  }

  template <class Args>
  static Args describe(const Tensor& x, const Tensor& gate, const Tensor& w, const Tensor& rstd, const Options& o) {
    Args a{};
    a.x = data(x), a.gate = data(gate), a.w = data(w), a.rstd = data<float>(rstd);
    a.rows = rows(x) * o.groups, a.cols = cols(x) / o.groups, a.groups = o.groups;
    a.dtype = dtype_of(x), a.w_dtype = dtype_of(w);
    a.act = o.activation, a.gate_first = !o.norm_before_gate, a.casting = o.casting;
    return a;
  }

  static Results forward(const Inputs& in, const Options& o) {
    check("gated_rms_norm", in, o);
    const Tensor x = in.x.contiguous(), gate = in.gate.contiguous(), w = in.weight.contiguous(),
                 y = output(at::empty_symint(x.sym_sizes(), x.options())), rstd = empty_stat(x, o.groups);
    if (x.is_meta() || x.numel() == 0) return {y, rstd};
    auto a = describe<GatedRMSNormForward>(x, gate, w, rstd, o);
    a.y = y.data_ptr(), a.eps = float(in.eps);
    run(gated_rms_norm_forward, x, a);
    return {y, rstd};
  }

  static Saved save(const Inputs& in, const Results& out) { return {in.x, in.gate, in.weight, out.rstd}; }

  static Gradients<Tensor> backward(const Upstream& up, const Saved& s, const Gradients<bool>& wanted,
                                    const Options& o) {
    check("gated_rms_norm_backward", s, o).like("dy", up.dy).count("rstd", s.rstd, o.groups * sym_rows(s.x));
    const Tensor x = s.x.contiguous(), gate = s.gate.contiguous(), w = s.weight.contiguous(),
                 rstd = s.rstd.contiguous(), dy = up.dy.contiguous();
    const auto like_x = [&](bool wanted) {
      return wanted ? output(at::empty_symint(x.sym_sizes(), x.options())) : Tensor();
    };
    const Tensor dx = like_x(wanted.dx), dgate = like_x(wanted.dgate);
    if (x.is_meta() || x.numel() == 0) return {dx, dgate, zeros_if(wanted.dw, w)};
    auto a = describe<GatedRMSNormBackward>(x, gate, w, rstd, o);
    a.partials = partial_count(x.view({a.rows, a.cols}), a.groups);
    const Tensor dw =
        wanted.dw ? empty_partials(x, a.groups * a.partials, a.cols).view({a.groups, a.partials, a.cols}) : Tensor();
    a.dy = data(dy), a.dx = data<void>(dx), a.dgate = data<void>(dgate), a.dw = data<float>(dw);
    run(gated_rms_norm_backward, x, a);
    Totals totals;
    const Gradients<Tensor> d{dx, dgate, wanted.dw ? totals.of(dw, w) : Tensor()};
    totals.run();
    return d;
  }
};

}  // namespace op

Tensor gated_rms_norm(const Tensor& x, const Tensor& gate, const Tensor& w, double eps, const GatedNormOptions& o) {
  return Operator<op::GatedRMSNorm>::public_op(x, gate, w, eps, o);
}

LIGER_OPERATORS(gated_rms_norm, Operator<op::GatedRMSNorm>)

}  // namespace liger
