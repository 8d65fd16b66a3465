#pragma once
#include <torch/nn/cloneable.h>
#include <torch/nn/modules/common.h>
#include <torch/nn/modules/container/any.h>
#include <torch/nn/pimpl.h>
#include "liger/nn/module.h"

namespace liger::nn {

/// liger::linear_distillation of a teacher's head into a student's, whose logits are never held in full:
///   student         [..., width]
///   student_weight  [classes, width]
///   teacher         [..., another width]
///   teacher_weight  [classes, that width]
///   labels          [...], where the hard loss or ignored tokens are wanted
///   token_weight    [...], which multiplies each token's terms
struct LinearDistillationImpl : torch::nn::Cloneable<LinearDistillationImpl> {
  explicit LinearDistillationImpl(DistillationOptions o = {}) : options(std::move(o)) {}
  void reset() override {}

  FORWARD_HAS_DEFAULT_ARGS({4, torch::nn::AnyValue(at::Tensor())}, {5, torch::nn::AnyValue(at::Tensor())},
                           {6, torch::nn::AnyValue(at::Tensor())}, {7, torch::nn::AnyValue(at::Tensor())})
  DistillationResult forward(const at::Tensor& student, const at::Tensor& student_weight, const at::Tensor& teacher,
                             const at::Tensor& teacher_weight, const at::Tensor& labels = {},
                             const at::Tensor& student_bias = {}, const at::Tensor& teacher_bias = {},
                             const at::Tensor& token_weight = {}) {
    return linear_distillation(student, student_weight, teacher, teacher_weight, given(labels), options,
                               given(student_bias), given(teacher_bias), given(token_weight));
  }

  void pretty_print(std::ostream& to) const override {
    print(to, *this, "kind", options.kind, "beta", options.beta, "temperature", options.temperature, "soft_weight",
          options.soft_weight, "hard_weight", options.hard_weight, "ignore_index", options.ignore_index);
  }

  DistillationOptions options;
};
TORCH_MODULE(LinearDistillation);

}  // namespace liger::nn
