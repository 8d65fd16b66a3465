#include "liger/functions/preference.h"
#include <array>
#include <cmath>
#include <string_view>
#include "liger/core/torch/operator.h"

namespace liger {
namespace op::preference {

Tensor without(const Tensor& logp, const OptTensor& reference) { return reference ? logp - reference->detach() : logp; }

/// Over the whole batch's number, where a part of it is given. No number is 0 divided by 0.
Tensor mean(const Tensor& losses, int64_t of) {
  return losses.sum() / double(std::max<int64_t>(of > 0 ? of : losses.numel(), 1));
}

void check_pairs(const char* op, const Tensor& chosen, const Tensor& rejected) {
  TORCH_CHECK(chosen.sizes() == rejected.sizes(), op, ": chosen is ", chosen.sizes(), " and rejected ",
              rejected.sizes());
}

/// Of the chosen sequences: the target or, where that is ignored, the nll's label; and the nll's where both count and
/// differ.
std::pair<Tensor, Tensor> both_labels(const Tensor& target, const Tensor& nll_target, int64_t ignore_index) {
  const int64_t pairs = target.size(0) / 2;
  TORCH_CHECK_VALUE(target.dim() == 2 && nll_target.sizes() == at::IntArrayRef({pairs, target.size(1)}),
                    "nll_target must be [", pairs, ", ", target.size(-1), "], the labels of the chosen sequences, got ",
                    nll_target.sizes());
  const Tensor chosen = target.narrow(0, 0, pairs), shared = at::where(chosen.ne(ignore_index), chosen, nll_target);
  return {shared, nll_target.masked_fill(nll_target.eq(shared), ignore_index)};
}

/// σ(x). Its derivative is σ(−|x|) (1 − σ(−|x|)): the σ(x) (1 − σ(x)) of ATen's is 0 where σ(x) rounds to 1.
Tensor logistic(const Tensor& x) {
  const Tensor positive = x > 0, small = at::where(positive, -x, x).sigmoid();
  return at::where(positive, 1 - small, small);
}

/// What the table's rows are made of.
struct Pairs {
  Tensor chosen, rejected, h;           // r_w, r_l, h
  Tensor chosen_ratio, rejected_ratio;  // Δ
  double beta, e, tau;
};

Tensor exo_pair(const Pairs& p) {
  return logistic(p.h) * (at::log_sigmoid(p.h) - std::log(1 - p.e)) +
         logistic(-p.h) * (at::log_sigmoid(-p.h) - std::log(p.e));
}

/// e^(−h) overflows where its factor vanishes: the product is made of logarithms.
Tensor discopop(const Pairs& p) {
  const Tensor modulation = p.h / p.tau;
  return -at::log_sigmoid(p.h) * logistic(-modulation) + (at::log_sigmoid(modulation) - p.h).exp();
}

struct LossFormula {
  std::string_view name;
  Tensor (*loss)(const Pairs&);
};

constexpr std::array<LossFormula, 10> kTable{{
    {"sigmoid", [](const Pairs& p) { return -at::log_sigmoid(p.h); }},
    {"hinge", [](const Pairs& p) { return at::relu(1 - p.h); }},
    {"exo_pair", exo_pair},
    {"nca_pair",
     [](const Pairs& p) {
       return -at::log_sigmoid(p.chosen) - 0.5 * at::log_sigmoid(-p.chosen) - 0.5 * at::log_sigmoid(-p.rejected);
     }},
    {"robust",
     [](const Pairs& p) { return ((p.e - 1) * at::log_sigmoid(p.h) + p.e * at::log_sigmoid(-p.h)) / (1 - 2 * p.e); }},
    {"bco_pair", [](const Pairs& p) { return -at::log_sigmoid(p.chosen) - at::log_sigmoid(-p.rejected); }},
    {"sppo_hard",
     [](const Pairs& p) {
       return (p.chosen_ratio - 0.5 / p.beta).square() + (p.rejected_ratio + 0.5 / p.beta).square();
     }},
    {"apo_zero", [](const Pairs& p) { return logistic(-p.chosen) + logistic(p.rejected); }},
    {"apo_down", [](const Pairs& p) { return logistic(p.chosen) + logistic(-p.h); }},
    {"discopop", discopop},
}};

const LossFormula& parse(const std::string& loss_type, double label_smoothing) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      loss_type != "ipo",
      "dpo_loss: loss_type 'ipo' needs the number of tokens of each sequence, which the loss does not see");
  std::string names;
  for (const LossFormula& row : kTable) {
    if (row.name != loss_type) {
      names.append(names.empty() ? "" : ", ").append(row.name);
      continue;
    }
    TORCH_CHECK_VALUE(loss_type != "exo_pair" || (label_smoothing > 0 && label_smoothing < 1),
                      "dpo_loss: label_smoothing must be > 0 for loss_type='exo_pair', and below 1, got ",
                      label_smoothing);
    TORCH_CHECK_VALUE(loss_type != "robust" || (label_smoothing >= 0 && label_smoothing < 0.5),
                      "dpo_loss: label_smoothing must lie in [0.0, 0.5) for loss_type='robust', got ", label_smoothing);
    return row;
  }
  TORCH_CHECK_VALUE(false, "dpo_loss: Unsupported loss_type '", loss_type, "': it is one of ", names);
}

/// ln(1 − e^x) for x <= 0. e^x that rounds to 1 leaves a probability of the others that is not 0: its logarithm and the
/// loss's gradient stay finite.
Tensor log1mexp(const Tensor& x) { return (-at::expm1(x.clamp_max(-1e-30))).log(); }

}  // namespace op::preference

Tensor sequence_log_prob(const Tensor& logp, const Tensor& labels, int64_t ignore_index, bool average) {
  const Tensor valid = labels.ne(ignore_index), sum = at::where(valid, logp, 0).sum(-1);
  return average ? sum / valid.sum(-1).clamp_min(1) : sum;
}

Tensor token_nll(const Tensor& logp, const Tensor& labels, int64_t ignore_index, const OptTensor& counted) {
  return -sequence_log_prob(logp, labels, ignore_index, false).sum() /
         counted.value_or(labels).ne(ignore_index).sum().clamp_min(1);
}

Tensor labels_with_nll(const Tensor& target, const Tensor& nll_target, int64_t ignore_index) {
  const auto [shared, other] = op::preference::both_labels(target, nll_target, ignore_index);
  return at::cat({shared, target.narrow(0, nll_target.size(0), nll_target.size(0)), other});
}

Tensor nll_log_probs(const Tensor& logp, const Tensor& target, const Tensor& nll_target, int64_t ignore_index) {
  const int64_t pairs = nll_target.size(0);
  const auto [shared, other] = op::preference::both_labels(target, nll_target, ignore_index);
  return at::where(other.ne(ignore_index), logp.narrow(0, 2 * pairs, pairs), logp.narrow(0, 0, pairs));
}

Tensor logit_sums(const Tensor& hidden_, const Tensor& weight, const OptTensor& bias) {
  const Tensor hidden = hidden_.detach();
  TORCH_CHECK(hidden.dim() == 3, "logit_sums: hidden must be [rows, tokens, width], got ", hidden.sizes());
  // No GEMM, which autocast would round. A CPU copies what it sums in another dtype: parts that fit into its first
  // caches, and are too small for several threads, took a third of the time that parts of 4096 rows did.
  const int64_t part_rows = weight.is_cpu() ? std::max<int64_t>(64, 32767 / std::max<int64_t>(weight.size(1), 1))
                                            : std::max<int64_t>(weight.size(0), 1);
  Tensor columns;
  for (const Tensor& part : weight.detach().split(part_rows)) {
    const Tensor sum = part.sum(0, false, at::kFloat);
    columns = columns.defined() ? columns + sum : sum;
  }
  const Tensor sums = (hidden.sum(1, false, at::kFloat) * columns).sum(-1);
  return bias ? sums + double(hidden.size(1)) * bias->detach().sum(at::kFloat) : sums;
}

std::tuple<Tensor, Tensor> class_sums(const Tensor& values_, const Tensor& liked_) {
  const Tensor values = values_.detach(), liked = liked_.to(at::kBool);
  TORCH_CHECK(values.sizes() == liked.sizes(), "class_sums: there are ", values.sizes(), " values and ", liked.sizes(),
              " labels");
  return {at::where(liked, values, 0).sum(), at::where(liked, 0, values).sum()};
}

PreferenceResult dpo_loss(const Tensor& chosen, const Tensor& rejected, const OptTensor& ref_chosen,
                          const OptTensor& ref_rejected, const DPOOptions& o) {
  using namespace op::preference;
  const LossFormula& row = parse(o.loss_type, o.label_smoothing);
  check_pairs("dpo_loss", chosen, rejected);
  const Tensor w = without(chosen, ref_chosen), l = without(rejected, ref_rejected);
  const Pairs p{.chosen = o.beta * w,
                .rejected = o.beta * l,
                .h = o.beta * (w - l),
                .chosen_ratio = w,
                .rejected_ratio = l,
                .beta = o.beta,
                .e = o.label_smoothing,
                .tau = o.discopop_tau};
  return {mean(row.loss(p), o.pairs), p.chosen.detach(), p.rejected.detach()};
}

ORPOResult orpo_loss(const Tensor& chosen, const Tensor& rejected, const ORPOOptions& o) {
  using namespace op::preference;
  check_pairs("orpo_loss", chosen, rejected);
  const Tensor g = (chosen - rejected) - (log1mexp(chosen) - log1mexp(rejected)),
               ratio = mean(at::log_sigmoid(g), o.pairs);
  return {{-o.beta * ratio, (o.beta * chosen).detach(), (o.beta * rejected).detach()},
          ratio.detach(),
          mean(g.detach(), o.pairs)};
}

PreferenceResult cpo_loss(const Tensor& chosen, const Tensor& rejected, const CPOOptions& o) {
  using namespace op::preference;
  check_pairs("cpo_loss", chosen, rejected);
  const Tensor u = o.beta * (chosen - rejected) - o.gamma;
  const Tensor losses = (o.label_smoothing - 1) * at::log_sigmoid(u) - o.label_smoothing * at::log_sigmoid(-u);
  return {mean(losses, o.pairs), (o.beta * chosen).detach(), (o.beta * rejected).detach()};
}

PreferenceResult kto_loss(const Tensor& logp, const Tensor& liked, const OptTensor& ref_logp, const OptTensor& kl,
                          const KTOOptions& o) {
  using namespace op::preference;
  TORCH_CHECK_VALUE(!kl || kl->numel() == 1, "kto_loss: kl must be one number, got ", kl->sizes());
  const Tensor delta = without(logp, ref_logp), gain = o.beta * (kl ? delta - kl->detach().reshape({}) : delta);
  const Tensor losses = logistic(at::where(liked.to(at::kBool), -gain, gain));  // 1 − σ(x) = σ(−x)
  const auto [chosen, rejected] = class_sums(o.beta * delta, liked);
  return {mean(losses, o.rows), chosen, rejected};
}

namespace op::preference {

struct PairInputs {
  Tensor chosen, rejected;
  LIGER_FIELDS(chosen, rejected)
};
struct DPOInputs {
  PairInputs of;
  OptTensor ref_chosen, ref_rejected;
  LIGER_FIELDS(of, ref_chosen, ref_rejected)
};
struct KTOInputs {
  Tensor logp, liked;
  OptTensor ref_logp, kl;
  LIGER_FIELDS(logp, liked, ref_logp, kl)
};

PreferenceResult dpo(const DPOInputs& in, const DPOOptions& o) {
  return dpo_loss(in.of.chosen, in.of.rejected, in.ref_chosen, in.ref_rejected, o);
}
ORPOResult orpo(const PairInputs& in, const ORPOOptions& o) { return orpo_loss(in.chosen, in.rejected, o); }
PreferenceResult cpo(const PairInputs& in, const CPOOptions& o) { return cpo_loss(in.chosen, in.rejected, o); }
PreferenceResult kto(const KTOInputs& in, const KTOOptions& o) {
  return kto_loss(in.logp, in.liked, in.ref_logp, in.kl, o);
}

}  // namespace op::preference

// Without a backend: each is what ATen's operators make of it, on any device, and is differentiated through them.
TORCH_LIBRARY_FRAGMENT(liger, m) {
  m.def("sequence_log_prob(Tensor logp, Tensor labels, int ignore_index, bool average) -> Tensor", sequence_log_prob);
  m.def("token_nll(Tensor logp, Tensor labels, int ignore_index, Tensor? counted) -> Tensor", token_nll);
  m.def("labels_with_nll(Tensor target, Tensor nll_target, int ignore_index) -> Tensor", labels_with_nll);
  m.def("nll_log_probs(Tensor logp, Tensor target, Tensor nll_target, int ignore_index) -> Tensor", nll_log_probs);
  m.def("logit_sums(Tensor hidden, Tensor weight, Tensor? bias) -> Tensor", logit_sums);
  m.def("class_sums(Tensor values, Tensor liked) -> (Tensor, Tensor)", class_sums);
  def_composite<op::preference::dpo>(m, "dpo_loss");
  def_composite<op::preference::orpo>(m, "orpo_loss");
  def_composite<op::preference::cpo>(m, "cpo_loss");
  def_composite<op::preference::kto>(m, "kto_loss");
}

}  // namespace liger
