#include "liger/ops/mixers/delta_gates.h"
#include "liger/core/torch/operator.h"
#include "liger/functions/mixers.h"

namespace liger {
namespace op {

struct DeltaGates {
  static constexpr Name kName = "delta_gates";
  struct Inputs {
    Tensor a, A;
    OptTensor dt_bias, b;
    bool log;
    double low, high;
    LIGER_FIELDS(a, A, dt_bias, b, log, low, high)
  };
  struct Results {
    Tensor g, beta;
    LIGER_FIELDS(g, beta)
  };
  using Saved = Inputs;
  struct Upstream {
    OptTensor dg, dbeta;
    LIGER_FIELDS(dg, dbeta)
  };
  template <class T>
  struct Gradients {
    T da, dA, ddt_bias, db;
    LIGER_FIELDS(da, dA, ddt_bias, db)
  };

  static Arguments check(const char* op, const Inputs& in) {
    const Arguments arguments(op, "a", in.a);
    const auto heads = in.a.sym_size(-1);
    arguments.vector("A", in.A, heads, Type::Kernels).like("b", in.b);
    if (in.dt_bias) arguments.vector("dt_bias", *in.dt_bias, heads, Type::Kernels);
    TORCH_CHECK_VALUE(in.low <= in.high, op, ": low ", in.low, " is above high ", in.high);
    return arguments;
  }

  /// What both kernels take, and the tensors that keep it alive.
  struct Common {
    Rows a, b;
    Tensor A, dt_bias;

    explicit Common(const Inputs& in)
        : a(in.a), b(in.b ? *in.b : in.a), A(in.A.contiguous()), dt_bias(contiguous(in.dt_bias)) {}

    template <class Args>
    Args describe(const Inputs& in) const {
      Args args{};
      args.a = data(a.tensor), args.a_stride = a.stride;
      if (in.b) args.b = data(b.tensor), args.b_stride = b.stride;
      args.A = numbers(A), args.dt_bias = numbers(dt_bias);
      args.heads = in.a.size(-1), args.rows = in.a.numel() / args.heads;
      args.low = float(in.low), args.high = float(in.high), args.log = in.log, args.dtype = dtype_of(in.a);
      return args;
    }
  };

  static Results forward(const Inputs& in) {
    check("delta_gates", in);
    const auto made = [&] { return output(at::empty_symint(in.a.sym_sizes(), in.a.options().dtype(at::kFloat))); };
    const Results out{made(), made()};
    if (in.a.is_meta() || in.a.numel() == 0) return out;
    const Common of(in);
    auto args = of.describe<DeltaGatesForward>(in);
    args.g = data<float>(out.g), args.beta = data<float>(out.beta);
    run(delta_gates_forward, of.a.tensor, args);
    return out;
  }

  static Saved save(const Inputs& in, const Results&) { return in; }

  static Gradients<Tensor> backward(const Upstream& up, const Saved& s, const Gradients<bool>& wanted) {
    constexpr auto kOp = "delta_gates_backward";
    const auto arguments = check(kOp, s);
    arguments.shaped("dg", up.dg, s.a.sym_sizes(), Type::Float).shaped("dbeta", up.dbeta, s.a.sym_sizes(), Type::Float);
    arguments.present("with_ddt_bias", wanted.ddt_bias, "dt_bias", s.dt_bias).present("with_db", wanted.db, "b", s.b);
    const auto made = [&] { return output(at::empty_symint(s.a.sym_sizes(), s.a.options())); };
    const Tensor da = made(), db = wanted.db ? made() : Tensor();
    if (s.a.is_meta() || s.a.numel() == 0)
      return {da, zeros_if(wanted.dA, s.A), zeros_if(wanted.ddt_bias, s.dt_bias), db};
    const Common of(s);
    const Tensor dg = contiguous(up.dg), dbeta = contiguous(up.dbeta);
    auto args = of.describe<DeltaGatesBackward>(s);
    args.partials = partial_count(s.a, 1, args.rows, args.heads);
    const auto sums = [&](bool wanted) { return wanted ? empty_partials(s.a, args.partials, args.heads) : Tensor(); };
    const Tensor dA = sums(wanted.dA), dbias = sums(wanted.ddt_bias);
    args.dg = data<float>(dg), args.dbeta = data<float>(dbeta), args.da = da.data_ptr(), args.db = data<void>(db);
    args.dA = data<float>(dA), args.ddt_bias = data<float>(dbias);
    run(delta_gates_backward, of.a.tensor, args);
    Totals totals;
    const Gradients<Tensor> d{da, wanted.dA ? totals.of(dA, s.A) : Tensor(),
                              wanted.ddt_bias ? totals.of(dbias, *s.dt_bias) : Tensor(), db};
    totals.run();
    return d;
  }
};

}  // namespace op

std::tuple<Tensor, Tensor> delta_gates(const Tensor& a, const Tensor& A, const OptTensor& dt_bias, const OptTensor& b,
                                       bool log, double low, double high) {
  return Operator<op::DeltaGates>::public_op(a, A, dt_bias, b, log, low, high);
}

LIGER_OPERATORS(delta_gates, Operator<op::DeltaGates>)

}  // namespace liger
