#pragma once
#include <ATen/core/Tensor.h>
#include <optional>
#include "liger/functions/loss.h"
#include "liger/ops/head/options.h"
#include "liger/options.h"

namespace liger {

/// Cross entropy of the logits hidden weightᵀ + bias, which are never held in full: hidden [tokens, width], weight
/// [classes, width]. The loss and the gradients are those of cross_entropy on the logits; the weight's gradient is
/// summed in float. Tokens that are ignored cost nothing. With `normalizer`, one number on the device, the losses are
/// summed and divided by it. Under autocast the GEMMs run in its dtype and the gradients come back in the parameters'.
/// The loss is float.
CrossEntropyResult fused_linear_cross_entropy(const at::Tensor& hidden, const at::Tensor& weight,
                                              const at::Tensor& target, const HeadOptions& options = {},
                                              const std::optional<at::Tensor>& bias = {},
                                              const std::optional<at::Tensor>& class_weight = {},
                                              const std::optional<at::Tensor>& normalizer = {});

/// The bytes of logits that heads work on at once, or keep for backward, where a caller names no max_bytes: for the
/// whole process; 0: the defaults, of which what is kept takes up to a sixteenth of a GPU's memory, but not more than 4
/// GiB, and 256 MiB on a CPU. Returns what it was. Code that torch.compile has traced keeps what was set then.
int64_t set_memory_budget(int64_t bytes);

struct HeadPeakOptions {
  int64_t tokens, width, classes;        // of hidden [tokens, width] that count, and weight [classes, width]
  at::ScalarType dtype = at::kBFloat16;  // of both
  at::Device device = at::kCUDA;
  bool trains_hidden = true, trains_weight = true;
  bool keeps_logits = true;  // linear_log_prob; false: fused_linear_cross_entropy
  int64_t max_bytes = 0;
};

/// The bytes beyond hidden and weight that a head's forward and backward pass take at their peak, the gradients among
/// them.
int64_t head_peak_bytes(const HeadPeakOptions& options);

struct LogProbOptions {
  double temperature = 1;  // T
  double softcap = 0;      // c; 0: none
  double logit_scale = 1;  // s
  int64_t ignore_index = -100;
  bool entropy = false;          // what else to return: −Σ p ln p,
  bool log_sum_squares = false;  // ln Σ p²,
  bool mean_logit = false;       // the mean of z,
  bool is_top1 = false;          // whether the id is the first of the largest z,
  bool lse = false;              // ln Σ exp z,
  bool argmax = false;           // the first class of the largest z,
  int64_t top_k = 0;             // and so many of the largest ln p
  /// [..., K] integers: classes of each token, whose ln p to return too; −1 for none.
  std::optional<at::Tensor> class_ids = {};
  bool log_tail = false;  // and ln Σ p of all other classes
  /// How many ids are not ignored, where the host knows it: then the device is not asked; -1: unknown.
  int64_t valid_count = -1;
  /// Of logits at once, and of those that wait for backward; 0: set_memory_budget's.
  int64_t max_bytes = 0;
  /// A token's results have the same bits whatever else is in the batch: GEMMs of one shape.
  bool batch_invariant = false;
  /// [classes, width], float: backward adds the weight's gradient to it and returns none.
  std::optional<at::Tensor> main_grad = {};
};

struct LogProbResult {
  at::Tensor logp;             // [...], float
  at::Tensor entropy;          // as logp, and as the following undefined unless asked for
  at::Tensor log_sum_squares;  // as logp, not differentiable
  at::Tensor mean_logit;       // as logp
  at::Tensor is_top1;          // [...], bool
  at::Tensor lse;              // as logp
  at::Tensor argmax;           // [...], int64
  at::Tensor top_logp;         // [..., top_k], float, not differentiable
  at::Tensor top_ids;          // [..., top_k], int64
  at::Tensor class_logp;       // [..., K], float, 0 where the class is −1
  at::Tensor log_tail;         // as logp; −inf where all classes are among class_ids
};

/// A low-rank part scale · b a of a head's weight (LoRA: Hu et al. 2021, arXiv:2106.09685): a [rank, width], b
/// [classes, rank], or none.
struct LowRank {
  std::optional<at::Tensor> a = {}, b = {};
  double scale = 1;
};

/// ln p_id for the logits y of a head, which are never held in full:
///   y = hidden (weight + low_rank)ᵀ + bias
///   z = c tanh(s y / c) / T, or s y / T without a softcap
///   p = softmax(z)
/// hidden [..., width], weight [classes, width], ids [...] integers. logp, entropy, mean_logit, lse, class_logp and
/// log_tail are differentiable, with any upstream gradient; absent ones cost nothing. log_tail is a separate sum, so
/// that it is exact where next to nothing is left; its gradient is that of a mass of at least exp(−80). A class that a
/// token has twice gets both gradients. All results are 0 where the id is
/// ignore_index, and such tokens cost nothing. Logits that fit into max_bytes wait for backward, others are recomputed
/// there. The weight's gradient is summed in float. An id that is neither a class nor ignore_index is an error:
/// c10::IndexError on the CPU, a device assertion on CUDA. Mixed dtypes compute in hidden's, or in autocast's.
LogProbResult linear_log_prob(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& ids,
                              const LogProbOptions& options = {}, const std::optional<at::Tensor>& bias = {},
                              const LowRank& low_rank = {});

/// Logits of a head at a few classes of each token, float [..., K]:
///   y = hidden weight_c + bias_c for each class c of class_ids
/// hidden [..., width], weight [classes, width], bias [classes], of one dtype; class_ids [..., K] integers, -1 for
/// none, whose logit is 0. For losses that are normalised over given classes: no other class is computed. The gradient
/// of a class is summed in float over its tokens, in their order. A class outside [-1, classes) is an error, as in
/// linear_log_prob.
at::Tensor class_logits(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& class_ids,
                        const std::optional<at::Tensor>& bias = {});

struct DistillationOptions {
  Distillation kind = Distillation::JensenShannon;
  double beta = 0.5;       // of JensenShannon, in [0, 1]
  double temperature = 1;  // T, of the soft loss
  double soft_weight = 1, hard_weight = 0;
  LogitMap student, teacher;  // what their models do to the logits
  int64_t ignore_index = -100;
  int64_t max_bytes = 0;  // of both heads' logits at once; 0: what is fastest
};

struct DistillationResult {
  at::Tensor loss;  // soft_weight · soft + hard_weight · hard, a float scalar; only this is differentiable
  at::Tensor soft;  // the mean divergence of softmax(z / T), or of z / T for Cosine
  at::Tensor hard;  // the mean of −ln softmax(z)_label; undefined without labels
};

/// Distillation of a teacher's head into a student's (Hinton et al. 2015, arXiv:1503.02531; Agarwal et al. 2024,
/// arXiv:2306.13649), whose logits are never held in full: student [..., width], student_weight [classes, width],
/// teacher [..., another width], teacher_weight [classes, that width], labels [...] or none. Means are over the tokens
/// whose label is not ignore_index, or all; others cost nothing; 0 where there are none. token_weight [...] multiplies
/// each token's terms. Forward makes the gradients of the student's tensors, the weight's summed in float; the
/// teacher's and token_weight get none. Under autocast the GEMMs run in its
/// dtype, otherwise in the student's. A label that is neither a class nor ignore_index is an error: c10::IndexError on
/// the CPU, a device assertion on CUDA.
DistillationResult linear_distillation(const at::Tensor& student, const at::Tensor& student_weight,
                                       const at::Tensor& teacher, const at::Tensor& teacher_weight,
                                       const std::optional<at::Tensor>& labels = {},
                                       const DistillationOptions& options = {},
                                       const std::optional<at::Tensor>& student_bias = {},
                                       const std::optional<at::Tensor>& teacher_bias = {},
                                       const std::optional<at::Tensor>& token_weight = {});

}  // namespace liger
