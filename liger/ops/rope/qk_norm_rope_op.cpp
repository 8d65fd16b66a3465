#include "liger/ops/rope/qk_norm_rope.h"
#include "liger/functions/rope.h"
#include "liger/ops/norm/norm_op.h"
#include "liger/ops/rope/rope_op.h"

namespace liger {
namespace op {

LIGER_OPTIONAL(qk_norm_rope_forward);
LIGER_OPTIONAL(qk_norm_rope_backward);

/// One kernel reads q and k once, where the device has it and it takes their layout; elsewhere the norm's kernel and
/// the rotation's run one after the other.
struct QkNormRope {
  static constexpr Name kName = "qk_norm_rope";
  struct Inputs {
    Tensor q, k;
    OptTensor q_weight, k_weight;
    Tensor cos, sin;
    double eps;
    norm::Rounding rounding;
    LIGER_FIELDS(q, k, q_weight, k_weight, cos, sin, eps, rounding)
  };
  struct Options {
    int64_t rotary_dim = -1;
    LIGER_OPTIONS(rotary_dim)
  };
  struct Results {
    Tensor q_out, k_out, q_rstd, k_rstd;  // rstd [batch, heads, seq]
    LIGER_FIELDS(q_out, k_out, q_rstd, k_rstd)
  };
  static constexpr size_t kResults = 2;
  struct Upstream {
    Tensor dq_out, dk_out;
    LIGER_FIELDS(dq_out, dk_out)
  };
  struct Saved {
    Tensor q, k;
    OptTensor q_weight, k_weight;
    Tensor cos, sin, q_rstd, k_rstd;
    norm::Rounding rounding;
    LIGER_FIELDS(q, k, q_weight, k_weight, cos, sin, q_rstd, k_rstd, rounding)
  };
  template <class T>
  struct Gradients {
    T dq, dk, dq_weight, dk_weight;
    LIGER_FIELDS(dq, dk, dq_weight, dk_weight)
  };

  static Arguments check(const char* op, const auto& in, const Options& o) {
    const Arguments arguments(op, "q", in.q);
    rope::check(op, arguments, in.q, in.k, in.cos, in.sin, false, {}, o.rotary_dim);
    arguments.vector("q_weight", in.q_weight, in.q.sym_size(3)).vector("k_weight", in.k_weight, in.q.sym_size(3));
    const int64_t casting = in.rounding.casting;
    TORCH_CHECK_VALUE(casting >= -1 && casting <= 1, op, ": casting is -1 (none), 0 (llama) or 1 (gemma), not ",
                      casting);
    return arguments;
  }

  /// [batch, heads, seq] over [batch, seq, heads].
  static Tensor empty_rstd(const Tensor& t) {
    return at::empty_symint({t.sym_size(0), t.sym_size(2), t.sym_size(1)}, t.options().dtype(at::kFloat))
        .transpose(1, 2);
  }

  /// A tensor's part of the kernels' arguments, of forward.
  static NormedHeads describe(const Tensor& x, const Tensor& out, const Tensor& w, const Tensor& rstd) {
    return {.x = data(x),
            .out = data<void>(out),
            .w = data(w),
            .rstd = data<float>(rstd),
            .heads = x.size(1),
            .x_strides = strides(x),
            .out_strides = out.defined() ? strides(out) : NormedHeads::Strides{},
            .w_dtype = dtype_of(w.defined() ? w : x)};
  }
  static NormedHeads::Strides strides(const Tensor& t) { return {t.stride(0), t.stride(1), t.stride(2)}; }

  static liger::QkNormRope arguments_of(const NormedHeads& q, const NormedHeads& k, const Tensor& x, const Tensor& cos,
                                        const Tensor& sin, const norm::Rounding& rounding, const Options& o) {
    return {.q = q,
            .k = k,
            .cos = data(cos),
            .sin = data(sin),
            .table_batch_stride = cos.dim() == 3 && cos.size(0) > 1 ? cos.stride(0) : 0,
            .table_seq_stride = cos.stride(-2),
            .batch = x.size(0),
            .seq = x.size(2),
            .cols = x.size(3),
            .rotary = rope::rotated_columns(cos, false, o.rotary_dim),
            .dtype = dtype_of(x),
            .table_dtype = dtype_of(cos),
            .offset = float(rounding.offset),
            .inv_cols = 1.f / std::max<int64_t>(1, x.size(3)),
            .casting = Casting(rounding.casting)};
  }

  static Results forward(const Inputs& in, const Options& o) {
    check("qk_norm_rope", in, o);
    const Results out{rope::empty_heads(in.q), rope::empty_heads(in.k), empty_rstd(in.q), empty_rstd(in.k)};
    if (in.q.is_meta() || out.q_out.numel() + out.k_out.numel() == 0) return out;
    const Tensor q = rope::with_unit_stride(in.q), k = rope::with_unit_stride(in.k), q_weight = contiguous(in.q_weight),
                 k_weight = contiguous(in.k_weight), cos = rope::table_like(in.cos, q).contiguous(),
                 sin = rope::table_like(in.sin, q).contiguous();
    auto a = arguments_of(describe(q, out.q_out, q_weight, out.q_rstd), describe(k, out.k_out, k_weight, out.k_rstd), q,
                          cos, sin, in.rounding, o);
    a.eps = float(in.eps);
    if (qk_norm_rope_forward.has(Backend(q.device().type())) && a.fits()) {
      run(qk_norm_rope_forward, q, a);
      return out;
    }
    const auto normalised = [&](const Tensor& x, const OptTensor& w, const Tensor& rstd) {
      const auto n = norm::forward("qk_norm_rope", {.x = x.transpose(1, 2), .w = w}, in.eps, in.rounding);
      rstd.copy_(n.rstd.transpose(1, 2));
      return n.y.transpose(1, 2);
    };
    const Tensor nq = normalised(q, in.q_weight, out.q_rstd), nk = normalised(k, in.k_weight, out.k_rstd);
    rope::rotate(rope::describe(nq, out.q_out), rope::describe(nk, out.k_out), {}, q, cos, sin, false, false, {},
                 o.rotary_dim);
    return out;
  }

  static Saved save(const Inputs& in, const Results& out) {
    return {in.q, in.k, in.q_weight, in.k_weight, in.cos, in.sin, out.q_rstd, out.k_rstd, in.rounding};
  }

  static Gradients<Tensor> backward(const Upstream& up, const Saved& s, const Gradients<bool>& wanted,
                                    const Options& o) {
    const char* op = "qk_norm_rope_backward";
    check(op, s, o)
        .like("dq_out", up.dq_out)
        .shaped("dk_out", up.dk_out, s.k.sym_sizes(), Type::Same)
        .shaped("q_rstd", s.q_rstd, s.q.sym_sizes().slice(0, 3), Type::Float)
        .shaped("k_rstd", s.k_rstd, s.k.sym_sizes().slice(0, 3), Type::Float)
        .present("with_dq_weight", wanted.dq_weight, "q_weight", s.q_weight)
        .present("with_dk_weight", wanted.dk_weight, "k_weight", s.k_weight);
    const auto in_rows = [](const Tensor& rstd) { return rstd.transpose(1, 2).contiguous(); };
    const auto gradient = [](bool wanted, const Tensor& t) { return wanted ? rope::empty_heads(t) : Tensor(); };
    Gradients<Tensor> d{gradient(wanted.dq, s.q), gradient(wanted.dk, s.k), {}, {}};
    if (s.q.is_meta() || s.q.numel() + s.k.numel() == 0) {
      d.dq_weight = zeros_if(wanted.dq_weight, s.q_weight), d.dk_weight = zeros_if(wanted.dk_weight, s.k_weight);
      return d;
    }
    const Tensor q = rope::with_unit_stride(s.q), k = rope::with_unit_stride(s.k), q_weight = contiguous(s.q_weight),
                 k_weight = contiguous(s.k_weight), cos = rope::table_like(s.cos, q).contiguous(),
                 sin = rope::table_like(s.sin, q).contiguous(), q_rstd = in_rows(s.q_rstd), k_rstd = in_rows(s.k_rstd),
                 dq_out = rope::with_unit_stride(up.dq_out), dk_out = rope::with_unit_stride(up.dk_out);
    auto a = arguments_of(describe(q, d.dq, q_weight, q_rstd), describe(k, d.dk, k_weight, k_rstd), q, cos, sin,
                          s.rounding, o);
    a.q.dy = data(dq_out), a.q.dy_strides = strides(dq_out), a.k.dy = data(dk_out), a.k.dy_strides = strides(dk_out);
    if (qk_norm_rope_backward.has(Backend(q.device().type())) && a.fits()) {
      Tensor partials[2];
      Totals totals;
      const auto sums = [&](NormedHeads& t, bool wanted, const OptTensor& w, Tensor& partials) {
        t.partials = std::max<int64_t>(1, partial_count(q, 1, a.rows(t), a.cols));
        if (wanted) partials = empty_partials(q, t.partials, a.cols), t.dw = data<float>(partials);
        return wanted ? totals.of(partials, *w) : Tensor();
      };
      d.dq_weight = sums(a.q, wanted.dq_weight, s.q_weight, partials[0]);
      d.dk_weight = sums(a.k, wanted.dk_weight, s.k_weight, partials[1]);
      run(qk_norm_rope_backward, q, a);
      totals.run();
      return d;
    }
    const Tensor gq = rope::empty_heads(q), gk = rope::empty_heads(k);
    rope::rotate(rope::describe(dq_out, gq), rope::describe(dk_out, gk), {}, q, cos, sin, true, false, {},
                 o.rotary_dim);
    const auto of_norm = [&](const Tensor& g, const Tensor& x, const OptTensor& w, const Tensor& rstd,
                             norm::Wants wants) {
      auto d = norm::backward(op, g.transpose(1, 2), {}, {.x = x.transpose(1, 2), .w = w}, {}, rstd, wants, s.rounding);
      if (wants.x) d.x = d.x.transpose(1, 2);
      return d;
    };
    const auto dq = of_norm(gq, q, s.q_weight, q_rstd, {.x = wanted.dq, .w = wanted.dq_weight}),
               dk = of_norm(gk, k, s.k_weight, k_rstd, {.x = wanted.dk, .w = wanted.dk_weight});
    return {dq.x, dk.x, dq.w, dk.w};
  }
};

}  // namespace op

std::tuple<Tensor, Tensor> qk_norm_rope(const Tensor& q, const Tensor& k, const OptTensor& q_weight,
                                        const OptTensor& k_weight, const Tensor& cos, const Tensor& sin, double eps,
                                        double offset, Casting casting, int64_t rotary_dim) {
  return Operator<op::QkNormRope>::public_op(q, k, q_weight, k_weight, cos, sin, eps, offset, int64_t(casting),
                                             rotary_dim);
}

LIGER_OPERATORS(qk_norm_rope, Operator<op::QkNormRope>)

}  // namespace liger
