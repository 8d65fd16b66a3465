#pragma once
#include <vector>
#include "liger/core/torch/op.h"

namespace liger::op::linear {

/// Matrices of adapters in x's type, one after another: what the forward of their model has cast for all the calls in
/// it and in its backward pass, where gradient checkpointing runs layers again. Undefined where a call casts its own:
/// outside of these, while a graph is captured, which would hold one step's numbers, where one of the matrices has
/// changed or lies elsewhere, and when the model first calls them together, which is noted for its next forward.
Tensor held_cast(const std::vector<Tensor>& parts, const Tensor& x);

}  // namespace liger::op::linear
