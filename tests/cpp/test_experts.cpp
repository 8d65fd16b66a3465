// Experts over the ranks of a process group: here threads of one process, which talk by gloo, where its headers are.
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <thread>
#include "liger/nn/experts.h"
#ifdef LIGER_GLOO
#define USE_C10D_GLOO
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#endif

using namespace liger::nn;
using torch::Tensor;

namespace {

constexpr int64_t kExperts = 4, kHidden = 8, kWidth = 6, kTokens = 5, kChosen = 2;

/// What all ranks together have.
struct Whole {
  bool gated;
  Tensor x, gate_up, down, weights, index, dy;

  explicit Whole(int64_t ranks, bool gated = true) : gated(gated) {
    torch::manual_seed(1);
    const int64_t tokens = ranks * kTokens;
    x = torch::randn({tokens, kHidden}), dy = torch::randn({tokens, kHidden});
    gate_up = torch::randn({kExperts, (1 + gated) * kWidth, kHidden}) * 0.4,
    down = torch::randn({kExperts, kHidden, kWidth}) * 0.4;
    weights = torch::rand({tokens, kChosen}), index = torch::randint(-1, kExperts + 1, {tokens, kChosen});
  }

  /// y of a loop over the experts, for leaves in double.
  Tensor reference(const Tensor& x, const Tensor& gate_up, const Tensor& down, const Tensor& weights) const {
    Tensor y = torch::zeros_like(x);
    for (int64_t e = 0; e < kExperts; ++e) {
      const Tensor weight = (weights * index.eq(e)).sum(1, true);
      const Tensor a = x.mm(gate_up[e].t());
      const auto halves = a.chunk(2, 1);
      const Tensor h = gated ? torch::silu(halves[0]) * halves[1] : torch::relu(a).square();
      y = y + weight * h.mm(down[e].t());
    }
    return y;
  }
};

Tensor leaf(const Tensor& t, torch::Dtype dtype) { return t.detach().to(dtype).clone().requires_grad_(); }

/// The largest difference is a last bit of each of some dozen terms.
void expect_close(const Tensor& found, const Tensor& expected, const std::string& what) {
  const double most = expected.abs().max().item<double>(),
               off = (found.to(torch::kDouble) - expected).abs().max().item<double>();
  EXPECT_LE(off, 1e-5 * most) << what;
}

/// What one of the ranks computes is that part of what one process does.
void check(const Whole& whole, const experts::Group& group, int64_t rank, int64_t ranks) {
  const auto of = [&](const Tensor& t) { return leaf(t, torch::kDouble); };
  const Tensor x = of(whole.x), gate_up = of(whole.gate_up), down = of(whole.down), weights = of(whole.weights);
  const Tensor y = whole.reference(x, gate_up, down, weights);
  y.backward(whole.dy.to(torch::kDouble));

  const int64_t mine = kExperts / ranks;
  liger::ExpertsOptions compute;
  if (!whole.gated) compute.activation = liger::Activation::ReLUSquared, compute.gated = false;
  Experts module(ExpertsOptions(kHidden, kWidth, kExperts).compute(compute), group);
  {
    torch::NoGradGuard no_grad;
    module->gate_up.copy_(whole.gate_up.narrow(0, rank * mine, mine));
    module->down.copy_(whole.down.narrow(0, rank * mine, mine));
  }
  const auto rows = [&](const Tensor& t) { return t.narrow(0, rank * kTokens, kTokens); };
  const Tensor own_x = leaf(rows(whole.x), torch::kFloat), own_weights = leaf(rows(whole.weights), torch::kFloat);
  const Tensor own = module(own_x, rows(whole.index), own_weights);
  own.backward(rows(whole.dy));
  expect_close(own.detach(), rows(y).detach(), "y");
  expect_close(own_x.grad(), rows(x.grad()), "dx");
  expect_close(own_weights.grad(), rows(weights.grad()), "dweights");
  expect_close(module->gate_up.grad(), gate_up.grad().narrow(0, rank * mine, mine), "dgate_up");
  expect_close(module->down.grad(), down.grad().narrow(0, rank * mine, mine), "ddown");
}

TEST(Experts, Alone) { check(Whole(1), {}, 0, 1); }

TEST(Experts, WithoutAGate) {
  check(Whole(1, false), {}, 0, 1);
  const auto named = Experts(ExpertsOptions(kHidden, kWidth, kExperts).compute({.gated = false}))->named_parameters();
  EXPECT_EQ(named.keys(), (std::vector<std::string>{"up_proj", "down_proj"}));
}

#ifdef LIGER_GLOO
/// f(group, rank) on a thread for each rank.
template <class F>
void on_ranks(int ranks, F f) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank)
    threads.emplace_back([&, rank] {
      const auto options = c10d::ProcessGroupGloo::Options::create();
      options->devices.push_back(c10d::ProcessGroupGloo::createDefaultDevice());
      f(c10::make_intrusive<c10d::ProcessGroupGloo>(store, rank, ranks, options), rank);
    });
  for (std::thread& thread : threads) thread.join();
}

class ExpertsOverRanks : public testing::TestWithParam<int> {};

TEST_P(ExpertsOverRanks, AreThoseOfOneProcess) {
  const Whole whole(GetParam());
  on_ranks(GetParam(), [&](const experts::Group& group, int rank) { check(whole, group, rank, GetParam()); });
}
INSTANTIATE_TEST_SUITE_P(, ExpertsOverRanks, testing::Values(1, 2, 4));

TEST(Experts, ThatRanksCannotShare) {
  on_ranks(2, [](const experts::Group& group, int) {
    EXPECT_THROW(Experts(ExpertsOptions(kHidden, kWidth, 3), group), c10::Error);
  });
}
#endif

}  // namespace
