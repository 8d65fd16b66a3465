#include "liger/ops/loss/cross_entropy_op.h"
#include "liger/core/torch/gradient_in_forward.h"
#include "liger/functions/loss.h"

namespace liger {
namespace op::cross_entropy {

CrossEntropyOptions checked(const char* op, CrossEntropyOptions o, const c10::SymInt& classes) {
  TORCH_CHECK_VALUE(int(o.reduction) >= 0 && int(o.reduction) <= 2, op,
                    ": reduction is 0 (none), 1 (mean) or 2 (sum), not ", int(o.reduction));
  TORCH_CHECK_VALUE(o.label_smoothing >= 0 && o.label_smoothing <= 1, op, ": label_smoothing must be in [0, 1], got ",
                    o.label_smoothing);
  TORCH_CHECK_VALUE(o.softcap >= 0, op, ": softcap must be positive, or 0 for none, got ", o.softcap);
  TORCH_CHECK_VALUE(classes > 0, op, ": there must be at least one class");
  if (o.softcap == std::numeric_limits<double>::infinity()) o.softcap = 0;
  return o;
}

namespace {
Tensor as_float(const OptTensor& t) { return t ? t->to(at::kFloat).contiguous() : Tensor(); }
}  // namespace

Batch::Batch(const Tensor& target, const OptTensor& class_weight, const OptTensor& normalizer, int64_t cols,
             const CrossEntropyOptions& options, at::ScalarType dtype, bool scaled)
    : options_(options),
      rows_(target.numel()),
      cols_(cols),
      target_(target.to(at::kLong).contiguous()),
      class_weight_(as_float(class_weight)),
      reduced_(options.reduction != Reduction::None),
      dtype_(dtype) {
  const auto floats = target.options().dtype(at::kFloat);
  const Tensor divisor = as_float(normalizer),
               largest_weight = scaled && class_weight_.defined() ? class_weight_.abs().amax() : Tensor();
  stats_ = at::empty({kSums + (reduced_ ? (1 + options.z_loss + options.accuracy) * rows_ : 0)}, floats);
  int64_t bad_label = options.ignore_index;
  run(cross_entropy_norm, stats_,
      {.target = data<int64_t>(target_),
       .class_weight = data<float>(class_weight_),
       .normalizer = data<float>(divisor),
       .largest_weight = data<float>(largest_weight),
       .sums = sums(),
       .bad_label = &bad_label,
       .rows = rows_,
       .cols = cols,
       .ignore_index = options.ignore_index,
       .mean = options.reduction == Reduction::Mean,
       .z_bound = scaled
                      ? float(2 * std::abs(options.lse_square_scale) * (options.softcap > 0 ? options.softcap : 65504))
                      : -1});
  TORCH_CHECK_INDEX(bad_label == options.ignore_index, "label ", bad_label, " is out of bounds: it is outside [0, ",
                    cols, ") and not ignore_index ", options.ignore_index);
  if (options.predicted) predicted_ = at::empty({rows_}, target_.options());
  const auto result = [&](at::ScalarType of, float without_rows) {
    if (!reduced_) return at::empty({rows_}, floats);
    return rows_ > 0 ? at::empty({}, floats.dtype(of)) : at::full({}, without_rows, floats.dtype(of));
  };
  loss_ = result(dtype, 0);
  if (options.z_loss) z_loss_ = result(dtype, 0);
  if (options.accuracy) accuracy_ = result(at::kFloat, NAN);
}

float* Batch::of_rows(int which, int64_t begin) const {
  if ((which == 1 && !options_.z_loss) || (which == 2 && !options_.accuracy)) return nullptr;
  if (!reduced_) return data<float>(which == 0 ? loss_ : which == 1 ? z_loss_ : accuracy_) + begin;
  return data<float>(stats_) + kSums + (which == 2 ? 1 + options_.z_loss : which) * rows_ + begin;
}

Tensor Batch::gradient_scale() const {
  return stats_.select(0, offsetof(CrossEntropySums, gradient_scale) / sizeof(float));
}

int64_t Batch::valid() const {
  return stats_.narrow(0, offsetof(CrossEntropySums, valid) / sizeof(float), sizeof(int64_t) / sizeof(float))
      .view(at::kLong)
      .item<int64_t>();
}

void Batch::run_rows(const Tensor& x, const Tensor& dx, int64_t begin, const Tensor& upstream) {
  CrossEntropyTotals totals{};
  if (reduced_ && begin + x.size(0) == rows_)
    totals = {.loss = of_rows(0, 0),
              .z_loss = of_rows(1, 0),
              .correct = of_rows(2, 0),
              .loss_total = loss_.data_ptr(),
              .z_loss_total = data<void>(z_loss_),
              .accuracy = data<float>(accuracy_),
              .rows = rows_,
              .dtype = dtype_of(loss_)};
  run(cross_entropy_rows, x,
      {.x = data(x),
       .dx = data<void>(dx),
       .x_stride = x.stride(0),
       .dx_stride = dx.defined() ? dx.stride(0) : 0,
       .target = data<int64_t>(target_) + begin,
       .class_weight = data<float>(class_weight_),
       .sums = sums(),
       .upstream = upstream.defined() ? data<float>(upstream) + begin : nullptr,
       .loss = of_rows(0, begin),
       .z_loss = of_rows(1, begin),
       .correct = of_rows(2, begin),
       .predicted = options_.predicted ? data<int64_t>(predicted_) + begin : nullptr,
       .rows = x.size(0),
       .cols = cols_,
       .ignore_index = options_.ignore_index,
       .label_smoothing = float(options_.label_smoothing),
       .lse_square_scale = float(options_.lse_square_scale),
       .softcap = float(options_.softcap),
       .token_scaling = options_.token_scaling,
       .dtype = dtype_of(x),
       .totals = totals});
}

CrossEntropyResult Batch::results(at::ScalarType z_loss_dtype) const {
  const auto as = [](const Tensor& t, at::ScalarType dtype) { return t.defined() ? t.to(dtype) : t; };
  return {loss_.to(dtype_), as(z_loss_, z_loss_dtype), accuracy_, predicted_};
}

CrossEntropyResult empty_results(const Tensor& target, const CrossEntropyOptions& o, at::ScalarType loss_dtype,
                                 at::ScalarType z_loss_dtype, const at::TensorOptions& options) {
  const auto shape = o.reduction == Reduction::None ? target.sym_sizes() : c10::SymIntArrayRef();
  const auto of = [&](bool wanted, c10::SymIntArrayRef shape, at::ScalarType dtype) {
    return wanted ? at::empty_symint(shape, options.dtype(dtype)) : Tensor();
  };
  return {of(true, shape, loss_dtype), of(o.z_loss, shape, z_loss_dtype), of(o.accuracy, shape, at::kFloat),
          of(o.predicted, target.sym_sizes(), at::kLong)};
}

CrossEntropyResult asked_for(CrossEntropyResult r, const CrossEntropyOptions& o) {
  if (!o.z_loss) r.z_loss.reset();
  if (!o.accuracy) r.accuracy.reset();
  if (!o.predicted) r.predicted.reset();
  return r;
}

}  // namespace op::cross_entropy

namespace op {

struct CrossEntropy {
  static constexpr Name kName = "cross_entropy";
  struct Inputs {
    Tensor x, target;
    OptTensor class_weight;
    LIGER_FIELDS(x, target, class_weight)
  };
  using Options = CrossEntropyOptions;
  template <class T>
  using Gradients = Dx<T>;

  /// In float16 a mean's gradients would vanish before a loss scale reaches them.
  static Made<CrossEntropyResult, Dx> forward(const Inputs& in, const Dx<bool>& wanted, const Options& given) {
    const Tensor& target = in.target;
    Arguments("cross_entropy", "x", in.x)
        .shaped("target", target, in.x.sym_sizes().slice(0, in.x.dim() - 1), Type::Integer)
        .vector("class_weight", in.class_weight, in.x.sym_size(-1), Type::Floating);
    const Options options = cross_entropy::checked("cross_entropy", given, in.x.sym_size(-1));
    const auto dtype = in.x.scalar_type();
    const bool scaled = wanted.dx && dtype == at::kHalf;
    Made<CrossEntropyResult, Dx> made;
    if (wanted.dx) made.gradients.dx = output(at::empty_symint(in.x.sym_sizes(), in.x.options()));
    if (in.x.is_meta()) {
      made.results = cross_entropy::empty_results(target, options, dtype, dtype, in.x.options());
      if (scaled) made.grad_scale = at::empty({}, in.x.options().dtype(at::kFloat));
      return made;
    }
    const Rows x(in.x);
    const auto matrix = [&](const Tensor& t, int64_t stride) {
      return t.dim() == 2 ? t : t.as_strided({target.numel(), cols(t)}, {stride, 1});
    };
    cross_entropy::Batch batch(target, in.class_weight, {}, cols(in.x), options, dtype, scaled);
    batch.run_rows(matrix(x.tensor, x.stride), wanted.dx ? matrix(made.gradients.dx, cols(in.x)) : Tensor(), 0, {});
    made.results = batch.results(dtype);
    if (scaled) made.grad_scale = batch.gradient_scale().clone();
    if (target.dim() == 1) return made;
    const bool each = options.reduction == Reduction::None;
    auto& [loss, z_loss, accuracy, predicted] = made.results;
    for (Tensor* t : {&loss, &z_loss, &accuracy})
      if (each && t->defined()) *t = t->view(target.sizes());
    if (predicted.defined()) predicted = predicted.view(target.sizes());
    return made;
  }
};

}  // namespace op

CrossEntropyResult cross_entropy(const Tensor& x, const Tensor& target, const CrossEntropyOptions& options,
                                 const OptTensor& class_weight) {
  using namespace op::cross_entropy;
  return asked_for(as_fields<CrossEntropyResult>(
                       Operator<GradientInForward<op::CrossEntropy>>::public_op(x, target, class_weight, options)),
                   options);
}

LIGER_OPERATORS(cross_entropy, Operator<GradientInForward<op::CrossEntropy>>)

}  // namespace liger
