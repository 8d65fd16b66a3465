#pragma once
#include <ATen/core/Tensor.h>
#include <optional>

namespace liger {

struct AdamWOptions {
  double lr = 1e-3, beta1 = 0.9, beta2 = 0.999, weight_decay = 1e-2, eps = 1e-8;
  bool maximize = false;
  // One float each, read where the parameters are: instead of lr; what gradients are multiplied by; no step is taken
  // where found_inf is not 0.
  std::optional<at::Tensor> lr_tensor, factor, found_inf;
};

/// A step of AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101) on all parameters, in a fixed order, by one launch
/// for each 60 of a kind on a GPU; liger/ops/optimizer/adamw.h has the formula. Writes to parameters, means (m),
/// squares (v) and masters. gradients: in the parameter's dtype or float. means and squares: both in the parameter's
/// dtype, or both float. masters: none, or the parameters in float, which are updated and then rounded to the
/// parameters. steps: the number of this step for each parameter, one float where it is. All tensors of a parameter
/// lie as it does: dense, with its strides.
void adamw_(at::TensorList parameters, at::TensorList gradients, at::TensorList means, at::TensorList squares,
            at::TensorList masters, at::TensorList steps, const AdamWOptions& options = {});

}  // namespace liger
