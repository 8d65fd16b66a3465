#include "liger/ops/loss/cross_entropy_op.h"
#include "liger/ops.h"

namespace liger {
namespace op::cross_entropy {

CrossEntropyOptions unpack(at::IntArrayRef flags, at::ArrayRef<double> scales) {
  TORCH_CHECK_VALUE(flags.size() == 5 && scales.size() == 3, "cross_entropy: expected 5 flags and 3 scales, got ", flags.size(), " and ", scales.size());
  return {.ignore_index = flags[0], .reduction = Reduction(flags[1]), .label_smoothing = scales[0], .lse_square_scale = scales[1],
          .softcap = scales[2], .token_scaling = flags[2] != 0, .accuracy = flags[3] != 0, .predicted = flags[4] != 0};
}

std::vector<int64_t> flags(const CrossEntropyOptions& o) {
  return {o.ignore_index, int64_t(o.reduction), o.token_scaling, o.accuracy, o.predicted};
}

std::vector<double> scales(const CrossEntropyOptions& o) { return {o.label_smoothing, o.lse_square_scale, o.softcap}; }

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

Batch::Batch(const Tensor& target, const OptTensor& class_weight, const OptTensor& normalizer, int64_t cols, const CrossEntropyOptions& options)
    : options_(options), rows_(target.size(0)), cols_(cols), target_(target.to(at::kLong).contiguous()), class_weight_(as_float(class_weight)) {
  const auto floats = target.options().dtype(at::kFloat);
  const Tensor divisor = as_float(normalizer);
  stats_ = at::empty({kNorm + (options.accuracy ? 3 : 2) * rows_}, floats);
  int64_t bad_label = options.ignore_index;
  run(cross_entropy_norm, stats_,
      {.target = data<int64_t>(target_), .class_weight = data<float>(class_weight_), .normalizer = data<float>(divisor), .norm = data<float>(stats_),
       .bad_label = &bad_label, .rows = rows_, .cols = cols, .ignore_index = options.ignore_index, .mean = options.reduction == Reduction::Mean});
  TORCH_CHECK_INDEX(bad_label == options.ignore_index, "label ", bad_label, " is out of bounds: it is outside [0, ", cols, ") and not ignore_index ", options.ignore_index);
  predicted_ = at::empty({options.predicted ? rows_ : 0}, target_.options());
}

void Batch::run_rows(const Tensor& x, const Tensor& dx, int64_t begin, const Tensor& upstream) {
  float* stats = data<float>(stats_) + kNorm + begin;
  run(cross_entropy_rows, x,
      {.x = data(x), .dx = data<void>(dx), .x_stride = x.stride(0), .dx_stride = dx.defined() ? dx.stride(0) : 0,
       .target = data<int64_t>(target_) + begin, .class_weight = data<float>(class_weight_), .norm = data<float>(stats_),
       .upstream = upstream.defined() ? data<float>(upstream) + begin : nullptr, .loss = stats, .z_loss = stats + rows_,
       .correct = options_.accuracy ? stats + 2 * rows_ : nullptr, .predicted = options_.predicted ? data<int64_t>(predicted_) + begin : nullptr,
       .rows = x.size(0), .cols = cols_, .ignore_index = options_.ignore_index, .label_smoothing = float(options_.label_smoothing),
       .lse_square_scale = float(options_.lse_square_scale), .softcap = float(options_.softcap), .token_scaling = options_.token_scaling,
       .dtype = dtype_of(x)});
}

Results Batch::results(at::ScalarType loss_dtype, at::ScalarType z_loss_dtype) {
  const Tensor none = at::empty({0}, stats_.options());
  if (options_.reduction == Reduction::None)
    return {of_row(0).to(loss_dtype), of_row(1).to(z_loss_dtype), options_.accuracy ? of_row(2) : none, predicted_};
  Tensor loss = at::empty({}, stats_.options().dtype(loss_dtype)), z_loss = at::empty_like(loss), accuracy = options_.accuracy ? at::empty({}, stats_.options()) : none;
  const float* rows = data<float>(stats_) + kNorm;
  run(cross_entropy_total, stats_,
      {.loss = rows, .z_loss = rows + rows_, .correct = options_.accuracy ? rows + 2 * rows_ : nullptr, .norm = data<float>(stats_), .loss_total = loss.data_ptr(), .z_loss_total = z_loss.data_ptr(),
       .accuracy = options_.accuracy ? data<float>(accuracy) : nullptr, .rows = rows_, .dtype = dtype_of(loss)});
  return {loss, z_loss.to(z_loss_dtype), accuracy, predicted_};
}

Results empty_results(const Tensor& target, const CrossEntropyOptions& o, at::ScalarType loss_dtype, at::ScalarType z_loss_dtype, const at::TensorOptions& options) {
  const auto shape = o.reduction == Reduction::None ? c10::SymDimVector{target.sym_size(0)} : c10::SymDimVector{};
  const auto of = [&](bool wanted, c10::SymIntArrayRef shape, at::ScalarType dtype) {
    return wanted ? at::empty_symint(shape, options.dtype(dtype)) : at::empty({0}, options.dtype(dtype));
  };
  return {of(true, shape, loss_dtype), of(true, shape, z_loss_dtype), of(o.accuracy, shape, at::kFloat), of(o.predicted, target.sym_sizes(), at::kLong)};
}

using Forward = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

Forward forward(const Tensor& x_, const Tensor& target, const OptTensor& class_weight, at::IntArrayRef flags, at::ArrayRef<double> scales, bool with_dx) {
  const CrossEntropyOptions options = unpack(flags, scales);
  check_rows("cross_entropy", x_);
  TORCH_CHECK(x_.dim() == 2, "cross_entropy: expected logits [rows, classes], got ", x_.sym_sizes());
  check_target("cross_entropy", target, x_.sym_size(0), x_.device());
  check_options("cross_entropy", options, class_weight, x_.sym_size(1));
  const auto dtype = x_.scalar_type();
  const Tensor dx = with_dx ? output(at::empty_symint(x_.sym_sizes(), x_.options())) : at::empty({0}, x_.options());
  const auto all = [&](const Results& r) { return std::tuple_cat(r, std::make_tuple(dx)); };
  if (x_.is_meta()) return all(empty_results(target, options, dtype, dtype, x_.options()));
  const Rows x(x_);
  Batch batch(target, class_weight, {}, x_.size(1), options);
  batch.run_rows(x.tensor, with_dx ? dx : Tensor(), 0, {});
  return all(batch.results(dtype, dtype));
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
                               at::IntArrayRef flags, at::ArrayRef<double> scales) {
    auto [loss, z_loss, accuracy, predicted, dx] = forward_op(x, target, class_weight, flags, scales, true);
    ctx->save_for_backward({dx});
    ctx->mark_non_differentiable({z_loss, accuracy, predicted});
    return {loss, z_loss, accuracy, predicted};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    return {scaled(ctx->get_saved_variables()[0], grads[0]), {}, {}, {}, {}};
  }
};

}  // namespace op::cross_entropy

CrossEntropyResult cross_entropy(const Tensor& x, const Tensor& target, const CrossEntropyOptions& options, const OptTensor& class_weight) {
  using namespace op::cross_entropy;
  auto [loss, z_loss, accuracy, predicted] = public_op(x, target, class_weight, flags(options), scales(options));
  return {loss, z_loss, accuracy, predicted};
}

TORCH_LIBRARY_FRAGMENT(liger, m) {
  // flags: ignore_index, reduction, token_scaling, accuracy, predicted; scales: label_smoothing, lse_square_scale, softcap.
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
