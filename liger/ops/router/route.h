#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include "liger/core/kernel.h"
#include "liger/core/math.h"

namespace liger {

/// How a router makes weights of logits z [experts].
///   s = softmax(z), σ(z) or √softplus(z)
///   w = scale · s                                                  of the chosen ones
///   w = scale · s / (max(Σ s, least_sum) + epsilon)                normalised, Σ over the chosen ones
struct RouterForm {
  RouterScore score;
  bool normalise;
  float epsilon, least_sum, scale;

  /// What a chosen score is divided by, of their sum.
  LIGER_HD float divisor(float sum) const {
    return normalise ? (sum < least_sum ? least_sum : sum) + epsilon : 1;  // NaN stays
  }
};

/// Experts that somebody else has chosen: [tokens, k] integers of any width, the tokens `stride` elements apart.
struct GivenExperts {
  const void* of = nullptr;  // null: none
  int64_t stride = 0;
  int8_t bytes = 8;
  bool is_signed = true;

  LIGER_HD int64_t operator()(int64_t token, int64_t i) const {
    const int64_t at = token * stride + i;
    switch (bytes) {
      case 1: return is_signed ? static_cast<const int8_t*>(of)[at] : static_cast<const uint8_t*>(of)[at];
      case 2: return is_signed ? static_cast<const int16_t*>(of)[at] : static_cast<const uint16_t*>(of)[at];
      case 4: return static_cast<const int32_t*>(of)[at];
      default: return static_cast<const int64_t*>(of)[at];
    }
  }

  /// Whether a token's i-th one is an expert, and none of those before it.
  LIGER_HD bool is_new(int64_t token, int64_t i, int64_t experts) const {
    const int64_t e = (*this)(token, i);
    bool is = e >= 0 && e < experts;
    for (int64_t j = 0; is && j < i; ++j) is = (*this)(token, j) != e;
    return is;
  }
};

/// Of each token, k experts by their key, the largest first, the lower number first where keys are equal:
///   key = s + bias
/// or z, in whose order the scores are, where there is no bias and a single group. Of several groups of neighbouring
/// experts only `kept_groups` take part, those whose `group_best` largest keys (1 or 2) have the largest sum. NaN is
/// larger than any number. A token of which `given` has k different experts gets those instead, in their order.
///   index[t]  = the experts of token t
///   weights   = w (RouterForm)
///   counts[e] = the tokens that have chosen expert e
struct RouteForward {
  const void* z;      // [tokens, experts], stride elements apart
  const float* bias;  // [experts] or null
  GivenExperts given;
  void* weights;   // [tokens, k]
  int64_t* index;  // [tokens, k]
  int* counts;     // [experts]
  int64_t tokens, experts, k, stride;
  int64_t groups, kept_groups, group_best;
  DType dtype, weights_dtype;
  RouterForm form;

  static constexpr int64_t kMostGroups = 1024;

  /// Whether experts are compared by their scores.
  LIGER_HD bool by_score() const { return bias || groups > 1; }
};

///   S    = Σ s                                          over the chosen ones
///   D    = max(S, least_sum) + epsilon, or 1            not normalised
///   ds_i = scale / D · (g_i − [S >= least_sum] · Σ g s / D)
/// for the chosen ones, 0 for the others, and
///   dz = s (ds − Σ ds s)      softmax
///   dz = ds · s · σ(−z)       σ
///   dz = ds · σ(z) / (2 s)    √softplus
struct RouteBackward {
  const void* z;         // [tokens, experts], stride elements apart
  const int64_t* index;  // [tokens, k]; what is no expert has no gradient
  Numbers dweights;      // [tokens, k]
  void* dz;              // [tokens, experts]
  int64_t tokens, experts, k, stride;
  DType dtype;
  RouterForm form;
};

/// An integer in the order of floats: NaN above all, −0 as 0, and none that is as small as kNoKey.
inline constexpr int kNoKey = std::numeric_limits<int>::min();
LIGER_HD inline int order_of(float key) {
  if (key != key) return std::numeric_limits<int>::max();
  key += 0.f;
  int bits;
  memcpy(&bits, &key, 4);
  return bits < 0 ? bits ^ 0x7fffffff : bits;
}

/// A key and its expert in one number: the larger key, or the lower expert, has the larger number.
LIGER_HD inline int64_t ranked(int key, int64_t expert) {
  return int64_t(key) * (int64_t(1) << 32) + (0x7fffffff - expert);
}
LIGER_HD inline int64_t expert_of(int64_t ranked) { return 0x7fffffff - (ranked & 0xffffffff); }

/// The two largest keys of a group.
struct GroupScore {
  float first = -INFINITY, second = -INFINITY;

  LIGER_HD void push(float key) {
    if (order_of(key) > order_of(first)) second = first, first = key;
    else if (order_of(key) > order_of(second)) second = key;
  }
  LIGER_HD float value(int64_t best) const { return best == 1 ? first : first + second; }
};

/// Whether a group is among those kept, which are the first ones where scores are equal.
LIGER_HD inline bool is_kept(const float* scores, int64_t groups, int64_t kept, int64_t group) {
  int64_t before = 0;
  for (int64_t g = 0; g < groups; ++g)
    before += ranked(order_of(scores[g]), g) > ranked(order_of(scores[group]), group);
  return before < kept;
}

/// The gradient of a router's logits, of S and Σ g s over the chosen experts.
struct RouterSlope {
  RouterForm form;
  float unit, level, mean;  // scale / D, Σ g s / D, Σ ds s

  LIGER_HD RouterSlope(const RouterForm& form, float sum, float dot) : form(form) {
    const float by = form.divisor(sum), part = form.normalise && !(sum < form.least_sum) ? sum / by : 0;
    unit = form.scale / by;
    level = part > 0 ? dot / by : 0;
    mean = unit * dot * (1 - part);  // exactly 0 where weights add up to a constant
  }

  /// dz of an expert that was not chosen.
  LIGER_HD float other(float s) const { return form.score == RouterScore::Softmax ? -s * mean : 0; }
  LIGER_HD float chosen(float z, float s, float g) const {
    const float ds = unit * (g - level);
    if (form.score == RouterScore::Softmax) return s * (ds - mean);
    if (form.score == RouterScore::Sigmoid) return ds * s * sigmoid(-z);
    return s > 0 ? ds * sigmoid(z) / (2 * s) : s * ds;
  }
};

inline constinit Kernel<RouteForward> route_forward{"route_forward"};
inline constinit Kernel<RouteBackward> route_backward{"route_backward"};

}  // namespace liger
