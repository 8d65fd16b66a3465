#include "liger/ops/head/linear_distillation.h"
#include "liger/core/torch/options.h"
#include "liger/ops.h"
#include "liger/ops/head/head_op.h"

namespace liger {
namespace op::linear_distillation {

constexpr auto kName = "linear_distillation";
constexpr int64_t kFloatLogitsChunk = 2048;  // tokens at once where logits are float, which take twice as much

struct Options {
  int64_t kind = 2;
  double beta = 0.5, temperature = 1, student_scale = 1, student_softcap = 0, teacher_scale = 1, teacher_softcap = 0;
  int64_t ignore_index = -100;
  bool skip_ignored = true, entropy = false, float_logits = false;
  int64_t max_bytes = 0;
  LIGER_OPTIONS(kind, beta, temperature, student_scale, student_softcap, teacher_scale, teacher_softcap, ignore_index,
                skip_ignored, entropy, float_logits, max_bytes)

  /// A mixture that is one of the two distributions alone is a divergence from the other.
  Distillation formula() const {
    if (Distillation(kind) != Distillation::JensenShannon || (beta > 0 && beta < 1)) return Distillation(kind);
    return beta == 0 ? Distillation::ForwardKL : Distillation::ReverseKL;
  }

  void check() const {
    TORCH_CHECK_VALUE(
        kind >= 0 && kind <= 4, kName,
        ": kind is 0 (forward KL), 1 (reverse KL), 2 (Jensen-Shannon), 3 (total variation) or 4 (cosine), not ", kind);
    TORCH_CHECK_VALUE(beta >= 0 && beta <= 1, kName, ": beta must be in [0, 1], got ", beta);
    TORCH_CHECK_VALUE(temperature > 0, kName, ": temperature must be positive, got ", temperature);
    TORCH_CHECK_VALUE(student_scale > 0 && teacher_scale > 0, kName,
                      ": student_scale and teacher_scale must be positive, got ", student_scale, " and ",
                      teacher_scale);
    TORCH_CHECK_VALUE(student_softcap >= 0 && std::isfinite(student_softcap) && teacher_softcap >= 0 &&
                          std::isfinite(teacher_softcap),
                      kName, ": student_softcap and teacher_softcap must be positive, or 0 for none, got ",
                      student_softcap, " and ", teacher_softcap);
  }
};

using Dtype = std::optional<at::ScalarType>;

/// (Σ soft · divergence + Σ hard · nll, divergence, nll, entropy), float; the last three [tokens].
using Results = std::tuple<Tensor, Tensor, Tensor, Tensor>;
/// Those, the gradients of the sum, empty unless wanted, and the power of two that they are still to be divided by:
/// empty but for float16.
using Forward = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

/// soft, hard [tokens]: the coefficients of divergence and nll in the loss.
Forward forward(const Options& o, const Tensor& student, const Tensor& student_weight, const OptTensor& student_bias,
                const Tensor& teacher, const Tensor& teacher_weight, const OptTensor& teacher_bias,
                const OptTensor& labels, const OptTensor& soft, const OptTensor& hard, Dtype dtype, bool with_dstudent,
                bool with_dweight, bool with_dbias) {
  o.check();
  const Arguments arguments(kName, "student", student);
  TORCH_CHECK(
      student.dim() == 2 && teacher.dim() == 2 && student_weight.dim() == 2 && teacher_weight.dim() == 2, kName,
      ": student and teacher must be [tokens, width] and student_weight and teacher_weight [classes, width], got ",
      student.sym_sizes(), ", ", teacher.sym_sizes(), ", ", student_weight.sym_sizes(), " and ",
      teacher_weight.sym_sizes());
  const c10::SymInt tokens_ = student.sym_size(0), classes = student_weight.sym_size(0);
  TORCH_CHECK_VALUE(classes > 0, kName, ": there must be at least one class");
  arguments.shaped("student_weight", student_weight, {classes, student.sym_size(1)}, Type::Kernels)
      .vector("student_bias", student_bias, classes, Type::Kernels)
      .shaped("teacher", teacher, {tokens_, teacher.sym_size(1)}, Type::Kernels)
      .shaped("teacher_weight", teacher_weight, {classes, teacher.sym_size(1)}, Type::Kernels)
      .vector("teacher_bias", teacher_bias, classes, Type::Kernels)
      .vector("labels", labels, tokens_, Type::Integer)
      .vector("soft", soft, tokens_, Type::Floating)
      .vector("hard", hard, tokens_, Type::Floating)
      .present("hard", hard.has_value(), "labels", labels)
      .present("with_dbias", with_dbias, "student_bias", student_bias);
  TORCH_CHECK_TYPE(!dtype || has_dtype(*dtype), kName,
                   ": dtype, in which it computes, must be float32, float16 or bfloat16");

  const auto floats = student.options().dtype(at::kFloat);
  const auto asked = dtype.value_or(student.scalar_type());
  // The gradients of these logits have no bound, as those of a distance between probabilities have, that would keep
  // them within float16.
  const bool unbounded =
      asked == at::kHalf && (o.formula() == Distillation::ReverseKL || o.formula() == Distillation::Cosine);
  // On a CPU a GEMM's result has its operands' type.
  const auto compute = unbounded || (o.float_logits && student.is_cpu()) ? at::kFloat : asked;
  const bool deferred = compute == at::kHalf && (with_dstudent || with_dweight || with_dbias);
  const Tensor loss = at::zeros({}, floats), power_or_none = deferred ? at::empty({}, floats) : at::empty({0}, floats);
  const auto none = [&] { return at::empty({0}, floats); };
  if (student.is_meta()) {
    const auto like = [&](bool wanted, const OptTensor& t) {
      return wanted
                 ? at::empty_symint(t->sym_sizes(), t->options().dtype(head::gradient_dtype(compute, t->scalar_type())))
                 : none();
    };
    const auto column = [&] { return at::empty_symint({tokens_}, floats); };
    return {loss,
            column(),
            column(),
            o.entropy ? column() : none(),
            like(with_dstudent, student),
            like(with_dweight, student_weight),
            like(with_dbias, student_bias),
            power_or_none};
  }

  const int64_t tokens = student.size(0);
  const Tensor ids = labels ? labels->to(at::kLong).contiguous() : Tensor();
  const Tensor kept =
      ids.defined() && o.skip_ignored
          ? head::kept_tokens(
                ids, o.ignore_index,
                head::kept_count(ids, student_weight, -1, [&] { return ids.ne(o.ignore_index).sum().item<int64_t>(); }))
          : Tensor();
  const auto vector = [&](const OptTensor& t) {
    return t ? head::gather(kept, t->to(at::kFloat)).contiguous() : Tensor();
  };
  const auto operand = [&](const Tensor& t) { return t.to(compute).contiguous(); };
  const Tensor of_labels = ids.defined() ? head::gather(kept, ids) : Tensor(), of_soft = vector(soft),
               of_hard = vector(hard);
  const Tensor x = operand(head::gather(kept, student)), y = operand(head::gather(kept, teacher)),
               y_weight = operand(teacher_weight);
  const Tensor y_bias = teacher_bias ? teacher_bias->to(compute) : Tensor();
  const int64_t n = x.size(0);
  const Tensor divergence = at::empty({n}, floats), nll = at::empty({n}, floats),
               of_entropy = at::empty({o.entropy ? n : 0}, floats);

  // float16 gradients of logits are made of coefficients whose largest is near 2048, so that those of a mean over many
  // tokens do not vanish.
  Tensor scaled_soft = of_soft, scaled_hard = of_hard;
  if (deferred) {
    Tensor largest = at::zeros({1}, floats);
    if (of_soft.defined() && n > 0) largest = at::maximum(largest, of_soft.abs().amax() * (1 / o.temperature));
    if (of_hard.defined() && n > 0) largest = at::maximum(largest, of_hard.abs().amax());
    power_or_none.copy_(head::unit_power(largest).mul_(2048));
    if (of_soft.defined()) scaled_soft = of_soft * power_or_none;
    if (of_hard.defined()) scaled_hard = of_hard * power_or_none;
  }
  const auto logits_dtype = o.float_logits ? at::kFloat : compute;
  // Two heads' logits share the bytes.
  const int64_t a_class = int64_t(c10::elementSize(compute)),
                a_pass = o.float_logits ? 2 * int64_t(c10::elementSize(at::kFloat)) : 2 * a_class;
  const int64_t given = head::budget(o.max_bytes);
  const int64_t bytes = given > 0                 ? std::max<int64_t>(1, given / a_pass * a_class)
                        : logits_dtype != compute ? kFloatLogitsChunk * student_weight.size(0) * a_class
                                                  : 0;
  const head::Pass pass{.of = {x, operand(student_weight), student_bias ? student_bias->to(compute) : Tensor()},
                        .wants = {with_dstudent, with_dweight, with_dbias},
                        .weight_dtype = student_weight.scalar_type(),
                        .max_bytes = bytes,
                        .logits_dtype = logits_dtype};
  Tensor teacher_logits;
  auto d = pass.run([&](const Tensor& z, int64_t begin, int64_t) {
    const int64_t rows = z.size(0);
    const auto of = [&](const Tensor& t) { return t.defined() && t.numel() > 0 ? t.narrow(0, begin, rows) : Tensor(); };
    if (!teacher_logits.defined()) teacher_logits = output(at::empty(z.sizes(), z.options()));
    const Tensor teacher_z = teacher_logits.narrow(0, 0, rows);
    project(teacher_z, y.narrow(0, begin, rows), y_weight, y_bias);
    int64_t bad_label = o.ignore_index;
    run(linear_distillation_rows, z,
        {.x = data(z),
         .y = data(teacher_z),
         .dx = pass.wants.any() ? z.data_ptr() : nullptr,
         .labels = data<int64_t>(of(of_labels)),
         .soft = data<float>(of(scaled_soft)),
         .hard = data<float>(of(scaled_hard)),
         .divergence = data<float>(of(divergence)),
         .nll = data<float>(of(nll)),
         .entropy = data<float>(of(of_entropy)),
         .bad_label = &bad_label,
         .rows = rows,
         .cols = z.size(1),
         .ignore_index = o.ignore_index,
         .x_map = {float(o.student_scale), float(o.student_softcap)},
         .y_map = {float(o.teacher_scale), float(o.teacher_softcap)},
         .inverse_temperature = float(1 / o.temperature),
         .beta = float(o.beta),
         .kind = o.formula(),
         .skip_ignored = o.skip_ignored,
         .dtype = dtype_of(z)});
    TORCH_CHECK_INDEX(bad_label == o.ignore_index, kName, ": label ", bad_label,
                      " is out of bounds: it is outside [0, ", z.size(1), ") and not ignore_index ", o.ignore_index);
  });
  if (of_soft.defined()) loss.add_(at::dot(of_soft, divergence));
  if (of_hard.defined()) loss.add_(at::dot(of_hard, nll));
  const auto all = [&](const Tensor& t) { return head::scatter(kept, t, tokens, 0); };
  const auto saved = [&](const Tensor& t, const OptTensor& like) {
    return t.defined() ? t.to(head::gradient_dtype(compute, like->scalar_type())) : none();
  };
  return {loss,
          all(divergence),
          all(nll),
          o.entropy ? all(of_entropy) : none(),
          saved(d.hidden.defined() ? all(d.hidden) : Tensor(), student),
          saved(d.weight, student_weight),
          saved(d.bias, student_bias),
          power_or_none};
}

Results inference(const Options& o, const Tensor& student, const Tensor& student_weight, const OptTensor& student_bias,
                  const Tensor& teacher, const Tensor& teacher_weight, const OptTensor& teacher_bias,
                  const OptTensor& labels, const OptTensor& soft, const OptTensor& hard, Dtype dtype) {
  const auto all = forward(o, student, student_weight, student_bias, teacher, teacher_weight, teacher_bias, labels,
                           soft, hard, dtype, false, false, false);
  return {std::get<0>(all), std::get<1>(all), std::get<2>(all), std::get<3>(all)};
}

constexpr Op<"liger::linear_distillation", flat<inference>> public_op;
constexpr Op<"liger::linear_distillation_forward", flat<forward>> forward_op;

/// Forward makes the gradients, backward multiplies them.
struct Autograd {
  using Dtypes = std::tuple<bool, int64_t, bool, int64_t, bool, int64_t>;

  static variable_list forward(AutogradContext* ctx, Results* results, const Options& o, const Tensor& student,
                               const Tensor& student_weight, const OptTensor& student_bias, const Tensor& teacher,
                               const Tensor& teacher_weight, const OptTensor& teacher_bias, const OptTensor& labels,
                               const OptTensor& soft, const OptTensor& hard, Dtype dtype) {
    const bool ds = wants_grad(student), dw = wants_grad(student_weight), db = wants_grad(student_bias);
    auto [loss, divergence, nll, of_entropy, dstudent, dweight, dbias, power] =
        with_options(forward_op, o, student, student_weight, student_bias, teacher, teacher_weight, teacher_bias,
                     labels, soft, hard, dtype, ds, dw, db);
    ctx->save_for_backward({dstudent, dweight, dbias, power});
    const auto type = [](const OptTensor& t) { return int64_t(t ? t->scalar_type() : at::kFloat); };
    ctx->saved_data["attrs"] = Dtypes(ds, type(student), dw, type(student_weight), db, type(student_bias));
    *results = {loss, divergence, nll, of_entropy};
    return {loss};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const auto [ds, of_student, dw, of_weight, db, of_bias] = ctx->saved_data["attrs"].to<Dtypes>();
    const Tensor g = saved[3].dim() == 0 ? grads[0] / saved[3] : grads[0];
    variable_list d(3);
    if (ds) d[0] = scaled(saved[0], g).to(at::ScalarType(of_student));
    if (dw) d[1] = scaled(saved[1], g).to(at::ScalarType(of_weight));
    if (db) d[2] = scaled(saved[2], g).to(at::ScalarType(of_bias));
    return d;
  }
};

template <c10::DeviceType kDevice>
Results autocast(const Options& o, const Tensor& student, const Tensor& student_weight, const OptTensor& student_bias,
                 const Tensor& teacher, const Tensor& teacher_weight, const OptTensor& teacher_bias,
                 const OptTensor& labels, const OptTensor& soft, const OptTensor& hard, Dtype dtype) {
  const c10::impl::ExcludeDispatchKeyGuard below_autocast(c10::autocast_dispatch_keyset);
  return with_options(public_op, o, student, student_weight, student_bias, teacher, teacher_weight, teacher_bias,
                      labels, soft, hard, dtype ? dtype : at::autocast::get_autocast_dtype(kDevice));
}

}  // namespace op::linear_distillation

DistillationResult linear_distillation(const Tensor& student, const Tensor& student_weight, const Tensor& teacher,
                                       const Tensor& teacher_weight, const OptTensor& labels,
                                       const DistillationOptions& o, const OptTensor& student_bias,
                                       const OptTensor& teacher_bias) {
  TORCH_CHECK(student.dim() >= 1 && teacher.dim() >= 1,
              "linear_distillation: student and teacher must be [..., width], got ", student.sizes(), " and ",
              teacher.sizes());
  TORCH_CHECK_VALUE(o.hard_weight == 0 || labels, "linear_distillation: hard_weight needs labels");
  const auto flat_rows = [](const Tensor& t) { return t.reshape({-1, t.size(-1)}); };
  const Tensor x = flat_rows(student);
  const OptTensor ids = labels ? OptTensor(labels->reshape(-1)) : std::nullopt;
  const Tensor counts =
      ids ? ids->ne(o.ignore_index).to(at::kFloat) : at::ones({x.size(0)}, x.options().dtype(at::kFloat));
  const Tensor each = counts / counts.sum().clamp_min(1);
  const auto weighted = [&](double weight) { return weight != 0 ? OptTensor(each * weight) : std::nullopt; };
  const op::linear_distillation::Options options{.kind = int64_t(o.kind),
                                                 .beta = o.beta,
                                                 .temperature = o.temperature,
                                                 .student_scale = o.student.scale,
                                                 .student_softcap = o.student.softcap,
                                                 .teacher_scale = o.teacher.scale,
                                                 .teacher_softcap = o.teacher.softcap,
                                                 .ignore_index = o.ignore_index,
                                                 .max_bytes = o.max_bytes};
  auto [loss, divergence, nll, entropy] = with_options(
      op::linear_distillation::public_op, options, x, student_weight, student_bias, flat_rows(teacher), teacher_weight,
      teacher_bias, ids, weighted(o.soft_weight), weighted(o.hard_weight), std::optional<at::ScalarType>());
  return {loss, at::dot(each, divergence), ids ? at::dot(each, nll) : Tensor()};
}

#define LIGER_INPUTS                                                                                             \
  "Tensor student, Tensor student_weight, Tensor? student_bias, Tensor teacher, Tensor teacher_weight, Tensor? " \
  "teacher_bias, Tensor? labels, "                                                                               \
  "Tensor? soft, Tensor? hard, ScalarType? dtype"
TORCH_LIBRARY_FRAGMENT(liger, m) {
  using op::linear_distillation::Options;
  const std::string results = "Tensor loss, Tensor divergence, Tensor nll, Tensor entropy";
  m.def(schema<Options>("linear_distillation(" LIGER_INPUTS, results));
  m.def(schema<Options>("linear_distillation_forward(" LIGER_INPUTS
                        ", bool with_dstudent, bool with_dweight, bool with_dbias",
                        results + ", Tensor dstudent, Tensor dweight, Tensor dbias, Tensor scale"));
}
#undef LIGER_INPUTS
LIGER_IMPL(linear_distillation, m) {
  m.impl("linear_distillation", flat<op::linear_distillation::inference>);
  m.impl("linear_distillation_forward", flat<op::linear_distillation::forward>);
}
TORCH_LIBRARY_IMPL(liger, Autograd, m) {
  m.impl("linear_distillation",
         differentiated<OptionsNode<op::linear_distillation::Autograd>, 3>(op::linear_distillation::public_op));
  refuse_derivative(m, {"linear_distillation_forward"});
}
TORCH_LIBRARY_IMPL(liger, AutocastCUDA, m) {
  m.impl("linear_distillation", flat<op::linear_distillation::autocast<c10::DeviceType::CUDA>>);
}
TORCH_LIBRARY_IMPL(liger, AutocastCPU, m) {
  m.impl("linear_distillation", flat<op::linear_distillation::autocast<c10::DeviceType::CPU>>);
}

}  // namespace liger
