// What compare_models.py compares with transformers:
//   run_model <checkpoint> <inputs.safetensors> <new checkpoint> <results.safetensors> [<adapter> <new adapter>]
#include <torch/torch.h>
#include "liger/models/llama.h"

int main(int argc, char** argv) {
  if (argc != 5 && argc != 7) return 2;
  const auto model = liger::nn::LlamaForCausalLMImpl::from_pretrained(argv[1]);
  if (argc == 7) {
    model->load_adapter(argv[5]);
    model->save_adapter(argv[6]);
  }
  const liger::SafetensorsFile inputs(argv[2]);
  const auto ids = inputs.tensor("ids"), mask = inputs.tensor("mask");
  liger::NamedTensors results;
  {
    const torch::NoGradGuard no_gradients;
    results.emplace_back("logits", model->forward(ids).logits);
    results.emplace_back(
        "padded", model->forward(ids, {.position_ids = inputs.tensor("positions"), .attention_mask = mask}).logits);
  }
  const auto loss = model->forward(ids, {.labels = inputs.tensor("labels")}).loss;
  loss.backward();
  results.emplace_back("loss", loss.detach());
  for (const auto& item : model->named_parameters())
    if (item.value().requires_grad()) results.emplace_back("gradient." + item.key(), item.value().grad());
  const auto options = liger::nn::GenerateOptions().max_new_tokens(12);
  results.emplace_back("generated", model->generate(ids, options));
  results.emplace_back("generated padded", model->generate(ids, options, mask));
  liger::save_safetensors(argv[4], results);
  model->save_pretrained(argv[3], 20000);
}
