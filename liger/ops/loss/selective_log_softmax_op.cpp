#include "liger/core/torch/operator.h"
#include "liger/ops/loss/selective_log_softmax_op.h"
#include "liger/ops.h"
#include "liger/ops/loss/selective_log_softmax.h"

namespace liger {
namespace op::selective_log_softmax {

Arguments check(const char* op, const Tensor& x, const Tensor& ids, double temperature) {
  Arguments arguments(op, "x", x);
  arguments.shaped("ids", ids, x.sym_sizes().slice(0, x.dim() - 1), Type::Integer);
  TORCH_CHECK_VALUE(temperature > 0, op, ": temperature must be positive, got ", temperature);
  return arguments;
}

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

using Forward = std::tuple<Tensor, Tensor, Tensor>;

Forward forward(const Tensor& x_, const Tensor& ids_, double temperature, int64_t ignore_index) {
  check("selective_log_softmax", x_, ids_, temperature);
  const Tensor logp = empty_stat(x_), entropy = empty_stat(x_),
               stats = at::empty_symint({logp.sym_numel(), 3}, logp.options());
  if (x_.is_meta() || logp.numel() == 0) return {logp, entropy, stats};
  const Rows x(x_);
  const Tensor ids = ids_.to(at::kLong).contiguous();
  run_rows({x.tensor, x.stride, ids, temperature, ignore_index}, {logp, entropy, stats});
  return {logp, entropy, stats};
}

Tensor backward(const Tensor& dlogp_, const Tensor& dentropy_, const Tensor& x_, const Tensor& ids_,
                const Tensor& stats_, double temperature, int64_t ignore_index) {
  const auto of_rows = x_.sym_sizes().slice(0, x_.dim() - 1);
  check("selective_log_softmax_backward", x_, ids_, temperature)
      .shaped("dlogp", dlogp_, of_rows, Type::Floating)
      .shaped("dentropy", dentropy_, of_rows, Type::Floating)
      .count("stats", stats_, 3 * sym_rows(x_));
  const Tensor dx = output(at::empty_symint(x_.sym_sizes(), x_.options()));
  if (dx.is_meta() || dx.numel() == 0) return dx;
  const Rows x(x_);
  const Tensor stats = stats_.contiguous(), ids = ids_.to(at::kLong).contiguous(),
               dlogp = dlogp_.to(at::kFloat).contiguous(), dentropy = dentropy_.to(at::kFloat).contiguous();
  run_backward({x.tensor, x.stride, ids, temperature, ignore_index}, {dlogp, dentropy}, stats, dx);
  return dx;
}

struct Definition {
  static constexpr Name kName = "selective_log_softmax";
  static constexpr std::array kInputs{"x", "ids", "temperature", "ignore_index"}, kAll{"logp", "entropy", "stats"},
      kSaved{"x", "ids", "stats", "temperature", "ignore_index"}, kGradients{"dx"};
  static constexpr size_t kResults = 2;
  static constexpr auto forward = selective_log_softmax::forward;
  static constexpr auto backward = selective_log_softmax::backward;
};

}  // namespace op::selective_log_softmax

std::tuple<Tensor, Tensor> selective_log_softmax(const Tensor& x, const Tensor& ids, double temperature,
                                                 int64_t ignore_index) {
  return call<op::selective_log_softmax::Definition>(x, ids, temperature, ignore_index);
}

LIGER_OPERATORS(selective_log_softmax, r) { Operator<op::selective_log_softmax::Definition>::describe(r); }

}  // namespace liger
