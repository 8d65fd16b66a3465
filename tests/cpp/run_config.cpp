// What compare_configs.py compares with transformers: run_config <inputs.safetensors>. Prints the table of
// config.json's fields and then, for each checkpoint folder that a line of stdin names, the loss of the inputs and the
// norm of its gradients, or the error.
#include <torch/torch.h>
#include <iostream>
#include "liger/models/json.h"
#include "liger/models/llama.h"

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  torch::set_num_threads(1);
  const liger::SafetensorsFile inputs(argv[1]);
  nlohmann::json fields = nlohmann::json::object();
  for (const auto& [name, field] : liger::LlamaConfig::fields())
    fields[name] = {{"use", static_cast<int>(field.use)}, {"allowed", nlohmann::json::parse(field.allowed)}};
  std::cout << fields << std::endl;
  for (std::string folder; std::getline(std::cin, folder);) {
    nlohmann::json found;
    try {
      const auto model = liger::nn::LlamaForCausalLMImpl::from_pretrained(folder);
      const auto loss = model->forward(inputs.tensor("ids"), {.labels = inputs.tensor("labels")}).loss;
      loss.backward();
      double squares = 0;
      for (const auto& parameter : model->parameters())
        squares += parameter.grad().to(torch::kDouble).square().sum().item<double>();
      found = {{"loss", loss.item<double>()}, {"norm", std::sqrt(squares)}};
    } catch (const c10::Error& error) { found["error"] = error.what_without_backtrace(); }
    std::cout << found << std::endl;
  }
}
