#include "liger/ops/linear/linear_op.h"

namespace liger {
namespace op::linear {

struct QKV {
  static constexpr Name kName = "qkv";
  static constexpr Autocast kAutocast = Autocast::Cast;
  struct Inputs {
    Tensor x;
    AdaptedLinear q, k, v;
    LIGER_FIELDS(x, q.weight, q.bias, q.a, q.b, k.weight, k.bias, k.a, k.b, v.weight, v.bias, v.a, v.b, q.weight_scale,
                 k.weight_scale, v.weight_scale, q.scale, k.scale, v.scale)
    Layers<3> layers() const { return {&q, &k, &v}; }
  };
  struct Options {
    int64_t head_dim = 0;
    LIGER_OPTIONS(head_dim)
  };
  struct Results {
    Tensor q, k, v, low, cast;
    LIGER_FIELDS(q, k, v, low, cast)
  };
  struct Saved {
    Inputs in;
    Tensor low, cast;
    LIGER_FIELDS(in, low, cast)
  };
  struct Upstream {
    Tensor dq, dk, dv;
    LIGER_FIELDS(dq, dk, dv)
  };
  template <class T>
  struct Gradients {
    T dx;
    LayerGradients<T> q, k, v;
    LIGER_FIELDS(dx, q.weight, q.bias, q.a, q.b, k.weight, k.bias, k.a, k.b, v.weight, v.bias, v.a, v.b)
  };

  static auto uncast(auto& in) {
    return refs(in.q.a, in.q.b, in.k.a, in.k.b, in.v.a, in.v.b, in.q.weight_scale, in.k.weight_scale,
                in.v.weight_scale);
  }

  static Arguments check(const char* op, const Inputs& in, const Options& options) {
    const Arguments arguments(op, "x", in.x);
    TORCH_CHECK(options.head_dim >= 0 && (options.head_dim == 0 || in.x.dim() > 1), op,
                ": head_dim is the width of the heads of x [..., seq, columns], or 0, got ", options.head_dim);
    const char* names[] = {"q", "k", "v"};
    for (size_t i = 0; i < 3; ++i)
      linear::check(arguments, *in.layers()[i], names[i] + std::string("_weight"), names[i] + std::string("_"),
                    in.x.sym_size(-1));
    for (const AdaptedLinear* layer : in.layers())
      TORCH_CHECK(options.head_dim == 0 || layer->weight.sym_size(0) % options.head_dim == 0, op, ": head_dim ",
                  options.head_dim, " does not divide ", layer->weight.sym_size(0));
    return arguments;
  }

  /// A layer's result [..., seq, out]; with head_dim as [..., seq, heads, head_dim].
  static c10::SymDimVector shape(const Inputs& in, const AdaptedLinear& layer, const Options& options) {
    c10::SymDimVector shape = with_columns(in.x, layer.weight.sym_size(0));
    if (options.head_dim) shape.back() /= options.head_dim, shape.push_back(options.head_dim);
    return shape;
  }
  /// The same as the result has it: [..., heads, seq, head_dim].
  static c10::SymDimVector result_shape(const Inputs& in, const AdaptedLinear& layer, const Options& options) {
    c10::SymDimVector of = shape(in, layer, options);
    if (options.head_dim) std::swap(of[of.size() - 3], of[of.size() - 2]);
    return of;
  }
  /// [..., seq, heads, head_dim] as [..., heads, seq, head_dim], and the other way round.
  static Tensor swapped(const Tensor& t, const Options& options) {
    return options.head_dim && t.defined() ? t.transpose(-3, -2) : t;
  }
  static Tensor matrix_of(const Tensor& t, const Tensor& x, const AdaptedLinear& layer) {
    return t.reshape({x.size(0), layer.weight.size(0)});
  }

  static Results forward(const Inputs& in, const Options& options) {
    check("qkv", in, options);
    const auto layers = in.layers();
    std::array<Tensor, 3> y;
    for (size_t i = 0; i < 3; ++i) y[i] = output(at::empty_symint(shape(in, *layers[i], options), in.x.options()));
    const auto results = [&](const Tensor& low, const Tensor& cast) {
      return Results{swapped(y[0], options), swapped(y[1], options), swapped(y[2], options), low, cast};
    };
    if (is_nothing(in.x))
      return results(Adapters<3>::empty_low_rank(layers, in.x), Adapters<3>::empty_cast(layers, in.x));
    const Adapters<3> adapters(layers, in.x);
    const Tensor x = matrix(in.x), low = adapters.low_rank(x);
    const Factor factor(x, take_rows(in.x));
    for (size_t i = 0; i < 3; ++i)
      run_forward(matrix_of(y[i], x, *layers[i]), factor, adapters.columns_of(low, layers, i), *layers[i],
                  adapters.b[i]);
    return results(low, adapters.cast);
  }

  static Saved save(const Inputs& in, const Results& results) { return {in, results.low, results.cast}; }

  static Gradients<Tensor> backward(const Upstream& up, const Saved& saved, const Gradients<bool>& wanted,
                                    const Options& options) {
    const Inputs& in = saved.in;
    const auto layers = in.layers();
    const Arguments arguments = check("qkv_backward", in, options);
    arguments.shaped("dq", up.dq, result_shape(in, in.q, options), Type::Same)
        .shaped("dk", up.dk, result_shape(in, in.k, options), Type::Same)
        .shaped("dv", up.dv, result_shape(in, in.v, options), Type::Same);
    const std::array<Tensor, 3> dy{swapped(up.dq, options), swapped(up.dk, options), swapped(up.dv, options)};
    linear::check(arguments, in.q, wanted.q, "q_");
    linear::check(arguments, in.k, wanted.k, "k_");
    linear::check(arguments, in.v, wanted.v, "v_");
    Adapters<3>::check(arguments, in.layers(), in.x, "low", saved.low, "cast", saved.cast);
    if (is_nothing(in.x))
      return {nothing(wanted.dx, in.x), nothing(wanted.q, in.q), nothing(wanted.k, in.k), nothing(wanted.v, in.v)};
    Gradients<Tensor> g;
    g.dx = room(wanted.dx, in.x);
    const Tensor x = matrix(in.x), dx = wanted.dx ? matrix(g.dx) : Tensor();
    const Adapters<3> adapters(layers, in.x, saved.cast);
    LayersBackward<3> sums(layers, adapters, {wanted.q, wanted.k, wanted.v});
    sums.add({matrix_of(dy[0], x, in.q), matrix_of(dy[1], x, in.k), matrix_of(dy[2], x, in.v)}, x, x, saved.low, dx,
             dx);
    std::tie(g.q, g.k, g.v) = std::tuple_cat(sums.gradients());
    return g;
  }
};

}  // namespace op::linear

std::tuple<Tensor, Tensor, Tensor> qkv(const Tensor& x, const AdaptedLinear& q, const AdaptedLinear& k,
                                       const AdaptedLinear& v, int64_t head_dim) {
  return Operator<op::linear::QKV>::public_op(op::linear::QKV::Inputs{x, q, k, v}, op::linear::QKV::Options{head_dim});
}

LIGER_OPERATORS(qkv, Operator<op::linear::QKV>)

}  // namespace liger
