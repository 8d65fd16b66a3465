// The C++ API of the research operators against libtorch; see tests/cpp/test_ops.cpp.
#include <gtest/gtest.h>
#include <torch/torch.h>
#include "liger/nn/research.h"
#include "liger/ops.h"
#include "tests/cpp/compare.h"

namespace {

TEST(ResearchNorms, EqualTorch) {
  const std::vector<Tensor> grouped{torch::randn({2, 6, 40}), torch::randn({6}), torch::randn({6})};
  expect_close(run([](auto& t) { return liger::group_norm(t[0], t[1], t[2], 3, 1e-5); }, grouped),
               run([](auto& t) { return torch::group_norm(t[0], 3, t[1], t[2], 1e-5); }, grouped));
}

TEST(ResearchNorms, Modules) {
  const auto x = torch::randn({3, 4, 16});
  expect_close({liger::nn::GroupNorm(liger::nn::GroupNormOptions(2, 4))(x)}, {torch::group_norm(x, 2, {}, {}, 1e-6)});
  expect_close({liger::nn::DyT(16)(x)}, {torch::tanh(0.5 * x)});
  const auto power = [&](int p) { return torch::rms_norm(x.pow(p), {16}, {}, 1e-6) / 3; };
  expect_close({liger::nn::PolyNorm()(x)}, {power(3) + power(2) + power(1) + 1});
}

TEST(Connections, EqualTorch) {
  const std::vector<Tensor> blocks{torch::randn({3, 5, 16}), torch::randn({16}) / 4, torch::randn({16})};
  expect_close(run([](auto& t) { return liger::attention_residuals(t[0], t[1], t[2]); }, blocks),
               run(
                   [](auto& t) {
                     const auto keys = torch::rms_norm(t[0], {16}, t[2], 1e-6);
                     return (torch::softmax((keys * t[1]).sum(-1, true), 0) * t[0]).sum(0);
                   },
                   blocks));
  const std::vector<Tensor> streams{torch::randn({5, 4, 16}), torch::randn({5, 16}), torch::rand({5, 4}),
                                    torch::rand({5, 4, 4})};
  const std::vector<Tensor> mixed{streams[0], streams[2]};
  expect_close(run([](auto& t) { return liger::mhc_pre(t[0], t[1]); }, mixed),
               run([](auto& t) { return (t[0] * t[1].unsqueeze(-1)).sum(-2); }, mixed));
  expect_close(run([](auto& t) { return liger::mhc_post_res(t[0], t[1], t[2], t[3]); }, streams),
               run([](auto& t) { return t[3].matmul(t[0]) + t[2].unsqueeze(-1) * t[1].unsqueeze(-2); }, streams));
  const auto one = torch::ones({});
  const auto [pre, post, res] =
      liger::mhc_coefficients(streams[0], torch::randn({64, 24}), torch::randn({24}), one, one, one);
  expect_close({res.sum(-2)}, {torch::ones({5, 4})});
  EXPECT_TRUE((pre > 0).all().item<bool>() && (post < 2).all().item<bool>());
}

TEST(Attention, EqualsTorch) {
  const std::vector<Tensor> heads{torch::randn({2, 9, 8}), torch::randn({2, 9, 8}), torch::randn({2, 9, 8})};
  const auto place = torch::arange(9), apart = (place.unsqueeze(1) - place).abs();
  expect_close(
      run([](auto& t) { return liger::neighborhood_attention(t[0], t[1], t[2], 3, 2); }, heads),
      run(
          [&](auto& t) {
            const auto scores = t[0].matmul(t[1].mT()) / std::sqrt(8.);
            return torch::softmax(scores.masked_fill((apart > 2) | (apart % 2 != 0), -INFINITY), -1).matmul(t[2]);
          },
          heads));
  const std::vector<Tensor> scores{torch::randn({2, 3, 9, 9}), torch::randn({4, 3, 3, 3}), torch::randn({4})};
  liger::MultiTokenAttentionOptions same;
  same.padding = {1, 1};
  expect_close(run([&](auto& t) { return liger::multi_token_attention(t[0], t[1], t[2], same); }, scores),
               run(
                   [](auto& t) {
                     const auto future = torch::ones({9, 9}, torch::kBool).triu(1);
                     return torch::conv2d(torch::softmax(t[0].masked_fill(future, -1e9), -1), t[1], t[2], 1, 1).tril();
                   },
                   scores));
  expect_close({liger::sparsemax(scores[0], -1, true)},
               {liger::sparsemax(scores[0].masked_fill(torch::ones({9, 9}, torch::kBool).triu(1), -1e9))});
}

TEST(Int2Matmul, IsExact) {
  const auto a = torch::randint(-128, 128, {5, 24}, torch::kChar), w = torch::randint(-1, 3, {24, 7}, torch::kInt),
             packed = liger::int2_pack(w);
  EXPECT_EQ(packed.sizes(), (std::vector<int64_t>{6, 7}));
  EXPECT_TRUE(torch::equal(liger::int2_unpack(packed), w));
  EXPECT_TRUE(torch::equal(liger::int2_matmul(a, packed), a.to(torch::kInt).matmul(w)));
}

TEST(Sparsemax, NearestProbabilities) {
  const auto x = torch::tensor({{0.5f, 0.1f, -1.f}, {3.f, 0.f, 1.f}});
  expect_close({liger::sparsemax(x)}, {torch::tensor({{0.7f, 0.3f, 0.f}, {1.f, 0.f, 0.f}})});
  expect_close({liger::nn::Sparsemax(liger::nn::SparsemaxOptions().dim(0))(x)}, {liger::sparsemax(x.t()).t()});
}

}  // namespace
