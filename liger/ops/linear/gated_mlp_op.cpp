#include "liger/ops/linear/activated_layer.h"

namespace liger {
namespace op::linear {

/// Keeps x, gate and up, and with `recompute` x; their product is recomputed in backward.
struct GatedMLP {
  static constexpr Name kName = "gated_mlp";
  static constexpr Autocast kAutocast = Autocast::Cast;
  struct Inputs {
    Tensor x;
    AdaptedLinear gate, up, down;
    LIGER_FIELDS(x, gate.weight, gate.bias, gate.a, gate.b, up.weight, up.bias, up.a, up.b, down.weight, down.bias,
                 down.a, down.b, gate.weight_scale, up.weight_scale, down.weight_scale, gate.scale, up.scale,
                 down.scale)
    Layers<2> of_x() const { return {&gate, &up}; }
    Layers<1> of_product() const { return {&down}; }
  };
  using Options = MLPOptions;
  struct Results {
    Tensor y, low, low_down, gates, ups, cast, cast_down;
    LIGER_FIELDS(y, low, low_down, gates, ups, cast, cast_down)
    Tensor product, down_b;  // between start and finish
    EightBitRows bytes;      // in product's place
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

  static auto uncast(auto& in) {
    return refs(in.gate.a, in.gate.b, in.up.a, in.up.b, in.down.a, in.down.b, in.gate.weight_scale, in.up.weight_scale,
                in.down.weight_scale);
  }

  static Arguments check(const char* op, const Inputs& in) {
    const Arguments arguments(op, "x", in.x);
    linear::check(arguments, in.gate, "gate_weight", "gate_", in.x.sym_size(-1));
    linear::check(arguments, in.up, "up_weight", "up_", in.x.sym_size(-1));
    arguments.shaped("up_weight", in.up.weight, in.gate.weight.sym_sizes(),
                     in.up.weight_scale ? Type::EightBit : Type::Same);
    linear::check(arguments, in.down, "down_weight", "down_", in.gate.weight.sym_size(0));
    return arguments;
  }
  static GateForm form(const char* op, const Options& options) {
    return {gated::parse(op, int64_t(options.activation)), float(options.gate_multiplier)};
  }

  /// The tokens that are worked on at once.
  static int64_t chunk_of(int64_t tokens, const Options& options) {
    return options.chunk > 0 ? std::min(options.chunk, tokens) : tokens;
  }
  /// Room for gate and up, or for their gradients.
  static std::array<Tensor, 2> wide(const Inputs& in, const Tensor& x, int64_t tokens) {
    const auto one = [&] { return output(at::empty({tokens, in.gate.weight.size(0)}, x.options())); };
    return {one(), one()};
  }
  static void gate_and_up(const Inputs& in, const Tensor& x, const Tensor& low, const Adapters<2>& adapters,
                          const Tensor& gate, const Tensor& up, const EightBitRows& bytes = {}) {
    const Factor factor(x, bytes);
    run_forward(gate, factor, adapters.columns_of(low, in.of_x(), 0), in.gate, adapters.b[0]);
    run_forward(up, factor, adapters.columns_of(low, in.of_x(), 1), in.up, adapters.b[1]);
  }

  /// The gradients of gate and up and, where a kernel gives them, their rows in 8 bits, which lie where dproduct did.
  static EightBitRows run_gradients(const Inputs& in, const Tensor& dproduct, const GateAndUp& of, EightBit format) {
    const Tensor scales[] = {in.gate.weight_scale->contiguous(), in.up.weight_scale->contiguous()};
    const EightBitRows bytes{dproduct.view(at::kByte),
                             at::empty({of.gate.size(0)}, of.gate.options().dtype(at::kFloat)), format};
    const gated::Bytes to{bytes.to(), {data<float>(scales[0]), data<float>(scales[1])}};
    const bool made = gated::run_backward(dproduct, of.gate, of.up, of.dgate, of.dup, of.d_stride, of.form, &to);
    return made ? bytes : EightBitRows();
  }

  /// All but y, which `finish` computes of one chunk; of several, y too. in_bytes: see run_product.
  static Results start(const Inputs& in, const Options& options) { return run_start(in, options, true); }
  static Results run_start(const Inputs& in, const Options& options, bool in_bytes) {
    check("gated_mlp", in);
    const GateForm gate_form = form("gated_mlp", options);
    Results r;
    r.y = output(at::empty_symint(with_columns(in.x, in.down.weight.sym_size(0)), in.x.options()));
    r.low_down = Adapters<1>::empty_low_rank(in.of_product(), in.x);
    if (is_nothing(in.x)) {
      r.low = Adapters<2>::empty_low_rank(in.of_x(), in.x), r.cast = Adapters<2>::empty_cast(in.of_x(), in.x);
      r.cast_down = Adapters<1>::empty_cast(in.of_product(), in.x);
      const auto wide = [&] { return at::empty_symint({sym_rows(in.x), in.gate.weight.sym_size(0)}, in.x.options()); };
      if (!options.recompute) r.gates = wide(), r.ups = wide();
      r.product = wide();
      return r;
    }
    const Tensor x = matrix(in.x), y = matrix(r.y);
    const int64_t tokens = x.size(0), chunk = chunk_of(tokens, options);
    const auto [gates, ups] = wide(in, x, options.recompute ? chunk : tokens);
    const auto format = in_bytes ? format_of_products(x, in.of_product()) : std::nullopt;
    const int64_t at_once = format ? part_of(chunk) : chunk;
    const Tensor products = options.recompute ? gates : output(at::empty({at_once, gates.size(1)}, x.options()));
    const Adapters<2> adapters(in.of_x(), x);
    const Adapters<1> of_down(in.of_product(), products);
    r.cast = adapters.cast, r.low = adapters.low_rank(x);
    r.cast_down = of_down.cast, r.down_b = of_down.b[0];
    if (!options.recompute) r.gates = gates, r.ups = ups;
    const EightBitRows bytes_of_x = chunk == tokens ? take_rows(in.x) : EightBitRows();
    for_chunks(tokens, chunk, [&](int64_t begin, int64_t n) {
      const int64_t first = options.recompute ? 0 : begin;
      const Tensor rows = part(x, begin, n), gate = part(gates, first, n), up = part(ups, first, n);
      const Tensor low = part(r.low_down, begin, n), c = format ? products : part(products, 0, n);
      gate_and_up(in, rows, part(r.low, begin, n), adapters, gate, up, bytes_of_x);
      const EightBitRows bytes = run_product(gate, up, c, gate_form, of_down.a, low, format);
      const Tensor product = format ? Tensor() : c;
      if (n < tokens) run_forward(part(y, begin, n), Factor(product, bytes), low, in.down, r.down_b);
      else r.product = product, r.bytes = bytes;
    });
    return r;
  }

  static void finish(const Inputs& in, Results& r, const Options& options) {
    if (is_nothing(in.x)) return;
    if (r.product.defined() || r.bytes.rows.defined())
      run_forward(matrix(r.y), Factor(r.product, r.bytes), r.low_down, in.down, r.down_b);
    if (options.down_multiplier != 1) multiplied(r.y, options.down_multiplier);
    r.product = Tensor(), r.bytes = {};
  }

  static Results forward(const Inputs& in, const Options& options) {
    Results results = start(in, options);
    finish(in, results, options);
    return results;
  }

  /// What `start` gives, to callers that finish by linear_finish.
  struct Started {
    Tensor y, low, low_down, gates, ups, cast, cast_down, product;
    LIGER_FIELDS(y, low, low_down, gates, ups, cast, cast_down, product)
  };
  static Started started(const Inputs& in, const Options& options) {
    TORCH_CHECK(options.chunk == 0 && options.down_multiplier == 1,
                "gated_mlp_start: the last product has all tokens at once, and no multiplier");
    const Results r = run_start(in, options, false);
    return {r.y, r.low, r.low_down, r.gates, r.ups, r.cast, r.cast_down, r.product};
  }

  static Saved save(const Inputs& in, const Results& r) {
    return {in, r.low, r.low_down, r.gates, r.ups, r.cast, r.cast_down};
  }

  static bool any(const LayerGradients<bool>& w) { return w.weight || w.bias || w.a || w.b; }

  static void check(const Upstream& up, const Saved& saved, const Gradients<bool>& wanted, const Options& options) {
    const Inputs& in = saved.in;
    const Arguments arguments = check("gated_mlp_backward", in);
    arguments.shaped("dy", up.dy, with_columns(in.x, in.down.weight.sym_size(0)), Type::Same);
    linear::check(arguments, in.gate, wanted.gate, "gate_");
    linear::check(arguments, in.up, wanted.up, "up_");
    linear::check(arguments, in.down, wanted.down, "down_");
    Adapters<2>::check(arguments, in.of_x(), in.x, "low", saved.low, "cast", saved.cast);
    Adapters<1>::check(arguments, in.of_product(), in.x, "low_down", saved.low_down, "cast_down", saved.cast_down);
    const c10::SymDimVector kept =
        options.recompute ? c10::SymDimVector{0} : c10::SymDimVector{sym_rows(in.x), in.gate.weight.sym_size(0)};
    arguments.shaped("gates", saved.gates, kept, Type::Same).shaped("ups", saved.ups, kept, Type::Same);
  }

  static Gradients<Tensor> backward(const Upstream& upstream, const Saved& saved, const Gradients<bool>& wanted,
                                    const Options& options) {
    return run_backward(upstream, saved, wanted, options, false);
  }
  static Gradients<Tensor> last_backward(const Upstream& upstream, const Saved& saved, const Gradients<bool>& wanted,
                                         const Options& options) {
    // Rows of all chunks may be aligned in another way than the buffer for one, which changes the order of a product's
    // sums: in chunks, the last pass has the bits of earlier ones only if it leaves gate and up as they are.
    const bool both = chunk_of(saved.gates.size(0), options) == saved.gates.size(0) && saved.gates.is_contiguous() &&
                      saved.ups.is_contiguous();
    if (both) saved.gates.unsafeGetTensorImpl()->bump_version(), saved.ups.unsafeGetTensorImpl()->bump_version();
    return run_backward(upstream, saved, wanted, options, both);
  }

  /// overwrite: the gradients of gate and up are written over these.
  static Gradients<Tensor> run_backward(const Upstream& upstream, const Saved& saved, const Gradients<bool>& wanted,
                                        const Options& options, bool overwrite) {
    const Inputs& in = saved.in;
    check(upstream, saved, wanted, options);
    const GateForm gate_form = form("gated_mlp_backward", options);
    if (is_nothing(in.x))
      return {nothing(wanted.dx, in.x), nothing(wanted.gate, in.gate), nothing(wanted.up, in.up),
              nothing(wanted.down, in.down)};
    Gradients<Tensor> d;
    Tensor dx;  // which has no memory before it is needed
    const Tensor x = matrix(in.x), dy = matrix(upstream.dy);
    const int64_t tokens = x.size(0), chunk = chunk_of(tokens, options);
    const ActivatedWanted of_down(wanted.dx || any(wanted.gate) || any(wanted.up), wanted.down);
    const auto [gates, ups] = options.recompute ? wide(in, x, chunk) : std::array{saved.gates, saved.ups};
    overwrite = overwrite || options.recompute || !of_down.inner;
    const auto [dgates, dups] = overwrite ? std::array{gates, ups} : wide(in, x, chunk);
    Tensor products = output(at::empty({chunk, gates.size(1)}, x.options()));  // and then their gradients
    const Layers<2> of_x = in.of_x();
    const Layers<1> of_product = in.of_product();
    const Adapters<2> adapters(of_x, x, saved.cast);
    const Adapters<1> adapter_down(of_product, products, saved.cast_down);
    LayersBackward<2> outer(of_x, adapters, {wanted.gate, wanted.up}, chunk < tokens);
    LayersBackward<1> down(of_product, adapter_down, {wanted.down}, chunk < tokens);
    for_chunks(tokens, chunk, [&](int64_t begin, int64_t n) {
      const int64_t first = options.recompute ? 0 : begin;
      const Tensor rows = part(x, begin, n), low = part(saved.low, begin, n), of_y = part(dy, begin, n);
      const Tensor gate = part(gates, first, n), up = part(ups, first, n);
      Tensor product = part(products, 0, n);
      if (options.recompute && (of_down.inner || of_down.of_inputs)) gate_and_up(in, rows, low, adapters, gate, up);
      const GateAndUp of{gate,       up,       overwrite ? gate : part(dgates, 0, n), overwrite ? up : part(dups, 0, n),
                         cols(gate), gate_form};
      const auto format = wanted.dx ? format_of_products(gate, of_x) : std::nullopt;  // in which dx is a product
      add_gated_layer(down, options.down_multiplier == 1 ? of_y : of_y * options.down_multiplier, product,
                      part(saved.low_down, begin, n), of, of_down, format.has_value());
      if (!of_down.inner) return;
      if (wanted.dx && !dx.defined()) d.dx = room(true, in.x), dx = matrix(d.dx);
      const Tensor out = part(dx, begin, n);
      const EightBitRows bytes = format ? run_gradients(in, product, of, *format) : EightBitRows();
      product = Tensor();
      if (begin + n == tokens) products = Tensor();  // whose memory rows in 8 bits can have
      outer.add({of.dgate, of.dup}, rows, rows, low, out, out, bytes);
    });
    d.down = down.gradients()[0];
    if (of_down.inner) std::tie(d.gate, d.up) = std::tuple_cat(outer.gradients());
    return d;
  }
};

}  // namespace op::linear

Tensor gated_mlp(const Tensor& x, const AdaptedLinear& gate, const AdaptedLinear& up, const AdaptedLinear& down,
                 const MLPOptions& options) {
  return Operator<op::linear::GatedMLP>::public_op(op::linear::GatedMLP::Inputs{x, gate, up, down}, options);
}

LIGER_OPERATORS(gated_mlp, Operator<op::linear::GatedMLP>,
                Undifferentiated<"gated_mlp_start", op::linear::GatedMLP::started>)

}  // namespace liger
