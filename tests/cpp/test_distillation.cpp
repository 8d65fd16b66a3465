// Distillation between two heads in C++ against its formulas in double.
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <sstream>
#include "liger/nn/distillation.h"
#include "liger/nn/topk_distillation.h"

using liger::Distillation;
using torch::Tensor;

namespace {

Tensor divergence(Distillation kind, const Tensor& z, const Tensor& t, double beta) {
  const Tensor s = z.log_softmax(-1), r = t.log_softmax(-1);
  const auto kl = [](const Tensor& p, const Tensor& q) { return (p.exp() * (p - q)).sum(-1); };
  const Tensor m = (beta * r.exp() + (1 - beta) * s.exp()).log();
  switch (kind) {
    case Distillation::ForwardKL: return kl(r, s);
    case Distillation::ReverseKL: return kl(s, r);
    case Distillation::JensenShannon: return beta * kl(r, m) + (1 - beta) * kl(s, m);
    case Distillation::TotalVariation: return 0.5 * (s.exp() - r.exp()).abs().sum(-1);
    case Distillation::Cosine: return 1 - torch::cosine_similarity(z, t, -1);
  }
  return {};
}

TEST(Distillation, EveryKind) {
  const Tensor student = torch::randn({2, 6, 5}, torch::requires_grad()),
               weight = torch::randn({9, 5}, torch::requires_grad()), bias = torch::randn({9}, torch::requires_grad());
  const Tensor teacher = torch::randn({2, 6, 7}), teacher_weight = torch::randn({9, 7}),
               labels = torch::randint(9, {2, 6});
  labels[0][1] = labels[1][5] = -100;
  const Tensor kept = labels.ne(-100), of_token = torch::rand({2, 6});
  for (const auto kind : {Distillation::ForwardKL, Distillation::ReverseKL, Distillation::JensenShannon,
                          Distillation::TotalVariation, Distillation::Cosine}) {
    liger::nn::LinearDistillation loss(liger::DistillationOptions{.kind = kind,
                                                                  .beta = 0.3,
                                                                  .temperature = 1.5,
                                                                  .soft_weight = 0.7,
                                                                  .hard_weight = 0.4,
                                                                  .student = {.softcap = 4}});
    const auto result = loss(student, weight, teacher, teacher_weight, labels, bias, Tensor(), of_token);
    const auto ours = torch::autograd::grad({result.loss}, {student, weight, bias});
    std::vector<Tensor> d;
    for (const Tensor& t : {student, weight, bias}) d.push_back(t.detach().to(torch::kDouble).requires_grad_());
    const Tensor z = 4 * torch::tanh(torch::linear(d[0], d[1], d[2]) / 4),
                 t = torch::linear(teacher.to(torch::kDouble), teacher_weight.to(torch::kDouble));
    const Tensor share = of_token * kept / kept.sum();
    const Tensor soft = (divergence(kind, z / 1.5, t / 1.5, 0.3) * share).sum();
    const Tensor hard = -(z.log_softmax(-1).gather(-1, labels.clamp_min(0).unsqueeze(-1)).squeeze(-1) * share).sum();
    const Tensor expected = 0.7 * soft + 0.4 * hard;
    EXPECT_NEAR(result.loss.item<double>(), expected.item<double>(), 1e-5);
    EXPECT_NEAR(result.soft.item<double>(), soft.item<double>(), 1e-5);
    EXPECT_NEAR(result.hard.item<double>(), hard.item<double>(), 1e-5);
    const auto theirs = torch::autograd::grad({expected}, d);
    for (size_t i = 0; i < 3; ++i) {
      EXPECT_GT(theirs[i].abs().max().item<double>(), 1e-3);
      EXPECT_LE((ours[i] - theirs[i]).abs().max().item<double>(), 1e-5) << int(kind) << " gradient " << i;
    }
  }
}

TEST(Distillation, WithoutLabelsAndErrors) {
  const Tensor student = torch::randn({4, 5}), weight = torch::randn({9, 5}), teacher = torch::randn({4, 7}),
               teacher_weight = torch::randn({9, 7});
  const auto result = liger::linear_distillation(student, weight, teacher, teacher_weight);
  EXPECT_FALSE(result.hard.defined());
  EXPECT_NEAR(result.loss.item<double>(),
              divergence(Distillation::JensenShannon, torch::linear(student, weight),
                         torch::linear(teacher, teacher_weight), 0.5)
                  .mean()
                  .item<double>(),
              1e-5);
  EXPECT_THROW(liger::linear_distillation(student, weight, teacher, teacher_weight, {}, {.hard_weight = 1}),
               c10::ValueError);
  EXPECT_THROW(liger::linear_distillation(student, weight, teacher, teacher_weight, {}, {.beta = 2}), c10::ValueError);
  std::ostringstream printed;
  printed << liger::nn::LinearDistillation(liger::DistillationOptions{.kind = Distillation::ReverseKL});
  EXPECT_EQ(printed.str(),
            "liger::nn::LinearDistillation(kind=ReverseKL, beta=0.5, temperature=1, soft_weight=1, hard_weight=0, "
            "ignore_index=-100)");
}

/// Log-probabilities of a few classes and of all others, their logits, and the losses on them.
TEST(TopKDistillation, ClassesAndDivergences) {
  const Tensor hidden = torch::randn({6, 5}, torch::requires_grad()),
               weight = torch::randn({9, 5}, torch::requires_grad());
  const Tensor ids = torch::randint(9, {6}), teacher = torch::randn({6, 9}).log_softmax(-1);
  const auto [teacher_logp, classes] = teacher.topk(3);
  const Tensor z = torch::linear(hidden, weight), logp = z.log_softmax(-1), at = logp.gather(1, classes);
  const Tensor outside = logp.scatter(1, classes, -INFINITY).logsumexp(-1);
  liger::LogProbOptions asked;
  asked.class_ids = classes, asked.log_tail = true;
  const auto result = liger::linear_log_prob(hidden, weight, ids, asked);
  EXPECT_TRUE(torch::allclose(result.class_logp, at, 1e-4, 1e-5) &&
              torch::allclose(result.log_tail, outside, 1e-4, 1e-5));
  EXPECT_TRUE(torch::allclose(liger::class_logits(hidden, weight, classes), z.gather(1, classes), 1e-4, 1e-5));

  const Tensor rest = (1 - teacher_logp.exp().sum(1)).log();
  const Tensor s = torch::cat({at, outside.unsqueeze(1)}, 1), t = torch::cat({teacher_logp, rest.unsqueeze(1)}, 1);
  const auto kl = [](const Tensor& p, const Tensor& q) { return (p.exp() * (p - q)).sum(1); };
  const auto normal = [](const Tensor& x) { return x.log_softmax(1); };
  for (const double beta : {0., 0.3, 1.})
    for (const auto tail : {liger::nn::Tail::Bucket, liger::nn::Tail::Renormalise}) {
      const bool bucket = tail == liger::nn::Tail::Bucket;
      const Tensor a = bucket ? s : normal(at), b = bucket ? t : normal(teacher_logp);
      const Tensor m = (beta * b.exp() + (1 - beta) * a.exp()).log();
      const Tensor each = beta == 0 ? kl(b, a) : beta == 1 ? kl(a, b) : beta * kl(b, m) + (1 - beta) * kl(a, m);
      liger::nn::TopKDistillation loss(
          liger::nn::TopKDistillationOptions{.beta = beta, .tail = tail, .hard_weight = 0.5});
      const auto found = loss(hidden, weight, classes, teacher_logp, ids);
      const Tensor want = (each - 0.5 * logp.gather(1, ids.unsqueeze(1)).squeeze(1)).mean();
      EXPECT_TRUE(torch::allclose(found.divergence, each, 1e-4, 1e-5) && torch::allclose(found.loss, want, 1e-4, 1e-5));
      const auto ours = torch::autograd::grad({found.loss}, {hidden, weight}, {}, true),
                 theirs = torch::autograd::grad({want}, {hidden, weight}, {}, true);
      for (size_t i = 0; i < 2; ++i) EXPECT_TRUE(torch::allclose(ours[i], theirs[i], 1e-4, 1e-5));
    }
  EXPECT_THROW(liger::nn::topk_divergence(at, teacher_logp, {}, 2, liger::nn::Tail::Drop), c10::ValueError);
  EXPECT_THROW(liger::nn::topk_divergence(at, teacher_logp, {}, 0, liger::nn::Tail::Bucket), c10::ValueError);
  EXPECT_THROW(liger::nn::TopKDistillation(liger::nn::TopKDistillationOptions{.hard_weight = 1})
                   ->forward(hidden, weight, classes, teacher_logp),
               c10::ValueError);
  std::ostringstream printed;
  printed << liger::nn::TopKDistillation();
  EXPECT_EQ(printed.str(),
            "liger::nn::TopKDistillation(beta=0, temperature=1, soft_weight=1, hard_weight=0, ignore_index=-100)");
}

/// A low-rank part of the head, the largest classes, and the gradient added to a buffer.
TEST(LinearLogProb, LowRankTopKAndMainGrad) {
  const Tensor hidden = torch::randn({6, 5}, torch::requires_grad()), weight = torch::randn({9, 5}),
               a = torch::randn({2, 5}, torch::requires_grad()), b = torch::randn({9, 2}, torch::requires_grad());
  const Tensor ids = torch::randint(9, {6});
  const auto result = liger::linear_log_prob(hidden, weight, ids, {.lse = true, .argmax = true, .top_k = 2}, {},
                                             {.a = a, .b = b, .scale = 0.5});
  const Tensor z = torch::linear(hidden, weight + 0.5 * b.mm(a)), logp = z.log_softmax(-1);
  EXPECT_TRUE(torch::allclose(result.logp, logp.gather(1, ids.unsqueeze(1)).squeeze(1), 1e-4, 1e-5));
  EXPECT_TRUE(torch::allclose(result.lse, z.logsumexp(-1), 1e-4, 1e-5) && torch::equal(result.argmax, z.argmax(-1)));
  EXPECT_TRUE(torch::allclose(result.top_logp, std::get<0>(logp.topk(2)), 1e-4, 1e-5));
  const auto ours = torch::autograd::grad({result.logp.sum()}, {hidden, a, b}),
             theirs = torch::autograd::grad({logp.gather(1, ids.unsqueeze(1)).sum()}, {hidden, a, b});
  for (size_t i = 0; i < 3; ++i) EXPECT_TRUE(torch::allclose(ours[i], theirs[i], 1e-4, 1e-5));
  const Tensor w = weight.clone().requires_grad_(), main = torch::ones_like(weight);
  liger::linear_log_prob(hidden, w, ids, {.main_grad = main}).logp.sum().backward();
  const Tensor v = weight.clone().requires_grad_();
  torch::linear(hidden, v).log_softmax(-1).gather(1, ids.unsqueeze(1)).sum().backward();
  EXPECT_TRUE(torch::allclose(main - 1, v.grad(), 1e-4, 1e-5) && !w.grad().defined());
  EXPECT_GT(liger::head_peak_bytes({.tokens = 10, .width = 5, .classes = 9}), 0);
}

}  // namespace
