#include "liger/functions/policy.h"
#include "liger/core/torch/operator.h"

namespace liger {
namespace op::policy {

constexpr const char* kLosses[] = {"grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo"};
const double kSmallestLogWeight = std::log(1e-8);
constexpr double kLargestLogWeight = 20;

PolicyLoss parse_loss(c10::string_view name) {
  for (int i = 0; i < int(std::size(kLosses)); ++i)
    if (name == kLosses[i]) return PolicyLoss(i);
  TORCH_CHECK_VALUE(false, "Unknown loss_type: ", name,
                    "; known are grpo, bnpo, dr_grpo, dapo, luspo, cispo, sapo and vespo");
}

bool parse_level(c10::string_view level) {
  TORCH_CHECK_VALUE(level == "token" || level == "sequence", "Unknown importance_sampling_level: ", level,
                    "; known are 'token' and 'sequence'");
  return level == "sequence";
}

bool is_clipped(PolicyLoss loss) { return loss < PolicyLoss::Cispo; }

void check(const Tensor& logp, const PolicyInputs& in, const PolicyOptions& o) {
  TORCH_CHECK(logp.dim() == 2, "policy_loss: logp must be [batch, tokens], got ", logp.sym_sizes());
  const auto shaped = [&](const char* name, const OptTensor& t, bool ok) {
    TORCH_CHECK(!t || ok, "policy_loss: ", name, " does not fit logp ", logp.sym_sizes(), ": it is ", t->sym_sizes());
  };
  const auto as_logp = [&](const OptTensor& t) { return t && t->sym_sizes() == logp.sym_sizes(); };
  const auto by_row = [&](const OptTensor& t) {
    return t && t->sym_numel() == logp.sym_size(0) && t->sym_size(0) == logp.sym_size(0);
  };
  TORCH_CHECK(in.mask.defined() && in.advantages.defined(), "policy_loss: mask and advantages must be given");
  shaped("mask", in.mask, as_logp(in.mask)), shaped("advantages", in.advantages, by_row(in.advantages));
  shaped("old_logp", in.old_logp, as_logp(in.old_logp)), shaped("ref_logp", in.ref_logp, as_logp(in.ref_logp));
  shaped("ratio", in.ratio, by_row(in.ratio) || as_logp(in.ratio)),
      shaped("vespo_weights", in.vespo_weights, by_row(in.vespo_weights));
  TORCH_CHECK_VALUE(!o.sequence_level || is_clipped(o.loss),
                    "Sequence-level importance sampling is not supported for loss_type ", name(o.loss));
  TORCH_CHECK_VALUE(o.loss != PolicyLoss::Sapo || (o.sapo_temperature_pos > 0 && o.sapo_temperature_neg > 0),
                    "policy_loss: sapo's temperatures must be positive, got ", o.sapo_temperature_pos, " and ",
                    o.sapo_temperature_neg);
}

/// In the dtype that sums are made in, and one column wide where there is one number a row.
Tensor column(const Tensor& t, at::ScalarType dtype) { return (t.dim() == 1 ? t.unsqueeze(1) : t).to(dtype); }
at::ScalarType wide(const Tensor& t) { return at::promote_types(t.scalar_type(), at::kFloat); }

Tensor lengths(const Tensor& m) { return m.sum(1, true).clamp_min(1); }
Tensor tokens(const Tensor& mask, const OptTensor& whole_mask, at::ScalarType dtype) {
  return whole_mask.value_or(mask).to(dtype).sum().clamp_min(1);
}
Tensor by_sign(const Tensor& positive, double yes, double no, at::ScalarType dtype) {
  return at::where(positive, yes, no).to(dtype);
}

}  // namespace op::policy

const char* name(PolicyLoss loss) { return op::policy::kLosses[int(loss)]; }

Tensor k3(const Tensor& log_p, const Tensor& log_q) {
  const Tensor x = log_p - log_q;
  return x.expm1() - x;
}

Tensor soft_clip(const Tensor& ratio, const Tensor& temperature) {
  return (temperature * (ratio - 1)).sigmoid() * (4 / temperature);
}

Tensor vespo_weights(const Tensor& advantages_, const Tensor& log_ratio_, const Tensor& mask, const OptTensor& ratio,
                     const VespoOptions& o) {
  using namespace op::policy;
  const Tensor log_ratio = log_ratio_.detach(), advantages = column(advantages_.detach(), wide(log_ratio));
  const auto dtype = wide(log_ratio);
  Tensor sum =
      (log_ratio.masked_fill(mask == 0, 0).to(dtype).clamp(-kLargestLogWeight, kLargestLogWeight) * mask.to(dtype))
          .sum(1, true);
  if (ratio)
    sum = sum + column(ratio->detach(), dtype).log().clamp(kSmallestLogWeight, kLargestLogWeight).sum(-1, true);
  const Tensor log_weight = sum.clamp(kSmallestLogWeight, kLargestLogWeight), positive = advantages >= 0;
  const auto lambda_of = [](double lambda) { return std::max(lambda, 1e-4); };
  const Tensor k = by_sign(positive, o.k_pos, o.k_neg, dtype),
               lambda = by_sign(positive, lambda_of(o.lambda_pos), lambda_of(o.lambda_neg), dtype);
  return at::nan_to_num((lambda + k * log_weight - lambda * log_weight.exp()).exp(), 0, 0, 0);
}

PolicyTerms policy_terms(const Tensor& logp_, const PolicyInputs& in, const PolicyOptions& o) {
  using namespace op::policy;
  check(logp_, in, o);
  const auto dtype = wide(logp_);
  const Tensor logp = logp_.to(dtype), m = in.mask.to(dtype), advantages = column(in.advantages, dtype),
               unread = in.mask == 0;
  const auto difference = [&](const OptTensor& other) {
    return other ? logp - other->detach().to(dtype) : logp - logp.detach();
  };
  const auto kept = [&](const Tensor& t) { return o.masked_terms ? t : t.masked_fill(unread, 0); };

  const Tensor difference_to_old = difference(in.old_logp);
  Tensor w = kept(difference_to_old);
  if (o.sequence_level) w = (difference_to_old.masked_fill(unread, 0) * m).sum(1, true) / lengths(m);
  const Tensor c = w.exp();
  const Tensor seen = c.detach();
  Tensor loss, clipped;
  switch (o.loss) {
    case PolicyLoss::Cispo:
      loss = -seen.clamp_max(o.epsilon_high) * advantages * logp;
      clipped = (seen > o.epsilon_high).logical_and(advantages > 0);
      break;
    case PolicyLoss::Sapo:
      loss = -advantages * soft_clip(c, by_sign(advantages > 0, o.sapo_temperature_pos, o.sapo_temperature_neg, dtype));
      break;
    case PolicyLoss::Vespo:
      loss = -column(in.vespo_weights ? *in.vespo_weights : vespo_weights(in.advantages, w, in.mask, in.ratio, o.vespo),
                     dtype)
                  .detach() *
             advantages * logp;
      break;
    default:
      loss = -at::minimum((o.delta ? c.clamp_max(*o.delta) : c) * advantages,
                          c.clamp(1 - o.epsilon_low, 1 + o.epsilon_high) * advantages);
      clipped = (seen < 1 - o.epsilon_low)
                    .logical_and(advantages < 0)
                    .logical_or((seen > 1 + o.epsilon_high).logical_and(advantages > 0));
  }
  clipped = clipped.defined() ? clipped.to(dtype) : at::zeros_like(seen);
  if (in.ratio && o.loss != PolicyLoss::Vespo) loss = loss * column(in.ratio->detach(), dtype);
  if (o.beta == 0) return {loss, {}, clipped};
  const Tensor from_reference = kept(difference(in.ref_logp));
  Tensor kl = k3(-from_reference, at::zeros({}, logp.options()));
  if (o.unbiased_kl) kl = kl * c;
  return {loss + o.beta * kl, kl, clipped};
}

Tensor policy_reduce(const Tensor& terms, const PolicyInputs& in, const PolicyOptions& o) {
  using namespace op::policy;
  const auto dtype = wide(terms);
  const Tensor m = in.mask.to(dtype);
  const auto batch = in.whole_mask.value_or(in.mask).sym_size(0);
  const auto total = [&] { return (terms * m).sum(); };
  switch (o.loss) {
    case PolicyLoss::Grpo:
    case PolicyLoss::Sapo: return ((terms * m).sum(1) / lengths(m).squeeze(1)).sum() / batch;
    case PolicyLoss::Bnpo: return total() / tokens(in.mask, in.whole_mask, dtype);
    case PolicyLoss::DrGrpo:
      return total() / (o.max_length > 0 ? c10::SymFloat(o.max_length) * batch : c10::SymFloat(m.sym_size(1) * batch));
    case PolicyLoss::Luspo: return (terms * m.sum(1, true)).sum() / (batch * terms.sym_size(1));
    default: return total() / (in.normalizer ? in.normalizer->to(dtype) : tokens(in.mask, in.whole_mask, dtype));
  }
}

Tensor masked_mean(const Tensor& x, const Tensor& mask, const OptTensor& whole_mask) {
  using namespace op::policy;
  return (x * mask.to(wide(x))).sum() / tokens(mask, whole_mask, wide(x));
}

PolicyResult policy_loss(const Tensor& logp, const PolicyInputs& in, const PolicyOptions& o) {
  const auto [terms, kl, clipped] = policy_terms(logp, in, o);
  const bool masked = o.loss == PolicyLoss::Luspo && !o.masked_terms;
  const auto mean = [&](const Tensor& x) { return x.defined() ? masked_mean(x.detach(), in.mask, in.whole_mask) : x; };
  return {policy_reduce(masked ? terms * in.mask.to(terms.scalar_type()) : terms, in, o), mean(kl), mean(clipped)};
}

namespace op::policy {

struct Inputs {
  Tensor logp, mask, advantages;
  OptTensor old_logp, ref_logp, ratio, vespo_weights, normalizer, whole_mask;
  LIGER_FIELDS(logp, mask, advantages, old_logp, ref_logp, ratio, vespo_weights, normalizer, whole_mask)

  PolicyInputs policy() const {
    return {mask, advantages, old_logp, ref_logp, ratio, vespo_weights, normalizer, whole_mask};
  }
};

/// In a schema the loss and the level are names.
struct Options : PolicyOptions {
  using KeywordOnly = std::true_type;
  std::string loss_type, level;
  LIGER_FIELDS(loss_type, level, epsilon_low, epsilon_high, delta, beta, unbiased_kl, sapo_temperature_pos,
               sapo_temperature_neg, vespo.k_pos, vespo.lambda_pos, vespo.k_neg, vespo.lambda_neg, max_length,
               masked_terms)

  PolicyOptions policy() const {
    PolicyOptions o = *this;
    o.loss = parse_loss(loss_type), o.sequence_level = parse_level(level);
    return o;
  }
};

PolicyTerms terms_of(const Inputs& in, const Options& o) { return policy_terms(in.logp, in.policy(), o.policy()); }

PolicyResult loss_of(const Inputs& in, const Options& o) { return policy_loss(in.logp, in.policy(), o.policy()); }

Tensor reduced(const Tensor& terms, const Tensor& mask, c10::string_view loss_type, double max_length,
               const OptTensor& normalizer) {
  return liger::policy_reduce(terms, {.mask = mask, .normalizer = normalizer},
                              {.loss = parse_loss(loss_type), .max_length = max_length});
}

Tensor weights_of(const Tensor& advantages, const Tensor& log_ratio, const Tensor& mask, const OptTensor& ratio,
                  double k_pos, double lambda_pos, double k_neg, double lambda_neg) {
  return liger::vespo_weights(advantages, log_ratio, mask, ratio, {k_pos, lambda_pos, k_neg, lambda_neg});
}

}  // namespace op::policy

// Composites: what they are made of has CPU, CUDA and Meta forms and derivatives.
TORCH_LIBRARY_FRAGMENT(liger, m) {
  def_composite<op::policy::terms_of>(m, "policy_terms");
  def_composite<op::policy::loss_of>(m, "policy_loss");
  m.def("policy_reduce(Tensor terms, Tensor mask, str loss_type, float max_length, Tensor? normalizer) -> Tensor",
        op::policy::reduced);
  m.def("masked_mean(Tensor x, Tensor mask, Tensor? whole_mask=None) -> Tensor", masked_mean);
  m.def(
      "vespo_weights(Tensor advantages, Tensor log_ratio, Tensor mask, Tensor? ratio, float k_pos, float lambda_pos, "
      "float k_neg, float lambda_neg) -> Tensor",
      op::policy::weights_of);
  m.def("k3(Tensor log_p, Tensor log_q) -> Tensor", k3);
  m.def("soft_clip(Tensor ratio, Tensor temperature) -> Tensor", soft_clip);
}

}  // namespace liger
