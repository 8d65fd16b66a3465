#pragma once
#include "liger/ops/router/route.h"

namespace liger {

/// How much a router gives to each expert, over the tokens that are not masked, with p = softmax(z):
///   load[e]   = Σ_t p[t, e]
///   counts[e] = the tokens of which expert e has one of the k largest logits, as in RouteForward
struct ExpertLoadForward {
  const void* z;     // [tokens, experts], stride elements apart
  const bool* mask;  // [tokens], false: the token does not count; or null
  float* load;       // [partials, experts]: partial sums
  int* counts;       // [experts]
  int64_t tokens, experts, k, stride, partials;
  DType dtype;
};

///   dz = p (g − Σ p g)
/// for g = ∂/∂load, and 0 for tokens that are masked.
struct ExpertLoadBackward {
  const void* z;       // [tokens, experts], stride elements apart
  const bool* mask;    // [tokens] or null
  const float* dload;  // [experts]
  void* dz;            // [tokens, experts]
  int64_t tokens, experts, stride;
  DType dtype;
};

inline constinit Kernel<ExpertLoadForward> expert_load_forward{"expert_load_forward"};
inline constinit Kernel<ExpertLoadBackward> expert_load_backward{"expert_load_backward"};

}  // namespace liger
