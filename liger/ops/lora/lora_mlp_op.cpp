#include "liger/ops/activation/gated_op.h"
#include "liger/ops/lora/lora_op.h"

namespace liger {
namespace op::lora {

/// Keeps x, gate and up, and with `recompute` x; their product is made again in backward.
struct MLP {
  static constexpr Name kName = "lora_mlp";
  static constexpr Autocast kAutocast = Autocast::Cast;
  struct Inputs {
    Tensor x;
    AdaptedLinear gate, up, down;
    Activation activation;
    bool recompute;
    LIGER_FIELDS(x, gate.weight, gate.bias, gate.a, gate.b, up.weight, up.bias, up.a, up.b, down.weight, down.bias,
                 down.a, down.b, gate.scale, up.scale, down.scale, activation, recompute)
    Layers<2> of_x() const { return {&gate, &up}; }
    Layers<1> of_product() const { return {&down}; }
  };
  struct Results {
    Tensor y, low, low_down, gates, ups, cast, cast_down;
    LIGER_FIELDS(y, low, low_down, gates, ups, cast, cast_down)
    Tensor product, down_b;  // between start and finish
  };
  struct Saved {
    Inputs in;
    Tensor low, low_down, gates, ups, cast, cast_down;
    LIGER_FIELDS(in, low, low_down, gates, ups, cast, cast_down)
  };
  using Upstream = Dy;
  template <class T>
  struct Gradients {
    T dx;
    LayerGradients<T> gate, up, down;
    LIGER_FIELDS(dx, gate.weight, gate.bias, gate.a, gate.b, up.weight, up.bias, up.a, up.b, down.weight, down.bias,
                 down.a, down.b)
  };

  static auto uncast(auto& in) { return refs(in.gate.a, in.gate.b, in.up.a, in.up.b, in.down.a, in.down.b); }

  static Arguments check(const char* op, const Inputs& in) {
    const Arguments arguments(op, "x", in.x);
    lora::check(arguments, in.gate, "gate_weight", "gate_", in.x.sym_size(-1));
    lora::check(arguments, in.up, "up_weight", "up_", in.x.sym_size(-1));
    arguments.shaped("up_weight", in.up.weight, in.gate.weight.sym_sizes(), Type::Same);
    lora::check(arguments, in.down, "down_weight", "down_", in.gate.weight.sym_size(0));
    return arguments;
  }

  /// gate and up of x, each [tokens, width].
  static std::array<Tensor, 2> gate_and_up(const Inputs& in, const Tensor& x, const Tensor& low,
                                           const Adapters<2>& adapters) {
    std::array<Tensor, 2> y;
    for (size_t i = 0; i < 2; ++i) {
      const AdaptedLinear& layer = *in.of_x()[i];
      y[i] = output(at::empty({x.size(0), layer.weight.size(0)}, x.options()));
      run_forward(y[i], x, adapters.columns_of(low, in.of_x(), i), layer, adapters.b[i]);
    }
    return y;
  }

  /// All but y, which `finish` computes.
  static Results start(const Inputs& in) {
    check("lora_mlp", in);
    const Activation act = gated::parse("lora_mlp", int64_t(in.activation));
    Results r;
    r.y = output(at::empty_symint(with_columns(in.x, in.down.weight.sym_size(0)), in.x.options()));
    if (is_nothing(in.x)) {
      r.low = Adapters<2>::empty_low_rank(in.of_x(), in.x), r.cast = Adapters<2>::empty_cast(in.of_x(), in.x);
      r.low_down = Adapters<1>::empty_low_rank(in.of_product(), in.x);
      r.cast_down = Adapters<1>::empty_cast(in.of_product(), in.x);
      for (Tensor* wide : {&r.gates, &r.ups})
        if (!in.recompute) *wide = at::empty_symint({sym_rows(in.x), in.gate.weight.sym_size(0)}, in.x.options());
      return r;
    }
    const Adapters<2> adapters(in.of_x(), in.x);
    const Tensor x = matrix(in.x);
    r.cast = adapters.cast, r.low = adapters.low_rank(x);
    const auto [g, u] = gate_and_up(in, x, r.low, adapters);
    r.product = in.recompute ? g : output(at::empty_like(g));
    gated::run_forward(g, u, r.product, {act});
    if (!in.recompute) r.gates = g, r.ups = u;
    const Adapters<1> of_down(in.of_product(), r.product);
    r.cast_down = of_down.cast, r.low_down = of_down.low_rank(r.product), r.down_b = of_down.b[0];
    return r;
  }

  static void finish(const Inputs& in, Results& r) {
    if (is_nothing(in.x)) return;
    run_forward(matrix(r.y), r.product, r.low_down, in.down, r.down_b);
    r.product = Tensor();
  }

  static Results forward(const Inputs& in) {
    Results results = start(in);
    finish(in, results);
    return results;
  }

  /// What `start` gives, to callers that finish by lora_finish.
  struct Started {
    Tensor y, low, low_down, gates, ups, cast, cast_down, product;
    LIGER_FIELDS(y, low, low_down, gates, ups, cast, cast_down, product)
  };
  static Started started(const Inputs& in) {
    const Results r = start(in);
    return {r.y, r.low, r.low_down, r.gates, r.ups, r.cast, r.cast_down, r.product};
  }

  static Saved save(const Inputs& in, const Results& r) {
    return {in, r.low, r.low_down, r.gates, r.ups, r.cast, r.cast_down};
  }

  static bool any(const LayerGradients<bool>& w) { return w.weight || w.bias || w.a || w.b; }

  static Gradients<Tensor> backward(const Upstream& up, const Saved& saved, const Gradients<bool>& wanted) {
    const Inputs& in = saved.in;
    const Arguments arguments = check("lora_mlp_backward", in);
    arguments.shaped("dy", up.dy, with_columns(in.x, in.down.weight.sym_size(0)), Type::Same);
    lora::check(arguments, in.gate, wanted.gate, "gate_");
    lora::check(arguments, in.up, wanted.up, "up_");
    lora::check(arguments, in.down, wanted.down, "down_");
    Adapters<2>::check(arguments, in.of_x(), in.x, "low", saved.low, "cast", saved.cast);
    Adapters<1>::check(arguments, in.of_product(), in.x, "low_down", saved.low_down, "cast_down", saved.cast_down);
    const c10::SymDimVector kept =
        in.recompute ? c10::SymDimVector{0} : c10::SymDimVector{sym_rows(in.x), in.gate.weight.sym_size(0)};
    arguments.shaped("gates", saved.gates, kept, Type::Same).shaped("ups", saved.ups, kept, Type::Same);
    const Activation act = gated::parse("lora_mlp_backward", int64_t(in.activation));
    if (is_nothing(in.x))
      return {nothing(wanted.dx, in.x), nothing(wanted.gate, in.gate), nothing(wanted.up, in.up),
              nothing(wanted.down, in.down)};
    Gradients<Tensor> d;
    d.dx = room(wanted.dx, in.x);
    const Tensor x = matrix(in.x), dx = wanted.dx ? matrix(d.dx) : Tensor();
    const Adapters<2> adapters(in.of_x(), in.x, saved.cast);
    const auto [g, u] = in.recompute ? gate_and_up(in, x, saved.low, adapters) : std::array{saved.gates, saved.ups};
    const Tensor c = output(at::empty_like(g));  // the product of gate and up, and then its gradient
    if (wanted.down.weight || wanted.down.a) gated::run_forward(g, u, c, {act});
    const bool inner = wanted.dx || any(wanted.gate) || any(wanted.up);
    const Tensor dc = inner ? c : Tensor();
    const Adapters<1> of_down(in.of_product(), c, saved.cast_down);
    d.down = run_backward<1>({matrix(up.dy)}, c, c, saved.low_down, in.of_product(), of_down, {wanted.down}, dc, dc)[0];
    if (!inner) return d;
    const Tensor dg = in.recompute ? g : output(at::empty_like(g)), du = in.recompute ? u : output(at::empty_like(u));
    gated::run_backward(c, g, u, dg, du, cols(g), {act});
    std::tie(d.gate, d.up) = std::tuple_cat(
        run_backward<2>({dg, du}, x, x, saved.low, in.of_x(), adapters, {wanted.gate, wanted.up}, dx, dx));
    return d;
  }
};

}  // namespace op::lora

Tensor lora_mlp(const Tensor& x, const AdaptedLinear& gate, const AdaptedLinear& up, const AdaptedLinear& down,
                Activation activation, bool recompute) {
  return Operator<op::lora::MLP>::public_op(op::lora::MLP::Inputs{x, gate, up, down, activation, recompute});
}

LIGER_OPERATORS(lora_mlp, Operator<op::lora::MLP>, Undifferentiated<"lora_mlp_start", op::lora::MLP::started>)

}  // namespace liger
