#include "liger/ops/linear/linear_op.h"

namespace liger {
namespace op::linear {

void check(const Arguments& arguments, const AdaptedLinear& layer, const std::string& name, const std::string& stem,
           const c10::SymInt& in) {
  const c10::SymInt out = layer.weight.sym_size(0);
  const auto called = [&](const char* what) { return stem + what; };
  TORCH_CHECK(layer.a.has_value() == layer.b.has_value(), arguments.op(), ": ", called("a"), " and ", called("b"),
              " are given together");
  arguments.shaped(name.c_str(), layer.weight, {out, in}, layer.weight_scale ? Type::EightBit : Type::Same)
      .vector(called("weight_scale").c_str(), layer.weight_scale, out, Type::Float)
      .vector(called("bias").c_str(), layer.bias, out, Type::Same)
      .shaped(called("a").c_str(), layer.a, {rank(layer), in}, Type::SameOrFloat)
      .shaped(called("b").c_str(), layer.b, {out, rank(layer)}, Type::SameOrFloat);
}

void product_of_rows(Tensor out, const Tensor& a, const Tensor& b, double factor, bool first) {
  const double kept = first ? 0 : 1;
  if (out.scalar_type() == a.scalar_type() && factor == 1 && first) at::mm_out(out, a.t(), b);
  else if (out.scalar_type() == a.scalar_type()) at::addmm_out(out, out, a.t(), b, kept, factor);
  else if (a.is_cpu()) product_of_rows(out, a.to(out.scalar_type()), b.to(out.scalar_type()), factor, first);
  else at::addmm_out(out, out, a.t(), b, out.scalar_type(), kept, factor);
}

void run_forward(Tensor y, const Factor& x, const Tensor& low, const AdaptedLinear& layer, const Tensor& b) {
  if (multiply(y, x, layer, low, b)) return;
  const Tensor weight = whole(layer, y.scalar_type());
  if (!layer.a) return project(y, x.rows(), weight, value_or_undefined(layer.bias));
  at::addmm_out(y, layer.bias ? *layer.bias : y, low, b.t(), layer.bias ? 1 : 0, layer.scale);
  at::addmm_out(y, y, x.rows(), weight.t());
}

struct Linear {
  static constexpr Name kName = "linear";
  static constexpr Autocast kAutocast = Autocast::Cast;
  struct Inputs : AdaptedLinear {
    Tensor x;
    OptTensor dropped;
    LIGER_FIELDS(x, weight, bias, a, b, dropped, weight_scale, scale)
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
  static auto uncast(auto& in) { return refs(in.a, in.b, in.weight_scale); }

  static Arguments check(const char* op, const Inputs& in) {
    const Arguments arguments(op, "x", in.x);
    linear::check(arguments.like("dropped", in.dropped), in, "weight", "", in.x.sym_size(-1));
    TORCH_CHECK(in.a || !in.dropped, op, ": dropped is what an adapter sees, and there is none");
    return arguments;
  }

  static Tensor seen(const Inputs& in) { return matrix(in.dropped ? *in.dropped : in.x); }

  /// All but y, which `finish` computes.
  static Results start(const Inputs& in) {
    check("linear", in);
    const Tensor y = output(at::empty_symint(with_columns(in.x, in.weight.sym_size(0)), in.x.options()));
    const Layers<1> layers{&in};
    if (is_nothing(in.x))
      return {y, Adapters<1>::empty_low_rank(layers, in.x), Adapters<1>::empty_cast(layers, in.x), Tensor()};
    const Adapters<1> adapters(layers, in.x);
    return {y, adapters.low_rank(seen(in)), adapters.cast, adapters.b[0]};
  }

  static void finish(const Inputs& in, Results& results) {
    if (!is_nothing(in.x))
      run_forward(matrix(results.y), Factor(matrix(in.x), take_rows(in.x)), results.low, in, results.b);
  }

  static Results forward(const Inputs& in) {
    Results results = start(in);
    finish(in, results);
    return results;
  }

  static Saved save(const Inputs& in, const Results& results) { return {in, results.low, results.cast}; }

  static Gradients<Tensor> backward(const Upstream& up, const Saved& saved, const Gradients<bool>& wanted) {
    const Inputs& in = saved.in;
    const Arguments arguments = check("linear_backward", in);
    arguments.shaped("dy", up.dy, with_columns(in.x, in.weight.sym_size(0)), Type::Same)
        .present("with_ddropped", wanted.ddropped, "dropped", in.dropped);
    linear::check(arguments, in, wanted.d, "");
    Adapters<1>::check(arguments, {&in}, in.x, "low", saved.low, "cast", saved.cast);
    if (is_nothing(in.x))
      return {nothing(wanted.dx, in.x), nothing(wanted.d, in), nothing(wanted.ddropped, in.dropped)};
    Gradients<Tensor> g{room(wanted.dx, in.x), {}, room(wanted.ddropped, in.x)};
    const Tensor x = matrix(in.x), dx = wanted.dx ? matrix(g.dx) : Tensor(),
                 dseen = wanted.ddropped ? matrix(g.ddropped) : Tensor();
    const Layers<1> layers{&in};
    const Adapters<1> adapters(layers, in.x, saved.cast);
    LayersBackward<1> sums(layers, adapters, {wanted.d});
    sums.add({matrix(up.dy)}, x, seen(in), saved.low, dx, in.dropped ? dseen : dx);
    g.d = sums.gradients()[0];
    return g;
  }
};

/// The second part of linear and of gated_mlp, whose last layer it is, for callers that hold its weight in a form
/// of their own: y of x, with what the first part gave. <name>_start reads that weight's shape and dtype only.
struct Finish : AdaptedLinear {
  Tensor y, x, low, cast;
  LIGER_FIELDS(y, x, weight, bias, a, b, low, cast, weight_scale, scale)
};
void finish(const Finish& in) {
  const Layers<1> layers{&in};
  const Arguments arguments("linear_finish", "x", in.x);
  check(arguments, in, "weight", "", in.x.sym_size(-1));
  arguments.shaped("y", in.y, with_columns(in.y, in.weight.sym_size(0)), Type::Same);
  TORCH_CHECK(sym_rows(in.y) == sym_rows(in.x), "linear_finish: y has ", sym_rows(in.y), " rows, and x ",
              sym_rows(in.x));
  Adapters<1>::check(arguments, layers, in.x, "low", in.low, "cast", in.cast);
  if (is_nothing(in.x)) return;
  run_forward(matrix(in.y), Factor(matrix(in.x)), in.low, in, Adapters<1>(layers, in.x, in.cast).b[0]);
}

}  // namespace op::linear

Tensor linear(const Tensor& x, const AdaptedLinear& layer, const OptTensor& dropped) {
  return Operator<op::linear::Linear>::public_op(op::linear::Linear::Inputs{{layer}, x, dropped});
}

LIGER_OPERATORS(linear, Operator<op::linear::Linear>, Undifferentiated<"linear_start", op::linear::Linear::start>,
                Undifferentiated<"linear_finish", op::linear::finish, "y(a!)">)

}  // namespace liger
