// Checkpoints, configs and models in C++; tests/test_models.py compares them with transformers.
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <fstream>
#include "tiny_model.h"

namespace {

std::string content(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

void write(const std::string& path, const std::string& bytes) { std::ofstream(path, std::ios::binary) << bytes; }

std::string with_length(const std::string& header, const std::string& data = "") {
  std::string bytes(8, '\0');
  for (int i = 0; i < 8; ++i) bytes[i] = char(uint64_t(header.size()) >> (8 * i));
  return bytes + header + data;
}

TEST(Safetensors, WhatIsWrittenIsRead) {
  const Folder folder;
  const liger::NamedTensors tensors{{"a", torch::randn({3, 5})},
                                    {"half", torch::randn({7}).to(torch::kBFloat16)},
                                    {"odd", torch::arange(3, torch::kChar)},
                                    {"turned", torch::randn({4, 6}).t()},
                                    {"none", torch::empty({0, 2})},
                                    {"number", torch::tensor(3.5, torch::kDouble)}};
  liger::save_safetensors(folder / "t.safetensors", tensors, {{"by", "a test"}});
  {
    const liger::SafetensorsFile file(folder / "t.safetensors");
    EXPECT_EQ(file.names().size(), tensors.size());
    EXPECT_EQ(file.metadata().at("by"), "a test");
    for (const auto& [name, tensor] : tensors) {
      EXPECT_TRUE(file.tensor(name).equal(tensor)) << name;
      EXPECT_EQ(file.tensor(name).scalar_type(), tensor.scalar_type());
    }
    EXPECT_EQ(file.tensor("a").data_ptr(), file.tensor("a").data_ptr());  // views
    file.tensor("a").zero_();                                             // of memory, not of the file
    EXPECT_NE(error_of([&] { file.tensor("b"); }).find("there is no b"), std::string::npos);
  }
  Tensor kept;
  {
    const liger::SafetensorsFile again(folder / "t.safetensors");
    kept = again.tensor("a");
  }
  EXPECT_TRUE(kept.equal(tensors[0].second));  // outlives the file
  EXPECT_EQ(std::distance(fs::directory_iterator(folder.path), fs::directory_iterator()), 1);
  EXPECT_NE(error_of([&] { liger::save_safetensors(folder / "no/such", tensors); }), "none");
  EXPECT_NE(error_of([&] { liger::save_safetensors(folder / "x", {tensors[0], tensors[0]}); }), "none");
}

TEST(Safetensors, BrokenFilesAreErrors) {
  const Folder folder;
  const std::string path = folder / "t.safetensors";
  liger::save_safetensors(path, {{"a", torch::randn({4, 4})}});
  const std::string good = content(path);
  const auto says = [&](const std::string& bytes) {
    write(path, bytes);
    return error_of([&] { liger::SafetensorsFile file(path); });
  };
  EXPECT_EQ(says(good), "none");
  const auto entry = [](const std::string& dtype, const std::string& shape, const std::string& offsets) {
    return R"({"a":{"dtype":")" + dtype + R"(","shape":)" + shape + R"(,"data_offsets":)" + offsets + "}}";
  };
  const std::string four(4, 'x');
  const std::pair<std::string, std::string> cases[] = {
      {"", "0 bytes"},
      {"1234", "4 bytes"},
      {good.substr(0, good.size() - 1), "truncated"},
      {good.substr(0, 20), "truncated"},
      {good + "x", "leave bytes out"},
      {std::string(8, '\xff') + "{}", "header of"},
      {with_length("not json"), "no JSON object"},
      {with_length("[]"), "no JSON object"},
      {with_length("{\"a\":" + std::string(200000, '[') + std::string(200000, ']') + "}"), "no JSON object"},
      {with_length(entry("F32", "[1]", "[0,8]"), four + four), "has 8 bytes"},
      {with_length(entry("F32", "[1]", "[0,4]")), "truncated"},
      {with_length(entry("F99", "[1]", "[0,4]"), four), "unknown dtype, F99"},
      {with_length(entry("F32", "[-1]", "[0,4]"), four), "shape"},
      {with_length(entry("F32", "[4611686018427387904,16]", "[0,4]"), four), "shape"},
      {with_length(entry("F32", "\"one\"", "[0,4]"), four), "a: "},
      {with_length(R"({"a":{"dtype":"F32","shape":[1]}})", four), "data_offsets"},
      {with_length(entry("F32", "[1]", "[4,0]"), four), "bytes"},
  };
  for (const auto& [bytes, expected] : cases) {
    const std::string error = says(bytes);
    EXPECT_NE(error.find(expected), std::string::npos) << expected << ": " << error;
    EXPECT_NE(error.find(path), std::string::npos) << error;
  }
  EXPECT_NE(error_of([&] { liger::SafetensorsFile file(folder / "absent"); }).find("absent"), std::string::npos);
}

TEST(Checkpoint, ShardsAndErrors) {
  const Folder folder;
  torch::manual_seed(0);
  liger::nn::LlamaForCausalLM model(tiny("qwen2"));
  model->save_pretrained(folder.path.string(), 3000);
  EXPECT_TRUE(fs::exists(folder / "model.safetensors.index.json"));
  const auto ids = torch::randint(40, {2, 9});
  const auto loaded = liger::nn::LlamaForCausalLMImpl::from_pretrained(folder.path.string());
  EXPECT_TRUE(loaded->forward(ids).logits.equal(model->forward(ids).logits));
  const auto indexed = [&](const std::string& map) {
    write(folder / "model.safetensors.index.json", R"({"weight_map":)" + map + "}");
    return error_of([&] { liger::Checkpoint checkpoint(folder.path.string()); });
  };
  EXPECT_NE(indexed(R"({"a":"../model.safetensors"})").find("a has no file of this folder"), std::string::npos);
  liger::save_safetensors(folder / "a.safetensors", {{"a", torch::zeros(1)}, {"b", torch::zeros(1)}});
  liger::save_safetensors(folder / "b.safetensors", {{"b", torch::zeros(1)}});
  EXPECT_NE(indexed(R"({"a":"b.safetensors"})").find("b.safetensors does not hold a"), std::string::npos);
  EXPECT_NE(indexed(R"({"a":"a.safetensors","b":"b.safetensors"})").find("a.safetensors holds b"), std::string::npos);
  // In one file, and in shards again: what was there before is not read.
  model->save_pretrained(folder.path.string());
  EXPECT_FALSE(fs::exists(folder / "model.safetensors.index.json"));
  model->save_pretrained(folder.path.string(), 3000);
  EXPECT_FALSE(fs::exists(folder / "model.safetensors"));
  model->save_pretrained(folder.path.string());
  const auto load = [&] { liger::nn::LlamaForCausalLMImpl::from_pretrained(folder.path.string()); };
  EXPECT_EQ(error_of(load), "none");

  liger::NamedTensors tensors;
  for (const auto& item : model->named_parameters()) tensors.emplace_back(item.key(), item.value());
  const auto changed = [&](const std::function<void(liger::NamedTensors&)>& change) {
    auto copy = tensors;
    change(copy);
    liger::save_checkpoint(folder.path.string(), copy);
    return error_of(load);
  };
  EXPECT_NE(changed([](auto& t) { t.pop_back(); }).find("has no lm_head.weight"), std::string::npos);
  EXPECT_NE(changed([](auto& t) { t.emplace_back("extra", torch::zeros(1)); }).find("lacks, extra"), std::string::npos);
  EXPECT_NE(changed([](auto& t) { t[0].second = torch::zeros({2, 2}); }).find("is of shape [2, 2]"), std::string::npos);
  EXPECT_NE(changed([](auto& t) { t[0].second = t[0].second.to(torch::kLong); }).find("is of Long"), std::string::npos);
}

TEST(Llama, ConfigsThatAreNone) {
  const Folder folder;
  const auto says = [&](const std::string& text) {
    write(folder / "config.json", text);
    return error_of([&] { liger::LlamaConfig::load(folder.path.string()); });
  };
  const std::string sizes =
      R"("vocab_size":10,"hidden_size":16,"intermediate_size":8,"num_hidden_layers":1,"num_attention_heads":)";
  EXPECT_EQ(says(R"({"model_type":"llama",)" + sizes + "2}"), "none");
  EXPECT_EQ(says(R"({"model_type":"mistral",)" + sizes + "8}"), "none");
  const auto mistral = liger::LlamaConfig::load(folder.path.string());  // what is missing has a default
  EXPECT_EQ(mistral.sliding_window, 4096);
  EXPECT_EQ(mistral.kv_heads(), 8);
  // A number of layers costs no memory while nobody makes them.
  EXPECT_EQ(says(R"({"model_type":"mistral","vocab_size":10,"hidden_size":16,"intermediate_size":8,)"
                 R"("num_hidden_layers":1000000000000,"num_attention_heads":8})"),
            "none");
  const std::pair<std::string, std::string> cases[] = {
      {"{", "no JSON object"},
      {R"({"model_type":"gpt2"})", "model_type gpt2"},
      {R"({"model_type":"llama"})", "there is no vocab_size"},
      {R"({"model_type":"llama",)" + sizes + "\"two\"}", "num_attention_heads"},
      {R"({"model_type":"llama",)" + sizes + R"(2,"hidden_act":"tanh"})", "unknown hidden_act tanh"},
      {R"({"model_type":"llama",)" + sizes + R"(2,"rope_scaling":{"rope_type":"dynamic"}})",
       "unknown rope_type dynamic"},
      {R"({"model_type":"llama",)" + sizes + R"(2,"num_key_value_heads":3})", "num_key_value_heads 3"},
      {R"({"model_type":"llama",)" + sizes + R"(2,"head_dim":3})", "head_dim"},
      {R"({"model_type":"llama",)" + sizes + "0}", "num_attention_heads is 0"},
      {R"({"model_type":"llama",)" + sizes + R"(2,"attention_dropout":0.5})", "attention_dropout 0.5"},
      {R"({"model_type":"llama",)" + sizes + R"(2,"partial_rotary_factor":0.5})", "partial_rotary_factor 0.5"},
      {R"({"model_type":"qwen3_5_text",)" + sizes + R"(4,"hidden_act":"gelu"})", "hidden_act"},
      {R"({"model_type":"qwen3_5_text",)" + sizes + R"(4,"linear_num_value_heads":24})", "linear_num_value_heads 24"},
      {R"({"model_type":"qwen3_5_text",)" + sizes + R"(4,"linear_conv_kernel_dim":9})", "linear_conv_kernel_dim 9"},
  };
  for (const auto& [text, expected] : cases)
    EXPECT_NE(says(text).find(expected), std::string::npos) << expected << ": " << says(text);
}

TEST(Llama, StepsCachesAndCheckpointing) {
  torch::manual_seed(0);
  for (const bool tied : {false, true}) {
    auto config = tiny();
    config.tie_word_embeddings = tied;
    liger::nn::LlamaForCausalLM model(config);
    const auto ids = torch::randint(40, {2, 11});
    const auto expected = plain_logits(model, ids);
    EXPECT_TRUE(expected.abs().max().item<double>() > 0.1);
    EXPECT_TRUE(torch::allclose(model->forward(ids).logits, expected, 1e-4, 1e-5));

    auto labels = ids.clone();
    labels[0].narrow(0, 0, 4).fill_(-100);
    const auto loss =
        torch::nn::functional::cross_entropy(expected.slice(1, 0, -1).flatten(0, 1), labels.slice(1, 1).flatten());
    loss.backward();
    std::vector<Tensor> gradients;
    for (auto& parameter : model->parameters()) gradients.push_back(parameter.grad().clone());
    const double counted = double(labels.slice(1, 1).ne(-100).sum().item<int64_t>());
    for (const bool again : {false, true}) {
      for (const bool sum : {false, true}) {
        model->zero_grad();
        model->gradient_checkpointing = again;
        liger::nn::CausalLMInputs inputs{.labels = labels};
        if (sum) inputs.num_items = counted;
        const auto output = model->forward(ids, inputs);
        EXPECT_FALSE(output.logits.defined());
        EXPECT_NEAR(output.loss.item<double>(), loss.item<double>(), 1e-5);
        output.loss.backward();
        size_t i = 0;
        for (auto& parameter : model->parameters())
          EXPECT_TRUE(torch::allclose(parameter.grad(), gradients[i++], 1e-3, 1e-5));
      }
    }
    model->gradient_checkpointing = false;

    liger::nn::KVCache cache;
    const auto first = model->forward(ids.slice(1, 0, 5), {.cache = &cache}).logits,
               middle = model->forward(ids.slice(1, 5, 8), {.cache = &cache}).logits;
    const auto last = model->forward(ids.slice(1, 8, 9), {.cache = &cache}).logits;
    EXPECT_TRUE(torch::allclose(torch::cat({first, middle, last}, 1), expected.slice(1, 0, 9), 1e-4, 1e-5));
    EXPECT_EQ(cache.length, 9);

    auto greedy = ids;
    for (int i = 0; i < 4; ++i) greedy = torch::cat({greedy, plain_logits(model, greedy).slice(1, -1).argmax(-1)}, 1);
    model->config.eos_token_ids = {};
    EXPECT_TRUE(model->generate(ids, liger::nn::GenerateOptions().max_new_tokens(4)).equal(greedy));
    model->config.eos_token_ids = {greedy[0][11].item<int64_t>(), greedy[1][11].item<int64_t>()};
    EXPECT_EQ(model->generate(ids, liger::nn::GenerateOptions().max_new_tokens(4)).size(1), 12);
  }
}

TEST(Llama, PackedDocumentsDoNotSeeEachOther) {
  for (const char* type : {"qwen3", "qwen3_5_text"}) {
    torch::manual_seed(0);
    liger::nn::LlamaForCausalLM model(tiny(type));
    const auto a = torch::randint(40, {1, 5}), b = torch::randint(40, {1, 7});
    const auto positions = torch::cat({torch::arange(5), torch::arange(7)}).unsqueeze(0);
    const auto alone = torch::cat({model->forward(a).logits, model->forward(b).logits}, 1);
    const auto row = torch::cat({a, b}, 1);
    const auto packed = model->forward(row, {.position_ids = positions}).logits;
    EXPECT_TRUE(torch::allclose(packed, alone, 1e-4, 1e-5)) << type;
    EXPECT_FALSE(torch::allclose(model->forward(row).logits, alone, 1e-2, 1e-3)) << type;
    const auto two = model->forward(row.expand({2, 12}), {.position_ids = positions}).logits;
    EXPECT_TRUE(torch::allclose(two, alone.expand_as(two), 1e-4, 1e-5)) << type;
    const auto padded = torch::cat({torch::zeros({1, 3}, torch::kLong), a}, 1);
    const auto mask = torch::cat({torch::zeros({1, 3}), torch::ones({1, 5})}, 1);
    const auto places = torch::cat({torch::zeros({3}, torch::kLong), torch::arange(5)}).unsqueeze(0);
    for (const bool cached : {false, true}) {
      liger::nn::KVCache cache;
      liger::nn::CausalLMInputs inputs{.position_ids = places, .attention_mask = mask};
      if (cached) inputs.cache = &cache;
      const auto left = model->forward(padded, inputs).logits;
      EXPECT_TRUE(torch::allclose(left.slice(1, 3), model->forward(a).logits, 1e-4, 1e-5)) << type;
    }
  }
}

TEST(Llama, HybridsHaveStatesCopiesAndCheckpointing) {
  torch::manual_seed(0);
  liger::nn::LlamaForCausalLM model(tiny("qwen3_5_text"));
  const auto ids = torch::randint(40, {2, 9});
  const auto loss = [&](liger::nn::LlamaForCausalLM& of) { return of->forward(ids, {.labels = ids}).loss; };
  loss(model).backward();
  std::vector<Tensor> gradients;
  for (auto& parameter : model->parameters()) gradients.push_back(parameter.grad().clone());
  model->zero_grad(), model->gradient_checkpointing = true;
  loss(model).backward();
  size_t i = 0;
  for (auto& parameter : model->parameters()) EXPECT_TRUE(parameter.grad().equal(gradients[i++]));

  const torch::NoGradGuard no_gradients;
  model->gradient_checkpointing = false;
  const auto expected = model->forward(ids).logits;
  liger::nn::KVCache cache;
  std::vector<Tensor> parts;
  for (const auto& part : ids.split_with_sizes({1, 4, 1, 3}, 1))
    parts.push_back(model->forward(part, {.cache = &cache}).logits);
  EXPECT_TRUE(torch::allclose(torch::cat(parts, 1), expected, 1e-4, 1e-5));
  liger::nn::KVCache other;
  const auto packed = torch::tensor({{0, 1, 2, 3, 0, 1, 2, 3, 4}});
  EXPECT_NE(error_of([&] { model->forward(ids, {.position_ids = packed, .cache = &other}); }).find("documents"),
            std::string::npos);

  liger::nn::LlamaForCausalLM copy(std::dynamic_pointer_cast<liger::nn::LlamaForCausalLMImpl>(model->clone()));
  EXPECT_TRUE(copy->forward(ids).logits.equal(expected));
  Folder folder;
  model->save_pretrained(folder / "saved");
  const auto loaded = liger::nn::LlamaForCausalLMImpl::from_pretrained(folder / "saved");
  EXPECT_TRUE(loaded->forward(ids).logits.equal(expected));
  EXPECT_EQ(loaded->config.linear_attention, model->config.linear_attention);
}

TEST(Llama, SamplesFromTheMostProbableTokens) {
  torch::manual_seed(0);
  liger::nn::LlamaForCausalLM model(tiny());
  model->config.eos_token_ids = {};
  const auto ids = torch::randint(40, {1, 4}).expand({300, 4}).contiguous();
  const auto p = torch::softmax(plain_logits(model, ids.slice(0, 0, 1))[0][-1] / 0.7, -1);
  const auto [sorted, order] = p.sort(-1, true);
  const auto kept = order.masked_select((sorted.cumsum(-1) - sorted) < 0.6);
  ASSERT_TRUE(kept.size(0) > 1 && kept.size(0) < 40);
  const auto drawn = model->generate(ids, liger::nn::GenerateOptions().max_new_tokens(1).temperature(0.7).top_p(0.6))
                         .slice(1, -1)
                         .flatten();
  EXPECT_TRUE(torch::isin(drawn, kept).all().item<bool>());
  const auto expected = (p.index_select(0, kept) / p.index_select(0, kept).sum() * 300);
  const auto counts = torch::bincount(drawn, {}, 40).index_select(0, kept).to(torch::kFloat);
  EXPECT_LT(((counts - expected).square() / expected).sum().item<double>(), 3.0 * double(kept.size(0)) + 10);  // χ²
  EXPECT_THROW(model->generate(ids, liger::nn::GenerateOptions().top_p(0)), c10::ValueError);
  EXPECT_THROW(model->generate(ids, {}, torch::zeros_like(ids)), c10::ValueError);
  EXPECT_THROW(model->generate(ids, {}, torch::ones({1, 1})), c10::Error);
}

TEST(Llama, ClonesAndSaves) {
  torch::manual_seed(0);
  for (const std::string type : {"llama", "qwen3"}) {
    liger::nn::LlamaForCausalLM model(tiny(type));
    const auto ids = torch::randint(40, {2, 6});
    const auto expected = model->forward(ids).logits;
    const auto copy = std::dynamic_pointer_cast<liger::nn::LlamaForCausalLMImpl>(model->clone());
    EXPECT_TRUE(copy->forward(ids).logits.equal(expected));
    std::stringstream stream;
    torch::save(model, stream);
    {
      const torch::NoGradGuard no_gradients;
      for (auto& parameter : copy->parameters()) parameter.mul_(2);
    }
    EXPECT_TRUE(model->forward(ids).logits.equal(expected));  // the copy has weights of its own
    liger::nn::LlamaForCausalLM loaded(tiny(type));
    torch::load(loaded, stream);
    EXPECT_TRUE(loaded->forward(ids).logits.equal(expected));
    model->to(torch::kBFloat16);
    EXPECT_EQ(model->forward(ids).logits.scalar_type(), torch::kBFloat16);
    std::stringstream printed;
    printed << model;
    EXPECT_NE(printed.str().find("LlamaForCausalLM(model_type=" + type + ", vocab_size=40"), std::string::npos);
  }
}

/// The C++ lines of docs/cpp.md.
TEST(Llama, TheExampleOfTheDocumentation) {
  const Folder made;
  torch::manual_seed(0);
  liger::nn::LlamaForCausalLM(tiny())->save_pretrained(made.path.string());
  const std::string folder = made.path.string();
  const auto ids = torch::randint(4, 40, {2, 12});
  constexpr int steps = 30;
  double first = 0, last = 0;

  auto model = liger::nn::LlamaForCausalLM(liger::nn::LlamaForCausalLMImpl::from_pretrained(folder));
  model->gradient_checkpointing = true;
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(1e-2));
  for (int step = 0; step < steps; ++step) {
    optimizer.zero_grad();
    auto loss = model->forward(ids, {.labels = ids}).loss;
    loss.backward();
    torch::nn::utils::clip_grad_norm_(model->parameters(), 1);
    optimizer.step();
    last = loss.item<double>();
    if (step == 0) first = last;
  }
  model->save_pretrained(folder);
  auto tokens =
      model->generate(ids.slice(1, 0, 4), liger::nn::GenerateOptions().max_new_tokens(16).temperature(0.7).top_p(0.9));

  EXPECT_LT(last, first / 4);
  EXPECT_GT(tokens.size(1), 4);
  const auto again = liger::nn::LlamaForCausalLMImpl::from_pretrained(folder);
  EXPECT_TRUE(again->forward(ids).logits.equal(model->forward(ids).logits));
}

}  // namespace
