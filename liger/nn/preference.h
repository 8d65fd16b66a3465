#pragma once
#include <torch/nn/cloneable.h>
#include <torch/nn/modules/common.h>
#include <torch/nn/modules/container/any.h>
#include <torch/nn/pimpl.h>
#include "liger/nn/module.h"

/// Losses of preferences on a head's hidden states, whose logits are never held in full:
///   hidden      [rows, tokens, width]
///   weight      [classes, width]
///   target      [rows, tokens]
///   bias        [classes]
///   nll_target  [rows, tokens], by default target
/// In the paired losses the first half of the rows is chosen, row i over row n + i; no token is shifted. Their nll is
/// that of the chosen rows of nll_target.
namespace liger::nn {

/// ln P of each sequence, and of the nll's tokens where it counts.
struct SequenceLogProbs {
  at::Tensor sequences, nll;
  at::Tensor chosen() const { return sequences.narrow(0, 0, sequences.size(0) / 2); }
  at::Tensor rejected() const { return sequences.narrow(0, sequences.size(0) / 2, sequences.size(0) / 2); }
};

/// The nll's labels are those of the chosen sequences in nll_target, where it is defined, else in target.
inline SequenceLogProbs sequence_log_probs(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& target,
                                           const at::Tensor& bias, int64_t ignore_index, bool average, bool paired,
                                           bool with_nll = false, const at::Tensor& nll_target = {}) {
  const int64_t rows = target.size(0), chosen = rows / 2;
  TORCH_CHECK_VALUE(!paired || rows % 2 == 0,
                    "liger::nn: target must hold as many rejected as chosen sequences, and has ", rows, " rows");
  const bool other = with_nll && nll_target.defined();
  TORCH_CHECK_VALUE(!other || nll_target.sizes() == target.sizes(), "liger::nn: nll_target must be ", target.sizes(),
                    " as target, got ", nll_target.sizes());
  const at::Tensor labels = (other ? nll_target : target).narrow(0, 0, chosen);
  const at::Tensor read = other ? at::cat({hidden, hidden.narrow(0, 0, chosen)}) : hidden;
  const at::Tensor ids = other ? labels_with_nll(target, labels, ignore_index) : target;
  const at::Tensor logp = linear_log_prob(read, weight, ids, {.ignore_index = ignore_index}, given(bias)).logp;
  SequenceLogProbs found{sequence_log_prob(logp.narrow(0, 0, rows), target, ignore_index, average), {}};
  if (with_nll) {
    const at::Tensor of_nll = other ? nll_log_probs(logp, target, labels, ignore_index) : logp.narrow(0, 0, chosen);
    found.nll = token_nll(of_nll, labels, ignore_index);
  }
  return found;
}

/// The same of a reference, without gradients; undefined where there is none.
inline SequenceLogProbs reference_log_probs(const at::Tensor& hidden, const at::Tensor& weight,
                                            const at::Tensor& target, const at::Tensor& bias, int64_t ignore_index,
                                            bool average, bool paired) {
  const at::NoGradGuard no_grad;
  return hidden.defined() ? sequence_log_probs(hidden, weight, target, bias, ignore_index, average, paired)
                          : SequenceLogProbs{};
}

/// loss + alpha · nll.
template <class Result>
Result plus_nll(Result result, const at::Tensor& nll, double alpha) {
  if (nll.defined()) result.loss = result.loss + alpha * nll;
  return result;
}

struct DPOLossOptions {
  TORCH_ARG(DPOOptions, loss);
  TORCH_ARG(bool, average_log_prob) = false;
  TORCH_ARG(double, alpha) = 0;  // weight of the chosen tokens' nll
  TORCH_ARG(int64_t, ignore_index) = -100;
};

/// liger::dpo_loss; a reference that is not given counts as 0.
struct DPOLossImpl : torch::nn::Cloneable<DPOLossImpl> {
  explicit DPOLossImpl(DPOLossOptions o = {}) : options(std::move(o)) {}
  void reset() override {}

  FORWARD_HAS_DEFAULT_ARGS({3, torch::nn::AnyValue(at::Tensor())}, {4, torch::nn::AnyValue(at::Tensor())},
                           {5, torch::nn::AnyValue(at::Tensor())}, {6, torch::nn::AnyValue(at::Tensor())},
                           {7, torch::nn::AnyValue(at::Tensor())})
  PreferenceResult forward(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& target,
                           const at::Tensor& bias = {}, const at::Tensor& ref_hidden = {},
                           const at::Tensor& ref_weight = {}, const at::Tensor& ref_bias = {},
                           const at::Tensor& nll_target = {}) {
    const bool average = options.average_log_prob();
    const auto policy = sequence_log_probs(hidden, weight, target, bias, options.ignore_index(), average, true,
                                           options.alpha() != 0, nll_target);
    const auto reference =
        reference_log_probs(ref_hidden, ref_weight, target, ref_bias, options.ignore_index(), average, true);
    const auto half = [&](at::Tensor (SequenceLogProbs::*part)() const) {
      return ref_hidden.defined() ? std::optional((reference.*part)()) : std::nullopt;
    };
    return plus_nll(dpo_loss(policy.chosen(), policy.rejected(), half(&SequenceLogProbs::chosen),
                             half(&SequenceLogProbs::rejected), options.loss()),
                    policy.nll, options.alpha());
  }

  void pretty_print(std::ostream& to) const override {
    const DPOOptions& o = options.loss();
    print(to, *this, "loss_type", o.loss_type, "beta", o.beta, "label_smoothing", o.label_smoothing, "discopop_tau",
          o.discopop_tau, "average_log_prob", options.average_log_prob(), "alpha", options.alpha(), "ignore_index",
          options.ignore_index());
  }

  DPOLossOptions options;
};
TORCH_MODULE(DPOLoss);

struct ORPOLossOptions {
  TORCH_ARG(double, beta) = 0.1;
  TORCH_ARG(double, alpha) = 1;  // weight of the chosen tokens' nll
  TORCH_ARG(int64_t, ignore_index) = -100;
};

/// liger::orpo_loss on average log-probabilities, and the nll.
struct ORPOLossImpl : torch::nn::Cloneable<ORPOLossImpl> {
  explicit ORPOLossImpl(ORPOLossOptions o = {}) : options(o) {}
  void reset() override {}

  FORWARD_HAS_DEFAULT_ARGS({3, torch::nn::AnyValue(at::Tensor())}, {4, torch::nn::AnyValue(at::Tensor())})
  ORPOResult forward(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& target,
                     const at::Tensor& bias = {}, const at::Tensor& nll_target = {}) {
    const auto policy = sequence_log_probs(hidden, weight, target, bias, options.ignore_index(), true, true,
                                           options.alpha() != 0, nll_target);
    return plus_nll(orpo_loss(policy.chosen(), policy.rejected(), {.beta = options.beta()}), policy.nll,
                    options.alpha());
  }

  void pretty_print(std::ostream& to) const override {
    print(to, *this, "beta", options.beta(), "alpha", options.alpha(), "ignore_index", options.ignore_index());
  }

  ORPOLossOptions options;
};
TORCH_MODULE(ORPOLoss);

struct CPOLossOptions {
  TORCH_ARG(double, beta) = 0.1;
  TORCH_ARG(double, label_smoothing) = 0;
  TORCH_ARG(double, gamma) = 0;
  TORCH_ARG(bool, average_log_prob) = false;
  TORCH_ARG(double, alpha) = 1;  // weight of the chosen tokens' nll
  TORCH_ARG(int64_t, ignore_index) = -100;

 public:
  /// SimPO: a margin between average log-probabilities.
  static CPOLossOptions simpo(double beta = 2, double gamma = 0.5) {
    return CPOLossOptions().beta(beta).gamma(gamma).average_log_prob(true).alpha(0);
  }
};

/// liger::cpo_loss, and the nll; with CPOLossOptions::simpo() SimPO.
struct CPOLossImpl : torch::nn::Cloneable<CPOLossImpl> {
  explicit CPOLossImpl(CPOLossOptions o = {}) : options(o) {}
  void reset() override {}

  FORWARD_HAS_DEFAULT_ARGS({3, torch::nn::AnyValue(at::Tensor())}, {4, torch::nn::AnyValue(at::Tensor())})
  PreferenceResult forward(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& target,
                           const at::Tensor& bias = {}, const at::Tensor& nll_target = {}) {
    const auto policy = sequence_log_probs(hidden, weight, target, bias, options.ignore_index(),
                                           options.average_log_prob(), true, options.alpha() != 0, nll_target);
    const CPOOptions loss{
        .beta = options.beta(), .label_smoothing = options.label_smoothing(), .gamma = options.gamma()};
    return plus_nll(cpo_loss(policy.chosen(), policy.rejected(), loss), policy.nll, options.alpha());
  }

  void pretty_print(std::ostream& to) const override {
    print(to, *this, "beta", options.beta(), "label_smoothing", options.label_smoothing(), "gamma", options.gamma(),
          "average_log_prob", options.average_log_prob(), "alpha", options.alpha(), "ignore_index",
          options.ignore_index());
  }

  CPOLossOptions options;
};
TORCH_MODULE(CPOLoss);

struct KTOLossOptions {
  TORCH_ARG(double, beta) = 0.1;
  TORCH_ARG(bool, average_log_prob) = false;
  TORCH_ARG(int64_t, ignore_index) = -100;
};

/// liger::kto_loss of sequences that are liked [rows] or not; a reference or kl that is not given counts as 0.
struct KTOLossImpl : torch::nn::Cloneable<KTOLossImpl> {
  explicit KTOLossImpl(KTOLossOptions o = {}) : options(o) {}
  void reset() override {}

  FORWARD_HAS_DEFAULT_ARGS({4, torch::nn::AnyValue(at::Tensor())}, {5, torch::nn::AnyValue(at::Tensor())},
                           {6, torch::nn::AnyValue(at::Tensor())}, {7, torch::nn::AnyValue(at::Tensor())},
                           {8, torch::nn::AnyValue(at::Tensor())})
  PreferenceResult forward(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& target,
                           const at::Tensor& liked, const at::Tensor& bias = {}, const at::Tensor& ref_hidden = {},
                           const at::Tensor& ref_weight = {}, const at::Tensor& ref_bias = {},
                           const at::Tensor& kl = {}) {
    const bool average = options.average_log_prob();
    const auto policy = sequence_log_probs(hidden, weight, target, bias, options.ignore_index(), average, false);
    const auto reference =
        reference_log_probs(ref_hidden, ref_weight, target, ref_bias, options.ignore_index(), average, false);
    return kto_loss(policy.sequences, liked, given(reference.sequences), given(kl), {.beta = options.beta()});
  }

  void pretty_print(std::ostream& to) const override {
    print(to, *this, "beta", options.beta(), "average_log_prob", options.average_log_prob(), "ignore_index",
          options.ignore_index());
  }

  KTOLossOptions options;
};
TORCH_MODULE(KTOLoss);

}  // namespace liger::nn
