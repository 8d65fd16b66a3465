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

Tensor forward(const Tensor& a, const Tensor& b, int64_t activation, double gate_multiplier) {
  Arguments("gated", "a", a).like("b", b);
  const Activation act = parse("gated", activation);
  const Tensor c = output(at::empty_symint(a.sym_sizes(), a.options()));
  if (!c.is_meta()) run_forward(a, b, c, act, gate_multiplier);
  return c;
}

std::tuple<Tensor, Tensor> backward(const Tensor& dc, const Tensor& a, const Tensor& b, int64_t activation,
                                    double gate_multiplier) {
  Arguments("gated_backward", "a", a).like("b", b).like("dc", dc);
  const Tensor da = output(at::empty_symint(a.sym_sizes(), a.options())),
               db = output(at::empty_symint(a.sym_sizes(), a.options()));
  if (!da.is_meta()) run_backward(dc, a, b, da, db, cols(a), parse("gated", activation), gate_multiplier);
  return {da, db};
}

void check_packed(const Tensor& y) {
  Arguments("gated_packed", "y", y);
  TORCH_CHECK_VALUE(y.sym_size(-1) % 2 == 0,
                    "gated_packed: the last dimension of y holds gate and up and must be even, got ", y.sym_size(-1));
}

Tensor packed_forward(const Tensor& y, int64_t activation, double gate_multiplier) {
  check_packed(y);
  const auto halves = y.chunk(2, -1);
  return forward(halves[0], halves[1], activation, gate_multiplier);
}

Tensor packed_backward(const Tensor& dc, const Tensor& y, int64_t activation, double gate_multiplier) {
  check_packed(y);
  const Tensor dy = output(at::empty_symint(y.sym_sizes(), y.options()));
  const auto in = y.chunk(2, -1), out = dy.chunk(2, -1);
  Arguments("gated_packed_backward", "y", in[0]).like("dc", dc);
  if (!dy.is_meta())
    run_backward(dc, in[0], in[1], out[0], out[1], cols(y), parse("gated_packed", activation), gate_multiplier);
  return dy;
}

/// Writes the gradient over y.
void packed_backward_(const Tensor& dc, const Tensor& y, int64_t activation, double gate_multiplier) {
  check_packed(y);
  const auto halves = y.chunk(2, -1);
  Arguments("gated_packed_backward_", "y", halves[0]).like("dc", dc);
  TORCH_CHECK(y.is_meta() || y.is_contiguous(), "gated_packed: to be overwritten, the input must be contiguous");
  if (!y.is_meta())
    run_backward(dc, halves[0], halves[1], halves[0], halves[1], cols(y), parse("gated_packed", activation),
                 gate_multiplier);
}

/// The gradient overwrites y.
constexpr Op<"liger::gated_packed_backward_", packed_backward_> packed_backward_in_place_op;

struct Gated {
  static constexpr Name kName = "gated";
  static constexpr std::array kInputs{"a", "b", "activation", "gate_multiplier"}, kAll{"c"},
      kSaved{"a", "b", "activation", "gate_multiplier"}, kGradients{"da", "db"};
  static constexpr auto forward = gated::forward;
  static constexpr auto backward = gated::backward;
};

struct GatedPacked {
  static constexpr Name kName = "gated_packed";
  static constexpr std::array kInputs{"y", "activation", "gate_multiplier"}, kAll{"c"},
      kSaved{"y", "activation", "gate_multiplier"}, kGradients{"dy"};
  static constexpr auto forward = packed_forward;
  static constexpr auto backward = packed_backward;
};

}  // namespace op::gated

Tensor gated(const Tensor& a, const Tensor& b, Activation activation, double gate_multiplier) {
  return call<op::gated::Gated>(a, b, int64_t(activation), gate_multiplier);
}

Tensor gated_packed(const Tensor& y, Activation activation, double gate_multiplier) {
  return call<op::gated::GatedPacked>(y, int64_t(activation), gate_multiplier);
}

TORCH_LIBRARY_FRAGMENT(liger, m) {
  m.def("activations() -> str[]", op::gated::names);  // their names, in the order of their numbers
}
LIGER_OPERATORS(gated, r) {
  Operator<op::gated::Gated>::describe(r);
  Operator<op::gated::GatedPacked>::describe(r);
  r.add(op::gated::packed_backward_in_place_op,
        "(Tensor dc, Tensor(a!) y, int activation, float gate_multiplier) -> ()");
}

}  // namespace liger
