// A program of an installed libliger: its version is that of the headers and, where there are models, one is saved and
// loaded.
#include <liger/nn/norm.h>
#include <liger/version.h>
#include <torch/torch.h>
#include <cstdio>
#include <string>
#ifdef LIGER_MODELS
#include <liger/models/llama.h>
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
  return 0;
}
