#pragma once
#include <torch/nn/cloneable.h>
#include <torch/nn/modules/common.h>
#include <torch/nn/modules/container/any.h>
#include <torch/nn/pimpl.h>
#include <cmath>
#include "liger/nn/module.h"

namespace liger::nn {

/// What becomes of the classes that a teacher did not send: one bucket of all, left out, or both distributions are
/// normalised over the classes that it sent.
enum class Tail { Bucket, Drop, Renormalise };

/// The divergence [...] of log-probabilities student and teacher [..., K], float, over buckets j, with probabilities s
/// of the student and t of the teacher:
///   m = β t + (1 − β) s
///   D = β Σ t ln(t / m) + (1 − β) Σ s ln(s / m)
/// and, for β of 0 and of 1,
///   D = Σ t ln(t / s)
///   D = Σ s ln(s / t)
/// there [..., K] says which classes count, if defined; those to which the teacher gives −inf do not. student_tail
/// [...], the student's log-probability of all other classes, is for Tail::Bucket, where the teacher's mass outside is
/// at least least_tail.
inline at::Tensor topk_divergence(at::Tensor student, at::Tensor teacher, at::Tensor there, double beta, Tail tail,
                                  const at::Tensor& student_tail = {}, double least_tail = 1e-7) {
  TORCH_CHECK_VALUE(beta >= 0 && beta <= 1, "liger::nn: beta must be in [0, 1], got ", beta);
  TORCH_CHECK_VALUE((tail == Tail::Bucket) == student_tail.defined(),
                    "liger::nn: student_tail is for Tail::Bucket, and is needed there");
  constexpr double kNone = -INFINITY;
  teacher = teacher.to(student.scalar_type());
  const at::Tensor known = teacher.gt(kNone);
  there = there.defined() ? there.logical_and(known) : known;
  const auto inside = [&](const at::Tensor& logp) { return logp.masked_fill(there.logical_not(), 0); };
  const auto mass = [&](const at::Tensor& logp) { return logp.masked_fill(there.logical_not(), kNone).logsumexp(-1); };
  student = inside(student), teacher = inside(teacher);
  if (tail == Tail::Renormalise) {
    const at::Tensor any = there.any(-1);
    for (at::Tensor* logp : {&student, &teacher}) *logp = inside(*logp - at::where(any, mass(*logp), 0).unsqueeze(-1));
  } else if (tail == Tail::Bucket) {
    const at::Tensor has = student_tail.gt(kNone);  // the student may have no other class
    const at::Tensor left = mass(teacher).clamp_max(std::log1p(-least_tail)).expm1().neg().log();
    student = at::cat({student, student_tail.masked_fill(has.logical_not(), 0).unsqueeze(-1)}, -1);
    teacher = at::cat({teacher, left.unsqueeze(-1)}, -1);
    there = at::cat({there, has.unsqueeze(-1)}, -1);
  }
  at::Tensor terms;
  if (beta == 0) {
    terms = teacher.exp() * (teacher - student);
  } else if (beta == 1) {
    terms = student.exp() * (student - teacher);
  } else {
    const at::Tensor mixture = at::logaddexp(teacher + std::log(beta), student + std::log1p(-beta));
    terms = beta * teacher.exp() * (teacher - mixture) + (1 - beta) * student.exp() * (student - mixture);
  }
  return inside(terms).sum(-1);
}

struct TopKDistillationOptions {
  double beta = 0;
  Tail tail = Tail::Bucket;
  double temperature = 1;  // of the student's logits; the teacher's log-probabilities have it already
  double soft_weight = 1, hard_weight = 0;
  int64_t ignore_index = -100;
  double softcap = 0, logit_scale = 1;  // of the head, as in LogProbOptions
  int64_t max_bytes = 0;
};

/// loss: the mean over the tokens that count; divergence and nll [...] of each, 0 for the others.
struct TopKDistillationResult {
  at::Tensor loss, divergence, nll;
};

/// Distillation from a teacher's K classes per token into a head, whose logits are never held in full:
///   hidden        [..., width]
///   weight        [classes, width]
///   class_ids     [..., K], −1 for none
///   teacher_logp  [..., K], −inf for none
///   labels        [...], where the hard loss or ignored tokens are wanted
///   bias          [classes]
struct TopKDistillationImpl : torch::nn::Cloneable<TopKDistillationImpl> {
  explicit TopKDistillationImpl(TopKDistillationOptions o = {}) : options(o) {}
  void reset() override {}

  FORWARD_HAS_DEFAULT_ARGS({4, torch::nn::AnyValue(at::Tensor())}, {5, torch::nn::AnyValue(at::Tensor())})
  TopKDistillationResult forward(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& class_ids,
                                 const at::Tensor& teacher_logp, const at::Tensor& labels = {},
                                 const at::Tensor& bias = {}) {
    const TopKDistillationOptions& o = options;
    TORCH_CHECK_VALUE(labels.defined() || o.hard_weight == 0, "liger::nn: hard_weight needs labels");
    const at::Tensor ids = labels.defined() ? labels : at::zeros_like(class_ids.select(-1, 0));
    const at::Tensor counts = ids.ne(o.ignore_index);
    LogProbOptions asked{.temperature = o.temperature,
                         .softcap = o.softcap,
                         .logit_scale = o.logit_scale,
                         .ignore_index = o.ignore_index,
                         .max_bytes = o.max_bytes};
    asked.class_ids = class_ids, asked.log_tail = o.tail == Tail::Bucket;
    const LogProbResult found = linear_log_prob(hidden, weight, ids, asked, given(bias));
    const at::Tensor there = class_ids.ge(0).logical_and(counts.unsqueeze(-1));
    TopKDistillationResult result;
    result.divergence = topk_divergence(found.class_logp, teacher_logp, there, o.beta, o.tail, found.log_tail)
                            .masked_fill(counts.logical_not(), 0);
    result.nll = labels.defined() ? -found.logp : at::zeros_like(found.logp);
    at::Tensor each = o.soft_weight * result.divergence;
    if (o.hard_weight != 0) each = each + o.hard_weight * result.nll;
    result.loss = each.sum() / counts.sum().clamp_min(1);
    return result;
  }

  void pretty_print(std::ostream& to) const override {
    print(to, *this, "beta", options.beta, "temperature", options.temperature, "soft_weight", options.soft_weight,
          "hard_weight", options.hard_weight, "ignore_index", options.ignore_index);
  }

  TopKDistillationOptions options;
};
TORCH_MODULE(TopKDistillation);

}  // namespace liger::nn
