#include "liger/core/torch/op.h"
#include "liger/functions/activation.h"
#include "liger/research.h"

namespace liger {

Tensor multi_token_attention(const Tensor& scores, const Tensor& weight, const OptTensor& bias,
                             const MultiTokenAttentionOptions& options) {
  const Tensor maps = options.sparse ? sparsemax(scores, -1, true) : liger::softmax(scores, true);
  return at::conv2d(maps, weight, bias, options.stride, options.padding, options.dilation, options.groups).tril();
}

}  // namespace liger
