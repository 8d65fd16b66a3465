#pragma once
#include "liger/core/kernel.h"
#include "liger/ops/activation/gated.h"

namespace liger {

///   y[t] = Σ_k weights[t, k] · rows[place[t, k]]
/// What experts make of a token's copies, summed in float. A place below 0 adds nothing.
struct CombineExperts {
  const void* rows;      // [pairs, cols]
  const float* weights;  // [tokens, k] or null: 1
  const int64_t* place;  // [tokens, k]
  void* y;               // [tokens, cols]
  int64_t tokens, k, cols;
  DType dtype;
};

/// The step back through an expert's output, weight · (h downᵀ), with
///   h  = act(a_gate) · a_up
///   dh = dy down
/// which gives
///   dweight = Σ h · dh
///   a  ← weight · dh · ∂h/∂a, the gradient of a
///   dh ← weight · h, whose product with dy is the gradient of down
struct ExpertsBackward {
  void* a;               // [pairs, 2 cols]: gate, then up
  void* dh;              // [pairs, cols]
  const float* weights;  // [pairs]
  float* dweights;       // [pairs]
  int64_t pairs, cols;
  DType dtype;
  Activation activation;
};

inline constinit Kernel<CombineExperts> combine_experts{"combine_experts"};
inline constinit Kernel<ExpertsBackward> experts_backward{"experts_backward"};

}  // namespace liger
