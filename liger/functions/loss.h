#pragma once
#include <ATen/core/Tensor.h>
#include <optional>
#include <tuple>
#include "liger/ops/loss/options.h"
#include "liger/options.h"

namespace liger {

/// What cross_entropy and fused_linear_cross_entropy return. Only the loss is differentiable.
struct CrossEntropyResult {
  at::Tensor loss;       // a scalar, or [rows] without reduction
  at::Tensor z_loss;     // as loss: the part of it that lse_square_scale adds; undefined unless asked for
  at::Tensor accuracy;   // as loss; undefined unless asked for
  at::Tensor predicted;  // [rows], int64; undefined unless asked for
  LIGER_FIELDS(loss, z_loss, accuracy, predicted)
};

/// Cross entropy of logits x [rows, classes] with labels target [rows]; class_weight [classes]. The gradient is made in
/// the same pass. A label that is neither a class nor ignore_index is an error: c10::IndexError on the CPU, a device
/// assertion on CUDA.
CrossEntropyResult cross_entropy(const at::Tensor& x, const at::Tensor& target, const CrossEntropyOptions& options = {},
                                 const std::optional<at::Tensor>& class_weight = {});

/// Kullback-Leibler divergence of log-probabilities x [rows, cols] from a target t (Kullback & Leibler 1951):
///   Σ t (ln max(t, eps) − x)   for probabilities t
///   Σ eᵗ (t − x)               where log_target says that t holds logarithms
/// target may have another dtype than x and gets no gradient. The loss is float: a scalar, or [rows, cols] without
/// reduction.
at::Tensor kl_div(const at::Tensor& x, const at::Tensor& target, Reduction reduction = Reduction::Mean,
                  bool log_target = false, double eps = 1e-10);

/// Generalised Jensen-Shannon divergence (Lin 1991) of log-probabilities x = ln Q and target = ln P [rows, cols]:
///   0 < β < 1  β KL(P ‖ M) + (1 − β) KL(Q ‖ M), M = β P + (1 − β) Q
///   β = 0      KL(P ‖ Q)
///   β = 1      KL(Q ‖ P)
/// Rows whose label [rows] is ignore_index do not count. The loss has x's dtype; target gets no gradient.
at::Tensor jsd(const at::Tensor& x, const at::Tensor& target, const std::optional<at::Tensor>& labels = {},
               double beta = 0.5, int64_t ignore_index = -100, Reduction reduction = Reduction::BatchMean);

/// Total variation distance ½ Σ |x − target| of probabilities [rows, cols] (Wen et al. 2023, arXiv:2307.15190). Rows
/// whose label [rows] is ignore_index do not count. The loss is float; target gets no gradient.
at::Tensor tvd(const at::Tensor& x, const at::Tensor& target, const std::optional<at::Tensor>& labels = {},
               Reduction reduction = Reduction::BatchMean, int64_t ignore_index = -100);

/// (ln p_id, −Σ p ln p), both float, for logits x [..., classes] and ids [...]: the log-probability of each token and
/// the entropy of its distribution
///   p = softmax(x / temperature)
/// 0 where the id is ignore_index, whose logits are not read. An id that is neither a class nor ignore_index is an
/// error: c10::IndexError on the CPU, a device assertion on CUDA.
std::tuple<at::Tensor, at::Tensor> selective_log_softmax(const at::Tensor& x, const at::Tensor& ids,
                                                         double temperature = 1, int64_t ignore_index = -100);

}  // namespace liger
