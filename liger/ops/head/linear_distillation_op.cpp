#include "liger/ops/head/linear_distillation.h"
#include "liger/core/torch/gradient_in_forward.h"
#include "liger/functions/head.h"
#include "liger/ops/head/head_op.h"

namespace liger {
namespace op {

struct LinearDistillation {
  static constexpr Name kName = "linear_distillation";
  static constexpr Autocast kAutocast = Autocast::Compute;
  static constexpr int64_t kFloatLogitsChunk = 2048;  // tokens at once where logits are float, which take twice as much

  struct Options : DistillationOptions {
    bool skip_ignored = true, entropy = false, float_logits = false;
    LIGER_OPTIONS(kind, beta, temperature, student.scale, student.softcap, teacher.scale, teacher.softcap, ignore_index,
                  skip_ignored, entropy, float_logits, max_bytes)

    /// A mixture of only one of the two distributions is a divergence from the other.
    Distillation formula() const {
      if (kind != Distillation::JensenShannon || (beta > 0 && beta < 1)) return kind;
      return beta == 0 ? Distillation::ForwardKL : Distillation::ReverseKL;
    }

    void check() const {
      TORCH_CHECK_VALUE(
          int(kind) >= 0 && int(kind) <= 4, kName.text,
          ": kind is 0 (forward KL), 1 (reverse KL), 2 (Jensen-Shannon), 3 (total variation) or 4 (cosine), not ",
          int(kind));
      TORCH_CHECK_VALUE(beta >= 0 && beta <= 1, kName.text, ": beta must be in [0, 1], got ", beta);
      TORCH_CHECK_VALUE(temperature > 0, kName.text, ": temperature must be positive, got ", temperature);
      TORCH_CHECK_VALUE(student.scale > 0 && teacher.scale > 0, kName.text,
                        ": student_scale and teacher_scale must be positive, got ", student.scale, " and ",
                        teacher.scale);
      TORCH_CHECK_VALUE(student.softcap >= 0 && std::isfinite(student.softcap) && teacher.softcap >= 0 &&
                            std::isfinite(teacher.softcap),
                        kName.text, ": student_softcap and teacher_softcap must be positive, or 0 for none, got ",
                        student.softcap, " and ", teacher.softcap);
    }
  };
  struct Inputs {
    Tensor student, student_weight;
    OptTensor student_bias;
    Tensor teacher, teacher_weight;
    OptTensor teacher_bias, labels;
    OptTensor soft, hard;  // [tokens]: the coefficients of divergence and nll in the loss
    OptDtype dtype;
    LIGER_FIELDS(student, student_weight, student_bias, teacher, teacher_weight, teacher_bias, labels, soft, hard,
                 dtype)
  };
  /// Σ soft · divergence + Σ hard · nll, and [tokens] each, float.
  struct Results {
    Tensor loss, divergence, nll, entropy;
    LIGER_FIELDS(loss, divergence, nll, entropy)
  };
  template <class T>
  struct Gradients {
    T dstudent, dweight, dbias;
    LIGER_FIELDS(dstudent, dweight, dbias)
  };
  using Made = liger::Made<Results, Gradients>;

  static void check(const Inputs& in, const Gradients<bool>& wanted, const Options& o) {
    constexpr auto op = kName.text;
    o.check();
    const Arguments arguments(op, "student", in.student);
    TORCH_CHECK(
        in.student.dim() == 2 && in.teacher.dim() == 2 && in.student_weight.dim() == 2 && in.teacher_weight.dim() == 2,
        op,
        ": student and teacher must be [tokens, width] and student_weight and teacher_weight [classes, width], "
        "got ",
        in.student.sym_sizes(), ", ", in.teacher.sym_sizes(), ", ", in.student_weight.sym_sizes(), " and ",
        in.teacher_weight.sym_sizes());
    const c10::SymInt tokens = in.student.sym_size(0), classes = in.student_weight.sym_size(0);
    TORCH_CHECK_VALUE(classes > 0, op, ": there must be at least one class");
    arguments.shaped("student_weight", in.student_weight, {classes, in.student.sym_size(1)}, Type::Kernels)
        .vector("student_bias", in.student_bias, classes, Type::Kernels)
        .shaped("teacher", in.teacher, {tokens, in.teacher.sym_size(1)}, Type::Kernels)
        .shaped("teacher_weight", in.teacher_weight, {classes, in.teacher.sym_size(1)}, Type::Kernels)
        .vector("teacher_bias", in.teacher_bias, classes, Type::Kernels)
        .vector("labels", in.labels, tokens, Type::Integer)
        .vector("soft", in.soft, tokens, Type::Floating)
        .vector("hard", in.hard, tokens, Type::Floating)
        .present("hard", in.hard.has_value(), "labels", in.labels)
        .present("with_dbias", wanted.dbias, "student_bias", in.student_bias);
    TORCH_CHECK_TYPE(!in.dtype || has_dtype(*in.dtype), op,
                     ": dtype, in which it computes, must be float32, float16 or bfloat16");
  }

  /// The dtype of the GEMMs.
  static at::ScalarType compute_dtype(const Inputs& in, const Options& o) {
    const auto asked = in.dtype.value_or(in.student.scalar_type());
    // The gradients of these logits have no bound, as those of a distance between probabilities have, that would keep
    // them within float16.
    const bool unbounded =
        asked == at::kHalf && (o.formula() == Distillation::ReverseKL || o.formula() == Distillation::Cosine);
    // On a CPU a GEMM's result has its operands' type.
    return unbounded || (o.float_logits && in.student.is_cpu()) ? at::kFloat : asked;
  }

  static Made empty(const Inputs& in, const Gradients<bool>& wanted, const Options& o, at::ScalarType compute,
                    bool deferred) {
    const auto floats = in.student.options().dtype(at::kFloat);
    const auto column = [&](bool wanted) {
      return wanted ? at::empty_symint({in.student.sym_size(0)}, floats) : Tensor();
    };
    const auto like = [&](bool wanted, const OptTensor& t) {
      if (!wanted) return Tensor();
      return at::empty_symint(t->sym_sizes(), t->options().dtype(head::gradient_dtype(compute, t->scalar_type())));
    };
    return {{at::empty({}, floats), column(true), column(true), column(o.entropy)},
            {like(wanted.dstudent, in.student), like(wanted.dweight, in.student_weight),
             like(wanted.dbias, in.student_bias)},
            deferred ? at::empty({}, floats) : Tensor()};
  }

  /// The hidden states of the tokens that count, and what the two heads make of them.
  struct CountedTokens {
    const Options& o;
    Tensor kept, labels, soft, hard;
    Tensor x, y, y_weight, y_bias;           // in the dtype of the GEMMs
    Tensor power, scaled_soft, scaled_hard;  // what float16 gradients are made of
    Tensor divergence, nll, entropy;         // results
    Tensor teacher_logits;                   // of a chunk

    CountedTokens(const Inputs& in, const Options& o, at::ScalarType compute, bool deferred) : o(o) {
      const Tensor ids = in.labels ? in.labels->to(at::kLong).contiguous() : Tensor();
      if (ids.defined() && o.skip_ignored)
        kept = head::kept_tokens(ids, o.ignore_index, head::kept_count(ids, in.student_weight, -1, [&] {
                                   return ids.ne(o.ignore_index).sum().item<int64_t>();
                                 }));
      const auto vector = [&](const OptTensor& t) {
        return t ? head::gather(kept, t->to(at::kFloat)).contiguous() : Tensor();
      };
      const auto operand = [&](const Tensor& t) { return t.to(compute).contiguous(); };
      labels = ids.defined() ? head::gather(kept, ids) : Tensor(), soft = vector(in.soft), hard = vector(in.hard);
      x = operand(head::gather(kept, in.student)), y = operand(head::gather(kept, in.teacher));
      y_weight = operand(in.teacher_weight), y_bias = in.teacher_bias ? in.teacher_bias->to(compute) : Tensor();
      const auto floats = x.options().dtype(at::kFloat);
      divergence = at::empty({x.size(0)}, floats), nll = at::empty({x.size(0)}, floats);
      if (o.entropy) entropy = at::empty({x.size(0)}, floats);
      scaled_soft = soft, scaled_hard = hard;
      if (deferred) scale_coefficients(floats);
    }

    /// float16 gradients of logits are made of coefficients whose largest is near 2048, so that those of a mean over
    /// many tokens do not vanish.
    void scale_coefficients(const at::TensorOptions& floats) {
      Tensor largest = at::zeros({1}, floats);
      const bool any = x.size(0) > 0;
      if (soft.defined() && any) largest = at::maximum(largest, soft.abs().amax() * (1 / o.temperature));
      if (hard.defined() && any) largest = at::maximum(largest, hard.abs().amax());
      power = head::unit_power(largest).mul_(2048);
      if (soft.defined()) scaled_soft = soft * power;
      if (hard.defined()) scaled_hard = hard * power;
    }

    /// The student's logits z of tokens from `begin` on become their gradient, if it is wanted.
    void run(const Tensor& z, int64_t begin, bool wanted) {
      const int64_t rows = z.size(0);
      const auto of = [&](const Tensor& t) { return t.defined() ? t.narrow(0, begin, rows) : t; };
      if (!teacher_logits.defined()) teacher_logits = output(at::empty(z.sizes(), z.options()));
      const Tensor teacher_z = teacher_logits.narrow(0, 0, rows);
      project(teacher_z, of(y), y_weight, y_bias);
      int64_t bad_label = o.ignore_index;
      liger::run(linear_distillation_rows, z,
                 {.x = data(z),
                  .y = data(teacher_z),
                  .dx = wanted ? z.data_ptr() : nullptr,
                  .labels = data<int64_t>(of(labels)),
                  .soft = data<float>(of(scaled_soft)),
                  .hard = data<float>(of(scaled_hard)),
                  .divergence = data<float>(of(divergence)),
                  .nll = data<float>(of(nll)),
                  .entropy = data<float>(of(entropy)),
                  .bad_label = &bad_label,
                  .rows = rows,
                  .cols = z.size(1),
                  .ignore_index = o.ignore_index,
                  .x_map = o.student,
                  .y_map = o.teacher,
                  .inverse_temperature = float(1 / o.temperature),
                  .beta = float(o.beta),
                  .kind = o.formula(),
                  .skip_ignored = o.skip_ignored,
                  .dtype = dtype_of(z)});
      TORCH_CHECK_INDEX(bad_label == o.ignore_index, kName.text, ": label ", bad_label,
                        " is out of bounds: it is outside [0, ", z.size(1), ") and not ignore_index ", o.ignore_index);
    }

    Results results(int64_t tokens) const {
      const auto all = [&](const Tensor& t) { return t.defined() ? head::scatter(kept, t, tokens, 0) : t; };
      const Tensor loss = at::zeros({}, divergence.options());
      if (soft.defined()) loss.add_(at::dot(soft, divergence));
      if (hard.defined()) loss.add_(at::dot(hard, nll));
      return {loss, all(divergence), all(nll), all(entropy)};
    }
  };

  /// The bytes of the student's logits at once: two heads' logits share what is given.
  static int64_t logit_bytes(const Inputs& in, const Options& o, at::ScalarType compute) {
    const int64_t a_class = int64_t(c10::elementSize(compute)),
                  a_pass = o.float_logits ? 2 * int64_t(c10::elementSize(at::kFloat)) : 2 * a_class;
    if (const int64_t given = head::budget(o.max_bytes)) return std::max<int64_t>(1, given / a_pass * a_class);
    return o.float_logits && compute != at::kFloat ? kFloatLogitsChunk * in.student_weight.size(0) * a_class : 0;
  }

  static Made forward(const Inputs& in, const Gradients<bool>& wanted, const Options& o) {
    check(in, wanted, o);
    const auto compute = compute_dtype(in, o);
    const bool deferred = compute == at::kHalf && any(wanted);
    if (in.student.is_meta()) return empty(in, wanted, o, compute, deferred);
    CountedTokens rows(in, o, compute, deferred);
    const head::Pass pass{.of = {rows.x, in.student_weight.to(compute).contiguous(),
                                 in.student_bias ? in.student_bias->to(compute) : Tensor()},
                          .wants = {wanted.dstudent, wanted.dweight, wanted.dbias},
                          .weight_dtype = in.student_weight.scalar_type(),
                          .max_bytes = logit_bytes(in, o, compute),
                          .logits_dtype = o.float_logits ? at::kFloat : compute};
    auto d = pass.run([&](const Tensor& z, int64_t begin, int64_t) { rows.run(z, begin, pass.wants.any()); });
    const int64_t tokens = in.student.size(0);
    if (d.hidden.defined()) d.hidden = head::scatter(rows.kept, d.hidden, tokens, 0);
    const auto kept_as = [&](const Tensor& t, const OptTensor& like) {
      return t.defined() ? t.to(head::gradient_dtype(compute, like->scalar_type())) : t;
    };
    return {rows.results(tokens),
            {kept_as(d.hidden, in.student), kept_as(d.weight, in.student_weight), kept_as(d.bias, in.student_bias)},
            rows.power};
  }
};

}  // namespace op

DistillationResult linear_distillation(const Tensor& student, const Tensor& student_weight, const Tensor& teacher,
                                       const Tensor& teacher_weight, const OptTensor& labels,
                                       const DistillationOptions& o, const OptTensor& student_bias,
                                       const OptTensor& teacher_bias, const OptTensor& token_weight) {
  TORCH_CHECK(student.dim() >= 1 && teacher.dim() >= 1,
              "linear_distillation: student and teacher must be [..., width], got ", student.sizes(), " and ",
              teacher.sizes());
  TORCH_CHECK_VALUE(o.hard_weight == 0 || labels, "linear_distillation: hard_weight needs labels");
  const auto flat_rows = [](const Tensor& t) { return t.reshape({-1, t.size(-1)}); };
  const Tensor x = flat_rows(student);
  const OptTensor ids = labels ? OptTensor(labels->reshape(-1)) : std::nullopt;
  const Tensor counts =
      ids ? ids->ne(o.ignore_index).to(at::kFloat) : at::ones({x.size(0)}, x.options().dtype(at::kFloat));
  Tensor each = counts / counts.sum().clamp_min(1);
  if (token_weight) each = each * token_weight->detach().reshape(-1);
  const auto weighted = [&](double weight) { return weight != 0 ? OptTensor(each * weight) : std::nullopt; };
  auto [loss, divergence, nll, entropy] = Operator<GradientInForward<op::LinearDistillation>>::public_op(
      x, student_weight, student_bias, flat_rows(teacher), teacher_weight, teacher_bias, ids, weighted(o.soft_weight),
      weighted(o.hard_weight), OptDtype(), op::LinearDistillation::Options{o});
  return {loss, at::dot(each, divergence), ids ? at::dot(each, nll) : Tensor()};
}

LIGER_OPERATORS(linear_distillation, Operator<GradientInForward<op::LinearDistillation>>)

}  // namespace liger
