#pragma once
#include <ATen/core/Tensor.h>
#include <optional>

namespace liger {

/// 1 − x · y / (max(‖x‖, 1e-12) max(‖y‖, 1e-12)) over the last dimension of x and y [..., n], float [...];
/// differentiated by autograd.
at::Tensor cosine_distance(const at::Tensor& x, const at::Tensor& y);

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
/// there [..., K] says which classes count; those to which the teacher gives −inf do not. student_tail [...], the
/// student's log-probability of all other classes, is for Tail::Bucket, where the teacher's mass outside is at least
/// least_tail. Differentiated by autograd.
at::Tensor topk_divergence(const at::Tensor& student, const at::Tensor& teacher, const std::optional<at::Tensor>& there,
                           double beta, Tail tail, const std::optional<at::Tensor>& student_tail = {},
                           double least_tail = 1e-7);

}  // namespace liger
