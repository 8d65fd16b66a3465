#include "liger/core/torch/batch_invariant.h"
#include "liger/core/torch/operator.h"
#include "liger/functions/mixers.h"
#include "liger/ops/mixers/gated_delta_rule.h"

namespace liger {
namespace op {

struct GatedDeltaRule {
  static constexpr Name kName = "gated_delta_rule";
  struct Inputs {
    Tensor q, k, v, g, beta;
    OptTensor state, skip, starts;
    double scale, eps;
    bool delta, final_state;
    LIGER_FIELDS(q, k, v, g, beta, state, skip, starts, scale, eps, delta, final_state)
  };
  struct Results {
    Tensor o, last;
    LIGER_FIELDS(o, last)
  };
  using Saved = Inputs;
  struct Upstream {
    OptTensor dout, dlast;
    LIGER_FIELDS(dout, dlast)
  };
  template <class T>
  struct Gradients {
    T dq, dk, dv, dg, dbeta, dstate, dskip;
    LIGER_FIELDS(dq, dk, dv, dg, dbeta, dstate, dskip)
  };

  /// Whether there is a gate for each channel of k.
  static bool channels(const Inputs& in) { return in.g.dim() == 4; }

  static Arguments check(const char* op, const Inputs& in) {
    const Arguments arguments(op, "q", in.q);
    TORCH_CHECK(in.q.dim() == 4, op, ": q must be [rows, tokens, key heads, width], got ", in.q.sym_sizes());
    TORCH_CHECK(in.v.dim() == 4, op, ": v must be [rows, tokens, heads, width], got ", in.v.sym_sizes());
    const auto rows = in.q.sym_size(0), tokens = in.q.sym_size(1), heads = in.v.sym_size(2), V = in.v.sym_size(3);
    arguments.like("k", in.k).shaped("v", in.v, {rows, tokens, heads, V}, Type::Same);
    TORCH_CHECK(in.q.sym_size(2) > 0 && heads % in.q.sym_size(2) == 0, op, ": the key heads, ", in.q.sym_size(2),
                ", do not divide the heads, ", heads);
    if (channels(in)) arguments.shaped("g", in.g, {rows, tokens, heads, in.q.sym_size(3)}, Type::Kernels);
    else arguments.shaped("g", in.g, {rows, tokens, heads}, Type::Float);
    arguments.shaped("beta", in.beta, {rows, tokens, heads}, Type::Kernels)
        .shaped("skip", in.skip, {heads}, Type::Kernels)
        .shaped("starts", in.starts, {rows, tokens}, Type::Integer);
    TORCH_CHECK(!in.skip || (!in.delta && !channels(in)), op,
                ": skip is for linear attention, without delta and with one gate for each head");
    if (!in.state) {
      TORCH_CHECK(!(in.starts && in.final_state), op, ": the number of documents is that of `state`, which is missing");
      return arguments;
    }
    TORCH_CHECK(in.state->dim() == 4, op, ": state must be [documents, heads, width of k, width of v], got ",
                in.state->sym_sizes());
    arguments.shaped("state", in.state, {in.starts ? in.state->sym_size(0) : rows, heads, in.q.sym_size(3), V},
                     Type::Float);
    return arguments;
  }

  /// t as kernels read it: rows of whole heads, wherever they lie, whose first number is aligned.
  static Tensor heads(const Tensor& t) {
    const int64_t unit = 16 / t.element_size();
    const bool whole = (t.size(3) == 1 || t.stride(3) == 1) && (t.size(2) == 1 || t.stride(2) == t.size(3));
    return whole && is_aligned(t) && t.stride(0) % unit == 0 && t.stride(1) % unit == 0 ? t : packed(t);
  }
  /// t without gaps, the first number aligned.
  static Tensor packed(const Tensor& t) {
    const Tensor c = t.contiguous();
    return is_aligned(c) ? c : c.clone();
  }
  static bool is_aligned(const Tensor& t) { return reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0; }

  /// What both kernels take, and the tensors that keep it alive.
  struct Common {
    Tensor q, k, v, g, beta, starts, state, skip, workspace;

    explicit Common(const Inputs& in)
        : q(heads(in.q)),
          k(heads(in.k)),
          v(heads(in.v)),
          g(in.g.to(at::kFloat).contiguous()),
          beta(in.beta.to(at::kFloat).contiguous()),
          starts(in.starts ? in.starts->to(at::kInt).contiguous() : Tensor()),
          state(contiguous(in.state)),
          skip(in.skip ? in.skip->to(at::kFloat).contiguous() : Tensor()) {}

    template <class Args>
    Args describe(const Inputs& in) {
      Args a{};
      a.q = data(q), a.k = data(k), a.v = data(v), a.g = data<float>(g), a.beta = data<float>(beta);
      a.q_row = q.stride(0), a.q_token = q.stride(1), a.k_row = k.stride(0), a.k_token = k.stride(1);
      a.v_row = v.stride(0), a.v_token = v.stride(1);
      a.starts = data<int32_t>(starts), a.state = data<float>(state), a.skip = data<float>(skip);
      a.rows = q.size(0), a.tokens = q.size(1), a.key_heads = q.size(2), a.heads = v.size(2);
      a.K = q.size(3), a.V = v.size(3), a.documents = state.defined() ? state.size(0) : a.rows;
      a.scale = float(in.scale), a.eps = float(in.eps), a.delta = in.delta, a.dtype = dtype_of(q);
      a.batch_invariant = is_batch_invariant();
      int64_t bytes = 0;
      run(channels(in) ? channel_delta_rule_workspace : gated_delta_rule_workspace, q,
          {.like = a, .backward = std::is_same_v<Args, GatedDeltaRuleBackward>, .bytes = &bytes});
      if (bytes > 0) workspace = at::empty({bytes}, q.options().dtype(at::kByte));
      a.workspace = data<void>(workspace);
      return a;
    }
  };

  static Results forward(const Inputs& in) {
    check("gated_delta_rule", in);
    Results out{output(at::empty_symint(in.v.sym_sizes(), in.v.options())), {}};
    if (in.final_state) {
      out.last = in.state ? at::empty_like(*in.state, at::MemoryFormat::Contiguous)
                          : at::empty_symint({in.q.sym_size(0), in.v.sym_size(2), in.q.sym_size(3), in.v.sym_size(3)},
                                             in.q.options().dtype(at::kFloat));
    }
    if (in.q.is_meta()) return out;
    if (in.v.numel() == 0) {
      if (in.final_state) in.state ? void(out.last.copy_(*in.state)) : void(out.last.zero_());
      return out;
    }
    Common of(in);
    auto a = of.describe<GatedDeltaRuleForward>(in);
    a.o = out.o.data_ptr(), a.final_state = data<float>(out.last);
    run(channels(in) ? channel_delta_rule_forward : gated_delta_rule_forward, of.q, a);
    return out;
  }

  static Saved save(const Inputs& in, const Results&) { return in; }

  static Gradients<Tensor> backward(const Upstream& up, const Saved& s, const Gradients<bool>& wanted) {
    constexpr auto op = "gated_delta_rule_backward";
    const auto arguments = check(op, s);
    if (up.dout) arguments.shaped("dout", *up.dout, s.v.sym_sizes(), Type::Same);
    if (up.dlast && s.final_state)
      arguments.shaped(
          "dlast", *up.dlast,
          {s.state ? s.state->sym_size(0) : s.q.sym_size(0), s.v.sym_size(2), s.q.sym_size(3), s.v.sym_size(3)},
          Type::Float);
    const auto like = [](const Tensor& t) { return output(at::empty_symint(t.sym_sizes(), t.options())); };
    Gradients<Tensor> d{like(s.q), like(s.k), like(s.v), {}, {}, {}, {}};
    if (wanted.dstate && s.state) d.dstate = like(*s.state);
    if (s.q.is_meta() || s.v.numel() == 0) {
      d.dg = like(s.g), d.dbeta = like(s.beta);
      d.dskip = zeros_if(wanted.dskip && s.skip, s.skip);
      if (d.dstate.defined() && !s.q.is_meta()) up.dlast ? void(d.dstate.copy_(*up.dlast)) : void(d.dstate.zero_());
      if (!s.q.is_meta()) d.dq.zero_(), d.dk.zero_();
      return d;
    }
    Common of(s);
    const Tensor dout = up.dout ? packed(*up.dout) : at::zeros_like(of.v, at::MemoryFormat::Contiguous),
                 dlast = up.dlast && s.final_state ? up.dlast->contiguous() : Tensor(), dg = at::empty_like(of.g),
                 dbeta = at::empty_like(of.beta), dskip = s.skip ? at::empty_like(of.beta) : Tensor();
    auto a = of.describe<GatedDeltaRuleBackward>(s);
    a.dout = data(dout), a.dfinal = data<float>(dlast);
    a.dq = d.dq.data_ptr(), a.dk = d.dk.data_ptr(), a.dv = d.dv.data_ptr();
    a.dg = data<float>(dg), a.dbeta = data<float>(dbeta), a.dstate = data<float>(d.dstate);
    a.dskip = data<float>(dskip);
    run(channels(s) ? channel_delta_rule_backward : gated_delta_rule_backward, of.q, a);
    d.dg = dg.to(s.g.scalar_type()), d.dbeta = dbeta.to(s.beta.scalar_type());
    if (wanted.dskip && s.skip) d.dskip = dskip.sum(at::IntArrayRef{0, 1}).to(s.skip->scalar_type());
    return d;
  }
};

}  // namespace op

std::tuple<Tensor, Tensor> gated_delta_rule(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g,
                                            const Tensor& beta, const OptTensor& state, const OptTensor& starts,
                                            std::optional<double> scale, double eps, bool delta, bool final_state,
                                            const OptTensor& skip) {
  return Operator<op::GatedDeltaRule>::public_op(q, k, v, g, beta, state, skip, starts,
                                                 scale.value_or(1 / std::sqrt(double(q.size(-1)))), eps, delta,
                                                 final_state);
}

LIGER_OPERATORS(gated_delta_rule, Operator<op::GatedDeltaRule>)

}  // namespace liger
