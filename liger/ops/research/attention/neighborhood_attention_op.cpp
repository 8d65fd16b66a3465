#include "liger/ops/research/attention/neighborhood_attention.h"
#include "liger/core/torch/operator.h"
#include "liger/research.h"

namespace liger {
namespace op {

struct NeighborhoodAttention {
  static constexpr Name kName = "neighborhood_attention";
  struct Inputs {
    Tensor q, k, v;
    int64_t kernel_size, dilation;
    double scale;
    LIGER_FIELDS(q, k, v, kernel_size, dilation, scale)
  };
  struct Results {
    Tensor out, stats;  // as q, float [..., seq, 2]
    LIGER_FIELDS(out, stats)
  };
  struct Saved {
    Tensor q, k, v, stats;
    int64_t kernel_size, dilation;
    double scale;
    LIGER_FIELDS(q, k, v, stats, kernel_size, dilation, scale)
  };
  struct Upstream {
    Tensor dout;
    LIGER_FIELDS(dout)
  };
  template <class T>
  struct Gradients {
    T dq, dk, dv;
    LIGER_FIELDS(dq, dk, dv)
  };

  static Arguments check(const char* op, const auto& in) {
    const Arguments arguments(op, "q", in.q);
    TORCH_CHECK(in.q.dim() >= 2, op, ": q must be [..., seq, dim], got ", in.q.sym_sizes());
    constexpr int kMost = NeighborhoodAttentionForward::kMostColumns;
    TORCH_CHECK(in.q.size(-1) <= kMost, op, ": q must have a last dimension of at most ", kMost, ", got ",
                in.q.sym_sizes());
    TORCH_CHECK_VALUE(in.kernel_size >= 1, op, ": kernel_size must be positive, got ", in.kernel_size);
    TORCH_CHECK_VALUE(in.dilation >= 1, op, ": dilation must be positive, got ", in.dilation);
    return arguments.like("k", in.k).like("v", in.v);
  }

  /// Rows in whole packs that begin at 16-byte boundaries: columns of zeros change nothing.
  static Tensor padded(const Tensor& t) {
    const int64_t more = round_up(cols(t), 8) - cols(t);
    const Tensor whole = more > 0 ? at::constant_pad_nd(t, {0, more}) : t.contiguous();
    return reinterpret_cast<uintptr_t>(whole.const_data_ptr()) % 16 == 0 ? whole : whole.clone();
  }
  static Tensor cut(const Tensor& t, const Tensor& like) {
    return cols(t) == cols(like) ? t : t.narrow(-1, 0, cols(like)).clone(at::MemoryFormat::Contiguous);
  }

  /// What forward and backward have in common.
  template <class Args>
  static Args sizes(const auto& in, const Tensor& q) {
    Args a{};
    a.rows = rows(q), a.seq = q.size(-2), a.cols = cols(q);
    a.half = std::min(in.kernel_size / 2, (a.seq - 1) / in.dilation), a.dilation = in.dilation;
    a.dtype = dtype_of(q), a.scale = float(in.scale);
    return a;
  }

  static Results forward(const Inputs& in) {
    check("neighborhood_attention", in);
    const Tensor stats = empty_stat(in.q, 2);
    if (in.q.is_meta() || in.q.numel() == 0) return {at::empty_symint(in.q.sym_sizes(), in.q.options()), stats};
    const Tensor q = padded(in.q), k = padded(in.k), v = padded(in.v), out = output(at::empty(q.sizes(), q.options()));
    auto a = sizes<NeighborhoodAttentionForward>(in, q);
    a.q = data(q), a.k = data(k), a.v = data(v), a.out = out.data_ptr(), a.stats = data<float>(stats);
    run(neighborhood_attention_forward, q, a);
    return {cut(out, in.q), stats};
  }

  static Saved save(const Inputs& in, const Results& out) {
    return {in.q, in.k, in.v, out.stats, in.kernel_size, in.dilation, in.scale};
  }

  static Gradients<Tensor> backward(const Upstream& up, const Saved& in, const Gradients<bool>& wanted) {
    check("neighborhood_attention_backward", in).like("dout", up.dout).count("stats", in.stats, 2 * sym_rows(in.q));
    if (in.q.is_meta() || in.q.numel() == 0) {
      const auto empty = [&](bool flag) {
        return flag ? at::empty_symint(in.q.sym_sizes(), in.q.options()) : Tensor();
      };
      return {empty(wanted.dq), empty(wanted.dk), empty(wanted.dv)};
    }
    const Tensor q = padded(in.q), k = padded(in.k), v = padded(in.v), dout = padded(up.dout),
                 stats = in.stats.contiguous(), delta = empty_stat(q);
    const auto like = [&] { return output(at::empty(q.sizes(), q.options())); };
    const Tensor dq = like(), dk = like(), dv = like();
    auto a = sizes<NeighborhoodAttentionBackward>(in, q);
    a.dout = data(dout), a.q = data(q), a.k = data(k), a.v = data(v), a.stats = data<float>(stats);
    a.dq = dq.data_ptr(), a.dk = dk.data_ptr(), a.dv = dv.data_ptr(), a.delta = data<float>(delta);
    run(neighborhood_attention_backward, q, a);
    const auto of = [&](bool flag, const Tensor& d) { return flag ? cut(d, in.q) : Tensor(); };
    return {of(wanted.dq, dq), of(wanted.dk, dk), of(wanted.dv, dv)};
  }
};

}  // namespace op

Tensor neighborhood_attention(const Tensor& q, const Tensor& k, const Tensor& v, int64_t kernel_size, int64_t dilation,
                              std::optional<double> scale) {
  return Operator<op::NeighborhoodAttention>::public_op(q, k, v, kernel_size, dilation,
                                                        scale.value_or(1 / std::sqrt(double(q.size(-1)))));
}

LIGER_OPERATORS(neighborhood_attention, Operator<op::NeighborhoodAttention>)

}  // namespace liger
