// Trains a two-layer decoder on a text of its own for a few steps, with the library's modules: no Python runs here.
//   prefix=$(python -c 'import liger_kernel; print(liger_kernel.cmake_prefix_path)')
//   cmake -S examples -B build/example -DCMAKE_PREFIX_PATH="$prefix"
//   cmake --build build/example && build/example/train
#include <liger/nn/activation.h>
#include <liger/nn/loss.h>
#include <liger/nn/norm.h>
#include <liger/nn/rope.h>
#include <torch/torch.h>
#include <cstdio>

namespace {

constexpr int64_t kHidden = 64, kHeads = 4, kLayers = 2, kVocabulary = 128, kLength = 48, kBatch = 8, kSteps = 60;
using torch::Tensor;

struct LayerImpl : torch::nn::Module {
  LayerImpl()
      : attention_norm(register_module("attention_norm", liger::nn::RMSNorm(kHidden))),
        mlp_norm(register_module("mlp_norm", liger::nn::RMSNorm(kHidden))),
        qkv(register_module("qkv", torch::nn::Linear(torch::nn::LinearOptions(kHidden, 3 * kHidden).bias(false)))),
        out(register_module("out", torch::nn::Linear(torch::nn::LinearOptions(kHidden, kHidden).bias(false)))),
        rotary(register_module("rotary", liger::nn::RotaryEmbedding(kHidden / kHeads))),
        mlp(register_module("mlp", liger::nn::GatedMLP(liger::nn::GatedMLPOptions(kHidden, 3 * kHidden)))) {}

  Tensor forward(const Tensor& x) {
    const auto heads =
        qkv(attention_norm(x)).view({x.size(0), x.size(1), 3 * kHeads, kHidden / kHeads}).transpose(1, 2).chunk(3, 1);
    const auto [q, k] = rotary(heads[0], heads[1]);
    const auto mixed = torch::scaled_dot_product_attention(q, k, heads[2], {}, 0, true);
    const auto y = x + out(mixed.transpose(1, 2).reshape(x.sizes()));
    return y + mlp(mlp_norm(y));
  }

  liger::nn::RMSNorm attention_norm, mlp_norm;
  torch::nn::Linear qkv, out;
  liger::nn::RotaryEmbedding rotary;
  liger::nn::GatedMLP mlp;
};
TORCH_MODULE(Layer);

struct DecoderImpl : torch::nn::Module {
  DecoderImpl()
      : embedding(register_module("embedding", torch::nn::Embedding(kVocabulary, kHidden))),
        norm(register_module("norm", liger::nn::RMSNorm(kHidden))),
        head(register_module(
            "head", liger::nn::LinearCrossEntropy(liger::nn::LinearCrossEntropyOptions(kHidden, kVocabulary)))) {
    for (int64_t i = 0; i < kLayers; ++i) layers.push_back(register_module("layer" + std::to_string(i), Layer()));
  }

  /// The mean loss of predicting each token from those before it.
  Tensor forward(const Tensor& tokens) {
    Tensor x = embedding(tokens.slice(1, 0, -1));
    for (auto& layer : layers) x = layer(x);
    return head(norm(x), tokens.slice(1, 1));
  }

  torch::nn::Embedding embedding;
  std::vector<Layer> layers;
  liger::nn::RMSNorm norm;
  liger::nn::LinearCrossEntropy head;
};
TORCH_MODULE(Decoder);

}  // namespace

int main() {
  torch::manual_seed(0);
  const std::string text =
      "The optimiser walks downhill, one small step at a time, and does not ask who made the hill. "
      "What it is given is a slope; what it gives back is a slightly better guess, and then it asks for the next "
      "slope. ";
  std::vector<int64_t> codes(text.begin(), text.end());
  const auto corpus = torch::tensor(codes);
  Decoder model;
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(3e-3));
  double first = 0, last = 0;
  for (int64_t step = 0; step < kSteps; ++step) {
    const auto starts = torch::randint(0, corpus.size(0) - kLength - 1, {kBatch, 1});
    const auto tokens = corpus.index({starts + torch::arange(kLength + 1)});
    optimizer.zero_grad();
    auto loss = model(tokens);
    loss.backward();
    optimizer.step();
    last = loss.item<double>();
    if (step == 0) first = last;
    if (step % 10 == 0 || step == kSteps - 1)
      std::printf("step %2lld  loss %.4f\n", static_cast<long long>(step), last);
  }
  return last < first / 2 ? 0 : 1;
}
