#include "liger/core/torch/operator.h"
#include "liger/ops/activation/gated_op.h"
#include "liger/ops.h"

namespace liger {
namespace op::lora {

/// A linear layer with an adapter, or without one: a and b are undefined then. `name` is that of its weight.
struct Layer {
  const char* name;
  const Tensor& weight;           // [out, in]
  const OptTensor &bias, &a, &b;  // [out]; [rank, in]; [out, rank]
  double scale;

  c10::SymInt rank() const { return a ? a->sym_size(0) : c10::SymInt(0); }

  void check(const Arguments& arguments, const c10::SymInt& in) const {
    const std::string text = name;
    TORCH_CHECK(weight.dim() == 2, text, " must be a matrix, got ", weight.sym_sizes());
    const c10::SymInt out = weight.sym_size(0);
    arguments.shaped(name, weight, {out, in}, Type::Same).vector((text + "_bias").c_str(), bias, out, Type::Same);
    TORCH_CHECK(a.has_value() == b.has_value(), text, "_a and ", text, "_b are given together");
    if (!a) return;
    TORCH_CHECK(a->dim() == 2, text, "_a must be a matrix, got ", a->sym_sizes());
    arguments.shaped((text + "_a").c_str(), *a, {rank(), in}, Type::SameOrFloat)
        .shaped((text + "_b").c_str(), *b, {out, rank()}, Type::SameOrFloat);
  }
};

/// The gradients of a layer's arguments; those that are not wanted are undefined.
struct Gradients {
  Tensor weight, bias, a, b;
};

/// Which of them are wanted.
struct Wanted {
  bool weight, bias, a, b;
};

Tensor matrix(const Tensor& t) { return t.reshape({-1, t.size(-1)}); }

c10::SymDimVector shape_of(const Tensor& x, const c10::SymInt& last) {
  c10::SymDimVector shape(x.sym_sizes());
  shape.back() = last;
  return shape;
}

/// out = factor · aᵀ b, in out's type: that of a and b, or float.
void product_of_rows(const Tensor& out_, const Tensor& a, const Tensor& b, double factor) {
  Tensor out = out_;
  if (out.scalar_type() == a.scalar_type()) at::addmm_out(out, out, a.t(), b, 0, factor);
  else if (a.is_cpu()) product_of_rows(out, a.to(out.scalar_type()), b.to(out.scalar_type()), factor);
  else at::addmm_out(out, out, a.t(), b, out.scalar_type(), 0, factor);
}

/// The adapters of layers that share their input, in the input's type: one GEMM reads the input for all A, which lie one
/// below the other.
template <size_t n>
struct Adapters {
  Tensor a;                 // [Σ rank, in]; undefined where there is no adapter
  std::array<Tensor, n> b;  // [out, rank] each
  Tensor cast;              // what both are parts of, for backward; empty where the adapters have the input's type

  /// `made` is what an earlier one was cast to, if anything.
  Adapters(const std::array<Layer, n>& layers, const Tensor& x, const Tensor& made = {}) {
    std::vector<Tensor> given;
    int64_t ranks = 0, numbers = 0;
    bool same = true;
    for (const Layer& layer : layers) {
      if (!layer.a) continue;
      ranks += layer.a->size(0), numbers += layer.a->numel() + layer.b->numel();
      same = same && layer.a->scalar_type() == x.scalar_type() && layer.b->scalar_type() == x.scalar_type();
      given.push_back(*layer.a);
    }
    cast = made;
    if (given.empty() || same) {
      if (!given.empty()) a = given.size() == 1 ? given[0] : at::cat(given);
      for (size_t i = 0; i < n; ++i)
        if (layers[i].b) b[i] = *layers[i].b;
      if (!cast.defined()) cast = x.new_empty({0});
      return;
    }
    if (!cast.defined()) cast = at::empty({numbers}, x.options());
    a = cast.narrow(0, 0, ranks * x.size(-1)).view({ranks, x.size(-1)});
    int64_t row = 0, begin = a.numel();
    std::vector<Tensor> to;
    for (const Layer& layer : layers)
      if (layer.a) to.push_back(a.narrow(0, row, layer.a->size(0))), row += layer.a->size(0);
    for (size_t i = 0; i < n; ++i) {
      if (!layers[i].b) continue;
      b[i] = cast.narrow(0, begin, layers[i].b->numel()).view(layers[i].b->sizes()), begin += b[i].numel();
      to.push_back(b[i]), given.push_back(*layers[i].b);
    }
    if (!made.defined()) at::_foreach_copy_(to, given);  // one launch for all
  }
};

/// How many numbers Adapters::cast has.
template <size_t n>
c10::SymInt cast_size(const std::array<Layer, n>& layers, at::ScalarType dtype) {
  c10::SymInt numbers = 0;
  bool same = true;
  for (const Layer& layer : layers) {
    if (!layer.a) continue;
    numbers += layer.a->sym_numel() + layer.b->sym_numel();
    same = same && layer.a->scalar_type() == dtype && layer.b->scalar_type() == dtype;
  }
  return same ? c10::SymInt(0) : numbers;
}

/// x Aᵀ of all layers side by side [tokens, Σ rank].
Tensor low_rank(const Tensor& x, const Tensor& a) { return a.defined() ? x.mm(a.t()) : x.new_empty({x.size(0), 0}); }

/// The columns of a layer in what low_rank gives.
template <size_t n>
Tensor columns_of(const Tensor& low, const std::array<Layer, n>& layers, size_t i) {
  int64_t begin = 0;
  for (size_t k = 0; k < i; ++k) begin += layers[k].a ? layers[k].a->size(0) : 0;
  return low.narrow(1, begin, layers[i].a ? layers[i].a->size(0) : 0);
}

/// y = x weightᵀ + bias + scale · low bᵀ. The low-rank term comes first: the GEMM of the weight adds it in float and
/// rounds the sum once, and what it reads for that hides behind its arithmetic.
void run_forward(Tensor y, const Tensor& x, const Tensor& low, const Layer& layer, const Tensor& b) {
  if (!layer.a) return project(y, x, layer.weight, value_or_undefined(layer.bias));
  at::addmm_out(y, layer.bias ? *layer.bias : y, low, b.t(), layer.bias ? 1 : 0, layer.scale);
  at::addmm_out(y, y, x, layer.weight.t());
}

/// The gradients of layers that share the input x, whose adapters saw `seen`: x, or x after a dropout. dx and dseen are
/// written where they are defined, after the last use of x and seen; where both are the same, the result is the sum.
template <size_t n>
std::array<Gradients, n> run_backward(const std::array<Tensor, n>& dy, const Tensor& x, const Tensor& seen,
                                      const Tensor& low, const std::array<Layer, n>& layers,
                                      const Adapters<n>& adapters, const std::array<Wanted, n>& wanted, Tensor dx,
                                      Tensor dseen) {
  std::array<Gradients, n> gradients;
  const Tensor& a = adapters.a;
  bool wants_a = false;
  for (const Wanted& w : wanted) wants_a = wants_a || w.a;
  Tensor dlow;  // scale · dy b of all layers side by side
  if (a.defined() && (wants_a || dseen.defined())) dlow = at::empty_like(low);
  for (size_t i = 0; i < n; ++i) {
    const Layer& layer = layers[i];
    Gradients& d = gradients[i];
    if (layer.a) {
      const Tensor part = columns_of(low, layers, i);
      if (dlow.defined()) {
        Tensor out = columns_of(dlow, layers, i);
        at::addmm_out(out, out, dy[i], adapters.b[i], 0, layer.scale);
      }
      if (wanted[i].b) product_of_rows(d.b = at::empty_like(*layer.b), dy[i], part, layer.scale);
    }
    if (wanted[i].weight) product_of_rows(d.weight = at::empty_like(layer.weight), dy[i], x, 1);
    if (wanted[i].bias) d.bias = dy[i].sum(0, false, at::kFloat).to(x.scalar_type());
  }
  if (wants_a) {
    bool is_float = false;
    for (const Layer& layer : layers) is_float = is_float || (layer.a && layer.a->scalar_type() == at::kFloat);
    const Tensor da = at::empty(a.sizes(), is_float ? a.options().dtype(at::kFloat) : a.options());
    product_of_rows(da, dlow, seen, 1);
    int64_t begin = 0;
    for (size_t i = 0; i < n; ++i) {
      if (!layers[i].a) continue;
      const int64_t rank = layers[i].a->size(0);
      if (wanted[i].a) gradients[i].a = da.narrow(0, begin, rank).to(layers[i].a->scalar_type());
      begin += rank;
    }
  }
  const bool shared = dx.defined() && dseen.defined() && dx.is_same(dseen);
  if (dseen.defined() && a.defined()) at::mm_out(dseen, dlow, a);
  bool first = !(shared && a.defined());
  for (size_t i = 0; i < n && dx.defined(); ++i, first = false)
    first ? at::mm_out(dx, dy[i], layers[i].weight) : at::addmm_out(dx, dx, dy[i], layers[i].weight);
  return gradients;
}

/// A gradient in a schema: an empty tensor where it is not wanted.
Tensor result(const Tensor& gradient, const Tensor& like) {
  return gradient.defined() ? gradient : at::empty({0}, like.options());
}
Tensor shape_only(bool wanted, const OptTensor& like, const Tensor& x) {
  return wanted ? at::empty_symint(like->sym_sizes(), like->options()) : at::empty({0}, x.options());
}

// One layer.

Arguments check_linear(const char* op, const Tensor& x, const Layer& layer, const OptTensor& dropped) {
  const Arguments arguments(op, "x", x);
  layer.check(arguments.like("dropped", dropped), x.sym_size(-1));
  TORCH_CHECK(layer.a || !dropped, op, ": dropped is what an adapter sees, and there is none");
  return arguments;
}

std::tuple<Tensor, Tensor, Tensor> linear_forward(const Tensor& x, const Tensor& weight, const OptTensor& bias,
                                                  const OptTensor& a, const OptTensor& b, const OptTensor& dropped,
                                                  double scale) {
  const std::array layers{Layer{"weight", weight, bias, a, b, scale}};
  check_linear("lora_linear", x, layers[0], dropped);
  const Tensor y = output(at::empty_symint(shape_of(x, weight.sym_size(0)), x.options()));
  if (y.is_meta() || y.numel() == 0)
    return {y, at::empty_symint({sym_rows(x), layers[0].rank()}, x.options()),
            at::empty_symint({cast_size(layers, x.scalar_type())}, x.options())};
  const Adapters adapters(layers, x);
  const Tensor rows = matrix(x), low = low_rank(dropped ? matrix(*dropped) : rows, adapters.a);
  run_forward(matrix(y), rows, low, layers[0], adapters.b[0]);
  return {y, low, adapters.cast};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> linear_backward(
    const Tensor& dy, const Tensor& x, const Tensor& low, const Tensor& cast, const Tensor& weight,
    const OptTensor& bias, const OptTensor& a, const OptTensor& b, const OptTensor& dropped, double scale, bool with_dx,
    bool with_dweight, bool with_dbias, bool with_da, bool with_db, bool with_ddropped) {
  const std::array layers{Layer{"weight", weight, bias, a, b, scale}};
  check_linear("lora_linear_backward", x, layers[0], dropped)
      .shaped("dy", dy, shape_of(x, weight.sym_size(0)), Type::Same);
  const Tensor dx = shape_only(with_dx, x, x), ddropped = shape_only(with_ddropped, dropped, x);
  if (x.is_meta() || x.numel() == 0 || dy.numel() == 0) {
    const auto zeros = [&](bool wanted, const OptTensor& like) {
      return x.is_meta() ? shape_only(wanted, like, x) : shape_only(wanted, like, x).zero_();
    };
    return {zeros(with_dx, x), zeros(with_dweight, weight), zeros(with_dbias, bias),
            zeros(with_da, a), zeros(with_db, b),           zeros(with_ddropped, dropped)};
  }
  const Tensor rows = matrix(x), out = with_dx ? matrix(dx) : Tensor();
  const auto [d] = run_backward<1>({matrix(dy)}, rows, dropped ? matrix(*dropped) : rows, low, layers,
                                   Adapters(layers, x, cast), {Wanted{with_dweight, with_dbias, with_da, with_db}}, out,
                                   dropped ? (with_ddropped ? matrix(ddropped) : Tensor()) : out);
  return {dx, result(d.weight, x), result(d.bias, x), result(d.a, x), result(d.b, x), ddropped};
}

struct Linear {
  static constexpr Name kName = "lora_linear";
  static constexpr std::array kInputs{"x", "weight", "bias", "a", "b", "dropped", "scale"}, kAll{"y", "low", "cast"},
      kSaved{"x", "low", "cast", "weight", "bias", "a", "b", "dropped", "scale"},
      kGradients{"dx", "dweight", "dbias", "da", "db", "ddropped"};
  static constexpr auto forward = linear_forward;
  static constexpr auto backward = linear_backward;
};

// Three layers of one input.

/// How many gradients three layers have, and the first, of x.
constexpr size_t kThree = 13;
using Thirteen =
    std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

std::array<Wanted, 3> of_flags(const std::array<bool, kThree>& w) {
  std::array<Wanted, 3> wanted;
  for (size_t i = 0; i < 3; ++i) wanted[i] = {w[1 + 4 * i], w[2 + 4 * i], w[3 + 4 * i], w[4 + 4 * i]};
  return wanted;
}

/// The gradients of x and of the layers in the order of a schema.
Thirteen in_order(const Tensor& dx, const std::array<Gradients, 3>& d, const Tensor& x) {
  const auto r = [&](const Tensor& t) { return result(t, x); };
  return {dx,        r(d[0].weight), r(d[0].bias),   r(d[0].a),    r(d[0].b), r(d[1].weight), r(d[1].bias),
          r(d[1].a), r(d[1].b),      r(d[2].weight), r(d[2].bias), r(d[2].a), r(d[2].b)};
}

/// The same where there is nothing to compute: shapes, or zeros where there are no rows.
Thirteen nothing(const Tensor& x, const std::array<Layer, 3>& layers, const std::array<bool, kThree>& w) {
  const auto zeros = [&](bool wanted, const OptTensor& like) {
    const Tensor t = shape_only(wanted, like, x);
    return t.is_meta() ? t : t.zero_();
  };
  std::array<Gradients, 3> d;
  for (size_t i = 0; i < 3; ++i)
    d[i] = {zeros(w[1 + 4 * i], layers[i].weight), zeros(w[2 + 4 * i], layers[i].bias),
            zeros(w[3 + 4 * i], layers[i].a), zeros(w[4 + 4 * i], layers[i].b)};
  return in_order(zeros(w[0], x), d, x);
}

c10::SymInt rank_of(const std::array<Layer, 3>& layers) {
  return layers[0].rank() + layers[1].rank() + layers[2].rank();
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> qkv_forward(
    const Tensor& x, const Tensor& q, const OptTensor& q_bias, const OptTensor& q_a, const OptTensor& q_b,
    const Tensor& k, const OptTensor& k_bias, const OptTensor& k_a, const OptTensor& k_b, const Tensor& v,
    const OptTensor& v_bias, const OptTensor& v_a, const OptTensor& v_b, double q_scale, double k_scale,
    double v_scale) {
  const Arguments arguments("lora_qkv", "x", x);
  const std::array layers{Layer{"q", q, q_bias, q_a, q_b, q_scale}, Layer{"k", k, k_bias, k_a, k_b, k_scale},
                          Layer{"v", v, v_bias, v_a, v_b, v_scale}};
  for (const Layer& layer : layers) layer.check(arguments, x.sym_size(-1));
  std::array<Tensor, 3> y;
  for (size_t i = 0; i < 3; ++i)
    y[i] = output(at::empty_symint(shape_of(x, layers[i].weight.sym_size(0)), x.options()));
  if (x.is_meta() || x.numel() == 0)
    return {y[0], y[1], y[2], at::empty_symint({sym_rows(x), rank_of(layers)}, x.options()),
            at::empty_symint({cast_size(layers, x.scalar_type())}, x.options())};
  const Adapters adapters(layers, x);
  const Tensor rows = matrix(x), low = low_rank(rows, adapters.a);
  for (size_t i = 0; i < 3; ++i) run_forward(matrix(y[i]), rows, columns_of(low, layers, i), layers[i], adapters.b[i]);
  return {y[0], y[1], y[2], low, adapters.cast};
}

Thirteen qkv_backward(const Tensor& dq, const Tensor& dk, const Tensor& dv, const Tensor& x, const Tensor& low,
                      const Tensor& cast, const Tensor& q, const OptTensor& q_bias, const OptTensor& q_a,
                      const OptTensor& q_b, const Tensor& k, const OptTensor& k_bias, const OptTensor& k_a,
                      const OptTensor& k_b, const Tensor& v, const OptTensor& v_bias, const OptTensor& v_a,
                      const OptTensor& v_b, double q_scale, double k_scale, double v_scale, bool with_dx,
                      bool with_dq_weight, bool with_dq_bias, bool with_dq_a, bool with_dq_b, bool with_dk_weight,
                      bool with_dk_bias, bool with_dk_a, bool with_dk_b, bool with_dv_weight, bool with_dv_bias,
                      bool with_dv_a, bool with_dv_b) {
  const Arguments arguments("lora_qkv_backward", "x", x);
  const std::array layers{Layer{"q", q, q_bias, q_a, q_b, q_scale}, Layer{"k", k, k_bias, k_a, k_b, k_scale},
                          Layer{"v", v, v_bias, v_a, v_b, v_scale}};
  const std::array<const Tensor*, 3> dy{&dq, &dk, &dv};
  const char* names[] = {"dq", "dk", "dv"};
  for (size_t i = 0; i < 3; ++i) {
    layers[i].check(arguments, x.sym_size(-1));
    arguments.shaped(names[i], *dy[i], shape_of(x, layers[i].weight.sym_size(0)), Type::Same);
  }
  const std::array wanted{with_dx,        with_dq_weight, with_dq_bias, with_dq_a, with_dq_b,
                          with_dk_weight, with_dk_bias,   with_dk_a,    with_dk_b, with_dv_weight,
                          with_dv_bias,   with_dv_a,      with_dv_b};
  if (x.is_meta() || x.numel() == 0) return nothing(x, layers, wanted);
  const Tensor dx = shape_only(with_dx, x, x), rows = matrix(x), out = with_dx ? matrix(dx) : Tensor();
  return in_order(dx,
                  run_backward<3>({matrix(dq), matrix(dk), matrix(dv)}, rows, rows, low, layers,
                                  Adapters(layers, x, cast), of_flags(wanted), out, out),
                  x);
}

struct QKV {
  static constexpr Name kName = "lora_qkv";
  static constexpr std::array kInputs{"x",   "q", "q_bias", "q_a", "q_b", "k",       "k_bias",  "k_a",
                                      "k_b", "v", "v_bias", "v_a", "v_b", "q_scale", "k_scale", "v_scale"},
      kAll{"yq", "yk", "yv", "low", "cast"},
      kSaved{"x",   "low", "cast", "q",      "q_bias", "q_a", "q_b",     "k",       "k_bias",
             "k_a", "k_b", "v",    "v_bias", "v_a",    "v_b", "q_scale", "k_scale", "v_scale"},
      kGradients{"dx",   "dq_weight", "dq_bias",   "dq_a",    "dq_b", "dk_weight", "dk_bias",
                 "dk_a", "dk_b",      "dv_weight", "dv_bias", "dv_a", "dv_b"};
  static constexpr int kResults = 3;
  static constexpr auto forward = qkv_forward;
  static constexpr auto backward = qkv_backward;
};

// A gated MLP.

/// gate and up of x, each [tokens, width].
std::array<Tensor, 2> gate_and_up(const Tensor& x, const Tensor& low, const std::array<Layer, 2>& layers,
                                  const Adapters<2>& adapters) {
  std::array<Tensor, 2> y;
  for (size_t i = 0; i < 2; ++i) {
    y[i] = output(at::empty({x.size(0), layers[i].weight.size(0)}, x.options()));
    run_forward(y[i], x, columns_of(low, layers, i), layers[i], adapters.b[i]);
  }
  return y;
}

Arguments check_mlp(const char* op, const Tensor& x, const std::array<Layer, 2>& of_x, const Layer& down) {
  const Arguments arguments(op, "x", x);
  for (const Layer& layer : of_x) layer.check(arguments, x.sym_size(-1));
  arguments.shaped("up", of_x[1].weight, of_x[0].weight.sym_sizes(), Type::Same);
  down.check(arguments, of_x[0].weight.sym_size(0));
  return arguments;
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> mlp_forward(
    const Tensor& x, const Tensor& gate, const OptTensor& gate_bias, const OptTensor& gate_a, const OptTensor& gate_b,
    const Tensor& up, const OptTensor& up_bias, const OptTensor& up_a, const OptTensor& up_b, const Tensor& down,
    const OptTensor& down_bias, const OptTensor& down_a, const OptTensor& down_b, double gate_scale, double up_scale,
    double down_scale, int64_t activation, bool recompute) {
  const std::array of_x{Layer{"gate", gate, gate_bias, gate_a, gate_b, gate_scale},
                        Layer{"up", up, up_bias, up_a, up_b, up_scale}};
  const std::array of_product{Layer{"down", down, down_bias, down_a, down_b, down_scale}};
  check_mlp("lora_mlp", x, of_x, of_product[0]);
  const Activation act = gated::parse("lora_mlp", activation);
  const Tensor y = output(at::empty_symint(shape_of(x, down.sym_size(0)), x.options()));
  const Tensor none = at::empty({0}, x.options());
  if (x.is_meta() || x.numel() == 0) {
    const auto tokens = sym_rows(x);
    const auto made = [&](const c10::SymInt& cols) { return at::empty_symint({tokens, cols}, x.options()); };
    return {y,
            made(of_x[0].rank() + of_x[1].rank()),
            made(of_product[0].rank()),
            recompute ? none : made(gate.sym_size(0)),
            recompute ? none : made(gate.sym_size(0)),
            at::empty_symint({cast_size(of_x, x.scalar_type())}, x.options()),
            at::empty_symint({cast_size(of_product, x.scalar_type())}, x.options())};
  }
  const Adapters adapters(of_x, x);
  const Tensor rows = matrix(x), low = low_rank(rows, adapters.a);
  const auto [g, u] = gate_and_up(rows, low, of_x, adapters);
  const Tensor c = recompute ? g : output(at::empty_like(g));
  gated::run_forward(g, u, c, act, 1);
  const Adapters of_down(of_product, c);
  const Tensor low_down = low_rank(c, of_down.a);
  run_forward(matrix(y), c, low_down, of_product[0], of_down.b[0]);
  return {y, low, low_down, recompute ? none : g, recompute ? none : u, adapters.cast, of_down.cast};
}

Thirteen mlp_backward(const Tensor& dy_, const Tensor& x, const Tensor& low, const Tensor& low_down,
                      const Tensor& gates, const Tensor& ups, const Tensor& cast, const Tensor& cast_down,
                      const Tensor& gate, const OptTensor& gate_bias, const OptTensor& gate_a, const OptTensor& gate_b,
                      const Tensor& up, const OptTensor& up_bias, const OptTensor& up_a, const OptTensor& up_b,
                      const Tensor& down, const OptTensor& down_bias, const OptTensor& down_a, const OptTensor& down_b,
                      double gate_scale, double up_scale, double down_scale, int64_t activation, bool recompute,
                      bool with_dx, bool with_dgate, bool with_dgate_bias, bool with_dgate_a, bool with_dgate_b,
                      bool with_dup, bool with_dup_bias, bool with_dup_a, bool with_dup_b, bool with_ddown,
                      bool with_ddown_bias, bool with_ddown_a, bool with_ddown_b) {
  const std::array of_x{Layer{"gate", gate, gate_bias, gate_a, gate_b, gate_scale},
                        Layer{"up", up, up_bias, up_a, up_b, up_scale}};
  const std::array of_product{Layer{"down", down, down_bias, down_a, down_b, down_scale}};
  check_mlp("lora_mlp_backward", x, of_x, of_product[0]).shaped("dy", dy_, shape_of(x, down.sym_size(0)), Type::Same);
  const std::array flags{with_dx,         with_dgate,    with_dgate_bias, with_dgate_a, with_dgate_b,
                         with_dup,        with_dup_bias, with_dup_a,      with_dup_b,   with_ddown,
                         with_ddown_bias, with_ddown_a,  with_ddown_b};
  if (x.is_meta() || x.numel() == 0) return nothing(x, {of_x[0], of_x[1], of_product[0]}, flags);
  const Activation act = gated::parse("lora_mlp_backward", activation);
  const auto wanted = of_flags(flags);
  const Tensor rows = matrix(x), dy = matrix(dy_);
  const Adapters adapters(of_x, x, cast);
  const auto [g, u] = recompute ? gate_and_up(rows, low, of_x, adapters) : std::array{gates, ups};
  // The product of gate and up, and then its gradient.
  const Tensor c = output(at::empty_like(g));
  if (wanted[2].weight || wanted[2].a) gated::run_forward(g, u, c, act, 1);
  const bool inner = with_dx || with_dgate || with_dgate_bias || with_dgate_a || with_dgate_b || with_dup ||
                     with_dup_bias || with_dup_a || with_dup_b;
  const Tensor dc = inner ? c : Tensor();
  const auto [d_down] =
      run_backward<1>({dy}, c, c, low_down, of_product, Adapters(of_product, c, cast_down), {wanted[2]}, dc, dc);
  const Tensor dx = shape_only(with_dx, x, x), out = with_dx ? matrix(dx) : Tensor();
  std::array<Gradients, 2> d{};
  if (inner) {
    const Tensor dg = recompute ? g : output(at::empty_like(g)), du = recompute ? u : output(at::empty_like(u));
    gated::run_backward(c, g, u, dg, du, cols(g), act, 1);
    d = run_backward<2>({dg, du}, rows, rows, low, of_x, adapters, {wanted[0], wanted[1]}, out, out);
  }
  return in_order(dx, {d[0], d[1], d_down}, x);
}

struct MLP {
  static constexpr Name kName = "lora_mlp";
  static constexpr std::array kInputs{"x",       "gate",       "gate_bias", "gate_a",     "gate_b",     "up",
                                      "up_bias", "up_a",       "up_b",      "down",       "down_bias",  "down_a",
                                      "down_b",  "gate_scale", "up_scale",  "down_scale", "activation", "recompute"},
      kAll{"y", "low", "low_down", "gates", "ups", "cast", "cast_down"},
      kSaved{"x",         "low",    "low_down", "gates",      "ups",      "cast",       "cast_down",  "gate",
             "gate_bias", "gate_a", "gate_b",   "up",         "up_bias",  "up_a",       "up_b",       "down",
             "down_bias", "down_a", "down_b",   "gate_scale", "up_scale", "down_scale", "activation", "recompute"},
      kGradients{"dx",    "dgate", "dgate_bias", "dgate_a",    "dgate_b", "dup",    "dup_bias",
                 "dup_a", "dup_b", "ddown",      "ddown_bias", "ddown_a", "ddown_b"};
  static constexpr auto forward = mlp_forward;
  static constexpr auto backward = mlp_backward;
};

/// As for the linear layers that these stand for: everything is cast, a weight once for a forward pass, but for adapters
/// in float, which the operators take in x's type themselves, so that their gradients are made in float.
template <c10::DeviceType kDevice>
struct Autocast {
  static auto cast(const auto& t) {
    return at::autocast::cached_cast(at::autocast::get_autocast_dtype(kDevice), t, kDevice);
  }
  static OptTensor adapter(const OptTensor& t) { return t && t->scalar_type() == at::kFloat ? t : cast(t); }

  static Tensor linear(const Tensor& x, const Tensor& weight, const OptTensor& bias, const OptTensor& a,
                       const OptTensor& b, const OptTensor& dropped, const double& scale) {
    const c10::impl::ExcludeDispatchKeyGuard below_autocast(c10::autocast_dispatch_keyset);
    return call<Linear>(cast(x), cast(weight), cast(bias), adapter(a), adapter(b), cast(dropped), scale);
  }

  static std::tuple<Tensor, Tensor, Tensor> qkv(const Tensor& x, const Tensor& q, const OptTensor& q_bias,
                                                const OptTensor& q_a, const OptTensor& q_b, const Tensor& k,
                                                const OptTensor& k_bias, const OptTensor& k_a, const OptTensor& k_b,
                                                const Tensor& v, const OptTensor& v_bias, const OptTensor& v_a,
                                                const OptTensor& v_b, const double& q_scale, const double& k_scale,
                                                const double& v_scale) {
    const c10::impl::ExcludeDispatchKeyGuard below_autocast(c10::autocast_dispatch_keyset);
    return call<QKV>(cast(x), cast(q), cast(q_bias), adapter(q_a), adapter(q_b), cast(k), cast(k_bias), adapter(k_a),
                     adapter(k_b), cast(v), cast(v_bias), adapter(v_a), adapter(v_b), q_scale, k_scale, v_scale);
  }

  static Tensor mlp(const Tensor& x, const Tensor& gate, const OptTensor& gate_bias, const OptTensor& gate_a,
                    const OptTensor& gate_b, const Tensor& up, const OptTensor& up_bias, const OptTensor& up_a,
                    const OptTensor& up_b, const Tensor& down, const OptTensor& down_bias, const OptTensor& down_a,
                    const OptTensor& down_b, const double& gate_scale, const double& up_scale, const double& down_scale,
                    const int64_t& activation, const bool& recompute) {
    const c10::impl::ExcludeDispatchKeyGuard below_autocast(c10::autocast_dispatch_keyset);
    return call<MLP>(cast(x), cast(gate), cast(gate_bias), adapter(gate_a), adapter(gate_b), cast(up), cast(up_bias),
                     adapter(up_a), adapter(up_b), cast(down), cast(down_bias), adapter(down_a), adapter(down_b),
                     gate_scale, up_scale, down_scale, activation, recompute);
  }

  static void describe(torch::Library& m) {
    m.impl("lora_linear", linear);
    m.impl("lora_qkv", qkv);
    m.impl("lora_mlp", mlp);
  }
};

}  // namespace op::lora

LIGER_OPERATORS(lora, r) {
  Operator<op::lora::Linear>::describe(r);
  Operator<op::lora::QKV>::describe(r);
  Operator<op::lora::MLP>::describe(r);
}
TORCH_LIBRARY_IMPL(liger, AutocastCUDA, m) { op::lora::Autocast<c10::DeviceType::CUDA>::describe(m); }
TORCH_LIBRARY_IMPL(liger, AutocastCPU, m) { op::lora::Autocast<c10::DeviceType::CPU>::describe(m); }

}  // namespace liger
