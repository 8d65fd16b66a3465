#include "liger/ops/lora/lora_op.h"

namespace liger {
namespace op::lora {

void check(const Arguments& arguments, const AdaptedLinear& layer, const std::string& name, const std::string& stem,
           const c10::SymInt& in) {
  const c10::SymInt out = layer.weight.sym_size(0);
  const auto called = [&](const char* what) { return stem + what; };
  TORCH_CHECK(layer.a.has_value() == layer.b.has_value(), arguments.op(), ": ", called("a"), " and ", called("b"),
              " are given together");
  arguments.shaped(name.c_str(), layer.weight, {out, in}, Type::Same)
      .vector(called("bias").c_str(), layer.bias, out, Type::Same)
      .shaped(called("a").c_str(), layer.a, {rank(layer), in}, Type::SameOrFloat)
      .shaped(called("b").c_str(), layer.b, {out, rank(layer)}, Type::SameOrFloat);
}

void product_of_rows(Tensor out, const Tensor& a, const Tensor& b, double factor) {
  if (out.scalar_type() == a.scalar_type() && factor == 1) at::mm_out(out, a.t(), b);
  else if (out.scalar_type() == a.scalar_type()) at::addmm_out(out, out, a.t(), b, 0, factor);
  else if (a.is_cpu()) product_of_rows(out, a.to(out.scalar_type()), b.to(out.scalar_type()), factor);
  else at::addmm_out(out, out, a.t(), b, out.scalar_type(), 0, factor);
}

void run_forward(Tensor y, const Tensor& x, const Tensor& low, const AdaptedLinear& layer, const Tensor& b) {
  if (!layer.a) return project(y, x, layer.weight, value_or_undefined(layer.bias));
  at::addmm_out(y, layer.bias ? *layer.bias : y, low, b.t(), layer.bias ? 1 : 0, layer.scale);
  at::addmm_out(y, y, x, layer.weight.t());
}

struct Linear {
  static constexpr Name kName = "lora_linear";
  static constexpr Autocast kAutocast = Autocast::Cast;
  struct Inputs : AdaptedLinear {
    Tensor x;
    OptTensor dropped;
    LIGER_FIELDS(x, weight, bias, a, b, dropped, scale)
  };
  struct Results {
    Tensor y, low, cast;
    LIGER_FIELDS(y, low, cast)
    Tensor b;  // in x's type, between start and finish
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
    T ddropped;
    LIGER_FIELDS(dx, d.weight, d.bias, d.a, d.b, ddropped)
  };

  /// Adapters in float stay so: they are taken in x's type here, and their gradients are made in float.
  static auto uncast(auto& in) { return refs(in.a, in.b); }

  static Arguments check(const char* op, const Inputs& in) {
    const Arguments arguments(op, "x", in.x);
    lora::check(arguments.like("dropped", in.dropped), in, "weight", "", in.x.sym_size(-1));
    TORCH_CHECK(in.a || !in.dropped, op, ": dropped is what an adapter sees, and there is none");
    return arguments;
  }

  static Tensor seen(const Inputs& in) { return matrix(in.dropped ? *in.dropped : in.x); }

  /// All but y, which `finish` computes.
  static Results start(const Inputs& in) {
    check("lora_linear", in);
    const Tensor y = output(at::empty_symint(with_columns(in.x, in.weight.sym_size(0)), in.x.options()));
    const Layers<1> layers{&in};
    if (is_nothing(in.x))
      return {y, Adapters<1>::empty_low_rank(layers, in.x), Adapters<1>::empty_cast(layers, in.x), Tensor()};
    const Adapters<1> adapters(layers, in.x);
    return {y, adapters.low_rank(seen(in)), adapters.cast, adapters.b[0]};
  }

  static void finish(const Inputs& in, Results& results) {
    if (!is_nothing(in.x)) run_forward(matrix(results.y), matrix(in.x), results.low, in, results.b);
  }

  static Results forward(const Inputs& in) {
    Results results = start(in);
    finish(in, results);
    return results;
  }

  static Saved save(const Inputs& in, const Results& results) { return {in, results.low, results.cast}; }

  static Gradients<Tensor> backward(const Upstream& up, const Saved& saved, const Gradients<bool>& wanted) {
    const Inputs& in = saved.in;
    const Arguments arguments = check("lora_linear_backward", in);
    arguments.shaped("dy", up.dy, with_columns(in.x, in.weight.sym_size(0)), Type::Same)
        .present("with_ddropped", wanted.ddropped, "dropped", in.dropped);
    lora::check(arguments, in, wanted.d, "");
    Adapters<1>::check(arguments, {&in}, in.x, "low", saved.low, "cast", saved.cast);
    if (is_nothing(in.x))
      return {nothing(wanted.dx, in.x), nothing(wanted.d, in), nothing(wanted.ddropped, in.dropped)};
    Gradients<Tensor> g{room(wanted.dx, in.x), {}, room(wanted.ddropped, in.x)};
    const Tensor x = matrix(in.x), dx = wanted.dx ? matrix(g.dx) : Tensor(),
                 dseen = wanted.ddropped ? matrix(g.ddropped) : Tensor();
    const Layers<1> layers{&in};
    const Adapters<1> adapters(layers, in.x, saved.cast);
    g.d = run_backward<1>({matrix(up.dy)}, x, seen(in), saved.low, layers, adapters, {wanted.d}, dx,
                          in.dropped ? dseen : dx)[0];
    return g;
  }
};

/// The second part of lora_linear and of lora_mlp, whose last layer it is, for callers that hold its weight in a form
/// of their own: y of x, with what the first part gave. <name>_start reads that weight's shape and dtype only.
struct Finish : AdaptedLinear {
  Tensor y, x, low, cast;
  LIGER_FIELDS(y, x, weight, bias, a, b, low, cast, scale)
};
void finish(const Finish& in) {
  const Layers<1> layers{&in};
  const Arguments arguments("lora_finish", "x", in.x);
  check(arguments, in, "weight", "", in.x.sym_size(-1));
  arguments.shaped("y", in.y, with_columns(in.y, in.weight.sym_size(0)), Type::Same);
  TORCH_CHECK(sym_rows(in.y) == sym_rows(in.x), "lora_finish: y has ", sym_rows(in.y), " rows, and x ", sym_rows(in.x));
  Adapters<1>::check(arguments, layers, in.x, "low", in.low, "cast", in.cast);
  if (is_nothing(in.x)) return;
  run_forward(matrix(in.y), matrix(in.x), in.low, in, Adapters<1>(layers, in.x, in.cast).b[0]);
}

struct QKV {
  static constexpr Name kName = "lora_qkv";
  static constexpr Autocast kAutocast = Autocast::Cast;
  struct Inputs {
    Tensor x;
    AdaptedLinear q, k, v;
    LIGER_FIELDS(x, q.weight, q.bias, q.a, q.b, k.weight, k.bias, k.a, k.b, v.weight, v.bias, v.a, v.b, q.scale,
                 k.scale, v.scale)
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

  static auto uncast(auto& in) { return refs(in.q.a, in.q.b, in.k.a, in.k.b, in.v.a, in.v.b); }

  static Arguments check(const char* op, const Inputs& in, const Options& options) {
    const Arguments arguments(op, "x", in.x);
    TORCH_CHECK(options.head_dim >= 0 && (options.head_dim == 0 || in.x.dim() > 1), op,
                ": head_dim is the width of the heads of x [..., seq, columns], or 0, got ", options.head_dim);
    const char* names[] = {"q", "k", "v"};
    for (size_t i = 0; i < 3; ++i)
      lora::check(arguments, *in.layers()[i], names[i] + std::string("_weight"), names[i] + std::string("_"),
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
    check("lora_qkv", in, options);
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
    for (size_t i = 0; i < 3; ++i)
      run_forward(matrix_of(y[i], x, *layers[i]), x, adapters.columns_of(low, layers, i), *layers[i], adapters.b[i]);
    return results(low, adapters.cast);
  }

  static Saved save(const Inputs& in, const Results& results) { return {in, results.low, results.cast}; }

  static Gradients<Tensor> backward(const Upstream& up, const Saved& saved, const Gradients<bool>& wanted,
                                    const Options& options) {
    const Inputs& in = saved.in;
    const auto layers = in.layers();
    const Arguments arguments = check("lora_qkv_backward", in, options);
    arguments.shaped("dq", up.dq, result_shape(in, in.q, options), Type::Same)
        .shaped("dk", up.dk, result_shape(in, in.k, options), Type::Same)
        .shaped("dv", up.dv, result_shape(in, in.v, options), Type::Same);
    const std::array<Tensor, 3> dy{swapped(up.dq, options), swapped(up.dk, options), swapped(up.dv, options)};
    lora::check(arguments, in.q, wanted.q, "q_");
    lora::check(arguments, in.k, wanted.k, "k_");
    lora::check(arguments, in.v, wanted.v, "v_");
    Adapters<3>::check(arguments, in.layers(), in.x, "low", saved.low, "cast", saved.cast);
    if (is_nothing(in.x))
      return {nothing(wanted.dx, in.x), nothing(wanted.q, in.q), nothing(wanted.k, in.k), nothing(wanted.v, in.v)};
    Gradients<Tensor> g;
    g.dx = room(wanted.dx, in.x);
    const Tensor x = matrix(in.x), dx = wanted.dx ? matrix(g.dx) : Tensor();
    const Adapters<3> adapters(layers, in.x, saved.cast);
    std::tie(g.q, g.k, g.v) = std::tuple_cat(
        run_backward<3>({matrix_of(dy[0], x, in.q), matrix_of(dy[1], x, in.k), matrix_of(dy[2], x, in.v)}, x, x,
                        saved.low, layers, adapters, {wanted.q, wanted.k, wanted.v}, dx, dx));
    return g;
  }
};

}  // namespace op::lora

Tensor lora_linear(const Tensor& x, const AdaptedLinear& layer, const OptTensor& dropped) {
  return Operator<op::lora::Linear>::public_op(x, layer.weight, layer.bias, layer.a, layer.b, dropped, layer.scale);
}

std::tuple<Tensor, Tensor, Tensor> lora_qkv(const Tensor& x, const AdaptedLinear& q, const AdaptedLinear& k,
                                            const AdaptedLinear& v, int64_t head_dim) {
  return Operator<op::lora::QKV>::public_op(op::lora::QKV::Inputs{x, q, k, v}, op::lora::QKV::Options{head_dim});
}

LIGER_OPERATORS(lora_linear, Operator<op::lora::Linear>, Operator<op::lora::QKV>,
                Undifferentiated<"lora_linear_start", op::lora::Linear::start>,
                Undifferentiated<"lora_finish", op::lora::finish, "y(a!)">)

}  // namespace liger
