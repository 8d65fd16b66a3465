#include "liger/core/torch/operator.h"
#include "liger/ops/activation/gated_op.h"
#include "liger/ops.h"

namespace liger {
namespace op::gated {

std::vector<std::string> names() {
#define LIGER_NAME(formula, name) name,
  return {LIGER_ACTIVATIONS(LIGER_NAME)};
#undef LIGER_NAME
}

Activation parse(const char* op, int64_t activation) {
#define LIGER_ONE(formula, name) +1
  constexpr int64_t kCount = LIGER_ACTIVATIONS(LIGER_ONE);
#undef LIGER_ONE
  TORCH_CHECK_VALUE(activation >= 0 && activation < kCount, op, ": activation is the number of one of ", names(),
                    ", not ", activation);
  return Activation(activation);
}

void run_forward(const Tensor& a_, const Tensor& b_, const Tensor& c, Activation activation, double gate_multiplier) {
  const Rows a(a_), b(b_);
  run(gated_forward, c,
      {.a = data(a.tensor),
       .b = data(b.tensor),
       .c = c.data_ptr(),
       .rows = rows(c),
       .cols = cols(c),
       .a_stride = a.stride,
       .b_stride = b.stride,
       .dtype = dtype_of(c),
       .activation = activation,
       .gate_multiplier = float(gate_multiplier)});
}

void run_backward(const Tensor& dc_, const Tensor& a_, const Tensor& b_, const Tensor& da, const Tensor& db,
                  int64_t d_stride, Activation activation, double gate_multiplier) {
  const Tensor dc = dc_.contiguous();
  const Rows a(a_), b(b_);
  run(gated_backward, dc,
      {.dc = data(dc),
       .a = data(a.tensor),
       .b = data(b.tensor),
       .da = da.data_ptr(),
       .db = db.data_ptr(),
       .rows = rows(dc),
       .cols = cols(dc),
       .a_stride = a.stride,
       .b_stride = b.stride,
       .d_stride = d_stride,
       .dtype = dtype_of(dc),
       .activation = activation,
       .gate_multiplier = float(gate_multiplier)});
}

}  // namespace op::gated

namespace op {

struct Dc {
  Tensor dc;
  LIGER_FIELDS(dc)
};

struct Gated {
  static constexpr Name kName = "gated";
  struct Inputs {
    Tensor a, b;
    int64_t activation;
    double gate_multiplier;
    LIGER_FIELDS(a, b, activation, gate_multiplier)
  };
  using Saved = Inputs;
  using Upstream = Dc;
  template <class T>
  struct Gradients {
    T da, db;
    LIGER_FIELDS(da, db)
  };

  static Tensor forward(const Inputs& in) {
    Arguments("gated", "a", in.a).like("b", in.b);
    const Activation act = gated::parse("gated", in.activation);
    const Tensor c = output(at::empty_symint(in.a.sym_sizes(), in.a.options()));
    if (!c.is_meta()) gated::run_forward(in.a, in.b, c, act, in.gate_multiplier);
    return c;
  }

  static Saved save(const Inputs& in, const Tensor&) { return in; }

  static Gradients<Tensor> backward(const Upstream& up, const Saved& in) {
    Arguments("gated_backward", "a", in.a).like("b", in.b).like("dc", up.dc);
    const Tensor da = output(at::empty_symint(in.a.sym_sizes(), in.a.options())),
                 db = output(at::empty_symint(in.a.sym_sizes(), in.a.options()));
    if (!da.is_meta())
      gated::run_backward(up.dc, in.a, in.b, da, db, cols(in.a), gated::parse("gated", in.activation),
                          in.gate_multiplier);
    return {da, db};
  }
};

/// The same for the two halves of y.
struct GatedPacked {
  static constexpr Name kName = "gated_packed";
  struct Inputs {
    Tensor y;
    int64_t activation;
    double gate_multiplier;
    LIGER_FIELDS(y, activation, gate_multiplier)
  };
  using Saved = Inputs;
  using Upstream = Dc;
  template <class T>
  struct Gradients {
    T dy;
    LIGER_FIELDS(dy)
  };

  static std::vector<Tensor> halves(const Tensor& y) {
    Arguments("gated_packed", "y", y);
    TORCH_CHECK_VALUE(y.sym_size(-1) % 2 == 0,
                      "gated_packed: the last dimension of y holds gate and up and must be even, got ", y.sym_size(-1));
    return y.chunk(2, -1);
  }

  static Tensor forward(const Inputs& in) {
    const auto of = halves(in.y);
    return Gated::forward({of[0], of[1], in.activation, in.gate_multiplier});
  }

  static Saved save(const Inputs& in, const Tensor&) { return in; }

  static Tensor backward(const Upstream& up, const Saved& in) {
    const Tensor dy = output(at::empty_symint(in.y.sym_sizes(), in.y.options()));
    write_gradient("gated_packed_backward", up.dc, in, dy);
    return dy;
  }

  /// Writes the gradient over y.
  static void backward_(const Upstream& up, const Saved& in) {
    halves(in.y);
    TORCH_CHECK(in.y.is_meta() || in.y.is_contiguous(),
                "gated_packed: to be overwritten, the input must be contiguous");
    write_gradient("gated_packed_backward_", up.dc, in, in.y);
  }

  static void write_gradient(const char* op, const Tensor& dc, const Saved& in, const Tensor& dy) {
    const auto from = halves(in.y), to = dy.chunk(2, -1);
    Arguments(op, "y", from[0]).like("dc", dc);
    if (!dy.is_meta())
      gated::run_backward(dc, from[0], from[1], to[0], to[1], cols(in.y), gated::parse("gated_packed", in.activation),
                          in.gate_multiplier);
  }
};

using GatedPackedInPlace = Undifferentiated<"gated_packed_backward_", &GatedPacked::backward_, "y(a!)">;

}  // namespace op

Tensor gated(const Tensor& a, const Tensor& b, Activation activation, double gate_multiplier) {
  return Operator<op::Gated>::public_op(a, b, activation, gate_multiplier);
}

Tensor gated_packed(const Tensor& y, Activation activation, double gate_multiplier) {
  return Operator<op::GatedPacked>::public_op(y, activation, gate_multiplier);
}

TORCH_LIBRARY_FRAGMENT(liger, m) {
  m.def("activations() -> str[]", op::gated::names);  // their names, in the order of their numbers
}
LIGER_OPERATORS(gated, Operator<op::Gated>, Operator<op::GatedPacked>, op::GatedPackedInPlace)

}  // namespace liger
