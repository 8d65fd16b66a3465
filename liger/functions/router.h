#pragma once
#include <ATen/core/Tensor.h>
#include <optional>
#include <tuple>
#include "liger/options.h"

namespace liger {

struct RouteOptions {
  RouterScore score = RouterScore::Softmax;
  bool normalise = false;             // of softmax: the same as a softmax over the chosen logits
  double epsilon = 0, least_sum = 0;  // of the sum that normalises
  double scale = 1;
  int64_t groups = 1, kept_groups = 1;    // of neighbouring experts
  int64_t group_best = 2;                 // how many keys make a group's score: 1 or 2
  std::optional<at::ScalarType> dtype{};  // of the weights; none: float
  LIGER_OPTIONS(score, normalise, epsilon, least_sum, scale, groups, kept_groups, group_best, dtype)
};

struct Routed {
  at::Tensor weights, index, counts;
};

/// The router of a mixture of experts. Of logits z [..., experts], computed in float whatever their dtype is:
///   s       = softmax(z), σ(z) or √softplus(z)
///   index   = the top_k experts with the largest s + bias
///   weights = scale · s, or scale · s / (max(Σ s, least_sum) + epsilon) with normalise
/// index [..., top_k] int64, the largest first and of equal ones the lower number first; weights [..., top_k]; counts
/// [experts] int32, the tokens that have chosen each expert. bias [experts] (Wang et al. 2024, arXiv:2408.15664) counts
/// in what is chosen only. With groups, the experts of the kept_groups groups take part whose group_best largest s +
/// bias have the largest sum (DeepSeek-AI 2024, arXiv:2412.19437). Differentiable with respect to logits, through
/// weights; backward recomputes the scores.
///
/// given [..., top_k], of any integer type, replays a choice (Ma et al. 2025, arXiv:2510.11370): a token whose top_k
/// ids there are different experts gets those, in that order, with the weights that its scores give. Any other token,
/// such as one of ids −1, chooses as without it.
Routed route(const at::Tensor& logits, int64_t top_k, const RouteOptions& options = {},
             const std::optional<at::Tensor>& bias = {}, const std::optional<at::Tensor>& given = {});

/// (load, counts) of a router's logits z [..., experts], with p = softmax(z) in float:
///   load[e]   = Σ p[t, e]
///   counts[e] = the tokens that have e among their top_k experts, as route chooses without a bias
/// over the tokens t that mask [...], bool, leaves; both [experts], of float and of int32. Differentiable with respect
/// to logits, through load.
std::tuple<at::Tensor, at::Tensor> expert_load(const at::Tensor& logits, int64_t top_k,
                                               const std::optional<at::Tensor>& mask = {});

/// The load-balancing loss (Fedus et al. 2021, arXiv:2101.03961, equations 4 to 6) of the routers of some layers:
///   loss = experts · Σ_e (counts[e] / tokens) · (load[e] / tokens)
/// with expert_load's sums, and the tokens, over all layers. One float.
at::Tensor load_balancing_loss(at::TensorList logits, int64_t top_k, const std::optional<at::Tensor>& mask = {});

}  // namespace liger
