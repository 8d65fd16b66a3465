// The preference losses in C++ against the papers' formulas in double, and their modules.
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <sstream>
#include "liger/nn/policy.h"
#include "liger/nn/preference.h"

namespace F = torch::nn::functional;
using torch::Tensor;

namespace {

struct Batch {
  Tensor hidden = torch::randn({4, 5, 6}, torch::requires_grad()),
         weight = torch::randn({9, 6}, torch::requires_grad()), bias = torch::randn({9}, torch::requires_grad());
  Tensor ref_hidden = torch::randn({4, 5, 7}), ref_weight = torch::randn({9, 7});
  Tensor target = torch::randint(9, {4, 5}), liked = torch::tensor({true, false, false, true});

  Batch() { target[0][1] = target[3][4] = target[2][0] = -100; }

  Tensor mask() const { return target.ne(-100); }
  static Tensor tokens(const Tensor& logits, const Tensor& target) {
    return logits.log_softmax(-1).gather(-1, target.clamp_min(0).unsqueeze(-1)).squeeze(-1);
  }

  /// ln P of each row, in double; the same for the reference.
  Tensor policy(bool average, std::vector<Tensor>* leaves = nullptr) const {
    std::vector<Tensor> d;
    for (const Tensor& t : {hidden, weight, bias}) d.push_back(t.detach().to(torch::kDouble).requires_grad_());
    if (leaves) *leaves = d;
    const Tensor logp = (tokens(torch::linear(d[0], d[1], d[2]), target) * mask());
    last_nll = -logp.narrow(0, 0, 2).sum() / mask().narrow(0, 0, 2).sum();
    return average ? logp.sum(1) / mask().sum(1) : logp.sum(1);
  }
  Tensor reference() const {
    return (tokens(torch::linear(ref_hidden.to(torch::kDouble), ref_weight.to(torch::kDouble)), target) * mask())
        .sum(1);
  }
  mutable Tensor last_nll;
};

/// The loss and the gradients of the head agree with those of `expected`, and are not 0.
void expect_equal(const Batch& batch, const Tensor& loss, const Tensor& expected, const std::vector<Tensor>& leaves) {
  EXPECT_NEAR(loss.item<double>(), expected.item<double>(), 1e-5 * (1 + std::abs(expected.item<double>())));
  const auto ours = torch::autograd::grad({loss}, {batch.hidden, batch.weight, batch.bias}),
             theirs = torch::autograd::grad({expected}, leaves);
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_GT(ours[i].abs().max().item<double>(), 1e-5);
    EXPECT_LE((ours[i] - theirs[i]).abs().max().item<double>(), 1e-5 * (1 + theirs[i].abs().max().item<double>()))
        << "gradient " << i;
  }
}

TEST(Preference, DpoWithAReference) {
  const Batch b;
  std::vector<Tensor> leaves;
  const Tensor delta = b.policy(false, &leaves) - b.reference(),
               h = 0.3 * (delta.narrow(0, 0, 2) - delta.narrow(0, 2, 2));
  liger::nn::DPOLoss loss(liger::nn::DPOLossOptions().loss({.beta = 0.3}).alpha(0.5));
  const auto result = loss(b.hidden, b.weight, b.target, b.bias, b.ref_hidden, b.ref_weight);
  expect_equal(b, result.loss, -F::logsigmoid(h).mean() + 0.5 * b.last_nll, leaves);
  EXPECT_TRUE(torch::allclose(result.chosen_rewards.to(torch::kDouble), 0.3 * delta.narrow(0, 0, 2), 1e-4, 1e-4));
  EXPECT_FALSE(result.chosen_rewards.requires_grad());
}

TEST(Preference, DpoTypes) {
  const Tensor w = torch::randn({5}, torch::kDouble), l = torch::randn({5}, torch::kDouble);
  const Tensor h = 0.7 * (w - l);
  const auto loss = [&](const char* type, double smoothing = 0) {
    return liger::dpo_loss(w, l, {}, {}, {.loss_type = type, .beta = 0.7, .label_smoothing = smoothing}).loss;
  };
  EXPECT_TRUE(torch::allclose(loss("hinge"), torch::relu(1 - h).mean()));
  EXPECT_TRUE(torch::allclose(loss("robust", 0.2), ((-0.8 * F::logsigmoid(h) + 0.2 * F::logsigmoid(-h)) / 0.6).mean()));
  EXPECT_TRUE(torch::allclose(loss("apo_down"), ((0.7 * w).sigmoid() + 1 - h.sigmoid()).mean()));
  EXPECT_TRUE(torch::allclose(liger::dpo_loss(w, l, {}, {}, {.pairs = 10}).loss, liger::dpo_loss(w, l).loss / 2));
  EXPECT_THROW(loss("exo_pair"), c10::ValueError);
  EXPECT_THROW(loss("robust", 0.5), c10::ValueError);
  EXPECT_THROW(loss("Sigmoid"), c10::ValueError);
  EXPECT_THROW(loss("ipo"), c10::NotImplementedError);
}

TEST(Preference, Orpo) {
  const Batch b;
  std::vector<Tensor> leaves;
  const Tensor logp = b.policy(true, &leaves), odds = logp - torch::log1p(-logp.exp()),
               g = odds.narrow(0, 0, 2) - odds.narrow(0, 2, 2);
  liger::nn::ORPOLoss loss(liger::nn::ORPOLossOptions().beta(0.4));
  const auto result = loss(b.hidden, b.weight, b.target, b.bias);
  expect_equal(b, result.loss, b.last_nll - 0.4 * F::logsigmoid(g).mean(), leaves);
  EXPECT_NEAR(result.log_odds_chosen.item<double>(), g.mean().item<double>(), 1e-4);
  EXPECT_NEAR(result.log_odds_ratio.item<double>(), F::logsigmoid(g).mean().item<double>(), 1e-4);
}

TEST(Preference, CpoAndSimpo) {
  const Batch b;
  std::vector<Tensor> leaves;
  Tensor logp = b.policy(false, &leaves), u = 0.2 * (logp.narrow(0, 0, 2) - logp.narrow(0, 2, 2));
  liger::nn::CPOLoss cpo(liger::nn::CPOLossOptions().beta(0.2).label_smoothing(0.1).alpha(0.3));
  expect_equal(b, cpo(b.hidden, b.weight, b.target, b.bias).loss,
               (-0.9 * F::logsigmoid(u) - 0.1 * F::logsigmoid(-u)).mean() + 0.3 * b.last_nll, leaves);
  logp = b.policy(true, &leaves), u = 2 * (logp.narrow(0, 0, 2) - logp.narrow(0, 2, 2)) - 0.5;
  liger::nn::CPOLoss simpo(liger::nn::CPOLossOptions::simpo());
  expect_equal(b, simpo(b.hidden, b.weight, b.target, b.bias).loss, -F::logsigmoid(u).mean(), leaves);
}

/// Labels of the nll that count where target's do not, differ where both count, agree, and are ignored.
TEST(Preference, NllTarget) {
  const Batch b;
  Tensor nll_target = torch::randint(9, {4, 5});
  nll_target[0][0] = b.target[0][0], nll_target[1][2] = (b.target[1][2] + 1) % 9;
  nll_target[0][3] = nll_target[1][0] = -100;
  const Tensor labels = nll_target.narrow(0, 0, 2), counted = labels.ne(-100);
  std::vector<Tensor> leaves;
  const auto nll = [&] {
    const Tensor logits = torch::linear(leaves[0].narrow(0, 0, 2), leaves[1], leaves[2]);
    return -(Batch::tokens(logits, labels) * counted).sum() / counted.sum();
  };
  const auto halves = [](const Tensor& t) { return t.narrow(0, 0, 2) - t.narrow(0, 2, 2); };

  Tensor logp = b.policy(true, &leaves);
  const Tensor g = halves(logp - torch::log1p(-logp.exp()));
  EXPECT_GT((nll() - b.last_nll).abs().item<double>(), 1e-2);
  liger::nn::ORPOLoss orpo(liger::nn::ORPOLossOptions().beta(0.4));
  Tensor loss = orpo(b.hidden, b.weight, b.target, b.bias, nll_target).loss;
  expect_equal(b, loss, nll() - 0.4 * F::logsigmoid(g).mean(), leaves);

  logp = b.policy(false, &leaves);
  liger::nn::CPOLoss cpo(liger::nn::CPOLossOptions().beta(0.2).alpha(0.3));
  loss = cpo(b.hidden, b.weight, b.target, b.bias, nll_target).loss;
  expect_equal(b, loss, 0.3 * nll() - F::logsigmoid(0.2 * halves(logp)).mean(), leaves);

  logp = b.policy(false, &leaves) - b.reference();
  liger::nn::DPOLoss dpo(liger::nn::DPOLossOptions().loss({.beta = 0.3}).alpha(0.5));
  loss = dpo(b.hidden, b.weight, b.target, b.bias, b.ref_hidden, b.ref_weight, Tensor(), nll_target).loss;
  expect_equal(b, loss, 0.5 * nll() - F::logsigmoid(0.3 * halves(logp)).mean(), leaves);

  EXPECT_THROW(orpo(b.hidden, b.weight, b.target, b.bias, labels), c10::ValueError);
  EXPECT_THROW(liger::labels_with_nll(b.target, nll_target), c10::ValueError);
  torch::nn::AnyModule any(liger::nn::ORPOLoss{});
  EXPECT_TRUE(
      any.forward<liger::ORPOResult>(b.hidden, b.weight, b.target, b.bias, nll_target).loss.isfinite().item<bool>());
}

TEST(Preference, Kto) {
  const Batch b;
  std::vector<Tensor> leaves;
  const Tensor delta = b.policy(false, &leaves) - b.reference(), sign = torch::where(b.liked, 1., -1.);
  liger::nn::KTOLoss loss(liger::nn::KTOLossOptions().beta(0.2));
  const auto result =
      loss(b.hidden, b.weight, b.target, b.liked, b.bias, b.ref_hidden, b.ref_weight, Tensor(), torch::tensor(0.3));
  expect_equal(b, result.loss, (1 - (0.2 * (delta - 0.3) * sign).sigmoid()).mean(), leaves);
  EXPECT_NEAR(result.rejected_rewards.item<double>(), (0.2 * delta).masked_select(~b.liked).sum().item<double>(), 1e-4);
  EXPECT_THROW(liger::kto_loss(delta, b.liked, {}, torch::zeros({2})), c10::ValueError);
}

TEST(Preference, ModulesPrintAndRefuse) {
  std::ostringstream printed;
  printed << liger::nn::DPOLoss(liger::nn::DPOLossOptions().loss({.loss_type = "hinge"}));
  EXPECT_EQ(printed.str(),
            "liger::nn::DPOLoss(loss_type=hinge, beta=0.1, label_smoothing=0, discopop_tau=0.05, "
            "average_log_prob=false, alpha=0, ignore_index=-100)");
  const Batch b;
  const auto odd = [&](const Tensor& t) { return t.narrow(0, 0, 3); };
  EXPECT_THROW(liger::nn::CPOLoss()(odd(b.hidden), b.weight, odd(b.target)), c10::ValueError);
  const auto copy = std::dynamic_pointer_cast<liger::nn::KTOLossImpl>(
      liger::nn::KTOLoss(liger::nn::KTOLossOptions().beta(3))->clone());
  EXPECT_EQ(copy->options.beta(), 3);
  torch::nn::AnyModule any(liger::nn::ORPOLoss{});
  EXPECT_TRUE(any.forward<liger::ORPOResult>(b.hidden, b.weight, b.target).loss.isfinite().item<bool>());
}

/// The C++ lines of docs/losses.md.
TEST(Preference, TheExampleOfTheDocumentation) {
  const Batch b;
  const auto &hidden = b.hidden, &weight = b.weight, &labels = b.target;
  liger::fused_linear_cross_entropy(hidden.flatten(0, 1), weight, labels.flatten()).loss.backward();
  const auto logp = liger::linear_log_prob(hidden, weight, labels).logp;
  const auto sequences = liger::sequence_log_prob(logp, labels).chunk(2);
  liger::dpo_loss(sequences[0], sequences[1]).loss.backward();
  const Tensor before = hidden.grad().clone(), ref_logp = logp.detach() - 0.1;
  const auto advantages = torch::randn({hidden.size(0)});
  liger::PolicyOptions grpo{.loss = liger::PolicyLoss::Grpo, .beta = 0.04};
  liger::policy_loss(liger::linear_log_prob(hidden, weight, labels).logp,
                     {.mask = labels.ne(-100), .advantages = advantages, .ref_logp = ref_logp}, grpo)
      .loss.backward();
  EXPECT_FALSE(hidden.grad().equal(before));
  EXPECT_TRUE(hidden.grad().isfinite().all().item<bool>() && hidden.grad().any().item<bool>() &&
              weight.grad().any().item<bool>());
}

}  // namespace
