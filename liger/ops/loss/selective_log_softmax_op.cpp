#include "liger/core/torch/operator.h"
#include "liger/ops/loss/selective_log_softmax_op.h"
#include "liger/functions/loss.h"
#include "liger/ops/loss/selective_log_softmax.h"

namespace liger {
namespace op::selective_log_softmax {

void run_rows(const LogitRows& of, const LogitColumns& to) {
  constexpr int64_t kLeast = 16384, kMost = 65536;  // elements of a chunk
  const int64_t n = of.ids.numel(), width = cols(of.x);
  const float inverse = float(1 / of.temperature);
  const int64_t chunk = of.fixed_chunks ? kMost : row_chunk_size(n * width, kLeast, kMost),
                per_row = ceil_div(width, chunk);
  const Tensor parts = at::empty({n, per_row, kSelectiveParts}, to.logp.options());
  run(selective_parts, to.logp,
      {.x = data(of.x),
       .ids = data<int64_t>(of.ids),
       .parts = data<float>(parts),
       .rows = n,
       .cols = width,
       .chunk = chunk,
       .x_stride = of.x_stride,
       .ignore_index = of.ignore_index,
       .inverse_temperature = inverse,
       .map = of.map,
       .mean_logit = to.mean_logit.defined(),
       .dtype = dtype_of(of.x)});
  int64_t bad_id = of.ignore_index;
  run(selective_log_softmax_rows, to.logp,
      {.x = data(of.x),
       .ids = data<int64_t>(of.ids),
       .parts = data<float>(parts),
       .logp = data<float>(to.logp),
       .entropy = data<float>(to.entropy),
       .lse = data<float>(to.lse),
       .mean_logit = data<float>(to.mean_logit),
       .stats = data<float>(to.stats),
       .bad_id = &bad_id,
       .rows = n,
       .cols = width,
       .per_row = per_row,
       .x_stride = of.x_stride,
       .ignore_index = of.ignore_index,
       .inverse_temperature = inverse,
       .map = of.map,
       .dtype = dtype_of(of.x)});
  TORCH_CHECK_INDEX(bad_id == of.ignore_index, "selective_log_softmax: id ", bad_id,
                    " is out of bounds: it is outside [0, ", width, ") and not ignore_index ", of.ignore_index);
}

void run_backward(const LogitRows& of, const LogitGradients& g, const Tensor& stats, const Tensor& dx, int64_t first,
                  int64_t classes) {
  run(selective_backward, dx,
      {.dlogp = data<float>(g.dlogp),
       .dentropy = data<float>(g.dentropy),
       .dlse = data<float>(g.dlse),
       .dmean_logit = data<float>(g.dmean_logit),
       .x = data(of.x),
       .ids = data<int64_t>(of.ids),
       .stats = data<float>(stats),
       .dx = dx.data_ptr(),
       .rows = rows(dx),
       .cols = cols(dx),
       .x_stride = of.x_stride,
       .ignore_index = of.ignore_index,
       .first = first,
       .classes = classes,
       .inverse_temperature = float(1 / of.temperature),
       .map = of.map,
       .dtype = dtype_of(dx)});
}

}  // namespace op::selective_log_softmax

namespace op {

struct SelectiveLogSoftmax {
  static constexpr Name kName = "selective_log_softmax";
  struct Inputs {
    Tensor x, ids;
    double temperature;
    int64_t ignore_index;
    LIGER_FIELDS(x, ids, temperature, ignore_index)
  };
  struct Results {
    Tensor logp, entropy, stats;
    LIGER_FIELDS(logp, entropy, stats)
  };
  struct Upstream {
    Tensor dlogp, dentropy;
    LIGER_FIELDS(dlogp, dentropy)
  };
  struct Saved {
    Tensor x, ids, stats;
    double temperature;
    int64_t ignore_index;
    LIGER_FIELDS(x, ids, stats, temperature, ignore_index)
  };
  template <class T>
  using Gradients = Dx<T>;

  static Arguments check(const char* op, const auto& in) {
    Arguments arguments(op, "x", in.x);
    arguments.shaped("ids", in.ids, in.x.sym_sizes().slice(0, in.x.dim() - 1), Type::Integer);
    TORCH_CHECK_VALUE(in.temperature > 0, op, ": temperature must be positive, got ", in.temperature);
    return arguments;
  }

  static Results forward(const Inputs& in) {
    check("selective_log_softmax", in);
    const Tensor logp = empty_stat(in.x), entropy = empty_stat(in.x),
                 stats = at::empty_symint({logp.sym_numel(), 3}, logp.options());
    if (in.x.is_meta() || logp.numel() == 0) return {logp, entropy, stats};
    const Rows x(in.x);
    const Tensor ids = in.ids.to(at::kLong).contiguous();
    selective_log_softmax::run_rows({x.tensor, x.stride, ids, in.temperature, in.ignore_index}, {logp, entropy, stats});
    return {logp, entropy, stats};
  }

  static Saved save(const Inputs& in, const Results& out) {
    return {in.x, in.ids, out.stats, in.temperature, in.ignore_index};
  }

  static Tensor backward(const Upstream& up, const Saved& in) {
    const auto of_rows = in.x.sym_sizes().slice(0, in.x.dim() - 1);
    check("selective_log_softmax_backward", in)
        .shaped("dlogp", up.dlogp, of_rows, Type::Floating)
        .shaped("dentropy", up.dentropy, of_rows, Type::Floating)
        .count("stats", in.stats, 3 * sym_rows(in.x));
    const Tensor dx = output(at::empty_symint(in.x.sym_sizes(), in.x.options()));
    if (dx.is_meta() || dx.numel() == 0) return dx;
    const Rows x(in.x);
    const Tensor stats = in.stats.contiguous(), ids = in.ids.to(at::kLong).contiguous(),
                 dlogp = up.dlogp.to(at::kFloat).contiguous(), dentropy = up.dentropy.to(at::kFloat).contiguous();
    selective_log_softmax::run_backward({x.tensor, x.stride, ids, in.temperature, in.ignore_index}, {dlogp, dentropy},
                                        stats, dx);
    return dx;
  }
};

}  // namespace op

std::tuple<Tensor, Tensor> selective_log_softmax(const Tensor& x, const Tensor& ids, double temperature,
                                                 int64_t ignore_index) {
  return Operator<op::SelectiveLogSoftmax>::public_op(x, ids, temperature, ignore_index);
}

LIGER_OPERATORS(selective_log_softmax, Operator<op::SelectiveLogSoftmax>)

}  // namespace liger
