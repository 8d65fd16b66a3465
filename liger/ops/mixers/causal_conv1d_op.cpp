#include "liger/ops/mixers/causal_conv1d.h"
#include "liger/core/torch/operator.h"
#include "liger/functions/mixers.h"

namespace liger {
namespace op {

struct CausalConv1d {
  static constexpr Name kName = "causal_conv1d";
  struct Inputs {
    Tensor x, weight;
    OptTensor bias, starts;
    LIGER_FIELDS(x, weight, bias, starts)
  };
  struct Options {
    bool silu = false;
    LIGER_OPTIONS(silu)
  };
  using Saved = Inputs;
  using Upstream = Dy;
  template <class T>
  struct Gradients {
    T dx, dw, dbias;
    LIGER_FIELDS(dx, dw, dbias)
  };

  static Arguments check(const char* op, const Inputs& in) {
    const Arguments arguments(op, "x", in.x);
    TORCH_CHECK(in.x.dim() == 3, op, ": x must be [batch, channels, time], got ", in.x.sym_sizes());
    TORCH_CHECK(in.x.sym_size(2) <= std::numeric_limits<int32_t>::max(), op, ": x has too many tokens, ",
                in.x.sym_size(2));
    TORCH_CHECK(in.weight.dim() == 2 && in.weight.size(1) > 0 && in.weight.size(1) <= liger::CausalConv1d::kMostTaps,
                op, ": weight must be [channels, width] with a width of 1 to ", liger::CausalConv1d::kMostTaps,
                ", got ", in.weight.sym_sizes());
    arguments.shaped("weight", in.weight, {in.x.sym_size(1), in.weight.sym_size(1)}, Type::SameOrFloat);
    if (in.bias) arguments.vector("bias", *in.bias, in.x.sym_size(1));
    if (in.starts) {
      arguments.shaped("starts", *in.starts, {in.x.sym_size(0), in.x.sym_size(2)}, Type::Integer);
      TORCH_CHECK_TYPE(in.starts->scalar_type() == at::kInt, op, ": starts must be int32, got ",
                       in.starts->scalar_type());
    }
    return arguments;
  }

  /// x with neighbouring channels, as projections give it, or neighbouring tokens; a copy only where neither is so.
  static bool channels_last(const Tensor& x) { return x.sym_stride(1) == 1 && x.sym_size(2) != 1; }
  static Tensor laid_out(const Tensor& x) { return channels_last(x) || x.sym_stride(2) == 1 ? x : x.contiguous(); }
  static Tensor empty_like(const Tensor& x) {
    if (!channels_last(x)) return output(at::empty_symint(x.sym_sizes(), x.options()));
    return output(at::empty_symint({x.sym_size(0), x.sym_size(2), x.sym_size(1)}, x.options())).transpose(1, 2);
  }
  static Tensor as_like(const Tensor& t, const Tensor& x) {
    return channels_last(x) ? t.transpose(1, 2).contiguous().transpose(1, 2) : t.contiguous();
  }

  template <class Args>
  static Args describe(const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor& starts,
                       const Options& o) {
    Args a{};
    a.x = data(x), a.w = numbers(weight), a.bias = numbers(bias), a.starts = data<int32_t>(starts);
    a.channels_last = channels_last(x);
    a.batch_stride = x.stride(0), a.row_stride = x.stride(a.channels_last ? 2 : 1);
    a.batch = x.size(0), a.channels = x.size(1), a.time = x.size(2), a.width = int(weight.size(1));
    a.silu = o.silu, a.dtype = dtype_of(x);
    return a;
  }

  /// As many partial sums as let blocks, each of a partial sum and of some neighbouring channels, run on the whole
  /// device all at once, or in two or three rounds where these fill it better. Not of so few tokens that those around
  /// them, which are read again, count; nor, where a warp's lanes share out neighbouring tokens, the sum over lanes.
  static int64_t partials_of(const Tensor& x, const liger::CausalConv1d& a) {
    using Backward = CausalConv1dBackward;
    constexpr int64_t kThreads = 2 * Backward::kThreads;  // partial_count is two blocks a multiprocessor
    const int64_t tokens = a.batch * a.time, most = ceil_div(tokens, a.channels_last ? 128 : 2048);
    const int64_t at_once = partial_count(x, 1, tokens, 4096) * Backward::kThreadsAtOnce / kThreads;
    const int64_t blocks = std::max<int64_t>(1, at_once);
    const int64_t across = ceil_div(a.channels, Backward::channels_of_block(a.width));
    int64_t best = 1;
    double filled = 0;
    for (int64_t rounds = 1; rounds <= 3; ++rounds) {
      const int64_t partials = std::max<int64_t>(1, rounds * blocks / across), used = partials * across;
      const double fills = double(used) / double(round_up(used, blocks));
      if (fills > filled + .03) best = partials, filled = fills;
    }
    return std::min(best, most);
  }

  static Tensor forward(const Inputs& in, const Options& o) {
    check("causal_conv1d", in);
    const Tensor x = laid_out(in.x), y = empty_like(x);
    if (x.is_meta() || x.numel() == 0) return y;
    const Tensor weight = in.weight.contiguous(), bias = contiguous(in.bias), starts = contiguous(in.starts);
    auto a = describe<CausalConv1dForward>(x, weight, bias, starts, o);
    a.y = y.data_ptr();
    run(causal_conv1d_forward, x, a);
    return y;
  }

  static Saved save(const Inputs& in, const Tensor&) { return in; }

  static Gradients<Tensor> backward(const Upstream& up, const Saved& s, const Gradients<bool>& wanted,
                                    const Options& o) {
    constexpr auto kOp = "causal_conv1d_backward";
    check(kOp, s).like("dy", up.dy).present("with_dbias", wanted.dbias, "bias", s.bias);
    const Tensor x = laid_out(s.x), dx = wanted.dx ? empty_like(x) : Tensor();
    if (x.is_meta() || x.numel() == 0) return {dx, zeros_if(wanted.dw, s.weight), zeros_if(wanted.dbias, s.bias)};
    const Tensor weight = s.weight.contiguous(), bias = contiguous(s.bias), starts = contiguous(s.starts),
                 dy = as_like(up.dy, x);
    auto a = describe<CausalConv1dBackward>(x, weight, bias, starts, o);
    a.partials = partials_of(x, a);
    const Tensor dw = wanted.dw ? empty_partials(x, a.partials, a.channels * a.width) : Tensor(),
                 dbias = wanted.dbias ? empty_partials(x, a.partials, a.channels) : Tensor();
    a.dy = data(dy), a.dx = data<void>(dx), a.dw = data<float>(dw), a.dbias = data<float>(dbias);
    run(causal_conv1d_backward, x, a);
    Totals totals;
    const Gradients<Tensor> d{dx, wanted.dw ? totals.of(dw, s.weight) : Tensor(),
                              wanted.dbias ? totals.of(dbias, *s.bias) : Tensor()};
    totals.run();
    return d;
  }
};

}  // namespace op

Tensor causal_conv1d(const Tensor& x, const Tensor& weight, const OptTensor& bias, bool silu, const OptTensor& starts) {
  return Operator<op::CausalConv1d>::public_op(x, weight, bias, starts, silu);
}

LIGER_OPERATORS(causal_conv1d, Operator<op::CausalConv1d>)

}  // namespace liger
