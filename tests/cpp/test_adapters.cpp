// Models with LoRA adapters in C++; compare_models.py compares them with PEFT.
#include <gtest/gtest.h>
#include <map>
#include "tiny_model.h"

namespace {

const std::vector<std::vector<std::string>> kTargets{
    {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"},
    {"q_proj", "v_proj"},
    {"0.mlp.up_proj", "model.layers.1.self_attn.o_proj"}};

liger::nn::LlamaForCausalLM with_adapter(const std::vector<std::string>& targets, double dropout = 0) {
  liger::nn::LlamaForCausalLM model(tiny());
  model->add_adapter({.rank = 3, .alpha = 6, .dropout = dropout, .target_modules = targets});
  for (auto& item : model->named_parameters())
    if (item.key().ends_with("lora_B")) item.value().data().normal_(0, 0.3);
  return model;
}

TEST(Adapters, AddTheirPart) {
  torch::manual_seed(0);
  const auto ids = torch::randint(40, {2, 11});
  for (const auto& targets : kTargets) {
    auto model = with_adapter(targets);
    const auto expected = plain_logits(model, ids);
    {
      const torch::NoGradGuard no_gradients;
      liger::nn::LlamaForCausalLM without(model->config);
      for (auto& item : without->named_parameters()) item.value().copy_(model->named_parameters()[item.key()]);
      EXPECT_GT((expected - plain_logits(without, ids)).abs().max().item<double>(), 1e-3);
    }
    EXPECT_TRUE(torch::allclose(model->forward(ids).logits, expected, 1e-4, 1e-5));
    torch::nn::functional::cross_entropy(expected.slice(1, 0, -1).flatten(0, 1), ids.slice(1, 1).flatten()).backward();
    std::map<std::string, Tensor> gradients;
    for (auto& item : model->named_parameters()) {
      const bool is_adapter = item.key().find(".lora_") != std::string::npos;
      EXPECT_EQ(item.value().requires_grad(), is_adapter) << item.key();
      if (is_adapter) gradients[item.key()] = item.value().grad().clone();
    }
    EXPECT_EQ(gradients.size(), 4 * targets.size() / (targets.size() == 2 && targets[0][0] == '0' ? 2 : 1));
    for (const bool again : {false, true}) {
      model->zero_grad();
      model->gradient_checkpointing = again;
      model->forward(ids, {.labels = ids}).loss.backward();
      for (auto& item : model->named_parameters())
        EXPECT_EQ(item.value().grad().defined(), gradients.contains(item.key())) << item.key();
      for (const auto& [name, gradient] : gradients)
        EXPECT_TRUE(torch::allclose(model->named_parameters()[name].grad(), gradient, 1e-3, 1e-5)) << name;
    }
    auto greedy = ids;
    for (int i = 0; i < 3; ++i) greedy = torch::cat({greedy, plain_logits(model, greedy).slice(1, -1).argmax(-1)}, 1);
    model->config.eos_token_ids = {};
    EXPECT_TRUE(model->generate(ids, liger::nn::GenerateOptions().max_new_tokens(3)).equal(greedy));
  }
}

/// A layer that is run again in backward has the masks that it had, and what is drawn next does not change.
TEST(Adapters, DropOnce) {
  auto model = with_adapter(kTargets[0], 0.4);
  const auto ids = torch::randint(40, {2, 11});
  std::vector<std::vector<Tensor>> results;
  for (const bool again : {false, true}) {
    torch::manual_seed(1);
    model->zero_grad();
    model->gradient_checkpointing = again;
    const auto loss = model->forward(ids, {.labels = ids}).loss;
    loss.backward();
    results.push_back({loss.detach(), torch::rand({4})});
    for (auto& parameter : model->parameters())
      if (parameter.requires_grad()) results.back().push_back(parameter.grad().clone());
  }
  for (size_t i = 0; i < results[0].size(); ++i) EXPECT_TRUE(results[1][i].equal(results[0][i])) << i;
  EXPECT_FALSE(model->forward(ids).logits.equal(model->forward(ids).logits));
  model->eval();
  EXPECT_TRUE(torch::allclose(model->forward(ids).logits, plain_logits(model, ids), 1e-4, 1e-5));
}

TEST(Adapters, AreClonedSavedAndMerged) {
  torch::manual_seed(0);
  const Folder adapter, base, merged;
  const auto ids = torch::randint(40, {2, 6});
  for (const auto& targets : kTargets) {
    auto model = with_adapter(targets);
    const auto expected = model->forward(ids).logits;
    const auto copy = std::dynamic_pointer_cast<liger::nn::LlamaForCausalLMImpl>(model->clone());
    EXPECT_TRUE(copy->forward(ids).logits.equal(expected));
    for (const auto& item : copy->named_parameters())
      EXPECT_EQ(item.value().requires_grad(), item.key().find(".lora_") != std::string::npos) << item.key();
    model->save_adapter(adapter.path.string());
    liger::NamedTensors weights;
    for (const auto& item : model->named_parameters())
      if (item.key().find(".lora_") == std::string::npos) weights.emplace_back(item.key(), item.value());
    model->config.save(base.path.string());
    liger::save_checkpoint(base.path.string(), weights);
    const auto loaded = liger::nn::LlamaForCausalLMImpl::from_pretrained(base.path.string());
    loaded->load_adapter(adapter.path.string());
    EXPECT_TRUE(torch::allclose(loaded->forward(ids).logits, expected, 1e-5, 1e-6));
    EXPECT_EQ(loaded->lora->target_modules, targets);
    model->save_pretrained(merged.path.string());
    const auto whole = liger::nn::LlamaForCausalLMImpl::from_pretrained(merged.path.string());
    EXPECT_FALSE(whole->lora.has_value());
    EXPECT_TRUE(torch::allclose(whole->forward(ids).logits, expected, 1e-4, 1e-5));
  }
}

/// The rows of a matrix in 8 bits, as doubles.
at::Tensor rounded(const at::Tensor& matrix, liger::EightBit format) {
  const double largest = format == liger::EightBit::E4M3 ? 448 : 127;
  const auto scale = std::get<0>(matrix.abs().max(1, true)) / largest;
  const auto numbers = (matrix / scale).clamp(-largest, largest);
  const auto nearest =
      format == liger::EightBit::Int8 ? numbers.round() : numbers.to(at::kFloat8_e4m3fn).to(at::kFloat);
  return nearest.to(at::kDouble) * scale.to(at::kDouble);
}

TEST(Adapters, OnABaseInEightBits) {
  torch::manual_seed(0);
  for (const auto format : {liger::EightBit::Int8, liger::EightBit::E4M3}) {
    liger::nn::LoRALinear layer(liger::nn::LoRALinearOptions(48, 64).rank(4).alpha(8));
    layer->lora_B.data().normal_();
    const auto before = layer->weight.clone(), x = torch::randn({5, 48}, at::requires_grad());
    layer->quantise(format);
    const auto again = std::dynamic_pointer_cast<liger::nn::LoRALinearImpl>(layer->clone());
    const auto y = layer->forward(x), dy = torch::randn_like(y);
    EXPECT_TRUE(again->forward(x).equal(y));
    y.backward(dy);
    const auto wide = [](const at::Tensor& t) { return t.detach().to(at::kDouble); };
    const auto whole = rounded(before, format) + 2 * wide(layer->lora_B).mm(wide(layer->lora_A));
    // Sums of up to 64 terms in float, in two products.
    EXPECT_TRUE(at::allclose(wide(y), wide(x).mm(whole.t()) + wide(layer->bias), 1e-5, 1e-5));
    EXPECT_TRUE(at::allclose(wide(x.grad()), wide(dy).mm(whole), 1e-5, 1e-5));
    EXPECT_TRUE(layer->lora_A.grad().defined() && !layer->weight.requires_grad());
    EXPECT_THROW(layer->merged_weight(), c10::Error);
  }
  liger::nn::LoRALinear trained(liger::nn::LoRALinearOptions(48, 64).rank(0));
  EXPECT_THROW(trained->quantise(liger::EightBit::Int8), c10::Error);

  auto config = tiny();
  config.hidden_size = 128, config.intermediate_size = 256;
  liger::nn::LlamaForCausalLM model(config);
  model->add_adapter({.rank = 3, .alpha = 6, .target_modules = kTargets[0]});
  const auto ids = torch::randint(40, {2, 11});
  const auto exact = plain_logits(model, ids);
  model->quantise(liger::EightBit::Int8);
  const auto weight = model->named_parameters()["model.layers.0.mlp.up_proj.weight"];
  EXPECT_EQ(weight.scalar_type(), at::kChar);
  const double error = ((model->forward(ids).logits - exact).norm() / exact.norm()).item<double>();
  EXPECT_GT(error, 1e-4);
  EXPECT_LT(error, 0.01 * std::sqrt(14));  // of 14 products, each off by at most 1 % of its norm
}

TEST(Adapters, ThatAreNone) {
  const Folder folder;
  auto model = with_adapter({"q_proj"});
  EXPECT_NE(error_of([&] { model->add_adapter({.target_modules = {"q_proj"}}); }).find("has adapters already"),
            std::string::npos);
  for (const auto& [target, words] : {std::pair("lm_head", "lm_head is no linear layer of a block"),
                                      std::pair("proj", "proj is no linear layer"), std::pair("norm", "norm is no")})
    EXPECT_NE(error_of([&, &target = target] {
                liger::nn::LlamaForCausalLM(tiny())->add_adapter({.target_modules = {"q_proj", target}});
              }).find(words),
              std::string::npos);
  EXPECT_NE(error_of([&] { liger::nn::LlamaForCausalLM(tiny())->add_adapter({}); }).find("target_modules is empty"),
            std::string::npos);
  EXPECT_NE(
      error_of([&] { liger::nn::LlamaForCausalLM(tiny())->save_adapter(folder.path.string()); }).find("has no adapter"),
      std::string::npos);

  model->save_adapter(folder.path.string());
  // A model that has refused an adapter is as it was.
  const auto load = [&] {
    liger::nn::LlamaForCausalLM into(tiny());
    const auto before = into->named_parameters();
    const std::string error = error_of([&] { into->load_adapter(folder.path.string()); });
    if (error == "none") return error;
    EXPECT_FALSE(into->lora.has_value());
    EXPECT_EQ(into->named_parameters().keys(), before.keys());
    for (const auto& item : into->named_parameters()) EXPECT_TRUE(item.value().requires_grad()) << item.key();
    return error;
  };
  EXPECT_EQ(load(), "none");
  const std::string file = folder / "adapter_model.safetensors",
                    first = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight";
  liger::NamedTensors tensors;
  for (const auto& name : liger::SafetensorsFile(file).names())
    tensors.emplace_back(name, liger::SafetensorsFile(file).tensor(name).clone());
  ASSERT_EQ(tensors[0].first, first);
  const auto changed = [&](auto change) {
    auto others = tensors;
    change(others);
    liger::save_safetensors(file, others);
    return load();
  };
  using Tensors = liger::NamedTensors;
  EXPECT_NE(changed([](Tensors& t) { t.erase(t.begin()); }).find("there is no " + first), std::string::npos);
  EXPECT_NE(changed([](Tensors& t) { t[0].second = torch::zeros({2, 16}); }).find(first + " is of Float[2, 16]"),
            std::string::npos);
  EXPECT_NE(changed([](Tensors& t) { t.emplace_back("more", torch::zeros({2})); }).find("more is of no layer"),
            std::string::npos);
  EXPECT_EQ(changed([](Tensors& t) { t[0].second = t[0].second.to(torch::kBFloat16); }), "none");
}

}  // namespace
