// A program of an installed libliger: its version is that of the headers and, where there are models, one is saved and
// loaded; and where there are tokenizers, a text is encoded.
#include <liger/nn/norm.h>
#include <liger/version.h>
#include <torch/torch.h>
#include <cstdio>
#include <string>
#ifdef LIGER_MODELS
#include <liger/models/llama.h>
#endif
#ifdef LIGER_TOKENIZER
#include <liger/models/tokenizer.h>
#include <fstream>
#endif

int main(int, char** argv) {
  const std::string headers = std::to_string(LIGER_VERSION_MAJOR) + "." + std::to_string(LIGER_VERSION_MINOR) + "." +
                              std::to_string(LIGER_VERSION_PATCH) + "+";
  std::printf("liger %s\n", liger::version());
  if (!std::string(liger::version()).starts_with(headers)) return 1;
  const auto x = torch::randn({2, 16});
  liger::nn::RMSNorm norm(16);
  if (!torch::allclose(norm(x), x / (x.square().mean(-1, true) + 1e-6).sqrt(), 1e-5, 1e-6)) return 2;
#ifdef LIGER_MODELS
  liger::LlamaConfig config;
  config.vocab_size = 20, config.hidden_size = 8, config.intermediate_size = 8, config.num_hidden_layers = 1;
  config.num_attention_heads = 2;
  liger::nn::LlamaForCausalLM model(config);
  const std::string folder = std::string(argv[0]) + ".model";
  model->save_pretrained(folder);
  const auto ids = torch::randint(20, {1, 5});
  if (!liger::nn::LlamaForCausalLMImpl::from_pretrained(folder)->forward(ids).logits.equal(model->forward(ids).logits))
    return 3;
#endif
#ifdef LIGER_TOKENIZER
  std::string vocabulary;
  for (int byte = 0, next = 256; byte < 256; ++byte) {  // each byte's letter, as GPT-2 has it
    const bool itself = (byte > 32 && byte < 127) || (byte > 160 && byte != 173);
    const int letter = itself ? byte : next++;
    vocabulary += byte == '"' || byte == '\\' ? "\"\\" : "\"";
    if (letter > 127) vocabulary += static_cast<char>(0xC0 | letter >> 6);
    vocabulary += static_cast<char>(letter > 127 ? 0x80 | (letter & 63) : letter);
    vocabulary += "\": " + std::to_string(byte) + ", ";
  }
  std::ofstream(folder + "/tokenizer.json")
      << R"({"model": {"type": "BPE", "vocab": {)" << vocabulary << R"("hi": 256}, "merges": ["h i"]},
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "use_regex": true},
    "decoder": {"type": "ByteLevel"}})";
  if (liger::Tokenizer(folder).encode("hi ho") != std::vector<int64_t>{256, ' ', 'h', 'o'}) return 4;
#endif
  return 0;
}
