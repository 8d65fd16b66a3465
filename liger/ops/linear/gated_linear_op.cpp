#include "liger/ops/linear/gated_layer.h"

namespace liger {
namespace op::linear {

/// Keeps x, which has gate and up; their product is recomputed in backward.
struct GatedLinear {
  static constexpr Name kName = "gated_linear";
  static constexpr Autocast kAutocast = Autocast::Cast;
  struct Inputs : AdaptedLinear {
    Tensor x;
    LIGER_FIELDS(x, weight, bias, a, b, weight_scale, scale)
    Layers<1> layers() const { return {this}; }
    c10::SymInt width() const { return x.sym_size(-1) / 2; }
  };
  using Options = GatedLinearOptions;
  struct Results {
    Tensor y, low, cast;
    LIGER_FIELDS(y, low, cast)
    Tensor product, b;   // between start and finish
    EightBitRows bytes;  // in product's place
  };
  struct Saved {
    Inputs in;
    Tensor low, cast;
    LIGER_FIELDS(in, low, cast)
  };
  using Upstream = Dy;
  template <class T>
  struct Gradients {
    T dx;
    LayerGradients<T> d;
    LIGER_FIELDS(dx, d.weight, d.bias, d.a, d.b)
  };

  static auto uncast(auto& in) { return refs(in.a, in.b, in.weight_scale); }

  static Arguments check(const char* op, const Inputs& in) {
    const Arguments arguments(op, "x", in.x);
    TORCH_CHECK_VALUE(in.x.sym_size(-1) % 2 == 0, op,
                      ": the last dimension of x holds gate and up and must be even, got ", in.x.sym_size(-1));
    linear::check(arguments, in, "weight", "", in.width());
    return arguments;
  }
  static GateForm form(const char* op, const Options& o) {
    return gated::form(op, int64_t(o.activation), o.gate_multiplier, o.gate);
  }

  /// All but y, which `finish` computes. in_bytes: see run_product.
  static Results start(const Inputs& in, const Options& options) { return run_start(in, options, true); }
  static Results run_start(const Inputs& in, const Options& options, bool in_bytes) {
    check("gated_linear", in);
    const GateForm gate_form = form("gated_linear", options);
    const Layers<1> layers = in.layers();
    Results r{output(at::empty_symint(with_columns(in.x, in.weight.sym_size(0)), in.x.options())),
              Adapters<1>::empty_low_rank(layers, in.x),
              {},
              {},
              {},
              {}};
    if (is_nothing(in.x)) {
      r.cast = Adapters<1>::empty_cast(layers, in.x);
      r.product = at::empty_symint({sym_rows(in.x), in.width()}, in.x.options());
      return r;
    }
    const auto halves = matrix(in.x).chunk(2, -1);
    const int64_t tokens = halves[0].size(0);
    const auto format = in_bytes ? format_of_products(in.x, layers) : std::nullopt;
    const Tensor product = output(at::empty({format ? part_of(tokens) : tokens, halves[0].size(1)}, in.x.options()));
    const Adapters<1> adapters(layers, product);
    r.cast = adapters.cast, r.b = adapters.b[0];
    r.bytes = run_product(halves[0], halves[1], product, gate_form, adapters.a, r.low, format);
    if (!format) r.product = product;
    return r;
  }

  static void finish(const Inputs& in, Results& r, const Options&) {
    if (!is_nothing(in.x)) run_forward(matrix(r.y), Factor(r.product, r.bytes), r.low, in, r.b);
    r.product = Tensor(), r.bytes = {};
  }

  static Results forward(const Inputs& in, const Options& options) {
    Results results = start(in, options);
    finish(in, results, options);
    return results;
  }

  /// What `start` gives, to callers that finish by linear_finish.
  struct Started {
    Tensor y, low, cast, product;
    LIGER_FIELDS(y, low, cast, product)
  };
  static Started started(const Inputs& in, const Options& options) {
    const Results r = run_start(in, options, false);
    return {r.y, r.low, r.cast, r.product};
  }

  static Saved save(const Inputs& in, const Results& r) { return {in, r.low, r.cast}; }

  static Gradients<Tensor> backward(const Upstream& up, const Saved& saved, const Gradients<bool>& wanted,
                                    const Options& options) {
    const Inputs& in = saved.in;
    const Arguments arguments = check("gated_linear_backward", in);
    const Layers<1> layers = in.layers();
    arguments.shaped("dy", up.dy, with_columns(in.x, in.weight.sym_size(0)), Type::Same);
    linear::check(arguments, in, wanted.d, "");
    Adapters<1>::check(arguments, layers, in.x, "low", saved.low, "cast", saved.cast);
    const GateForm gate_form = form("gated_linear_backward", options);
    if (is_nothing(in.x)) return {nothing(wanted.dx, in.x), nothing(wanted.d, in)};
    Gradients<Tensor> g{room(wanted.dx, in.x), {}};
    const auto halves = matrix(in.x).chunk(2, -1);
    const auto to = wanted.dx ? matrix(g.dx).chunk(2, -1) : std::vector<Tensor>(2);
    const Tensor product = output(at::empty({halves[0].size(0), halves[0].size(1)}, in.x.options()));
    const Adapters<1> adapters(layers, product, saved.cast);
    LayersBackward<1> sums(layers, adapters, {wanted.d});
    add_gated_layer(sums, matrix(up.dy), product, saved.low,
                    {halves[0], halves[1], to[0], to[1], 2 * halves[0].size(1), gate_form}, {wanted.dx, wanted.d});
    g.d = sums.gradients()[0];
    return g;
  }
};

}  // namespace op::linear

Tensor gated_linear(const Tensor& x, const AdaptedLinear& layer, const GatedLinearOptions& options) {
  return Operator<op::linear::GatedLinear>::public_op(op::linear::GatedLinear::Inputs{{layer}, x}, options);
}

LIGER_OPERATORS(gated_linear, Operator<op::linear::GatedLinear>,
                Undifferentiated<"gated_linear_start", op::linear::GatedLinear::started>)

}  // namespace liger
