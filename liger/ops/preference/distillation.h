#pragma once
#include <ATen/core/Tensor.h>

namespace liger {

/// 1 − x · y / (max(‖x‖, 1e-12) max(‖y‖, 1e-12)) over the last dimension of x and y [..., n], float [...];
/// differentiated by autograd.
at::Tensor cosine_distance(const at::Tensor& x, const at::Tensor& y);

}  // namespace liger
