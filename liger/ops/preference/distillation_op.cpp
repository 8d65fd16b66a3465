#include "liger/functions/distillation.h"
#include <algorithm>
#include <array>
#include <cmath>
#include <string_view>
#include "liger/core/torch/op.h"

namespace liger {

Tensor cosine_distance(const Tensor& x, const Tensor& y) {
  const auto unit = [](const Tensor& t) {
    const Tensor wide = t.to(at::promote_types(t.scalar_type(), at::kFloat));
    return wide / wide.norm(2, {-1}, true).clamp_min(1e-12);
  };
  return 1 - (unit(x) * unit(y)).sum(-1);
}

Tensor topk_divergence(const Tensor& of_student, const Tensor& of_teacher, const OptTensor& counts, double beta,
                       Tail tail, const OptTensor& student_tail, double least_tail) {
  TORCH_CHECK_VALUE(beta >= 0 && beta <= 1, "topk_divergence: beta must be in [0, 1], got ", beta);
  TORCH_CHECK_VALUE((tail == Tail::Bucket) == student_tail.has_value(),
                    "topk_divergence: student_tail is for the tail as a bucket, and is needed there");
  constexpr double kNone = -INFINITY;
  Tensor teacher = of_teacher.to(of_student.scalar_type()), there = teacher.gt(kNone);
  if (counts) there = there.logical_and(*counts);
  // Outside, numbers without a gradient and without infinities take their place, and nothing is summed of them.
  const auto inside = [&](const Tensor& logp) { return logp.masked_fill(there.logical_not(), 0); };
  const auto mass = [&](const Tensor& logp) { return logp.masked_fill(there.logical_not(), kNone).logsumexp(-1); };
  Tensor student = inside(of_student);
  teacher = inside(teacher);
  if (tail == Tail::Renormalise) {
    const Tensor any = there.any(-1);
    for (Tensor* logp : {&student, &teacher}) *logp = inside(*logp - at::where(any, mass(*logp), 0).unsqueeze(-1));
  } else if (tail == Tail::Bucket) {
    const Tensor has = student_tail->gt(kNone);  // the student may have no other class
    const Tensor left = mass(teacher).clamp_max(std::log1p(-least_tail)).expm1().neg().log();
    student = at::cat({student, student_tail->masked_fill(has.logical_not(), 0).unsqueeze(-1)}, -1);
    teacher = at::cat({teacher, left.unsqueeze(-1)}, -1);
    there = at::cat({there, has.unsqueeze(-1)}, -1);
  }
  Tensor terms;
  if (beta == 0) {
    terms = teacher.exp() * (teacher - student);
  } else if (beta == 1) {
    terms = student.exp() * (student - teacher);
  } else {
    const Tensor mixture = at::logaddexp(teacher + std::log(beta), student + std::log1p(-beta));
    terms = beta * teacher.exp() * (teacher - mixture) + (1 - beta) * student.exp() * (student - mixture);
  }
  return inside(terms).sum(-1);
}

namespace {

Tail parse(std::string_view name) {
  constexpr std::array<std::string_view, 3> kNames = {"bucket", "drop", "renormalise"};  // in the order of Tail
  const auto* found = std::find(kNames.begin(), kNames.end(), name);
  TORCH_CHECK_VALUE(found != kNames.end(), "topk_divergence: tail must be one of bucket, drop, renormalise, got '",
                    name, "'");
  return Tail(found - kNames.begin());
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(liger, m) {
  m.def("cosine_distance(Tensor x, Tensor y) -> Tensor", cosine_distance);
  m.def(
      "topk_divergence(Tensor student, Tensor teacher, Tensor? there, float beta, str tail, Tensor? student_tail, "
      "float least_tail) -> Tensor",
      [](const Tensor& student, const Tensor& teacher, const OptTensor& there, double beta, std::string_view tail,
         const OptTensor& student_tail, double least_tail) {
        return topk_divergence(student, teacher, there, beta, parse(tail), student_tail, least_tail);
      });
}

}  // namespace liger
