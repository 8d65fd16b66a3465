// What every module owes to torch: clone(), to(), save and load, printing, and forward through AnyModule; a row of the
// table each.
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <functional>
#include <sstream>
#include "liger/nn/activation.h"
#include "liger/nn/embedding.h"
#include "liger/nn/experts.h"
#include "liger/nn/lora.h"
#include "liger/nn/loss.h"
#include "liger/nn/norm.h"
#include "liger/nn/mixers.h"
#include "liger/nn/rope.h"
#include "liger/nn/router.h"

using namespace liger::nn;
using torch::Tensor;
using Module = std::shared_ptr<torch::nn::Module>;

namespace {

struct Row {
  std::string printed;
  std::function<Module()> make;
  std::function<std::vector<Tensor>(const Module&, torch::Dtype)> call;  // its results for inputs of a dtype
};

std::vector<Tensor> listed(const Tensor& t) { return {t}; }
std::vector<Tensor> listed(const std::tuple<Tensor, Tensor>& t) { return {std::get<0>(t), std::get<1>(t)}; }
std::vector<Tensor> listed(const RouterImpl::Output& t) { return {t.logits, t.weights}; }

/// make() gives a holder; inputs that are floating are cast to the dtype.
template <class Make, class... Inputs>
Row row(const char* printed, Make make, Inputs... inputs) {
  using Holder = decltype(make());
  return {printed, [=] { return Module(make().ptr()); },
          [=](const Module& module, torch::Dtype dtype) {
            Holder holder(std::dynamic_pointer_cast<typename Holder::ContainedType>(module));
            const auto cast = [&](const Tensor& t) { return t.is_floating_point() ? t.to(dtype) : t; };
            auto results = listed(holder(cast(inputs)...));
            torch::nn::AnyModule any(holder);  // takes tensors of exactly the types that forward declares
            EXPECT_TRUE(torch::equal(
                listed(any.template forward<decltype(holder(cast(inputs)...))>(cast(inputs)...))[0], results[0]));
            return results;
          }};
}

const std::vector<Row>& table() {
  torch::manual_seed(3);
  const auto x = torch::randn({3, 4, 16}), y = torch::randn({3, 4, 16}), logits = torch::randn({5, 7});
  const auto p = torch::softmax(torch::randn({5, 7}), -1), logp = torch::log_softmax(logits, -1),
             labels = torch::tensor({1, -100, 0, 6, 2});
  const auto q = torch::randn({1, 2, 2048, 8}), hidden = torch::randn({5, 16});
  const auto scores = torch::randn({2, 4, 9, 9});
  liger::HeadOptions smoothed;
  smoothed.label_smoothing = 0.1;
  static const std::vector<Row> rows{
      row(
          "RMSNorm(hidden_size=16, eps=1e-05, offset=1, casting=Gemma, elementwise_affine=true)",
          [] { return RMSNorm(RMSNormOptions(16).eps(1e-5).offset(1).casting(liger::Casting::Gemma)); }, x),
      row(
          "RMSNorm(hidden_size=16, eps=1e-06, offset=0, casting=Llama, elementwise_affine=false)",
          [] { return RMSNorm(RMSNormOptions(16).elementwise_affine(false)); }, x),
      row(
          "FusedAddRMSNorm(hidden_size=16, eps=1e-06, offset=0, casting=Llama, elementwise_affine=true)",
          [] { return FusedAddRMSNorm(16); }, x, y),
      row(
          "ModulatedRMSNorm(hidden_size=16, eps=1e-06, offset=0, casting=None, elementwise_affine=true)",
          [] { return ModulatedRMSNorm(RMSNormOptions(16).casting(liger::Casting::None)); }, x, y),
      row(
          "ModulatedRMSNorm(hidden_size=16, eps=1e-06, offset=0, casting=Llama, elementwise_affine=true)",
          [] { return ModulatedRMSNorm(16); }, x, y, x),
      row(
          "RMSNormGated(hidden_size=16, eps=1e-06, activation=Sigmoid, norm_before_gate=true, groups=2, casting=Llama)",
          [] { return RMSNormGated(RMSNormGatedOptions(16).norm({.activation = liger::Gate::Sigmoid, .groups = 2})); },
          x, y),
      row(
          "ShortConvolution(channels=16, width=3, bias=true, silu=true)",
          [] { return ShortConvolution(ShortConvolutionOptions(16, 3).bias(true)); }, x.view({1, -1, 16})),
      row(
          "GatedDeltaNet(hidden_size=16, key_heads=2, heads=4, key_dim=8, value_dim=6, width=3, eps=1e-06)",
          [] { return GatedDeltaNet(GatedDeltaNetOptions(16).key_heads(2).heads(4).key_dim(8).value_dim(6).width(3)); },
          x),
      row(
          "KimiDeltaAttention(hidden_size=16, heads=3, head_dim=8, width=3, eps=1e-05)",
          [] { return KimiDeltaAttention(KimiDeltaAttentionOptions(16).heads(3).head_dim(8).width(3)); }, x),
      row(
          "Mamba2(hidden_size=16, heads=4, head_dim=6, groups=2, state_size=8, width=3, eps=1e-05, bias=true, "
          "conv_bias=true)",
          [] { return Mamba2(Mamba2Options(16, 4).head_dim(6).groups(2).state_size(8).width(3).bias(true)); }, x),
      row(
          "LayerNorm(hidden_size=16, eps=0.001, bias=true)", [] { return LayerNorm(LayerNormOptions(16).eps(1e-3)); },
          x),
      row(
          "GroupNorm(groups=2, channels=4, eps=1e-06)", [] { return GroupNorm(GroupNormOptions(2, 4)); }, x),
      row(
          "DyT(hidden_size=16, init_alpha=0.5, bias=false)", [] { return DyT(DyTOptions(16).bias(false)); }, x),
      row(
          "PolyNorm(eps=1e-06)", [] { return PolyNorm(); }, x),
      row(
          "ActivationLayer(activation=ReLUSquared)", [] { return ActivationLayer(); }, x),
      row(
          "XIELU(alpha_p=0.8, alpha_n=0.9, beta=0.5, eps=-1e-06)", [] { return XIELU(XIELUOptions().alpha_n(0.9)); },
          x),
      row(
          "GatedMLP(hidden_size=16, intermediate_size=24, bias=true, activation=GeLUTanh, recompute=false, chunk=0)",
          [] { return GatedMLP(GatedMLPOptions(16, 24).bias(true).activation(liger::Activation::GeLUTanh)); }, x),
      row(
          "GatedMLP(hidden_size=16, intermediate_size=24, bias=false, activation=SiLU, recompute=true, chunk=2)",
          [] { return GatedMLP(GatedMLPOptions(16, 24).recompute(true).chunk(2)); }, x),
      row(
          "LoRALinear(in_features=16, out_features=24, rank=4, alpha=6, rslora=true, dropout=0, bias=false)",
          [] { return LoRALinear(LoRALinearOptions(16, 24).rank(4).alpha(6).rslora(true).bias(false)); }, x),
      row(
          "LoRALinear(in_features=16, out_features=24, rank=0, alpha=8, rslora=false, dropout=0, bias=true)",
          [] { return LoRALinear(LoRALinearOptions(16, 24).rank(0)); }, x),
      row(
          "Softmax()", [] { return Softmax(); }, x),
      row(
          "Sparsemax(dim=1)", [] { return Sparsemax(SparsemaxOptions().dim(1)); }, x),
      row(
          "MultiTokenAttention(in_channels=4, out_channels=6, kernel_size=3, padding=1, groups=2, bias=true, "
          "sparse=false)",
          [] { return MultiTokenAttention(MultiTokenAttentionOptions(4, 6, 3).padding(1).groups(2)); }, scores),
      row(
          "Router(hidden_size=16, experts=6, top_k=2, bias=true, selection_bias=true, score=Sigmoid, normalise=true)",
          [] {
            return Router(RouterOptions(16, 6, 2).bias(true).selection_bias(true).route(
                {.score = liger::RouterScore::Sigmoid, .normalise = true}));
          },
          x),
      row(
          "Router(hidden_size=16, experts=6, top_k=2, bias=false, selection_bias=false, score=Softmax, "
          "normalise=false)",
          [] { return Router(RouterOptions(16, 6, 2)); }, x, torch::tensor({5, 1}).expand({3, 4, 2})),
      row(
          "Experts(hidden_size=16, width=6, experts=3, activation=GeLUTanh, gated=true)",
          [] { return Experts(ExpertsOptions(16, 6, 3).compute({.activation = liger::Activation::GeLUTanh})); }, hidden,
          torch::tensor({{0, 1}, {2, 1}, {3, 0}, {1, -1}, {2, 2}}), torch::rand({5, 2})),
      row(
          "Embedding(num_embeddings=7, embedding_dim=16, padding_idx=2)",
          [] { return Embedding(EmbeddingOptions(7, 16).padding_idx(2)); }, torch::tensor({2, 0, 6})),
      row(
          "RotaryEmbedding(dim=8, base=10000, interleaved=true)",
          [] { return RotaryEmbedding(RotaryEmbeddingOptions(8).interleaved(true)); }, q, q),
      row(
          "CrossEntropyLoss(ignore_index=-100, reduction=Sum, label_smoothing=0, lse_square_scale=0, softcap=0, "
          "token_scaling=false, weight=[7])",
          [] {
            return CrossEntropyLoss(liger::CrossEntropyOptions{.reduction = liger::Reduction::Sum},
                                    torch::arange(1, 8).to(torch::kFloat) / 4);
          },
          logits, labels),
      row(
          "CrossEntropyLoss(ignore_index=-100, reduction=Mean, label_smoothing=0, lse_square_scale=0, softcap=0, "
          "token_scaling=false, weight=none)",
          [] { return CrossEntropyLoss(); }, logits, labels),
      row(
          "KLDivLoss(reduction=Mean, log_target=false, eps=1e-10)", [] { return KLDivLoss(); }, logp, p),
      row(
          "JSDLoss(beta=0.25, ignore_index=-100, reduction=BatchMean)",
          [] { return JSDLoss(JSDLossOptions().beta(0.25)); }, logp, p.log(), labels),
      row(
          "TVDLoss(reduction=None, ignore_index=-100)",
          [] { return TVDLoss(TVDLossOptions().reduction(liger::Reduction::None)); }, logp.exp(), p),
      row(
          "SelectiveLogSoftmax(temperature=0.5, ignore_index=-100)",
          [] { return SelectiveLogSoftmax(SelectiveLogSoftmaxOptions().temperature(0.5)); }, logits, labels),
      row(
          "LinearCrossEntropy(hidden_size=16, classes=7, bias=false, ignore_index=-100, reduction=Mean, "
          "label_smoothing=0.1, lse_square_scale=0, softcap=0, "
          "token_scaling=false, max_bytes=0)",
          [=] { return LinearCrossEntropy(LinearCrossEntropyOptions(16, 7).loss(smoothed)); }, hidden, labels),
  };
  return rows;
}

class Modules : public testing::TestWithParam<size_t> {
 protected:
  const Row& row = table()[GetParam()];
  /// One whose state no other has.
  Module fresh() {
    auto module = row.make();
    for (auto tensors : {module->parameters(), module->buffers()})
      for (auto& t : tensors) t.data().add_(torch::rand_like(t)).mul_(torch::rand_like(t) + 0.5);
    return module;
  }
};

void expect_equal(const std::vector<Tensor>& a, const std::vector<Tensor>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(torch::equal(a[i], b[i])) << "result " << i;
}

TEST_P(Modules, AreCloned) {
  const auto module = fresh();
  const auto before = row.call(module, torch::kFloat);
  const auto copy = module->clone();
  EXPECT_EQ(typeid(*copy), typeid(*module));
  expect_equal(row.call(copy, torch::kFloat), before);
  for (auto tensors : {copy->parameters(), copy->buffers()})
    for (auto& t : tensors) t.data().zero_();
  expect_equal(row.call(module, torch::kFloat), before);
}

TEST_P(Modules, AreCast) {
  const auto module = fresh();
  module->to(torch::kBFloat16);  // so that the parameters are the same in both
  const auto low = row.call(module, torch::kBFloat16);
  for (const auto& p : module->parameters()) EXPECT_EQ(p.scalar_type(), torch::kBFloat16);
  module->to(torch::kCPU, torch::kFloat);
  const auto high = row.call(module, torch::kFloat);
  for (const auto& p : module->parameters()) EXPECT_EQ(p.scalar_type(), torch::kFloat);
  for (size_t i = 0; i < low.size(); ++i)
    EXPECT_LE((low[i] - high[i]).abs().max().item<double>(), 0.05 * (1 + high[i].abs().max().item<double>()))
        << "result " << i;
}

TEST_P(Modules, AreSavedAndLoaded) {
  const auto module = fresh(), other = fresh();
  std::stringstream file;
  torch::serialize::OutputArchive out;
  module->save(out);
  out.save_to(file);
  torch::serialize::InputArchive in;
  in.load_from(file);
  other->load(in);
  expect_equal(row.call(other, torch::kFloat), row.call(module, torch::kFloat));
}

TEST_P(Modules, PrintTheirOptions) {
  std::ostringstream to;
  to << *row.make();
  EXPECT_EQ(to.str().substr(0, to.str().find("(\n")), "liger::nn::" + row.printed);
}

INSTANTIATE_TEST_SUITE_P(All, Modules, testing::Range(size_t{0}, table().size()), [](const auto& i) {
  const auto& printed = table()[i.param].printed;
  return printed.substr(0, printed.find('(')) + std::to_string(i.param);
});

TEST(RotaryEmbedding, KeepsItsAnglesInFloat) {
  const auto q = torch::randn({1, 2, 2048, 8});
  RotaryEmbedding rotary(8);
  const auto before = listed(rotary(q, q));
  struct Parent : torch::nn::Module {
  } model;
  model.register_module("rotary", rotary);
  model.to(torch::kBFloat16);
  expect_equal(listed(rotary(q, q)), before);
  model.to(torch::kCPU, torch::kHalf);
  expect_equal(listed(rotary(q, q)), before);
}

TEST(LinearCrossEntropy, GivesLogitsOrTheLoss) {
  LinearCrossEntropy head(LinearCrossEntropyOptions(16, 7));
  const auto hidden = torch::randn({5, 16}), labels = torch::tensor({1, -100, 0, 6, 2}),
             logits = torch::linear(hidden, head->linear->weight);
  EXPECT_TRUE(torch::equal(head(hidden), logits));
  EXPECT_TRUE(torch::allclose(head(hidden, labels), torch::nn::functional::cross_entropy(logits, labels)));
  RMSNorm norm(16);
  torch::nn::Sequential model(norm, head);
  EXPECT_TRUE(torch::equal(model->forward(hidden), head(norm(hidden))));
}

TEST(CrossEntropyLoss, HasAWeightOfItsOwn) {
  const auto weight = torch::arange(1, 8).to(torch::kFloat), x = torch::randn({2, 7}), labels = torch::tensor({1, 5});
  CrossEntropyLoss loss(liger::CrossEntropyOptions{}, weight);
  EXPECT_TRUE(loss->named_buffers().contains("weight"));
  const auto before = loss(x, labels);
  EXPECT_TRUE(torch::allclose(before, torch::nn::functional::cross_entropy(
                                          x, labels, torch::nn::functional::CrossEntropyFuncOptions().weight(weight))));
  weight.zero_();
  EXPECT_TRUE(torch::equal(loss(x, labels), before));
}

/// Forward and gradients of plain torch in float64; float32's rounding of sums of 16 products is below 1e-5 of them.
TEST(LoRALinear, IsTheFrozenLayerAndItsAdapter) {
  torch::manual_seed(5);
  for (const bool rslora : {false, true}) {
    LoRALinear layer(LoRALinearOptions(16, 24).rank(4).alpha(6).rslora(rslora));
    EXPECT_TRUE(layer->lora_B.eq(0).all().item<bool>());
    layer->lora_B.data().normal_();
    const auto x = torch::randn({3, 5, 16}).requires_grad_(), up = torch::randn({3, 5, 24});
    const auto wide = [](const Tensor& t) { return t.detach().to(torch::kDouble).requires_grad_(); };
    const auto x64 = wide(x), a = wide(layer->lora_A), b = wide(layer->lora_B);
    const auto weight = layer->weight.to(torch::kDouble), bias = layer->bias.to(torch::kDouble);
    const double scale = rslora ? 3 : 1.5;  // 6 / √4 and 6 / 4
    const auto expected = torch::linear(x64, weight, bias) + scale * torch::linear(torch::linear(x64, a), b);
    const auto y = layer(x);
    (y * up).sum().backward();
    (expected * up).sum().backward();
    const auto close = [](const Tensor& got, const Tensor& want) {
      return (got - want).abs().max().item<double>() <= 1e-5 * want.abs().max().item<double>();
    };
    EXPECT_TRUE(close(y, expected));
    EXPECT_TRUE(close(x.grad(), x64.grad()));
    EXPECT_TRUE(close(layer->lora_A.grad(), a.grad()));
    EXPECT_TRUE(close(layer->lora_B.grad(), b.grad()));
    EXPECT_FALSE(layer->weight.grad().defined() || layer->bias.grad().defined());
    EXPECT_TRUE(close(layer->merged_weight(), weight + scale * b.detach().mm(a.detach())));
    EXPECT_EQ(layer->merged_weight().scalar_type(), torch::kFloat);
  }
}

TEST(LoRALinear, BeginsAsPEFTDoes) {
  torch::manual_seed(7);
  LoRALinear layer(LoRALinearOptions(400, 300).rank(50));
  const double bound = 1 / 20.;  // √(6 / ((1 + 5) · 400)): kaiming_uniform with a = √5
  const auto& a = layer->lora_A;
  EXPECT_LE(a.abs().max().item<double>(), bound);
  EXPECT_GT(a.abs().max().item<double>(), 0.99 * bound);
  // Of 20,000 uniform numbers the deviation is known to 0.5 %.
  EXPECT_NEAR(a.std().item<double>(), bound / std::sqrt(3.), 0.03 * bound);
  EXPECT_EQ(layer->lora_B.abs().max().item<double>(), 0);
  EXPECT_FALSE(layer->weight.requires_grad() || layer->bias.requires_grad());
  EXPECT_TRUE(layer->lora_A.requires_grad() && layer->lora_B.requires_grad());
}

/// The adapter sees what torch's dropout leaves of x with the same seed; evaluation sees all of it.
TEST(LoRALinear, DropsWhatTheAdapterSees) {
  LoRALinear layer(LoRALinearOptions(16, 24).rank(4).dropout(0.5).bias(false));
  layer->lora_B.data().normal_();
  const auto x = torch::randn({40, 16});
  torch::manual_seed(9);
  const auto y = layer(x);
  torch::manual_seed(9);
  const auto dropped = torch::dropout(x, 0.5, true);
  const auto plain = [&](const Tensor& seen) {
    return torch::linear(x, layer->weight) + 2 * torch::linear(torch::linear(seen, layer->lora_A), layer->lora_B);
  };
  EXPECT_TRUE(torch::allclose(y, plain(dropped), 1e-4, 1e-4));
  EXPECT_FALSE(torch::allclose(y, plain(x), 1e-2, 1e-2));
  layer->eval();
  EXPECT_TRUE(torch::allclose(layer(x), plain(x), 1e-4, 1e-4));
  EXPECT_THROW(LoRALinear(LoRALinearOptions(16, 24).dropout(1)), c10::ValueError);
  EXPECT_THROW(LoRALinear(LoRALinearOptions(16, 24).rank(-1)), c10::ValueError);
}

}  // namespace
