#pragma once
#include <torch/nn/cloneable.h>
#include <torch/nn/modules/common.h>
#include <torch/nn/modules/container/any.h>
#include <torch/nn/pimpl.h>
#include "liger/nn/module.h"
#include "liger/functions/distillation.h"

namespace liger::nn {

using liger::Tail;
using liger::topk_divergence;

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
    result.divergence = topk_divergence(found.class_logp, teacher_logp, there, o.beta, o.tail, given(found.log_tail))
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
