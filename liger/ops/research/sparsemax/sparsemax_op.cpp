#include "liger/research.h"
#include "liger/ops/activation/softmax_op.h"

namespace liger {

Tensor sparsemax(const Tensor& x, int64_t dim, bool causal) {
  TORCH_CHECK_VALUE(!causal || dim == -1 || dim == x.dim() - 1, "sparsemax: causal is of the last dimension, not of ",
                    dim);
  if (causal) return Operator<op::CausalSoftmax>::public_op(x, Simplex::Sparsemax);
  return Operator<op::Softmax>::public_op(x.transpose(dim, -1), Simplex::Sparsemax).transpose(dim, -1);
}

}  // namespace liger
