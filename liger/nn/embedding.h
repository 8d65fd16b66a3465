#pragma once
#include <torch/nn.h>
#include "liger/nn/module.h"

namespace liger::nn {

struct EmbeddingOptions {
  EmbeddingOptions(int64_t num_embeddings, int64_t embedding_dim)
      : num_embeddings_(num_embeddings), embedding_dim_(embedding_dim) {}
  TORCH_ARG(int64_t, num_embeddings);
  TORCH_ARG(int64_t, embedding_dim);
  TORCH_ARG(int64_t, padding_idx) = -1;  // a row that begins as zeros and gets no gradient
};

/// liger::embedding with its table.
struct EmbeddingImpl : torch::nn::Cloneable<EmbeddingImpl> {
  explicit EmbeddingImpl(EmbeddingOptions o) : options(std::move(o)) { reset(); }

  void reset() override {
    weight = register_parameter("weight", torch::randn({options.num_embeddings(), options.embedding_dim()}));
    torch::NoGradGuard no_grad;
    if (options.padding_idx() >= 0) weight[options.padding_idx()].zero_();
  }

  at::Tensor forward(const at::Tensor& ids) {
    return liger::embedding(weight, ids, options.padding_idx());
  }  // at:: has one too

  void pretty_print(std::ostream& to) const override {
    print(to, *this, "num_embeddings", options.num_embeddings(), "embedding_dim", options.embedding_dim(),
          "padding_idx", options.padding_idx());
  }

  EmbeddingOptions options;
  at::Tensor weight;
};
TORCH_MODULE(Embedding);

}  // namespace liger::nn
