#include "liger/ops/mixers/channel_gates.h"
#include "liger/core/torch/operator.h"
#include "liger/functions/mixers.h"

namespace liger {
namespace op {

struct ChannelGates {
  static constexpr Name kName = "channel_gates";
  struct Inputs {
    Tensor a, A_log;
    OptTensor dt_bias;
    std::optional<double> low;
    OptDtype dtype;
    LIGER_FIELDS(a, A_log, dt_bias, low, dtype)
  };
  using Saved = Inputs;
  struct Upstream {
    Tensor dg;
    LIGER_FIELDS(dg)
  };
  template <class T>
  struct Gradients {
    T da, dA_log, ddt_bias;
    LIGER_FIELDS(da, dA_log, ddt_bias)
  };

  static at::ScalarType type_of_g(const Inputs& in) { return in.dtype.value_or(at::kFloat); }

  static Arguments check(const char* op, const Inputs& in) {
    const Arguments arguments(op, "a", in.a);
    const auto columns = in.a.sym_size(-1);
    arguments.any("A_log", in.A_log, Type::Kernels);
    TORCH_CHECK(in.A_log.dim() == 1 && in.A_log.sym_size(0) > 0 && columns % in.A_log.sym_size(0) == 0, op,
                ": A_log must be [heads], and heads must divide the ", columns, " columns of a; got ",
                in.A_log.sym_sizes());
    if (in.dt_bias) arguments.vector("dt_bias", *in.dt_bias, columns, Type::Kernels);
    TORCH_CHECK_VALUE(!in.low || *in.low < 0, op, ": low must be below 0, got ", in.low.value_or(0));
    TORCH_CHECK_TYPE(type_of_g(in) == at::kFloat || type_of_g(in) == in.a.scalar_type(), op,
                     ": dtype must be float32 or that of a, got ", type_of_g(in));
    return arguments;
  }

  /// What both kernels take, and the tensors that keep it alive.
  struct Common {
    Rows a;
    Tensor A, dt_bias;

    explicit Common(const Inputs& in) : a(in.a), A(in.A_log.contiguous()), dt_bias(contiguous(in.dt_bias)) {}

    template <class Args>
    Args describe(const Inputs& in) const {
      Args args{};
      args.a = data(a.tensor), args.a_stride = a.stride, args.A = numbers(A), args.dt_bias = numbers(dt_bias);
      args.heads = A.numel(), args.channels = in.a.size(-1) / args.heads, args.rows = in.a.numel() / in.a.size(-1);
      args.low = float(in.low.value_or(0)), args.dtype = dtype_of(in.a);
      args.g_dtype = type_of_g(in) == at::kFloat ? DType::F32 : args.dtype;
      return args;
    }
  };

  static Tensor forward(const Inputs& in) {
    check("channel_gates", in);
    const Tensor g = output(at::empty_symint(in.a.sym_sizes(), in.a.options().dtype(type_of_g(in))));
    if (g.is_meta() || in.a.numel() == 0) return g;
    const Common of(in);
    auto args = of.describe<ChannelGatesForward>(in);
    args.g = g.data_ptr();
    run(channel_gates_forward, of.a.tensor, args);
    return g;
  }

  static Saved save(const Inputs& in, const Tensor&) { return in; }

  static Gradients<Tensor> backward(const Upstream& up, const Saved& s, const Gradients<bool>& wanted) {
    constexpr auto kOp = "channel_gates_backward";
    const auto arguments = check(kOp, s);
    arguments.shaped("dg", up.dg, s.a.sym_sizes(), type_of_g(s) == at::kFloat ? Type::Float : Type::Same);
    arguments.present("with_ddt_bias", wanted.ddt_bias, "dt_bias", s.dt_bias);
    const Tensor da = output(at::empty_symint(s.a.sym_sizes(), s.a.options()));
    if (s.a.is_meta() || s.a.numel() == 0)
      return {da, zeros_if(wanted.dA_log, s.A_log), zeros_if(wanted.ddt_bias, s.dt_bias)};
    const Common of(s);
    const Tensor dg = up.dg.contiguous();
    auto args = of.describe<ChannelGatesBackward>(s);
    // A block has one head of a partial sum's rows, and half of the threads that partial_count takes a block to have;
    // their sums take few registers, so that twice as many fit.
    args.partials = partial_count(s.a, ceil_div(args.heads, 4), args.rows, args.heads * args.channels);
    const auto sums = [&](bool wanted, int64_t n) { return wanted ? empty_partials(s.a, args.partials, n) : Tensor(); };
    const Tensor dA = sums(wanted.dA_log, args.heads), dbias = sums(wanted.ddt_bias, args.heads * args.channels);
    args.dg = data(dg), args.da = da.data_ptr(), args.dA = data<float>(dA), args.ddt_bias = data<float>(dbias);
    run(channel_gates_backward, of.a.tensor, args);
    Totals totals;
    const Gradients<Tensor> d{da, wanted.dA_log ? totals.of(dA, s.A_log) : Tensor(),
                              wanted.ddt_bias ? totals.of(dbias, *s.dt_bias) : Tensor()};
    totals.run();
    return d;
  }
};

}  // namespace op

Tensor channel_gates(const Tensor& a, const Tensor& A_log, const OptTensor& dt_bias, std::optional<double> low,
                     std::optional<at::ScalarType> dtype) {
  return Operator<op::ChannelGates>::public_op(a, A_log, dt_bias, low, dtype);
}

LIGER_OPERATORS(channel_gates, Operator<op::ChannelGates>)

}  // namespace liger
