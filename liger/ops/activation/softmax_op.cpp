#include "liger/ops/activation/softmax_op.h"
#include "liger/functions/activation.h"

namespace liger {

Tensor softmax(const Tensor& x, bool causal) {
  return causal ? Operator<op::CausalSoftmax>::public_op(x, Simplex::Softmax)
                : Operator<op::Softmax>::public_op(x, Simplex::Softmax);
}

LIGER_OPERATORS(softmax, Operator<op::Softmax>, Operator<op::CausalSoftmax>)

}  // namespace liger
