#pragma once
#include <ATen/core/Tensor.h>
#include <cstdint>
#include <optional>
#include "liger/options.h"

/// Policy gradients of completions, from the log-probabilities of their tokens: vectors [batch, tokens], differentiated
/// by autograd.
namespace liger {

enum class PolicyLoss : int8_t {
  Grpo,    // Shao et al. 2024, arXiv:2402.03300: clipped; the mean over completions of a completion's mean
  Bnpo,    // clipped; the mean over the batch's tokens
  DrGrpo,  // Liu et al. 2025, arXiv:2503.20783: clipped; divided by the longest completion allowed
  Dapo,    // Yu et al. 2025, arXiv:2503.14476: clipped; the mean over the tokens of all ranks
  Luspo,   // arXiv:2602.05261: clipped, for sequence_level; the mean of a completion's loss times its length
  Cispo,   // MiniMax 2025, arXiv:2506.13585: -sg(min(c, epsilon_high)) · A · logp; the mean as Dapo's
  Sapo,    // Gao et al. 2025, arXiv:2511.20347: -A · 4/τ · σ(τ (c − 1)) with a τ for each sign of A; the mean as Grpo's
  Vespo    // arXiv:2602.10693: -φ · A · logp with a completion's weight φ, below; the mean as Dapo's
};

/// As in Python: "grpo", "bnpo", "dr_grpo", ...
const char* name(PolicyLoss loss);

struct VespoOptions {
  double k_pos = 2, lambda_pos = 3, k_neg = 3, lambda_neg = 2;
};

struct PolicyOptions {
  PolicyLoss loss = PolicyLoss::Dapo;
  /// One ratio per completion (GSPO, Zheng et al. 2025, arXiv:2507.18071); for the clipped losses.
  bool sequence_level = false;
  double epsilon_low = 0.2, epsilon_high = 0.2;
  std::optional<double> delta;  // the clipped losses' second bound: c is at most delta (INTELLECT-2, arXiv:2505.07291)
  double beta = 0;              // weight of the divergence from the reference
  /// The divergence is multiplied by the ratio, which makes its gradient unbiased (DeepSeek-V3.2, arXiv:2512.02556).
  bool unbiased_kl = false;
  double sapo_temperature_pos = 1, sapo_temperature_neg = 1.05;
  VespoOptions vespo;
  double max_length = 0;  // DrGrpo's divisor, of a completion; 0: the number of columns
  /// Luspo's sum has the terms of masked tokens too, and the terms of a sequence level count once, not once per token.
  bool masked_terms = false;
};

struct PolicyInputs {
  at::Tensor mask, advantages;                   // [batch, tokens], 0 where a token does not count; [batch]
  std::optional<at::Tensor> old_logp, ref_logp;  // [batch, tokens] or none: logp itself, not differentiated
  /// Importance of what another engine has sampled, [batch], [batch, 1] or [batch, tokens].
  std::optional<at::Tensor> ratio;
  std::optional<at::Tensor> vespo_weights;  // φ [batch, 1] or [batch]; none: made here, with `ratio`
  std::optional<at::Tensor> normalizer;     // one number: Dapo's, Cispo's and Vespo's divisor; none: the mask's sum
  std::optional<at::Tensor> whole_mask;  // of the whole batch, whose counts divide, where these rows are a part of it
};

struct PolicyTerms {
  /// [batch, tokens], or [batch, 1] where a completion has one; kl is undefined for beta 0.
  at::Tensor loss, kl, clipped;
  LIGER_FIELDS(loss, kl, clipped)
};

struct PolicyResult {
  /// Numbers; the means of kl and clipped over the tokens that count are not differentiable.
  at::Tensor loss, kl, clipped;
  LIGER_FIELDS(loss, kl, clipped)
};

/// The terms of a policy's loss, for logp [batch, tokens]; A = advantages, m = mask.
///   w  = logp − old_logp, or its mean over the tokens of a completion
///   c  = eʷ
///   ℓ  = −min(min(c, delta) · A, clamp(c, 1 − epsilon_low, 1 + epsilon_high) · A)   clipped losses; others: PolicyLoss
///   ℓ  ← ℓ · ratio                                                                  but for Vespo
///   kl = e^(ref_logp − logp) − (ref_logp − logp) − 1, times c for unbiased_kl       Schulman 2020
///   ℓ  ← ℓ + beta · kl
///   clipped = 1 where the clamp holds the ratio back, else 0
/// Where m is 0, w and kl are 0 unless masked_terms. Raises ValueError for a sequence level of Cispo, Sapo or Vespo and
/// for temperatures that are not positive, RuntimeError where shapes do not fit.
PolicyTerms policy_terms(const at::Tensor& logp, const PolicyInputs& inputs, const PolicyOptions& options = {});

/// Terms ℓ [batch, tokens] or [batch, 1] as one number:
///   Grpo, Sapo          the mean over rows of Σ m ℓ / max(Σ m, 1)
///   Bnpo                Σ m ℓ / max(Σ m, 1)
///   DrGrpo              Σ m ℓ / (batch · max_length)
///   Dapo, Cispo, Vespo  Σ m ℓ / normalizer
///   Luspo               Σ ℓ · (Σ m of the row) / (batch · columns of ℓ)
at::Tensor policy_reduce(const at::Tensor& terms, const PolicyInputs& inputs, const PolicyOptions& options = {});

/// policy_reduce of policy_terms.
PolicyResult policy_loss(const at::Tensor& logp, const PolicyInputs& inputs, const PolicyOptions& options = {});

/// Σ m x / max(Σ m, 1) for x [batch, tokens] or [batch, 1]; the divisor from whole_mask if given.
at::Tensor masked_mean(const at::Tensor& x, const at::Tensor& mask, const std::optional<at::Tensor>& whole_mask = {});

/// The weights of completions [batch, 1], not differentiated, with (k, λ) by the sign of the advantage and λ >= 1e-4:
///   L = clamp(Σ m clamp(log_ratio, −20, 20) + Σ clamp(ln ratio, ln 1e-8, 20), ln 1e-8, 20)
///   φ = exp(λ + k L − λ eᴸ), 0 where that is not finite
at::Tensor vespo_weights(const at::Tensor& advantages, const at::Tensor& log_ratio, const at::Tensor& mask,
                         const std::optional<at::Tensor>& ratio = {}, const VespoOptions& options = {});

/// e^x − x − 1 for x = log_p − log_q: an estimate of KL(q ‖ p) that is never negative (Schulman 2020, "Approximating KL
/// divergence").
at::Tensor k3(const at::Tensor& log_p, const at::Tensor& log_q);

/// 4/τ · σ(τ (ratio − 1)), temperature τ a number or a tensor.
at::Tensor soft_clip(const at::Tensor& ratio, const at::Tensor& temperature);

}  // namespace liger
