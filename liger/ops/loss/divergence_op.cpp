#include "liger/core/torch/operator.h"
#include "liger/ops.h"
#include "liger/ops/loss/divergence.h"

namespace liger {
namespace op::divergence {

/// A Jensen-Shannon divergence whose mixture is one of the two distributions alone is the other's distance from it.
Divergence parse(int64_t kind, double parameter) {
  TORCH_CHECK_VALUE(kind >= 0 && kind <= 4,
                    "divergence: kind is 0 (kl), 1 (kl, target in logarithms), 2 (reverse kl), 3 (jensen-shannon) or 4 "
                    "(total variation), not ",
                    kind);
  if (Divergence(kind) != Divergence::JensenShannon) return Divergence(kind);
  TORCH_CHECK_VALUE(parameter >= 0 && parameter <= 1, "divergence: beta must be in [0, 1], got ", parameter);
  return parameter == 0 ? Divergence::LogKL : parameter == 1 ? Divergence::ReverseKL : Divergence::JensenShannon;
}

Arguments check(const char* op, const Tensor& x, const Tensor& target, const OptTensor& labels) {
  Arguments arguments(op, "x", x);
  TORCH_CHECK(x.dim() == 2, op, ": x must be [rows, cols], got ", x.sym_sizes());
  arguments.shaped("target", target, x.sym_sizes(), Type::Kernels)
      .vector("labels", labels, x.sym_size(0), Type::Integer);
  return arguments;
}

/// The operands as the kernels read them.
struct Operands {
  Tensor x, target, labels;

  Operands(const Tensor& x, const Tensor& target, const OptTensor& labels)
      : x(x.contiguous()),
        target((target.scalar_type() == x.scalar_type() ? target : target.to(at::kFloat)).contiguous()),
        labels(labels ? labels->to(at::kLong).contiguous() : Tensor()) {}

  DivergenceChunks chunks(int64_t kind, double parameter, int64_t ignore_index) const {
    // Where no row is ignored nothing depends on rows: all elements are one.
    const int64_t rows = labels.defined() ? x.size(0) : x.numel() > 0, cols = labels.defined() ? x.size(1) : x.numel();
    return {.x = data(x),
            .target = data(target),
            .labels = data<int64_t>(labels),
            .rows = rows,
            .cols = cols,
            .chunk = row_chunk_size(rows * cols, 8192, 16384),
            .ignore_index = ignore_index,
            .dtype = dtype_of(x),
            .target_dtype = dtype_of(target),
            .kind = parse(kind, parameter),
            .parameter = float(parameter),
            .scale = 1};
  }
};

using Forward = std::tuple<Tensor, Tensor, Tensor>;

/// loss, dx (none without a reduction) and what dx is still to be multiplied by: float16 keeps it undivided, so that it
/// does not vanish before the loss scale reaches it.
Forward forward(const Tensor& x_, const Tensor& target_, const OptTensor& labels_, int64_t kind, double parameter,
                int64_t ignore_index, int64_t reduction_, at::ScalarType dtype, bool with_dx) {
  check("divergence", x_, target_, labels_);
  TORCH_CHECK_TYPE(has_dtype(dtype), "divergence: dtype, the loss's, must be float32, float16 or bfloat16, got ",
                   dtype);
  parse(kind, parameter);
  TORCH_CHECK_VALUE(reduction_ >= 0 && reduction_ <= 3,
                    "divergence: reduction is 0 (none), 1 (mean), 2 (sum) or 3 (batchmean), not ", reduction_);
  const Reduction reduction(static_cast<Reduction>(reduction_));
  const auto floats = x_.options().dtype(at::kFloat);
  const bool each = reduction == Reduction::None, makes_dx = with_dx && !each,
             defer = makes_dx && x_.scalar_type() == at::kHalf;
  const Tensor dx = makes_dx ? output(at::empty_symint(x_.sym_sizes(), x_.options())) : at::empty({0}, x_.options());
  const Tensor rest = defer ? at::empty({}, floats) : at::empty({0}, floats);
  if (x_.is_meta())
    return {each ? at::empty_symint(x_.sym_sizes(), floats.dtype(dtype)) : at::empty({}, floats.dtype(dtype)), dx,
            rest};

  const Operands in(x_, target_, labels_);
  DivergenceChunks p = in.chunks(kind, parameter, ignore_index);
  if (each) {
    const Tensor loss = output(at::empty(x_.sizes(), floats));
    p.each = data<float>(loss);
    run(divergence_chunks, in.x, p);
    return {loss.to(dtype), dx, rest};
  }
  const bool mean = reduction != Reduction::Sum;
  Tensor count;
  if (mean && labels_) {
    count = at::empty({}, floats);
    run(divergence_count, count,
        {.labels = p.labels, .count = data<float>(count), .rows = p.rows, .ignore_index = ignore_index});
  }
  const double divisor =
      (reduction == Reduction::Mean ? double(x_.size(1)) : 1) * (mean && !labels_ ? double(x_.size(0)) : 1);
  const double scale = 1 / std::max(divisor, 1.);
  const Tensor sums = at::empty({p.rows, ceil_div(p.cols, p.chunk)}, floats), loss = at::empty({}, floats.dtype(dtype));
  p.sums = data<float>(sums), p.dx = makes_dx ? dx.data_ptr() : nullptr;
  if (!defer) p.count = data<float>(count), p.scale = float(scale);
  run(divergence_chunks, in.x, p);
  run(divergence_total, sums,
      {.sums = p.sums,
       .count = data<float>(count),
       .total = loss.data_ptr(),
       .chunks = sums.numel(),
       .dtype = dtype_of(loss),
       .scale = scale});
  if (defer) {
    rest.fill_(scale);
    if (count.defined()) rest.div_(count);
  }
  return {loss, dx, rest};
}

Tensor inference(const Tensor& x, const Tensor& target, const OptTensor& labels, int64_t kind, double parameter,
                 int64_t ignore_index, int64_t reduction, at::ScalarType dtype) {
  return std::get<0>(forward(x, target, labels, kind, parameter, ignore_index, reduction, dtype, false));
}

/// For losses without a reduction: g has x's shape.
Tensor backward(const Tensor& g, const Tensor& x, const Tensor& target, const OptTensor& labels, int64_t kind,
                double parameter, int64_t ignore_index) {
  check("divergence_backward", x, target, labels).shaped("g", g, x.sym_sizes(), Type::Floating);
  const Tensor dx = output(at::empty_symint(x.sym_sizes(), x.options()));
  if (dx.is_meta()) return dx;
  const Operands in(x, target, labels);
  const Tensor upstream = g.to(at::kFloat).contiguous();
  DivergenceChunks p = in.chunks(kind, parameter, ignore_index);
  p.upstream = data<float>(upstream), p.dx = dx.data_ptr();
  run(divergence_chunks, in.x, p);
  return dx;
}

constexpr Op<"liger::divergence", inference> public_op;
constexpr Op<"liger::divergence_forward", forward> forward_op;
constexpr Op<"liger::divergence_backward", backward> backward_op;

/// The gradient of a sum is made in forward, where both rows are on chip; that of single losses in backward.
struct Autograd {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& target, const OptTensor& labels,
                        int64_t kind, double parameter, int64_t ignore_index, int64_t reduction, at::ScalarType dtype) {
    const bool each = Reduction(reduction) == Reduction::None;
    auto [loss, dx, rest] = forward_op(x, target, labels, kind, parameter, ignore_index, reduction, dtype, !each);
    ctx->save_for_backward(each ? variable_list{x, target, value_or_undefined(labels)} : variable_list{dx, rest});
    ctx->saved_data["attrs"] = std::make_tuple(kind, parameter, ignore_index);
    return loss;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const auto gradient = [&] {
      if (saved.size() == 2)
        return scaled(saved[0], saved[1].dim() > 0 ? grads[0] : grads[0].to(at::kFloat) * saved[1]);
      const auto [kind, parameter, ignore_index] = ctx->saved_data["attrs"].to<std::tuple<int64_t, double, int64_t>>();
      return backward_op(grads[0], saved[0], saved[1], optional(saved[2]), kind, parameter, ignore_index);
    };
    return {gradient(), {}, {}, {}, {}, {}, {}, {}};
  }
};

}  // namespace op::divergence

Tensor kl_div(const Tensor& x, const Tensor& target, Reduction reduction, bool log_target, double eps) {
  return op::divergence::public_op(x, target, OptTensor(), int64_t(log_target ? Divergence::LogKL : Divergence::KL),
                                   eps, int64_t(-100), int64_t(reduction), at::kFloat);
}

Tensor jsd(const Tensor& x, const Tensor& target, const OptTensor& labels, double beta, int64_t ignore_index,
           Reduction reduction) {
  return op::divergence::public_op(x, target, labels, int64_t(Divergence::JensenShannon), beta, ignore_index,
                                   int64_t(reduction), x.scalar_type());
}

Tensor tvd(const Tensor& x, const Tensor& target, const OptTensor& labels, Reduction reduction, int64_t ignore_index) {
  return op::divergence::public_op(x, target, labels, int64_t(Divergence::TotalVariation), 0., ignore_index,
                                   int64_t(reduction), at::kFloat);
}

LIGER_OPERATORS(divergence, r) {
  using namespace op::divergence;
  const Names inputs{"x", "target", "labels", "kind", "parameter", "ignore_index", "reduction", "dtype"};
  Names with_dx = inputs;
  with_dx.push_back("with_dx");
  r.add<Autograd, 1>(public_op, inputs, {"loss"});
  r.add(forward_op, with_dx, {"loss", "dx", "rest"});
  r.add(backward_op, {"g", "x", "target", "labels", "kind", "parameter", "ignore_index"}, {"dx"});
}

}  // namespace liger
