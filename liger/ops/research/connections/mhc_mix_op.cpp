#include "liger/ops/research/connections/mhc_mix.h"
#include "liger/core/torch/operator.h"
#include "liger/research.h"

namespace liger {
namespace op {

/// What the two operators share: one y, or as many as there are x, with f.
struct MHCMix {
  static Arguments check(const char* op, const Tensor& x) {
    const Arguments arguments(op, "x", x);
    TORCH_CHECK(x.dim() >= 2 && x.size(-2) >= 1 && x.size(-2) <= MHCMixForward::kMostStreams, op,
                ": x must be [..., streams, width] for 1 to ", MHCMixForward::kMostStreams, " streams, got ",
                x.sym_sizes());
    return arguments;
  }

  /// [..., width].
  static c10::SymDimVector of_one(const Tensor& x) {
    c10::SymDimVector shape(x.sym_sizes().slice(0, x.dim() - 2));
    shape.push_back(x.sym_size(-1));
    return shape;
  }
  /// [..., streams].
  static c10::SymDimVector of_streams(const Tensor& x) {
    return c10::SymDimVector(x.sym_sizes().slice(0, x.dim() - 1));
  }

  /// What the kernels share, of contiguous tensors; f and of_f may be undefined.
  template <class Args>
  static Args describe(const Tensor& x, const Tensor& f, const Tensor& weight, const Tensor& of_f) {
    Args a{};
    a.x = data(x), a.f = data(f), a.weight = data<float>(weight), a.of_f = data<float>(of_f);
    a.rows = x.numel() / (x.size(-2) * x.size(-1)), a.cols = cols(x);
    a.in = int(x.size(-2)), a.out = int(weight.numel() * x.size(-1) / x.numel());
    a.dtype = dtype_of(x), a.f_dtype = dtype_of(f.defined() ? f : x);
    return a;
  }

  static Tensor forward(const Tensor& x, const OptTensor& f, const Tensor& weight, const OptTensor& of_f,
                        const c10::SymDimVector& shape) {
    const Tensor y = output(at::empty_symint(shape, x.options()));
    if (y.is_meta() || y.numel() == 0) return y;
    const Tensor x_rows = x.contiguous(), f_rows = contiguous(f), weight_rows = weight.contiguous(),
                 of_f_rows = contiguous(of_f);
    auto a = describe<MHCMixForward>(x_rows, f_rows, weight_rows, of_f_rows);
    a.y = y.data_ptr();
    run(mhc_mix_forward, x, a);
    return y;
  }

  struct Gradients {
    Tensor x, f, weight, of_f;
  };
  static Gradients backward(const Tensor& dy, const Tensor& x, const OptTensor& f, const Tensor& weight,
                            const OptTensor& of_f, bool with_dx, bool with_df) {
    const auto like = [](bool wanted, const Tensor& t) {
      return wanted ? output(at::empty_symint(t.sym_sizes(), t.options())) : Tensor();
    };
    const Gradients d{like(with_dx, x), like(with_df, f.value_or(x)), like(true, weight),
                      like(!!of_f, of_f.value_or(x))};
    if (x.is_meta()) return d;
    if (x.numel() == 0) {
      d.weight.zero_();
      if (d.of_f.defined()) d.of_f.zero_();
      return d;
    }
    const Tensor dy_rows = dy.contiguous(), x_rows = x.contiguous(), f_rows = contiguous(f),
                 weight_rows = weight.contiguous(), of_f_rows = contiguous(of_f);
    auto a = describe<MHCMixBackward>(x_rows, f_rows, weight_rows, of_f_rows);
    a.dy = data(dy_rows), a.dx = data<void>(d.x), a.df = data<void>(d.f);
    a.dweight = data<float>(d.weight), a.dof_f = data<float>(d.of_f);
    run(mhc_mix_backward, x, a);
    return d;
  }
};

struct MHCPre {
  static constexpr Name kName = "mhc_pre";
  struct Inputs {
    Tensor x, pre;
    LIGER_FIELDS(x, pre)
  };
  using Saved = Inputs;
  using Upstream = Dy;
  template <class T>
  struct Gradients {
    T dx, dpre;
    LIGER_FIELDS(dx, dpre)
  };

  static Arguments check(const char* op, const Inputs& in) {
    return MHCMix::check(op, in.x).shaped("pre", in.pre, MHCMix::of_streams(in.x), Type::Float);
  }
  static Tensor forward(const Inputs& in) {
    check("mhc_pre", in);
    return MHCMix::forward(in.x, {}, in.pre, {}, MHCMix::of_one(in.x));
  }
  static Saved save(const Inputs& in, const Tensor&) { return in; }
  static Gradients<Tensor> backward(const Upstream& up, const Saved& in, const Gradients<bool>& wanted) {
    check("mhc_pre_backward", in).shaped("dy", up.dy, MHCMix::of_one(in.x), Type::Same);
    const auto d = MHCMix::backward(up.dy, in.x, {}, in.pre, {}, wanted.dx, false);
    return {d.x, if_wanted(wanted.dpre, d.weight)};
  }
};

struct MHCPostRes {
  static constexpr Name kName = "mhc_post_res";
  struct Inputs {
    Tensor x, f, post, res;
    LIGER_FIELDS(x, f, post, res)
  };
  using Saved = Inputs;
  using Upstream = Dy;
  template <class T>
  struct Gradients {
    T dx, df, dpost, dres;
    LIGER_FIELDS(dx, df, dpost, dres)
  };

  static Arguments check(const char* op, const Inputs& in) {
    auto of_res = MHCMix::of_streams(in.x);
    const Arguments arguments = MHCMix::check(op, in.x);
    of_res.push_back(in.x.sym_size(-2));
    return arguments.shaped("f", in.f, MHCMix::of_one(in.x), Type::SameOrFloat)
        .shaped("post", in.post, MHCMix::of_streams(in.x), Type::Float)
        .shaped("res", in.res, of_res, Type::Float);
  }
  static Tensor forward(const Inputs& in) {
    check("mhc_post_res", in);
    return MHCMix::forward(in.x, in.f, in.res, in.post, c10::SymDimVector(in.x.sym_sizes()));
  }
  static Saved save(const Inputs& in, const Tensor&) { return in; }
  static Gradients<Tensor> backward(const Upstream& up, const Saved& in, const Gradients<bool>& wanted) {
    check("mhc_post_res_backward", in).like("dy", up.dy);
    const auto d = MHCMix::backward(up.dy, in.x, in.f, in.res, in.post, wanted.dx, wanted.df);
    return {d.x, d.f, if_wanted(wanted.dpost, d.of_f), if_wanted(wanted.dres, d.weight)};
  }
};

}  // namespace op

Tensor mhc_pre(const Tensor& x, const Tensor& pre) { return Operator<op::MHCPre>::public_op(x, pre); }

Tensor mhc_post_res(const Tensor& x, const Tensor& f, const Tensor& post, const Tensor& res) {
  return Operator<op::MHCPostRes>::public_op(x, f, post, res);
}

LIGER_OPERATORS(mhc_mix, Operator<op::MHCPre>, Operator<op::MHCPostRes>)

}  // namespace liger
