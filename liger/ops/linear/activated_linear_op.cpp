#include "liger/ops/activation/activate_op.h"
#include "liger/ops/linear/activated_layer.h"

namespace liger {
namespace op::linear {

/// A layer of an activation of x. Keeps x; what the layer reads is recomputed in backward. Of says what that is: its
/// form, whose members make it and its gradients of the rows of x.
template <class Of>
struct ActivatedLayer {
  static constexpr auto kName = Of::kName;
  static constexpr Autocast kAutocast = Autocast::Cast;
  struct Inputs : AdaptedLinear {
    Tensor x;
    LIGER_FIELDS(x, weight, bias, a, b, weight_scale, scale)
    Layers<1> layers() const { return {this}; }
  };
  using Options = typename Of::Options;
  struct Results {
    Tensor y, low, cast;
    LIGER_FIELDS(y, low, cast)
    Tensor input, b;     // between start and finish
    EightBitRows bytes;  // in input's place
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
    linear::check(arguments, in, "weight", "", Of::width(op, in.x));
    return arguments;
  }

  /// All but y, which `finish` computes. in_bytes: see run_input.
  static Results start(const Inputs& in, const Options& options) { return run_start(in, options, true); }
  static Results run_start(const Inputs& in, const Options& options, bool in_bytes) {
    check(kName.text, in);
    const Of of(kName.text, options);
    const Layers<1> layers = in.layers();
    Results r{output(at::empty_symint(with_columns(in.x, in.weight.sym_size(0)), in.x.options())),
              Adapters<1>::empty_low_rank(layers, in.x),
              {},
              {},
              {},
              {}};
    if (is_nothing(in.x)) {
      r.cast = Adapters<1>::empty_cast(layers, in.x);
      r.input = at::empty_symint({sym_rows(in.x), in.weight.sym_size(1)}, in.x.options());
      return r;
    }
    const Tensor x = matrix(in.x);
    const auto format = in_bytes ? format_of_products(in.x, layers) : std::nullopt;
    const Tensor input = room_for_input(in, format ? part_of(x.size(0)) : x.size(0));
    const Adapters<1> adapters(layers, input);
    r.cast = adapters.cast, r.b = adapters.b[0];
    r.bytes = run_input(input, x.size(0), adapters.a, r.low, format,
                        [&](int64_t begin, int64_t n, const Tensor& rows, const gated::Bytes* bytes) {
                          return of.forward(part(x, begin, n), rows, bytes);
                        });
    if (!format) r.input = input;
    return r;
  }

  static void finish(const Inputs& in, Results& r, const Options&) {
    if (!is_nothing(in.x)) run_forward(matrix(r.y), Factor(r.input, r.bytes), r.low, in, r.b);
    r.input = Tensor(), r.bytes = {};
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
    return {r.y, r.low, r.cast, r.input};
  }

  static Saved save(const Inputs& in, const Results& r) { return {in, r.low, r.cast}; }

  static Gradients<Tensor> backward(const Upstream& up, const Saved& saved, const Gradients<bool>& wanted,
                                    const Options& options) {
    const Inputs& in = saved.in;
    const Arguments arguments = check(Of::kBackward, in);
    const Layers<1> layers = in.layers();
    arguments.shaped("dy", up.dy, with_columns(in.x, in.weight.sym_size(0)), Type::Same);
    linear::check(arguments, in, wanted.d, "");
    Adapters<1>::check(arguments, layers, in.x, "low", saved.low, "cast", saved.cast);
    const Of of(Of::kBackward, options);
    if (is_nothing(in.x)) return {nothing(wanted.dx, in.x), nothing(wanted.d, in)};
    Gradients<Tensor> g{room(wanted.dx, in.x), {}};
    const Tensor x = matrix(in.x), dx = wanted.dx ? matrix(g.dx) : Tensor(), input = room_for_input(in, x.size(0));
    const Adapters<1> adapters(layers, input, saved.cast);
    LayersBackward<1> sums(layers, adapters, {wanted.d});
    add_activated_layer(
        sums, matrix(up.dy), input, saved.low, {wanted.dx, wanted.d}, false, [&] { of.forward(x, input, nullptr); },
        [&](const Tensor& again) { of.backward(input, x, dx, again); });
    g.d = sums.gradients()[0];
    return g;
  }

 private:
  static Tensor room_for_input(const Inputs& in, int64_t tokens) {
    return output(at::empty({tokens, in.weight.size(1)}, in.x.options()));
  }
};

/// act(x).
struct OfActivation {
  static constexpr Name kName = "activated_linear";
  static constexpr const char* kBackward = "activated_linear_backward";
  using Options = ActivatedLinearOptions;
  Activation activation;

  OfActivation(const char* op, const Options& o) : activation(gated::parse(op, int64_t(o.activation))) {}
  static c10::SymInt width(const char*, const Tensor& x) { return x.sym_size(-1); }

  bool forward(const Tensor& x, const Tensor& y, const gated::Bytes*) const {
    return activated::run_forward(x, y, activation), false;
  }
  void backward(const Tensor& dy, const Tensor& x, const Tensor& dx, const Tensor& y) const {
    activated::run_backward(dy, x, dx, activation, y);
  }
};

/// act(m · gate) · up, or with clamps; gate and up are the halves of a row of x.
struct OfGateAndUp {
  static constexpr Name kName = "gated_linear";
  static constexpr const char* kBackward = "gated_linear_backward";
  using Options = GatedLinearOptions;
  GateForm form;

  OfGateAndUp(const char* op, const Options& o)
      : form(gated::form(op, int64_t(o.activation), o.gate_multiplier, o.gate)) {}
  static c10::SymInt width(const char* op, const Tensor& x) {
    TORCH_CHECK_VALUE(x.sym_size(-1) % 2 == 0, op, ": the last dimension of x holds gate and up and must be even, got ",
                      x.sym_size(-1));
    return x.sym_size(-1) / 2;
  }

  bool forward(const Tensor& x, const Tensor& y, const gated::Bytes* bytes) const {
    const auto halves = x.chunk(2, -1);
    return gated::run_forward(halves[0], halves[1], y, form, bytes);
  }
  void backward(const Tensor& dy, const Tensor& x, const Tensor& dx, const Tensor& y) const {
    const auto halves = x.chunk(2, -1), to = dx.chunk(2, -1);
    gated::run_backward(dy, halves[0], halves[1], to[0], to[1], cols(x), form, nullptr, y);
  }
};

struct ActivatedLinear : ActivatedLayer<OfActivation> {};
struct GatedLinear : ActivatedLayer<OfGateAndUp> {};

}  // namespace op::linear

Tensor activated_linear(const Tensor& x, const AdaptedLinear& layer, const ActivatedLinearOptions& options) {
  return Operator<op::linear::ActivatedLinear>::public_op(op::linear::ActivatedLinear::Inputs{{layer}, x}, options);
}
Tensor gated_linear(const Tensor& x, const AdaptedLinear& layer, const GatedLinearOptions& options) {
  return Operator<op::linear::GatedLinear>::public_op(op::linear::GatedLinear::Inputs{{layer}, x}, options);
}

LIGER_OPERATORS(activated_linear, Operator<op::linear::ActivatedLinear>,
                Undifferentiated<"activated_linear_start", op::linear::ActivatedLinear::started>)
LIGER_OPERATORS(gated_linear, Operator<op::linear::GatedLinear>,
                Undifferentiated<"gated_linear_start", op::linear::GatedLinear::started>)

}  // namespace liger
