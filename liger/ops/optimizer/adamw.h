#pragma once
#include <cmath>
#include "liger/core/kernel.h"

namespace liger {

/// A parameter of `count` elements, with what is kept of it between steps.
struct AdamWTensor {
  void* parameter;
  const void* gradient;
  void *mean, *square;  // the moments m and v
  float* master;        // the parameter in float, which is updated and rounded to `parameter`; or null for all
  const float* step;    // t, the number of this step, from 1 on
  int64_t count;
};

/// AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101), element by element and in float. What is stored is rounded to
/// its type:
///   g  = factor · gradient
///   p' = p · (1 − lr · weight_decay)
///   m' = m + (g − m) · (1 − beta1)
///   v' = v · beta2 + g² · (1 − beta2)
///   p″ = p' − lr / (1 − beta1ᵗ) · m' / (√v' / √(1 − beta2ᵗ) + eps)
/// With `maximize`, −factor. Nothing is written where *found_inf is not 0.
struct AdamW {
  const AdamWTensor* tensors;  // [tensors_count], in the host's memory
  int64_t tensors_count;
  const float *lr, *factor, *found_inf;  // where the tensors are; null: lr_value, 1, 0
  float lr_value;
  double beta1, beta2;
  float weight_decay, eps;
  bool maximize;
  DType parameter, gradient, moments;  // the last two are that of the parameters, or float

  /// 1 − betaᵗ, from t and ln beta: as precise where beta is near 1.
  float log_beta1() const { return float(std::log(beta1)); }
  float log_beta2() const { return float(std::log(beta2)); }
};

inline constinit Kernel<AdamW> adamw{"adamw"};

}  // namespace liger
