#include <torch/headeronly/version.h>
#include <cmath>
#include "liger/core/torch/operator.h"
#include "liger/ops/activation/gated_op.h"
#include "liger/functions/activation.h"

namespace liger {

LIGER_OPTIONAL(gated_forward_bytes);
LIGER_OPTIONAL(gated_backward_bytes);

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

/// Whether torch.clamp passes the gradient of a value at its limit, where 16-bit values often are.
constexpr bool kSlopeAtLimit = TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 14;

GateForm form(const char* op, int64_t activation, double multiplier, const GateOptions& o, bool interleaved) {
  GateForm form{.activation = parse(op, activation), .m = float(multiplier)};
  TORCH_CHECK_VALUE(o.limit >= 0, op, ": limit must not be negative, got ", o.limit);
  TORCH_CHECK_VALUE(o.alpha != 0, op, ": alpha must not be 0");
  if (o.limit > 0) {
    form.limit = float(o.limit);
    form.last = kSlopeAtLimit ? form.limit : std::nextafter(form.limit, 0.f);
  }
  form.alpha = float(o.alpha), form.up_offset = float(o.up_offset), form.interleaved = interleaved;
  TORCH_CHECK_VALUE(form.plain() || form.activation == Activation::SiLU, op,
                    ": limit, alpha, up_offset and interleaved are silu's, not ", names()[activation], "'s");
  return form;
}

namespace {

/// Both in turn are read without gaps.
Tensor rows_of(const Tensor& t, const GateForm& form) { return form.interleaved ? t.contiguous() : t; }

/// Whether rows in 8 bits are asked for and a kernel gives them.
template <class Args>
bool gives(const Kernel<Args>& kernel, const Bytes* bytes, const Tensor& t, const GateForm& form) {
  return bytes && kernel.has(Backend(t.device().type())) && form.plain() && t.scalar_type() != at::kFloat &&
         cols(t) <= kMostByteColumns;
}

}  // namespace

bool run_forward(const Tensor& a_, const Tensor& b_, const Tensor& c, const GateForm& form, const Bytes* bytes) {
  const Rows a(rows_of(a_, form)), b(b_);
  const GatedForward args{.a = data(a.tensor),
                          .b = data(b.tensor),
                          .c = c.data_ptr(),
                          .rows = rows(c),
                          .cols = cols(c),
                          .a_stride = a.stride,
                          .b_stride = b.stride,
                          .dtype = dtype_of(c),
                          .form = form};
  if (gives(gated_forward_bytes, bytes, c, form) && rows_fit_bytes(c, {args.a, args.b, args.c}, {a.stride, b.stride})) {
    run(gated_forward_bytes, c, {args, bytes->to});
    return true;
  }
  run(gated_forward, c, args);
  return false;
}

bool run_backward(const Tensor& dc_, const Tensor& a_, const Tensor& b_, const Tensor& da, const Tensor& db,
                  int64_t d_stride, const GateForm& form, const Bytes* bytes, const Tensor& c) {
  const Tensor dc = dc_.contiguous();
  const Rows a(rows_of(a_, form)), b(b_);
  const GatedBackward args{.dc = data(dc),
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
                           .form = form,
                           .c = c.defined() ? c.data_ptr() : nullptr};
  if (gives(gated_backward_bytes, bytes, dc, form) &&
      rows_fit_bytes(dc, {args.dc, args.a, args.b, args.da, args.db, bytes->factors[0], bytes->factors[1]},
                     {a.stride, b.stride, d_stride})) {
    run(gated_backward_bytes, dc, {args, bytes->to, bytes->factors[0], bytes->factors[1]});
    return true;
  }
  run(gated_backward, dc, args);
  return false;
}

}  // namespace op::gated

namespace op {

struct Dc {
  Tensor dc;
  LIGER_FIELDS(dc)
};

struct Gated {
  static constexpr Name kName = "gated";
  using Options = GateOptions;
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

  static Tensor forward(const Inputs& in, const Options& o) {
    Arguments("gated", "a", in.a).like("b", in.b);
    const GateForm form = gated::form("gated", in.activation, in.gate_multiplier, o);
    const Tensor c = output(at::empty_symint(in.a.sym_sizes(), in.a.options()));
    if (!c.is_meta()) gated::run_forward(in.a, in.b, c, form);
    return c;
  }

  static Saved save(const Inputs& in, const Tensor&) { return in; }

  static Gradients<Tensor> backward(const Upstream& up, const Saved& in, const Options& o) {
    Arguments("gated_backward", "a", in.a).like("b", in.b).like("dc", up.dc);
    const GateForm form = gated::form("gated_backward", in.activation, in.gate_multiplier, o);
    const Tensor da = output(at::empty_symint(in.a.sym_sizes(), in.a.options())),
                 db = output(at::empty_symint(in.a.sym_sizes(), in.a.options()));
    if (!da.is_meta()) gated::run_backward(up.dc, in.a, in.b, da, db, cols(in.a), form);
    return {da, db};
  }
};

/// The same for the two halves of y, or for its columns in turn.
struct GatedPacked {
  static constexpr Name kName = "gated_packed";
  using Options = GatedPackedOptions;
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

  static GateForm form(const char* op, const Inputs& in, const Options& o) {
    return gated::form(op, in.activation, in.gate_multiplier, o.gate, o.interleaved);
  }

  static Tensor forward(const Inputs& in, const Options& o) {
    const auto of = halves(in.y);
    const GateForm form = GatedPacked::form("gated_packed", in, o);
    const Tensor c = output(at::empty_symint(of[0].sym_sizes(), in.y.options()));
    if (!c.is_meta()) o.interleaved ? gated::run_forward(in.y, c, c, form) : gated::run_forward(of[0], of[1], c, form);
    return c;
  }

  static Saved save(const Inputs& in, const Tensor&) { return in; }

  static Tensor backward(const Upstream& up, const Saved& in, const Options& o) {
    const Tensor dy = output(at::empty_symint(in.y.sym_sizes(), in.y.options()));
    write_gradient("gated_packed_backward", up.dc, in, dy, o);
    return dy;
  }

  /// Writes the gradient over y.
  static void backward_(const Upstream& up, const Saved& in, const Options& o) {
    halves(in.y);
    TORCH_CHECK(in.y.is_meta() || in.y.is_contiguous(),
                "gated_packed: to be overwritten, the input must be contiguous");
    write_gradient("gated_packed_backward_", up.dc, in, in.y, o);
  }

  static void write_gradient(const char* op, const Tensor& dc, const Saved& in, const Tensor& dy, const Options& o) {
    const auto from = halves(in.y), to = dy.chunk(2, -1);
    Arguments(op, "y", from[0]).like("dc", dc);
    const GateForm form = GatedPacked::form(op, in, o);
    if (dy.is_meta()) return;
    if (o.interleaved) gated::run_backward(dc, in.y, dc, dy, dy, cols(in.y), form);
    else gated::run_backward(dc, from[0], from[1], to[0], to[1], cols(in.y), form);
  }
};

using GatedPackedInPlace = Undifferentiated<"gated_packed_backward_", &GatedPacked::backward_, "y(a!)">;

}  // namespace op

Tensor gated(const Tensor& a, const Tensor& b, Activation activation, double gate_multiplier,
             const GateOptions& options) {
  return Operator<op::Gated>::public_op(a, b, activation, gate_multiplier, options);
}

Tensor gated_packed(const Tensor& y, Activation activation, double gate_multiplier, const GatedPackedOptions& options) {
  return Operator<op::GatedPacked>::public_op(y, activation, gate_multiplier, options);
}

TORCH_LIBRARY_FRAGMENT(liger, m) {
  m.def("activations() -> str[]", op::gated::names);  // their names, in the order of their numbers
}
LIGER_OPERATORS(gated, Operator<op::Gated>, Operator<op::GatedPacked>, op::GatedPackedInPlace)

}  // namespace liger
