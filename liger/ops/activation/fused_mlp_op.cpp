#include "liger/core/torch/operator.h"
#include "liger/ops/activation/gated_op.h"
#include "liger/ops.h"

namespace liger {
namespace op {

/// Keeps the input alone: gate, up and their product, each as wide as the MLP, are made again in backward.
struct FusedMLP {
  static constexpr Name kName = "fused_mlp";
  static constexpr Autocast kAutocast = Autocast::Cast;
  struct Inputs {
    Tensor x, gate, up, down;
    OptTensor gate_bias, up_bias, down_bias;
    MLPOptions options;
    LIGER_FIELDS(x, gate, up, down, gate_bias, up_bias, down_bias, options)
  };
  struct Saved {
    Tensor x, gate, up, down;
    OptTensor gate_bias, up_bias;
    MLPOptions options;
    LIGER_FIELDS(x, gate, up, down, gate_bias, up_bias, options)
  };
  using Upstream = Dy;
  template <class T>
  struct Gradients {
    T dx, dgate, dup, ddown, dgate_bias, dup_bias, ddown_bias;
    LIGER_FIELDS(dx, dgate, dup, ddown, dgate_bias, dup_bias, ddown_bias)
  };
  /// Bit i: the gradient of forward's i-th argument.
  struct Wants {
    int64_t wants;
    LIGER_FIELDS(wants)

    static Wants of(const Gradients<bool>& wanted) {
      int64_t bits = 0, bit = 1;
      wanted.fields().apply([&](const auto&... flag) { ((bits |= flag * bit, bit <<= 1), ...); });
      return {bits};
    }
    Gradients<bool> wanted() const {
      Gradients<bool> flags;
      int bit = 0;
      flags.fields().apply([&](auto&... flag) { ((flag = (wants >> bit++ & 1) != 0), ...); });
      return flags;
    }
  };

  static Arguments check(const char* op, const auto& in) {
    const Arguments arguments(op, "x", in.x);
    TORCH_CHECK(in.gate.dim() == 2 && in.down.dim() == 2, op, ": gate must be [width, ", in.x.sym_size(-1),
                "] and down [out, width], got ", in.gate.sym_sizes(), " and ", in.down.sym_sizes());
    const c10::SymInt width = in.gate.sym_size(0), out = in.down.sym_size(0);
    arguments.shaped("gate", in.gate, {width, in.x.sym_size(-1)}, Type::Same)
        .shaped("up", in.up, in.gate.sym_sizes(), Type::Same)
        .shaped("down", in.down, {out, width}, Type::Same)
        .vector("gate_bias", in.gate_bias, width, Type::Same)
        .vector("up_bias", in.up_bias, width, Type::Same);
    return arguments;
  }

  /// [..., rows of down] for x [..., n].
  static c10::SymDimVector result_shape(const auto& in) {
    c10::SymDimVector shape(in.x.sym_sizes());
    shape.back() = in.down.sym_size(0);
    return shape;
  }

  /// Tokens that are worked on at once: 0 asks for all.
  static int64_t chunk_of(int64_t tokens, int64_t asked) {
    return std::max<int64_t>(1, asked > 0 ? std::min(asked, tokens) : tokens);
  }

  static Tensor forward(const Inputs& in) {
    check("fused_mlp", in).vector("down_bias", in.down_bias, in.down.sym_size(0), Type::Same);
    const Activation act = gated::parse("fused_mlp", int64_t(in.options.activation));
    const Tensor y = output(at::empty_symint(result_shape(in), in.x.options()));
    if (y.is_meta() || y.numel() == 0) return y;
    const Tensor x = in.x.reshape({-1, in.x.size(-1)}), out = y.view({x.size(0), in.down.size(0)});
    const int64_t tokens = x.size(0), chunk = chunk_of(tokens, in.options.chunk);
    const Tensor gates = output(at::empty({chunk, in.gate.size(0)}, x.options())), ups = output(at::empty_like(gates));
    for_chunks(tokens, chunk, [&](int64_t begin, int64_t n) {
      const Tensor rows = x.narrow(0, begin, n), g = gates.narrow(0, 0, n), u = ups.narrow(0, 0, n);
      project(g, rows, in.gate, value_or_undefined(in.gate_bias));
      project(u, rows, in.up, value_or_undefined(in.up_bias));
      gated::run_forward(g, u, g, {act, float(in.options.gate_multiplier)});
      project(out.narrow(0, begin, n), g, in.down, value_or_undefined(in.down_bias));
    });
    if (in.options.down_multiplier != 1) out.mul_(in.options.down_multiplier);
    return y;
  }

  static Saved save(const Inputs& in, const Tensor&) {
    return {in.x, in.gate, in.up, in.down, in.gate_bias, in.up_bias, in.options};
  }

  static Gradients<Tensor> empty_gradients(const Saved& in, const Gradients<bool>& wanted, at::ScalarType of_weights,
                                           at::ScalarType of_biases) {
    const auto empty = [&](bool wanted, c10::SymIntArrayRef shape, at::ScalarType dtype) {
      return wanted ? output(at::empty_symint(shape, in.x.options().dtype(dtype))) : Tensor();
    };
    const auto width = in.gate.sym_sizes().slice(0, 1), out = in.down.sym_sizes().slice(0, 1);
    return {empty(wanted.dx, in.x.sym_sizes(), in.x.scalar_type()),
            empty(wanted.dgate, in.gate.sym_sizes(), of_weights),
            empty(wanted.dup, in.up.sym_sizes(), of_weights),
            empty(wanted.ddown, in.down.sym_sizes(), of_weights),
            empty(wanted.dgate_bias, width, of_biases),
            empty(wanted.dup_bias, width, of_biases),
            empty(wanted.ddown_bias, out, of_biases)};
  }

  /// Adds what a chunk of tokens contributes to the gradients d. gates, ups and products are buffers with one row per
  /// token of a chunk.
  struct Chunks {
    const Saved& in;
    const Gradients<bool>& wanted;
    Gradients<Tensor>& d;
    Tensor gates, ups, products;
    Activation act;

    void add(int64_t begin, const Tensor& rows, const Tensor& dy) {
      const GateForm form{act, float(in.options.gate_multiplier)};
      const double down_multiplier = in.options.down_multiplier;
      const auto of_chunk = [&](const Tensor& buffer) { return buffer.narrow(0, 0, rows.size(0)); };
      const Tensor g = of_chunk(gates), u = of_chunk(ups), dout = down_multiplier != 1 ? dy * down_multiplier : dy;
      Tensor c = of_chunk(products);
      const bool through_gate = wanted.dx || wanted.dgate || wanted.dup || wanted.dgate_bias || wanted.dup_bias;
      if (wanted.ddown_bias) d.ddown_bias.add_(dout.sum(0, false, at::kFloat));
      if (!through_gate && !wanted.ddown) return;
      project(g, rows, in.gate, value_or_undefined(in.gate_bias));
      project(u, rows, in.up, value_or_undefined(in.up_bias));
      if (wanted.ddown) {
        gated::run_forward(g, u, c, form);
        accumulate(d.ddown, dout, c, begin == 0);
      }
      if (!through_gate) return;
      at::mm_out(c, dout, in.down);
      gated::run_backward(c, g, u, g, u, in.gate.size(0), form);
      if (wanted.dgate) accumulate(d.dgate, g, rows, begin == 0);
      if (wanted.dup) accumulate(d.dup, u, rows, begin == 0);
      if (wanted.dgate_bias) d.dgate_bias.add_(g.sum(0, false, at::kFloat));
      if (wanted.dup_bias) d.dup_bias.add_(u.sum(0, false, at::kFloat));
      if (!wanted.dx) return;
      Tensor out = d.dx.view({-1, rows.size(1)}).narrow(0, begin, rows.size(0));
      at::mm_out(out, g, in.gate);
      at::addmm_out(out, out, u, in.up);
    }
  };

  /// The activations are made again; of the weights' gradients, the sums over chunks are in float.
  static Gradients<Tensor> backward(const Upstream& up, const Saved& in, const Wants& wants) {
    const Gradients<bool> wanted = wants.wanted();
    const Arguments arguments = check("fused_mlp_backward", in);
    arguments.shaped("dy", up.dy, result_shape(in), Type::Same)
        .present("wants", wanted.dgate_bias, "gate_bias", in.gate_bias)
        .present("wants", wanted.dup_bias, "up_bias", in.up_bias);
    const auto dtype = in.x.scalar_type();
    if (in.x.is_meta()) return empty_gradients(in, wanted, dtype, dtype);
    const Tensor x = in.x.reshape({-1, in.x.size(-1)}), dy = up.dy.reshape({x.size(0), in.down.size(0)});
    const int64_t tokens = x.size(0), chunk = chunk_of(tokens, in.options.chunk);
    // One chunk needs no accumulator: its GEMM sums in float and rounds once.
    Gradients<Tensor> d = empty_gradients(in, wanted, chunk >= tokens ? dtype : at::kFloat, at::kFloat);
    for (Tensor* bias : {&d.dgate_bias, &d.dup_bias, &d.ddown_bias})
      if (bias->defined()) bias->zero_();
    for (Tensor* weight : {&d.dgate, &d.dup, &d.ddown})
      if (weight->defined() && tokens == 0) weight->zero_();
    const auto buffer = [&] { return output(at::empty({chunk, in.gate.size(0)}, x.options())); };
    Chunks chunks{
        in, wanted, d, buffer(), buffer(), buffer(), gated::parse("fused_mlp", int64_t(in.options.activation))};
    for_chunks(tokens, chunk,
               [&](int64_t begin, int64_t n) { chunks.add(begin, x.narrow(0, begin, n), dy.narrow(0, begin, n)); });
    for (Tensor* sum : {&d.dgate, &d.dup, &d.ddown, &d.dgate_bias, &d.dup_bias, &d.ddown_bias})
      if (sum->defined()) *sum = sum->to(dtype);
    return d;
  }

  static Gradients<Tensor> differentiate(const Upstream& up, const Saved& saved, const Gradients<bool>& wanted) {
    return as_fields<Gradients<Tensor>>(Operator<FusedMLP>::backward_op(up, saved, Wants::of(wanted)));
  }
};

}  // namespace op

Tensor fused_mlp(const Tensor& x, const Tensor& gate, const Tensor& up, const Tensor& down, const MLPOptions& o,
                 const OptTensor& gate_bias, const OptTensor& up_bias, const OptTensor& down_bias) {
  return Operator<op::FusedMLP>::public_op(x, gate, up, down, gate_bias, up_bias, down_bias, o);
}

LIGER_OPERATORS(fused_mlp, Operator<op::FusedMLP>)

}  // namespace liger
