#include "liger/ops/loss/cross_entropy_op.h"
#include "liger/ops.h"

namespace liger {
namespace op::cross_entropy {

CrossEntropyOptions unpack(at::IntArrayRef flags, at::ArrayRef<double> scales) {
  TORCH_CHECK_VALUE((flags.empty() || flags.size() == 6) && (scales.empty() || scales.size() == 3), "cross_entropy: expected 6 flags and 3 scales, or none, got ",
                    flags.size(), " and ", scales.size());
  CrossEntropyOptions o;
  if (!flags.empty()) {
    o.ignore_index = flags[0], o.reduction = Reduction(flags[1]), o.token_scaling = flags[2] != 0;
    o.z_loss = flags[3] != 0, o.accuracy = flags[4] != 0, o.predicted = flags[5] != 0;
  }
  if (!scales.empty()) o.label_smoothing = scales[0], o.lse_square_scale = scales[1], o.softcap = scales[2];
  return o;
}

std::vector<int64_t> flags(const CrossEntropyOptions& o) {
  if (o == CrossEntropyOptions()) return {};
  return {o.ignore_index, int64_t(o.reduction), o.token_scaling, o.z_loss, o.accuracy, o.predicted};
}

std::vector<double> scales(const CrossEntropyOptions& o) {
  if (o == CrossEntropyOptions()) return {};
  return {o.label_smoothing, o.lse_square_scale, o.softcap};
}

void check_target(const char* op, const Tensor& target, const c10::SymInt& rows, c10::Device device) {
  TORCH_CHECK(target.dim() == 1 && target.sym_size(0) == rows, op, ": target must be [", rows, "], got ", target.sym_sizes());
  TORCH_CHECK_TYPE(at::isIntegralType(target.scalar_type(), false), op, ": target must hold class indices, got ", target.scalar_type());
  TORCH_CHECK(target.device() == device, op, ": target is on ", target.device(), ", the input on ", device);
}

void check_options(const char* op, const CrossEntropyOptions& o, const OptTensor& class_weight, const c10::SymInt& cols) {
  TORCH_CHECK_VALUE(int(o.reduction) >= 0 && int(o.reduction) <= 2, op, ": reduction is 0 (none), 1 (mean) or 2 (sum), not ", int(o.reduction));
  TORCH_CHECK_VALUE(o.label_smoothing >= 0 && o.label_smoothing <= 1, op, ": label_smoothing must be in [0, 1], got ", o.label_smoothing);
  TORCH_CHECK_VALUE(o.softcap >= 0, op, ": softcap must be positive, or 0 for none, got ", o.softcap);
  if (!class_weight) return;
  TORCH_CHECK(class_weight->dim() == 1 && class_weight->sym_size(0) == cols, op, ": class weight must be [", cols, "], got ", class_weight->sym_sizes());
  TORCH_CHECK_TYPE(class_weight->is_floating_point(), op, ": class weight must be floating point, got ", class_weight->scalar_type());
}

namespace {
Tensor as_float(const OptTensor& t) { return t ? t->to(at::kFloat).contiguous() : Tensor(); }
}  // namespace

Batch::Batch(const Tensor& target, const OptTensor& class_weight, const OptTensor& normalizer, int64_t cols, const CrossEntropyOptions& options, at::ScalarType dtype)
    : options_(options), rows_(target.size(0)), cols_(cols), target_(target.to(at::kLong).contiguous()), class_weight_(as_float(class_weight)),
      reduced_(options.reduction != Reduction::None), dtype_(dtype) {
  const auto floats = target.options().dtype(at::kFloat);
  const Tensor divisor = as_float(normalizer);
  stats_ = at::empty({kSums + (1 + options.z_loss + options.accuracy) * rows_}, floats);
  int64_t bad_label = options.ignore_index;
  run(cross_entropy_norm, stats_,
      {.target = data<int64_t>(target_), .class_weight = data<float>(class_weight_), .normalizer = data<float>(divisor), .sums = sums(),
       .bad_label = &bad_label, .rows = rows_, .cols = cols, .ignore_index = options.ignore_index, .mean = options.reduction == Reduction::Mean});
  TORCH_CHECK_INDEX(bad_label == options.ignore_index, "label ", bad_label, " is out of bounds: it is outside [0, ", cols, ") and not ignore_index ", options.ignore_index);
  if (options.predicted) predicted_ = at::empty({rows_}, target_.options());
  if (!reduced_) return;
  const auto total = [&](at::ScalarType of, float without_rows) {
    return rows_ > 0 ? at::empty({}, floats.dtype(of)) : at::full({}, without_rows, floats.dtype(of));
  };
  loss_ = total(dtype, 0);
  if (options.z_loss) z_loss_ = total(dtype, 0);
  if (options.accuracy) accuracy_ = total(at::kFloat, NAN);
}

float* Batch::of_rows(int which, int64_t begin) const {
  if ((which == 1 && !options_.z_loss) || (which == 2 && !options_.accuracy)) return nullptr;
  return data<float>(stats_) + kSums + (which == 2 ? 1 + options_.z_loss : which) * rows_ + begin;
}

Tensor Batch::of_rows(int which) const {
  float* first = of_rows(which, 0);
  return first ? stats_.narrow(0, first - data<float>(stats_), rows_) : Tensor();
}

int64_t Batch::valid() const {
  return stats_.narrow(0, offsetof(CrossEntropySums, valid) / sizeof(float), sizeof(int64_t) / sizeof(float)).view(at::kLong).item<int64_t>();
}

void Batch::run_rows(const Tensor& x, const Tensor& dx, int64_t begin, const Tensor& upstream) {
  CrossEntropyTotals totals{};
  if (reduced_ && begin + x.size(0) == rows_)
    totals = {.loss = of_rows(0, 0), .z_loss = of_rows(1, 0), .correct = of_rows(2, 0), .loss_total = loss_.data_ptr(), .z_loss_total = data<void>(z_loss_),
              .accuracy = data<float>(accuracy_), .rows = rows_, .dtype = dtype_of(loss_)};
  run(cross_entropy_rows, x,
      {.x = data(x), .dx = data<void>(dx), .x_stride = x.stride(0), .dx_stride = dx.defined() ? dx.stride(0) : 0,
       .target = data<int64_t>(target_) + begin, .class_weight = data<float>(class_weight_), .sums = sums(),
       .upstream = upstream.defined() ? data<float>(upstream) + begin : nullptr, .loss = of_rows(0, begin), .z_loss = of_rows(1, begin),
       .correct = of_rows(2, begin), .predicted = options_.predicted ? data<int64_t>(predicted_) + begin : nullptr,
       .rows = x.size(0), .cols = cols_, .ignore_index = options_.ignore_index, .label_smoothing = float(options_.label_smoothing),
       .lse_square_scale = float(options_.lse_square_scale), .softcap = float(options_.softcap), .token_scaling = options_.token_scaling,
       .dtype = dtype_of(x), .totals = totals});
}

Results Batch::results(at::ScalarType z_loss_dtype) const {
  const auto in = [](const Tensor& t, at::ScalarType dtype) { return t.defined() ? t.to(dtype) : t; };
  if (!reduced_) return {of_rows(0).to(dtype_), in(of_rows(1), z_loss_dtype), of_rows(2), predicted_};
  return {loss_, in(z_loss_, z_loss_dtype), accuracy_, predicted_};
}

Results empty_results(const Tensor& target, const CrossEntropyOptions& o, at::ScalarType loss_dtype, at::ScalarType z_loss_dtype, const at::TensorOptions& options) {
  const auto shape = o.reduction == Reduction::None ? c10::SymDimVector{target.sym_size(0)} : c10::SymDimVector{};
  const auto of = [&](bool wanted, c10::SymIntArrayRef shape, at::ScalarType dtype) { return wanted ? at::empty_symint(shape, options.dtype(dtype)) : Tensor(); };
  return {of(true, shape, loss_dtype), of(o.z_loss, shape, z_loss_dtype), of(o.accuracy, shape, at::kFloat), of(o.predicted, target.sym_sizes(), at::kLong)};
}

using Forward = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

Forward forward(const Tensor& x_, const Tensor& target, const OptTensor& class_weight, at::IntArrayRef flags, at::ArrayRef<double> scales, bool with_dx) {
  const CrossEntropyOptions options = unpack(flags, scales);
  check_rows("cross_entropy", x_);
  TORCH_CHECK(x_.dim() == 2, "cross_entropy: expected logits [rows, classes], got ", x_.sym_sizes());
  check_target("cross_entropy", target, x_.sym_size(0), x_.device());
  check_options("cross_entropy", options, class_weight, x_.sym_size(1));
  const auto dtype = x_.scalar_type();
  const Tensor dx = with_dx ? output(at::empty_symint(x_.sym_sizes(), x_.options())) : Tensor();
  const auto all = [&](const Results& r) { return std::tuple_cat(r, std::make_tuple(dx)); };
  if (x_.is_meta()) return all(empty_results(target, options, dtype, dtype, x_.options()));
  const Rows x(x_);
  Batch batch(target, class_weight, {}, x_.size(1), options, dtype);
  batch.run_rows(x.tensor, dx, 0, {});
  return all(batch.results(dtype));
}

Results inference(const Tensor& x, const Tensor& target, const OptTensor& class_weight, at::IntArrayRef flags, at::ArrayRef<double> scales) {
  auto [loss, z_loss, accuracy, predicted, dx] = forward(x, target, class_weight, flags, scales, false);
  return {loss, z_loss, accuracy, predicted};
}

constexpr Op<"liger::cross_entropy", inference> public_op;
constexpr Op<"liger::cross_entropy_forward", forward> forward_op;

/// The gradient is made in forward, where the row is on chip; backward scales it by the upstream gradient.
struct Autograd : torch::autograd::Function<Autograd> {
  static variable_list forward(AutogradContext* ctx, const Tensor& x, const Tensor& target, const OptTensor& class_weight,
                               at::IntArrayRef flags, at::ArrayRef<double> scales, Results* results) {
    auto [loss, z_loss, accuracy, predicted, dx] = forward_op(x, target, class_weight, flags, scales, true);
    ctx->save_for_backward({dx});
    *results = {loss, z_loss, accuracy, predicted};
    return {loss};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    return {scaled(ctx->get_saved_variables()[0], grads[0]), {}, {}, {}, {}, {}};
  }
};

}  // namespace op::cross_entropy

CrossEntropyResult cross_entropy(const Tensor& x, const Tensor& target, const CrossEntropyOptions& options, const OptTensor& class_weight) {
  using namespace op::cross_entropy;
  auto [loss, z_loss, accuracy, predicted] = public_op(x, target, class_weight, flags(options), scales(options));
  return {loss, z_loss, accuracy, predicted};
}

TORCH_LIBRARY_FRAGMENT(liger, m) {
  // flags: ignore_index, reduction, token_scaling, z_loss, accuracy, predicted; scales: label_smoothing, lse_square_scale, softcap. Empty lists
  // stand for the defaults: a list from Python is read element by element.
  m.def("cross_entropy(Tensor x, Tensor target, Tensor? class_weight, int[] flags, float[] scales) "
        "-> (Tensor loss, Tensor z_loss, Tensor accuracy, Tensor predicted)");
  m.def("cross_entropy_forward(Tensor x, Tensor target, Tensor? class_weight, int[] flags, float[] scales, bool with_dx) "
        "-> (Tensor loss, Tensor z_loss, Tensor accuracy, Tensor predicted, Tensor dx)");
}
LIGER_IMPL(cross_entropy, m) {
  m.impl("cross_entropy", op::cross_entropy::inference);
  m.impl("cross_entropy_forward", op::cross_entropy::forward);
}
TORCH_LIBRARY_IMPL(liger, Autograd, m) {
  m.impl("cross_entropy", differentiated<op::cross_entropy::Autograd, 1>(op::cross_entropy::public_op));
  refuse_derivative(m, {"cross_entropy_forward"});
}

}  // namespace liger
