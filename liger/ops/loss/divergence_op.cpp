#include "liger/core/torch/gradient_in_forward.h"
#include "liger/functions/loss.h"
#include "liger/ops/loss/divergence.h"

namespace liger {
namespace op {

struct DivergenceLoss {
  static constexpr Name kName = "divergence";
  struct Operands {
    Tensor x, target;
    OptTensor labels;
    int64_t kind;
    double parameter;
    int64_t ignore_index;
    LIGER_FIELDS(x, target, labels, kind, parameter, ignore_index)

    /// A Jensen-Shannon divergence whose mixture is only one of the two distributions is the other's distance from it.
    Divergence formula() const {
      TORCH_CHECK_VALUE(
          kind >= 0 && kind <= 4,
          "divergence: kind is 0 (kl), 1 (kl, target in logarithms), 2 (reverse kl), 3 (jensen-shannon) or 4 (total "
          "variation), not ",
          kind);
      if (Divergence(kind) != Divergence::JensenShannon) return Divergence(kind);
      TORCH_CHECK_VALUE(parameter >= 0 && parameter <= 1, "divergence: beta must be in [0, 1], got ", parameter);
      return parameter == 0 ? Divergence::LogKL : parameter == 1 ? Divergence::ReverseKL : Divergence::JensenShannon;
    }

    Arguments check(const char* op) const {
      Arguments arguments(op, "x", x);
      TORCH_CHECK(x.dim() == 2, op, ": x must be [rows, cols], got ", x.sym_sizes());
      arguments.shaped("target", target, x.sym_sizes(), Type::Kernels)
          .vector("labels", labels, x.sym_size(0), Type::Integer);
      return arguments;
    }
  };
  struct Inputs {
    Operands of;
    int64_t reduction;
    at::ScalarType dtype;  // of the loss
    LIGER_FIELDS(of, reduction, dtype)
  };
  struct Results {
    Tensor loss;
    LIGER_FIELDS(loss)
  };
  using Saved = Operands;
  template <class T>
  using Gradients = Dx<T>;
  using Made = liger::Made<Results, Dx>;

  /// The operands as the kernels read them.
  struct Contiguous {
    Tensor x, target, labels;

    explicit Contiguous(const Operands& in)
        : x(in.x.contiguous()),
          target((in.target.scalar_type() == x.scalar_type() ? in.target : in.target.to(at::kFloat)).contiguous()),
          labels(in.labels ? in.labels->to(at::kLong).contiguous() : Tensor()) {}

    DivergenceChunks chunks(const Operands& in) const {
      // Where no row is ignored nothing depends on rows: all elements are one.
      const int64_t rows = labels.defined() ? x.size(0) : x.numel() > 0,
                    cols = labels.defined() ? x.size(1) : x.numel();
      return {.x = data(x),
              .target = data(target),
              .labels = data<int64_t>(labels),
              .rows = rows,
              .cols = cols,
              .chunk = row_chunk_size(rows * cols, 8192, 16384),
              .ignore_index = in.ignore_index,
              .dtype = dtype_of(x),
              .target_dtype = dtype_of(target),
              .kind = in.formula(),
              .parameter = float(in.parameter),
              .scale = 1};
    }
  };

  /// float16 keeps dx undivided, so that it does not vanish before the loss scale reaches it. There is none without a
  /// reduction.
  static Made forward(const Inputs& inputs, const Dx<bool>& wanted) {
    const Operands& of = inputs.of;
    of.check("divergence");
    TORCH_CHECK_TYPE(has_dtype(inputs.dtype),
                     "divergence: dtype, the loss's, must be float32, float16 or bfloat16, got ", inputs.dtype);
    of.formula();
    TORCH_CHECK_VALUE(inputs.reduction >= 0 && inputs.reduction <= 3,
                      "divergence: reduction is 0 (none), 1 (mean), 2 (sum) or 3 (batchmean), not ", inputs.reduction);
    const auto floats = of.x.options().dtype(at::kFloat);
    const bool each = !in_forward(inputs, {}), makes_dx = wanted.dx && !each,
               defer = makes_dx && of.x.scalar_type() == at::kHalf;
    Made made;
    if (makes_dx) made.gradients.dx = output(at::empty_symint(of.x.sym_sizes(), of.x.options()));
    if (defer) made.grad_scale = at::empty({}, floats);
    Tensor& loss = made.results.loss;
    if (of.x.is_meta()) {
      loss = at::empty_symint(each ? of.x.sym_sizes() : c10::SymIntArrayRef(), floats.dtype(inputs.dtype));
      return made;
    }
    const Contiguous in(of);
    DivergenceChunks p = in.chunks(of);
    if (each) {
      loss = output(at::empty(of.x.sizes(), floats));
      p.each = data<float>(loss);
      run(divergence_chunks, in.x, p);
      loss = loss.to(inputs.dtype);
    } else {
      loss = at::empty({}, floats.dtype(inputs.dtype));
      p.dx = data<void>(made.gradients.dx);
      reduce(p, in, Reduction(inputs.reduction), loss, made.grad_scale);
    }
    return made;
  }

  /// Where grad_scale is defined, dx stays undivided, and grad_scale is the divisor.
  static void reduce(DivergenceChunks p, const Contiguous& in, Reduction reduction, const Tensor& loss,
                     const Tensor& grad_scale) {
    const bool mean = reduction != Reduction::Sum;
    const auto floats = loss.options().dtype(at::kFloat);
    Tensor count;
    if (mean && in.labels.defined()) {
      count = at::empty({}, floats);
      run(divergence_count, count,
          {.labels = p.labels, .count = data<float>(count), .rows = p.rows, .ignore_index = p.ignore_index});
    }
    const double divisor = (reduction == Reduction::Mean ? double(in.x.size(1)) : 1) *
                           (mean && !in.labels.defined() ? double(in.x.size(0)) : 1);
    const double scale = 1 / std::max(divisor, 1.);
    const Tensor sums = at::empty({p.rows, ceil_div(p.cols, p.chunk)}, floats);
    p.sums = data<float>(sums);
    if (!grad_scale.defined()) p.count = data<float>(count), p.scale = float(scale);
    run(divergence_chunks, in.x, p);
    run(divergence_total, sums,
        {.sums = p.sums,
         .count = data<float>(count),
         .total = loss.data_ptr(),
         .chunks = sums.numel(),
         .dtype = dtype_of(loss),
         .scale = scale});
    if (!grad_scale.defined()) return;
    grad_scale.fill_(std::max(divisor, 1.));
    if (count.defined()) grad_scale.mul_(count);
  }

  static bool in_forward(const Inputs& in, const NoFields&) { return Reduction(in.reduction) != Reduction::None; }
  static Saved save(const Inputs& in) { return in.of; }

  /// For losses without a reduction: g has x's shape.
  static Tensor backward(const LossGradient& up, const Saved& of) {
    of.check("divergence_backward").shaped("g", up.g, of.x.sym_sizes(), Type::Floating);
    const Tensor dx = output(at::empty_symint(of.x.sym_sizes(), of.x.options()));
    if (dx.is_meta()) return dx;
    const Contiguous in(of);
    const Tensor upstream = up.g.to(at::kFloat).contiguous();
    DivergenceChunks p = in.chunks(of);
    p.upstream = data<float>(upstream), p.dx = dx.data_ptr();
    run(divergence_chunks, in.x, p);
    return dx;
  }
};

}  // namespace op

Tensor kl_div(const Tensor& x, const Tensor& target, Reduction reduction, bool log_target, double eps) {
  return Operator<GradientInForward<op::DivergenceLoss>>::public_op(x, target, OptTensor(),
                                                                    log_target ? Divergence::LogKL : Divergence::KL,
                                                                    eps, int64_t(-100), reduction, at::kFloat);
}

Tensor jsd(const Tensor& x, const Tensor& target, const OptTensor& labels, double beta, int64_t ignore_index,
           Reduction reduction) {
  return Operator<GradientInForward<op::DivergenceLoss>>::public_op(x, target, labels, Divergence::JensenShannon, beta,
                                                                    ignore_index, reduction, x.scalar_type());
}

Tensor tvd(const Tensor& x, const Tensor& target, const OptTensor& labels, Reduction reduction, int64_t ignore_index) {
  return Operator<GradientInForward<op::DivergenceLoss>>::public_op(x, target, labels, Divergence::TotalVariation, 0.,
                                                                    ignore_index, reduction, at::kFloat);
}

LIGER_OPERATORS(divergence, Operator<GradientInForward<op::DivergenceLoss>>)

}  // namespace liger
