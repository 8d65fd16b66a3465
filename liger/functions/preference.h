#pragma once
#include <ATen/core/Tensor.h>
#include <optional>
#include <string>
#include <tuple>
#include "liger/options.h"

/// Losses of preferences, on the log-probabilities that a policy (and a reference) gives to sequences. Written with
/// ATen and differentiated by its autograd: vectors with a number for each sequence cost nothing next to the head that
/// made them. Only the policy's log-probabilities get gradients, and of the results only the loss has one.
namespace liger {

/// ln P(sequence) of tokens' log-probabilities logp [..., tokens]: their sum, or with `average` their mean, over the
/// tokens whose label is not ignore_index. A sequence without any has 0.
at::Tensor sequence_log_prob(const at::Tensor& logp, const at::Tensor& labels, int64_t ignore_index = -100,
                             bool average = false);

///   −Σ logp / count
/// over the tokens whose label is not ignore_index, for logp and labels of one shape. `counted` holds the labels that
/// are counted where logp is a part of a batch, by default `labels`. 0 where every label is ignored.
at::Tensor token_nll(const at::Tensor& logp, const at::Tensor& labels, int64_t ignore_index = -100,
                     const std::optional<at::Tensor>& counted = {});

/// Labels [3 pairs, tokens] with which one pass of a head over (hidden, its first `pairs` rows again) makes the
/// log-probabilities of target [2 pairs, tokens] and of other labels of the chosen sequences, nll_target [pairs,
/// tokens]. A token where one of both counts, or both and agree, is worked on once.
at::Tensor labels_with_nll(const at::Tensor& target, const at::Tensor& nll_target, int64_t ignore_index = -100);

/// The log-probabilities of nll_target [pairs, tokens] in logp [3 pairs, tokens] of `labels_with_nll`; something else
/// where it is ignore_index.
at::Tensor nll_log_probs(const at::Tensor& logp, const at::Tensor& target, const at::Tensor& nll_target,
                         int64_t ignore_index = -100);

/// The sum over tokens and classes of the logits hidden weightᵀ + bias, for each row of hidden [rows, tokens, width]:
///   (Σ hidden) · (Σ weight) + tokens Σ bias
/// in float and without the logits. weight [classes, width], bias [classes]. Not differentiable.
at::Tensor logit_sums(const at::Tensor& hidden, const at::Tensor& weight, const std::optional<at::Tensor>& bias = {});

/// (Σ values where liked, Σ values where not) for values [rows] and liked [rows] of bool. Not differentiable.
std::tuple<at::Tensor, at::Tensor> class_sums(const at::Tensor& values, const at::Tensor& liked);

/// A loss with the rewards that it gives to the sequences.
struct PreferenceResult {
  at::Tensor loss;            // a scalar
  at::Tensor chosen_rewards;  // [pairs]; KTO: their sum
  at::Tensor rejected_rewards;
  LIGER_FIELDS(loss, chosen_rewards, rejected_rewards)
};

struct DPOOptions {
  /// A row of the table below: sigmoid, hinge, exo_pair, nca_pair, robust, bco_pair, sppo_hard, apo_zero, apo_down or
  /// discopop.
  std::string loss_type = "sigmoid";
  double beta = 0.1;
  double label_smoothing = 0;  // ε of robust, in [0, 0.5), and of exo_pair, in (0, 1)
  double discopop_tau = 0.05;  // τ
  int64_t pairs = 0;  // that the sum is divided by, where those given are a part of a batch; 0: as many as given
  LIGER_FIELDS(loss_type, beta, label_smoothing, discopop_tau, pairs)
};

/// Direct preference optimisation (Rafailov et al. 2023, arXiv:2305.18290) and its relatives: (1/pairs) Σ ℓ of
/// log-probabilities [pairs] of the chosen (w) and the rejected (l). A reference that is not given counts as 0. With
///   Δ = ln P − ln P_ref
///   r = β Δ
///   h = r_w − r_l
/// and σ the logistic function, ℓ is one of
///   sigmoid    −ln σ(h)
///   hinge      max(0, 1 − h)                                             Zhao et al. 2023, arXiv:2305.10425
///   exo_pair   σ(h) (ln σ(h) − ln(1 − ε)) + σ(−h) (ln σ(−h) − ln ε)       Ji et al. 2024, arXiv:2402.00856
///   nca_pair   −ln σ(r_w) − ½ ln σ(−r_w) − ½ ln σ(−r_l)                   Chen et al. 2024, arXiv:2402.05369
///   robust     (−(1 − ε) ln σ(h) + ε ln σ(−h)) / (1 − 2ε)                 Chowdhury et al. 2024, arXiv:2403.00409
///   bco_pair   −ln σ(r_w) − ln σ(−r_l)                                   Jung et al. 2024, arXiv:2404.04656
///   sppo_hard  (Δ_w − 1/(2β))² + (Δ_l + 1/(2β))²                         Wu et al. 2024, arXiv:2405.00675
///   apo_zero   1 − σ(r_w) + σ(r_l)                                       D'Oosterlinck et al. 2024, arXiv:2408.06266
///   apo_down   σ(r_w) + 1 − σ(h)                                         the same
///   discopop   −ln σ(h) (1 − σ(h/τ)) + e^(−h) σ(h/τ)                     Lu et al. 2024, arXiv:2406.08414
/// The rewards are r. Raises c10::ValueError for an unknown loss_type or an ε out of range, c10::NotImplementedError
/// for ipo, which needs the sequences' lengths.
PreferenceResult dpo_loss(const at::Tensor& chosen, const at::Tensor& rejected,
                          const std::optional<at::Tensor>& ref_chosen = {},
                          const std::optional<at::Tensor>& ref_rejected = {}, const DPOOptions& options = {});

struct ORPOOptions {
  double beta = 0.1;
  int64_t pairs = 0;  // as in DPOOptions
  LIGER_FIELDS(beta, pairs)
};

struct ORPOResult : PreferenceResult {
  at::Tensor log_odds_ratio;   // (1/pairs) Σ ln σ(g)
  at::Tensor log_odds_chosen;  // (1/pairs) Σ g
  LIGER_FIELDS(loss, chosen_rewards, rejected_rewards, log_odds_ratio, log_odds_chosen)
};

/// Odds ratio preference optimisation (Hong et al. 2024, arXiv:2403.07691), its second term, of average
/// log-probabilities [pairs]; g is the logarithm of the odds' ratio:
///   loss = −(β/pairs) Σ ln σ(g)
///   g    = ln(P_w / (1 − P_w)) − ln(P_l / (1 − P_l))
/// The rewards are β ln P. A probability that rounds to 1 has large, finite odds.
ORPOResult orpo_loss(const at::Tensor& chosen, const at::Tensor& rejected, const ORPOOptions& options = {});

struct CPOOptions {
  double beta = 0.1;
  double label_smoothing = 0;  // ε
  double gamma = 0;            // γ
  int64_t pairs = 0;           // as in DPOOptions
  LIGER_FIELDS(beta, label_smoothing, gamma, pairs)
};

/// Contrastive preference optimisation (Xu et al. 2024, arXiv:2401.08417), its first term:
///   loss = (1/pairs) Σ (−(1 − ε) ln σ(u) − ε ln σ(−u))
///   u    = β (ln P_w − ln P_l) − γ
/// With average log-probabilities and a margin γ it is SimPO (Meng et al. 2024, arXiv:2405.14734). The rewards are
/// β ln P.
PreferenceResult cpo_loss(const at::Tensor& chosen, const at::Tensor& rejected, const CPOOptions& options = {});

struct KTOOptions {
  double beta = 0.1;
  int64_t rows = 0;  // that the sum is divided by, where those given are a part of a batch; 0: as many as given
  LIGER_FIELDS(beta, rows)
};

/// Kahneman-Tversky optimisation (Ethayarajh et al. 2024, arXiv:2402.01306) for log-probabilities [rows], each liked
/// (s = 1) or not (s = −1):
///   loss = (1/rows) Σ (1 − σ(s β (Δ − kl)))
///   Δ    = ln P − ln P_ref
/// A reference that is not given counts as 0, and so does kl, one number. The rewards are the sums of β Δ over those
/// that are liked and those that are not.
PreferenceResult kto_loss(const at::Tensor& logp, const at::Tensor& liked,
                          const std::optional<at::Tensor>& ref_logp = {}, const std::optional<at::Tensor>& kl = {},
                          const KTOOptions& options = {});

}  // namespace liger
