// The C++ API against libtorch: values, gradients, modules, errors. What the kernels promise is tested in Python, over
// all cases.
#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include "liger/nn/activation.h"
#include "liger/nn/embedding.h"
#include "liger/nn/loss.h"
#include "liger/nn/norm.h"
#include "liger/nn/policy.h"
#include "liger/nn/rope.h"
#include "tests/cpp/compare.h"

namespace F = torch::nn::functional;
using torch::Tensor;

namespace {

const Tensor labels() { return torch::tensor({1, -100, 0, 6, 2}, torch::kLong); }

TEST(RmsNorm, EqualsTorch) {
  const std::vector<Tensor> in{torch::randn({2, 3, 40}), torch::randn({40})};
  expect_close(run([](auto& t) { return liger::rms_norm(t[0], t[1], 1e-5); }, in),
               run([](auto& t) { return torch::rms_norm(t[0], {40}, t[1], 1e-5); }, in));
}

TEST(RmsNorm, Module) {
  liger::nn::RMSNorm norm(liger::nn::RMSNormOptions(16).offset(1).casting(liger::Casting::Gemma));
  const auto x = torch::randn({3, 16});
  expect_close({norm(x)}, {torch::rms_norm(x, {16}, {}, 1e-6)});
  EXPECT_EQ(norm->parameters().size(), 1u);
  EXPECT_TRUE(liger::nn::RMSNorm(liger::nn::RMSNormOptions(16).elementwise_affine(false))->parameters().empty());
}

TEST(Norms, EqualTorch) {
  const std::vector<Tensor> in{torch::randn({2, 6, 40}), torch::randn({40}), torch::randn({40})};
  expect_close(run([](auto& t) { return liger::layer_norm(t[0], t[1], t[2], 1e-5); }, in),
               run([](auto& t) { return torch::layer_norm(t[0], {40}, t[1], t[2], 1e-5); }, in));
}

TEST(Norms, Modules) {
  const auto x = torch::randn({3, 4, 16}), residual = torch::randn({3, 4, 16}), scale = torch::randn({3, 1, 16}),
             shift = torch::randn({3, 1, 16});
  const auto normed = torch::rms_norm(x + residual, {16}, {}, 1e-6);
  auto [y, s] = liger::nn::FusedAddRMSNorm(liger::nn::RMSNormOptions(16))(x, residual);
  expect_close({y, s}, {normed, x + residual});
  expect_close({liger::nn::ModulatedRMSNorm(liger::nn::RMSNormOptions(16))(x, scale, shift)},
               {torch::rms_norm(x, {16}, {}, 1e-6) * (1 + scale) + shift});
  expect_close({liger::nn::RMSNormGated(16)(x, residual)},
               {torch::rms_norm(x, {16}, {}, 1e-6) * torch::silu(residual)});
  expect_close({liger::nn::LayerNorm(16)(x)}, {torch::layer_norm(x, {16}, {}, {}, 1e-6)});
}

TEST(Gated, EqualsTorch) {
  const std::vector<Tensor> in{torch::randn({5, 24}), torch::randn({5, 24})};
  expect_close(run([](auto& t) { return liger::gated(t[0], t[1]); }, in),
               run([](auto& t) { return torch::silu(t[0]) * t[1]; }, in));
  expect_close(run([](auto& t) { return liger::gated(t[0], t[1], liger::Activation::GeLUTanh); }, in),
               run([](auto& t) { return torch::gelu(t[0], "tanh") * t[1]; }, in));
  expect_close(run([](auto& t) { return liger::gated_packed(t[0]); }, {in[0]}),
               run([](auto& t) { return torch::silu(t[0].slice(1, 0, 12)) * t[0].slice(1, 12); }, {in[0]}));
  const std::vector<Tensor> layer{in[0], torch::randn({7, 12})}, without_gate{in[0], torch::randn({7, 24})};
  expect_close(
      run([](auto& t) { return liger::gated_linear(t[0], {t[1]}); }, layer),
      run([](auto& t) { return (torch::silu(t[0].slice(1, 0, 12)) * t[0].slice(1, 12)).mm(t[1].t()); }, layer));
  expect_close(
      run([](auto& t) { return liger::activated_linear(t[0], {t[1]}, {liger::Activation::GeLUErf}); }, without_gate),
      run([](auto& t) { return torch::gelu(t[0]).mm(t[1].t()); }, without_gate));
}

TEST(Gated, Module) {
  liger::nn::GatedMLP mlp(liger::nn::GatedMLPOptions(8, 24));
  const auto x = torch::randn({3, 8});
  expect_close({mlp(x)}, {mlp->down_proj(torch::silu(mlp->gate_proj(x)) * mlp->up_proj(x))});
}

TEST(Gated, RecomputingModule) {
  liger::nn::GatedMLP mlp(liger::nn::GatedMLPOptions(8, 24).bias(true).recompute(true).chunk(2));
  const std::vector<Tensor> in{torch::randn({5, 8})};
  const auto with_gradients = [&](auto forward) {
    mlp->zero_grad();
    std::vector<Tensor> found = run([&](auto& t) { return forward(t[0]); }, in);
    for (const Tensor& parameter : mlp->parameters()) found.push_back(parameter.grad().clone());
    return found;
  };
  expect_close(with_gradients([&](const Tensor& x) { return mlp(x); }), with_gradients([&](const Tensor& x) {
                 return mlp->down_proj(torch::silu(mlp->gate_proj(x)) * mlp->up_proj(x));
               }));
}

TEST(Activate, EqualsTorch) {
  const std::vector<Tensor> in{torch::randn({5, 24})};
  expect_close(run([](auto& t) { return liger::nn::ActivationLayer()(t[0]); }, in),
               run([](auto& t) { return torch::relu(t[0]).square(); }, in));
}

TEST(Rope, TurnsAndTurnsBack) {
  liger::nn::RotaryEmbedding rotary(liger::nn::RotaryEmbeddingOptions(8));
  const auto q = torch::randn({2, 4, 5, 8}), k = torch::randn({2, 2, 5, 8});
  const auto [rq, rk] = rotary(q, k, 3);
  const auto half = torch::outer(torch::arange(3, 8, torch::kFloat), rotary->inv_freq),
             angles = torch::cat({half, half}, -1);
  const auto turned = torch::cat({-q.slice(3, 4), q.slice(3, 0, 4)}, -1);
  expect_close({rq}, {q * angles.cos() + turned * angles.sin()});
  const auto [bq, bk] = liger::rope(rq, rk, angles.cos(), angles.sin(), true);
  expect_close({bq, bk}, {q, k});
}

TEST(Rope, TurnsNeighboursAsComplexNumbers) {
  liger::nn::RotaryEmbedding rotary(liger::nn::RotaryEmbeddingOptions(8).interleaved(true));
  const auto q = torch::randn({2, 4, 5, 8}), k = torch::randn({2, 2, 5, 8});
  const auto angles = torch::outer(torch::arange(5, torch::kFloat), rotary->inv_freq);
  const auto turned = [&](const Tensor& t) {
    return torch::view_as_real(torch::view_as_complex(t.unflatten(-1, {4, 2})) *
                               torch::polar(torch::ones_like(angles), angles))
        .flatten(-2);
  };
  const auto [rq, rk] = rotary(q, k);
  expect_close({rq, rk}, {turned(q), turned(k)});
}

TEST(Rope, PackedEqualsUnpacked) {
  const auto qkv = torch::randn({2, 5, 6 * 8}), angles = torch::rand({5, 8}), cos = angles.cos(), sin = angles.sin();
  const auto heads = qkv.view({2, 5, 6, 8}).transpose(1, 2);
  const auto [q, k] = liger::rope(heads.narrow(1, 0, 4), heads.narrow(1, 4, 1), cos, sin);
  expect_close({liger::rope_packed(qkv, cos, sin, 4, 1)},
               {torch::cat({q, k, heads.narrow(1, 5, 1)}, 1).transpose(1, 2).flatten(2)});
}

TEST(Embedding, EqualsTorch) {
  const std::vector<Tensor> in{torch::randn({7, 12})};
  const auto ids = torch::tensor({{3, 0, 3}, {6, 3, 1}});
  expect_close(run([&](auto& t) { return liger::embedding(t[0], ids, 1); }, in),
               run([&](auto& t) { return torch::embedding(t[0], ids, 1); }, in));
}

TEST(Embedding, Module) {
  liger::nn::Embedding table(liger::nn::EmbeddingOptions(7, 12).padding_idx(2));
  const auto ids = torch::tensor({2, 0});
  expect_close({table(ids)}, {torch::embedding(table->weight, ids)});
  EXPECT_FALSE(table(ids)[0].any().item<bool>());
}

TEST(CrossEntropy, EqualsTorch) {
  const auto x = torch::randn({5, 7});
  const auto options = F::CrossEntropyFuncOptions().ignore_index(-100).label_smoothing(0.1);
  expect_close(run([](auto& t) { return liger::cross_entropy(t[0], labels(), {.label_smoothing = 0.1}).loss; }, {x}),
               run([&](auto& t) { return F::cross_entropy(t[0], labels(), options); }, {x}));
  expect_close({liger::nn::CrossEntropyLoss()(x, labels())}, {F::cross_entropy(x, labels())});
}

TEST(CrossEntropy, ReturnsWhatIsAskedFor) {
  const auto x = torch::randn({5, 7}).requires_grad_();
  const auto loss = liger::cross_entropy(x, labels());
  EXPECT_FALSE(loss.z_loss.defined() || loss.accuracy.defined() || loss.predicted.defined());
  const auto some = liger::cross_entropy(x, labels(), {.accuracy = true, .predicted = true});
  EXPECT_FALSE(some.z_loss.defined());
  EXPECT_TRUE(torch::equal(some.predicted, torch::where(labels() == -100, -1, x.argmax(1))));
  EXPECT_FALSE(some.accuracy.requires_grad());
  const auto all = liger::cross_entropy(x, labels(), {.lse_square_scale = 0.5, .z_loss = true});
  expect_close({all.loss - all.z_loss}, {loss.loss});
  EXPECT_TRUE(all.loss.requires_grad() && !all.z_loss.requires_grad());
}

TEST(FusedLinearCrossEntropy, EqualsTorch) {
  const std::vector<Tensor> in{torch::randn({5, 16}), torch::randn({7, 16}), torch::randn({7})};
  const auto theirs = run([](auto& t) { return F::cross_entropy(torch::linear(t[0], t[1], t[2]), labels()); }, in);
  expect_close(run([](auto& t) { return liger::fused_linear_cross_entropy(t[0], t[1], labels(), {}, t[2]).loss; }, in),
               theirs);
  liger::HeadOptions one_token;
  one_token.max_bytes = 1;
  expect_close(
      run([&](auto& t) { return liger::fused_linear_cross_entropy(t[0], t[1], labels(), one_token, t[2]).loss; }, in),
      theirs);
  const auto divisor = torch::tensor(3.f);
  expect_close(
      run([&](auto& t) { return liger::fused_linear_cross_entropy(t[0], t[1], labels(), {}, t[2], {}, divisor).loss; },
          in),
      run(
          [](auto& t) {
            return F::cross_entropy(torch::linear(t[0], t[1], t[2]), labels(),
                                    F::CrossEntropyFuncOptions().reduction(torch::kSum)) /
                   3;
          },
          in));
}

TEST(FusedLinearCrossEntropy, AutocastKeepsFloatGradients) {
  const std::vector<Tensor> in{torch::randn({5, 16}), torch::randn({7, 16})};
  const auto exact = run([](auto& t) { return liger::fused_linear_cross_entropy(t[0], t[1], labels()).loss; }, in);
  at::autocast::set_autocast_enabled(at::kCPU, true);
  const auto cast = run([](auto& t) { return liger::fused_linear_cross_entropy(t[0], t[1], labels()).loss; }, in);
  at::autocast::set_autocast_enabled(at::kCPU, false);
  for (size_t i = 0; i < cast.size(); ++i) {
    EXPECT_EQ(cast[i].scalar_type(), torch::kFloat);
    EXPECT_LE((cast[i] - exact[i]).norm().item<double>(),
              2e-2 * exact[i].norm().item<double>());  // bfloat16: 2^-8 an operand
  }
}

TEST(FusedLinearCrossEntropy, Module) {
  liger::nn::LinearCrossEntropy head(liger::nn::LinearCrossEntropyOptions(16, 7));
  const auto hidden = torch::randn({5, 16});
  expect_close({head->forward(hidden, labels())}, {F::cross_entropy(head->forward(hidden), labels())});
}

TEST(Divergence, EqualsTorch) {
  const auto x = torch::log_softmax(torch::randn({5, 9}), -1), t = torch::log_softmax(torch::randn({5, 9}), -1);
  expect_close(
      run([&](auto& in) { return liger::kl_div(in[0], t.exp()); }, {x}),
      run([&](auto& in) { return F::kl_div(in[0], t.exp(), F::KLDivFuncOptions().reduction(torch::kMean)); }, {x}));
  const auto mixture = [](const Tensor& q, const Tensor& p) { return (0.3 * p.exp() + 0.7 * q.exp()).log(); };
  const auto plain = [&](const Tensor& q) {
    return (0.3 * t.exp() * (t - mixture(q, t)) + 0.7 * q.exp() * (q - mixture(q, t))).sum() / 5;
  };
  expect_close(run([&](auto& in) { return liger::jsd(in[0], t, {}, 0.3); }, {x}),
               run([&](auto& in) { return plain(in[0]); }, {x}));
  expect_close(
      run([&](auto& in) { return liger::tvd(in[0], t.exp(), labels()); }, {x.exp()}),
      run([&](auto& in) { return 0.5 * (in[0] - t.exp()).abs().index({labels() != -100}).sum() / 4; }, {x.exp()}));
}

TEST(Divergence, Modules) {
  const auto x = torch::log_softmax(torch::randn({5, 9}), -1), t = torch::log_softmax(torch::randn({5, 9}), -1);
  using namespace liger::nn;
  expect_close({KLDivLoss(KLDivLossOptions().reduction(liger::Reduction::BatchMean).log_target(true))(x, t)},
               {(t.exp() * (t - x)).sum() / 5});
  expect_close({JSDLoss(JSDLossOptions().beta(1))(x, t)}, {(x.exp() * (x - t)).sum() / 5});
  expect_close({TVDLoss(TVDLossOptions().reduction(liger::Reduction::None))(x.exp(), t.exp())},
               {0.5 * (x.exp() - t.exp()).abs()});
}

TEST(Softmax, EqualsTorch) {
  const auto x = torch::randn({3, 5, 7});
  expect_close(run([](auto& t) { return liger::softmax(t[0]); }, {x}),
               run([](auto& t) { return torch::softmax(t[0], -1); }, {x}));
  expect_close({liger::nn::Softmax()(x)}, {torch::softmax(x, -1)});
}

TEST(Route, EqualsTorch) {
  const std::vector<Tensor> in{torch::randn({9, 20})};
  expect_close(run([](auto& t) { return liger::route(t[0], 3, {.normalise = true, .scale = 2}).weights; }, in),
               run([](auto& t) { return 2 * torch::softmax(std::get<0>(t[0].topk(3)), -1); }, in));
  const auto bias = torch::randn({20});
  const auto routed = liger::route(in[0], 4, {.score = liger::RouterScore::Sigmoid, .dtype = torch::kBFloat16}, bias);
  EXPECT_TRUE(torch::equal(routed.index, std::get<1>((torch::sigmoid(in[0]) + bias).topk(4))));
  EXPECT_EQ(routed.weights.scalar_type(), torch::kBFloat16);
  EXPECT_TRUE(torch::equal(routed.counts.to(torch::kLong), torch::bincount(routed.index.flatten(), {}, 20)));
}

TEST(Route, ReplaysAChoice) {
  const std::vector<Tensor> in{torch::randn({4, 6})};
  const auto live = std::get<1>(in[0].topk(2));
  auto given = torch::tensor({{5, 0}, {3, 3}, {-1, -1}, {1, 6}}, torch::kInt16);
  const auto expected = torch::cat({torch::tensor({{5, 0}}), live.slice(0, 1)});
  const auto routed = liger::route(in[0], 2, {}, {}, given);
  EXPECT_TRUE(torch::equal(routed.index, expected));
  EXPECT_TRUE(torch::equal(routed.counts.to(torch::kLong), torch::bincount(expected.flatten(), {}, 6)));
  expect_close(run([&](auto& t) { return liger::route(t[0], 2, {.normalise = true}, {}, given).weights; }, in),
               run([&](auto& t) { return torch::softmax(t[0].gather(-1, expected), -1); }, in));
}

TEST(LoadBalancingLoss, EqualsTorch) {
  const std::vector<Tensor> in{torch::randn({9, 6}), torch::randn({9, 6})};
  const auto mask = torch::arange(9).lt(7);
  const auto plain = [&](auto& t) {
    const auto kept = torch::cat({t[0].index({mask}), t[1].index({mask})});
    const auto chosen = torch::zeros_like(kept).scatter(1, std::get<1>(kept.topk(2)), 1);
    return 6 * chosen.detach().mean(0).dot(torch::softmax(kept, -1).mean(0));
  };
  expect_close(run([&](auto& t) { return liger::load_balancing_loss(t, 2, mask); }, in), run(plain, in));
  const auto all = torch::ones({9}, torch::kBool);
  expect_close({liger::load_balancing_loss(in, 2)}, {liger::load_balancing_loss(in, 2, all)});
}

TEST(SelectiveLogSoftmax, EqualsTorch) {
  const auto x = torch::randn({5, 7}), ids = labels(), kept = (ids != -100).to(torch::kFloat);
  const auto plain = [&](const Tensor& x) {
    const auto logp = torch::log_softmax(x / 0.8, -1);
    return torch::stack({logp.gather(1, ids.clamp_min(0).unsqueeze(1)).squeeze(1), -(logp.exp() * logp).sum(-1)}) *
           kept;
  };
  liger::nn::SelectiveLogSoftmax module(liger::nn::SelectiveLogSoftmaxOptions().temperature(0.8));
  expect_close(run(
                   [&](auto& t) {
                     const auto [logp, entropy] = module(t[0], ids);
                     return torch::stack({logp, entropy});
                   },
                   {x}),
               run([&](auto& t) { return plain(t[0]); }, {x}));
}

TEST(PolicyLoss, EqualsTorch) {
  const auto ids = torch::randint(7, {3, 5}), mask = torch::tensor({{1, 1, 1, 1, 1}, {1, 1, 0, 0, 0}, {0, 0, 0, 0, 0}}),
             advantages = torch::tensor({1.f, -2.f, 3.f});
  const auto old = -2 + 0.5 * torch::randn({3, 5}), reference = -2 + 0.5 * torch::randn({3, 5});
  const auto plain = [&](const Tensor& hidden, const Tensor& weight, const Tensor& bias) {
    const auto logp =
        torch::log_softmax((torch::matmul(hidden, weight.t()) + bias) / 0.8, -1).gather(2, ids.unsqueeze(2)).squeeze(2);
    const auto c = (logp - old).exp(), a = advantages.unsqueeze(1), x = reference - logp;
    return ((-torch::minimum(c * a, c.clamp(0.8, 1.3) * a) + 0.1 * (x.exp() - x - 1)) * mask).sum() / 7;
  };
  const liger::PolicyInputs inputs{.mask = mask, .advantages = advantages, .old_logp = old, .ref_logp = reference};
  liger::nn::LinearPolicyLoss loss(
      liger::nn::LinearPolicyLossOptions().loss({.epsilon_high = 0.3, .beta = 0.1}).temperature(0.8));
  const std::vector<Tensor> in{torch::randn({3, 5, 16}), 0.3 * torch::randn({7, 16}), torch::randn({7})};
  const auto ours = run([&](auto& t) { return loss(t[0], t[1], ids, inputs, t[2]).loss; }, in);
  EXPECT_GT(ours[1].abs().max().item<double>(), 1e-3);
  expect_close(ours, run([&](auto& t) { return plain(t[0], t[1], t[2]); }, in));
  const auto result = loss(in[0], in[1], ids, inputs, in[2]);
  EXPECT_GT(result.kl.item<double>(), 0);
  EXPECT_GT(result.clipped.item<double>(), 0);
  EXPECT_FALSE(liger::policy_loss(old, {.mask = mask, .advantages = advantages}).kl.defined());
  std::ostringstream printed;
  printed << *loss->clone();
  EXPECT_EQ(printed.str(),
            "liger::nn::LinearPolicyLoss(loss=dapo, sequence_level=false, epsilon_low=0.2, epsilon_high=0.3, beta=0.1, "
            "temperature=0.8)");
}

template <class F>
bool raises(F f, const char* text) {
  try {
    f();
  } catch (const c10::Error& e) { return std::string(e.what()).find(text) != std::string::npos; }
  return false;
}

/// Parameters of a dtype with float moments after three steps, with and without masters, against the formula in double.
TEST(AdamW, EqualsItsFormula) {
  const double lr = 0.03, beta1 = 0.8, beta2 = 0.9, decay = 0.1, eps = 1e-6, factor = 0.25;
  const std::vector<std::vector<int64_t>> shapes{{7, 33}, {1}, {5000}};
  struct Case {
    at::ScalarType parameter, gradient;
    bool masters, tensor_rate;
  };
  for (const auto& [dtype, gradient_dtype, has_masters, tensor_rate] :
       {Case{at::kFloat, at::kFloat, false, true}, Case{at::kBFloat16, at::kBFloat16, true, false},
        Case{at::kHalf, at::kFloat, true, true}}) {
    torch::manual_seed(2);
    std::vector<Tensor> parameters, means, squares, masters, steps;
    std::vector<std::array<Tensor, 3>> exact;  // p, m and v
    for (const auto& shape : shapes) {
      parameters.push_back(torch::randn(shape).to(dtype).requires_grad_());
      const auto p = parameters.back().detach();
      means.push_back(torch::zeros(shape)), squares.push_back(torch::zeros(shape)), steps.push_back(torch::zeros({}));
      if (has_masters) masters.push_back(p.to(at::kFloat));
      exact.push_back({p.to(at::kDouble), torch::zeros(shape, at::kDouble), torch::zeros(shape, at::kDouble)});
    }
    liger::AdamWOptions options{.beta1 = beta1, .beta2 = beta2, .weight_decay = decay, .eps = eps};
    options.factor = torch::full({}, factor);
    if (tensor_rate) options.lr_tensor = torch::full({}, lr);
    else options.lr = lr;
    for (int t = 1; t <= 3; ++t) {
      std::vector<Tensor> gradients;
      for (size_t i = 0; i < shapes.size(); ++i) {
        gradients.push_back(torch::randn(shapes[i]).to(gradient_dtype));
        steps[i].fill_(t);
        auto& [p, m, v] = exact[i];
        const auto g = factor * gradients[i].to(at::kDouble);
        m = beta1 * m + (1 - beta1) * g, v = beta2 * v + (1 - beta2) * g * g;
        p = p * (1 - lr * decay) - lr * m / (1 - std::pow(beta1, t)) / ((v / (1 - std::pow(beta2, t))).sqrt() + eps);
      }
      liger::adamw_(parameters, gradients, means, squares, masters, steps, options);
      options.found_inf = torch::ones({});
      liger::adamw_(parameters, gradients, means, squares, masters, steps, options);  // no step
      options.found_inf.reset();
    }
    for (size_t i = 0; i < shapes.size(); ++i) {
      const auto p = parameters[i].detach(), updated = has_masters ? masters[i] : p;
      expect_close({updated, means[i], squares[i]}, {exact[i][0], exact[i][1], exact[i][2]});
      if (has_masters) EXPECT_TRUE(p.equal(updated.to(dtype)));
    }
  }
}

/// Of a dimension of 1 a gradient may have another stride; of others not.
TEST(AdamW, TakesGradientsThatLieAlike) {
  const auto one = torch::ones({1}), p = torch::zeros({1, 8}), m = torch::zeros({1, 8}), v = torch::zeros({1, 8});
  const auto step = [&](const Tensor& p, const Tensor& g, const Tensor& m, const Tensor& v) {
    liger::adamw_({p}, {g}, {m}, {v}, {}, {one}, {.lr = 0.5, .weight_decay = 0});
  };
  const auto gradient = torch::ones({8, 1}).t();
  ASSERT_NE(gradient.strides(), p.strides());
  step(p, gradient, m, v);
  expect_close({p}, {torch::full({1, 8}, -0.5)});  // the first step has the length of the learning rate
  const auto square = [] { return torch::zeros({4, 4}); };
  EXPECT_TRUE(raises([&] { step(square(), square().t(), square(), square()); }, "gradients must be as its parameter"));
}

TEST(Errors, LabelOnTheCpu) {  // on a GPU a device assertion, which ends the program
  EXPECT_TRUE(raises([] { liger::cross_entropy(torch::randn({2, 4}), torch::tensor({0, 9})); }, "label 9"));
}

TEST(Errors, IdOnTheCpu) {
  EXPECT_TRUE(raises([] { liger::embedding(torch::randn({4, 2}), torch::tensor({0, 4})); }, "id 4"));
}

TEST(Errors, NameTheArgument) {
  EXPECT_TRUE(raises([] { liger::rms_norm(torch::randn({2, 8}), torch::ones({7})); }, "rms_norm: weight must be [8]"));
  EXPECT_TRUE(raises([] { liger::gated(torch::randn({2, 8}), torch::randn({2, 7})); }, "gated: b must be"));
  const auto x = torch::randn({2, 8}).requires_grad_();
  const auto dx = torch::autograd::grad({liger::rms_norm(x, {}).pow(2).sum()}, {x}, {}, true, true)[0];
  EXPECT_TRUE(raises([&] { dx.sum().backward(); }, "liger::rms_norm has no second derivative"));
  EXPECT_TRUE(raises(
      [] { liger::policy_loss(torch::randn({2, 8}), {.mask = torch::ones({2, 7}), .advantages = torch::ones({2})}); },
      "mask does not fit logp"));
  EXPECT_TRUE(raises([] { liger::policy_loss(torch::randn({2, 8}), {.mask = torch::ones({2, 8})}); }, "must be given"));
  EXPECT_TRUE(raises([] { liger::rms_norm(at::Tensor(), {}); }, "rms_norm: x is an undefined tensor"));
  EXPECT_TRUE(raises([] { liger::cross_entropy(torch::randn({2, 8}), at::Tensor()); },
                     "cross_entropy: target is an undefined tensor"));
}

}  // namespace
