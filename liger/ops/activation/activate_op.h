#pragma once
#include "liger/core/torch/operator.h"
#include "liger/ops/activation/activate.h"

/// Activations on tensors. All have x's shape and dtype; y and dx are contiguous.
namespace liger::op::activated {

/// y = act(x).
void run_forward(const Tensor& x, const Tensor& y, Activation activation);

/// dx = dy · act'(x), and where y is defined act(x) again; y may be dy.
void run_backward(const Tensor& dy, const Tensor& x, const Tensor& dx, Activation activation, const Tensor& y = {});

}  // namespace liger::op::activated
