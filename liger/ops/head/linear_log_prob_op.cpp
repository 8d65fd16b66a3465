#include "liger/ops.h"
#include "liger/ops/head/head_op.h"
#include "liger/ops/loss/selective_log_softmax_op.h"

namespace liger {
namespace op::linear_log_prob {

using head::Wants;
constexpr auto kName = "linear_log_prob";

enum Output : int64_t { kEntropy = 1, kLogSumSquares = 2, kMeanLogit = 4, kIsTop1 = 8 };  // bits of `outputs`

/// How the softmax's argument is made of a projection's result y: softcap · tanh(y · scale / softcap) / temperature, or y · scale / temperature.
struct Logits {
  double temperature, softcap, scale;

  /// What the rows are still to be divided by.
  double rest() const { return softcap > 0 ? temperature : temperature / scale; }

  void cap(const Tensor& z) const {
    if (softcap > 0) z.mul_(scale / softcap).tanh_().mul_(softcap);
  }

  /// ∂cap(y)/∂y where cap(y) is z; undefined where nothing is capped.
  Tensor slope(const Tensor& z) const {
    return softcap > 0 ? z.to(at::kFloat).div(softcap).square_().neg_().add_(1).mul_(scale) : Tensor();
  }
};

/// Logits of up to so many bytes wait for backward instead of being made again.
int64_t bytes_kept(const Tensor& hidden, int64_t max_bytes) { return max_bytes > 0 ? max_bytes : hidden.is_cpu() ? int64_t(256) << 20 : int64_t(4) << 30; }

/// hidden [tokens, H] for hidden [..., H], in the dtype of the GEMMs, the weight and the bias likewise.
struct Operands {
  Tensor hidden, weight, bias, ids;
  at::ScalarType dtype;

  Operands(const Tensor& h, const Tensor& w, const OptTensor& b, const Tensor& i, std::optional<at::ScalarType> asked)
      : dtype(asked.value_or(h.scalar_type())) {
    hidden = h.reshape({-1, h.size(-1)}).to(dtype).contiguous(), weight = w.to(dtype).contiguous(), bias = b ? b->to(dtype) : Tensor();
    ids = i.reshape(-1).to(at::kLong).contiguous();
  }
};

void check(const Tensor& hidden, const Tensor& weight, const OptTensor& bias, const Tensor& ids, const Logits& logits,
           std::optional<at::ScalarType> dtype) {
  const Arguments arguments(kName, "hidden", hidden);
  TORCH_CHECK(weight.dim() == 2, kName, ": weight must be [classes, width], got ", weight.sym_sizes());
  arguments.shaped("weight", weight, {weight.sym_size(0), hidden.sym_size(-1)}, Type::Kernels).vector("bias", bias, weight.sym_size(0), Type::Kernels)
      .shaped("ids", ids, hidden.sym_sizes().slice(0, hidden.dim() - 1), Type::Integer);
  TORCH_CHECK_VALUE(logits.temperature > 0, kName, ": temperature must be positive, got ", logits.temperature);
  TORCH_CHECK_VALUE(logits.scale > 0, kName, ": logit_scale must be positive, got ", logits.scale);
  TORCH_CHECK_VALUE(logits.softcap >= 0 && std::isfinite(logits.softcap), kName, ": softcap must be positive, or 0 for none, got ", logits.softcap);
  TORCH_CHECK_VALUE(weight.sym_size(0) > 0, kName, ": there must be at least one class");
  TORCH_CHECK_TYPE(!dtype || has_dtype(*dtype), kName, ": dtype, in which it computes, must be float32, float16 or bfloat16");
}

int64_t count_tokens(const Tensor& ids, const Tensor& weight, int64_t ignore_index, int64_t valid_count) {
  return head::kept_count(ids, weight, valid_count, [&] { return ids.ne(ignore_index).sum().item<int64_t>(); });
}

/// (logp, entropy, log Σ p², mean logit, whether the id is the first of the largest logits).
using Results = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;
/// Those, and stats [tokens, 3] and logits [tokens, classes] or empty, of which the first rows are those of the kept tokens.
using Forward = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

Forward forward(const Tensor& hidden_, const Tensor& weight_, const OptTensor& bias_, const Tensor& ids_, double temperature, double softcap, double logit_scale,
                int64_t ignore_index, int64_t outputs, int64_t valid_count, int64_t max_bytes, std::optional<at::ScalarType> asked, bool keep) {
  const Logits of_logits{temperature, softcap, logit_scale};
  check(hidden_, weight_, bias_, ids_, of_logits, asked);
  const auto floats = hidden_.options().dtype(at::kFloat);
  const auto dtype = asked.value_or(hidden_.scalar_type());
  const c10::SymInt tokens_ = ids_.sym_numel();
  keep = keep && tokens_ * weight_.sym_size(0) * int64_t(c10::elementSize(dtype)) <= bytes_kept(hidden_, max_bytes);
  const Tensor logits = output(at::empty_symint({keep ? tokens_ : c10::SymInt(0), weight_.sym_size(0)}, hidden_.options().dtype(dtype)));
  const Tensor stats = at::empty_symint({tokens_, 3}, floats);
  const auto type_of = [&](int64_t output) { return floats.dtype(output == kIsTop1 ? at::kBool : at::kFloat); };
  if (hidden_.is_meta()) {
    const auto empty = [&](int64_t output) { return outputs & output ? at::empty_symint(ids_.sym_sizes(), type_of(output)) : at::empty({0}, type_of(output)); };
    return {at::empty_symint(ids_.sym_sizes(), floats), empty(kEntropy), empty(kLogSumSquares), empty(kMeanLogit), empty(kIsTop1), stats, logits};
  }
  const Operands in(hidden_, weight_, bias_, ids_, asked);
  const int64_t tokens = in.ids.numel();
  const Tensor kept = head::kept_tokens(in.ids, ignore_index, count_tokens(in.ids, in.weight, ignore_index, valid_count));
  const Tensor ids = head::gather(kept, in.ids), hidden = head::gather(kept, in.hidden);
  const auto column = [&](int64_t output) { return at::empty({outputs & output ? ids.numel() : 0}, type_of(output)); };
  const Tensor logp = at::empty({ids.numel()}, floats), entropy = at::empty_like(logp), squares = column(kLogSumSquares), means = column(kMeanLogit), top = column(kIsTop1);
  const auto rows = [&](const Tensor& z, int64_t begin) {
    const int64_t n = z.size(0);
    const auto of = [&](const Tensor& t) { return t.narrow(0, begin, n); };
    const auto run = [&](const Tensor& logp, const Tensor& entropy, const Tensor& stats, double temperature) {
      selective_log_softmax::run_rows(z, z.stride(0), of(ids), logp, entropy, stats, temperature, ignore_index);
    };
    of_logits.cap(z);
    run(of(logp), of(entropy), of(stats), of_logits.rest());
    if (outputs & kLogSumSquares) {  // ln Σ exp(2 (z − m)) − 2 ln Σ exp(z − m)
      const Tensor scratch = at::empty({n}, floats), twice = at::empty({n, 3}, floats);
      run(scratch, at::empty_like(scratch), twice, of_logits.rest() / 2);
      of(squares).copy_(twice.select(1, 1).log().sub_(of(stats).select(1, 1).log(), 2));
    }
    if (outputs & kMeanLogit) of(means).copy_(z.mean(-1, false, at::kFloat).div_(of_logits.rest()));
    if (outputs & kIsTop1) of(top).copy_(z.argmax(-1).eq_(of(ids)));
  };
  if (keep) {
    const Tensor z = logits.narrow(0, 0, ids.numel());
    if (ids.numel() > 0) project(z, hidden, in.weight, in.bias), rows(z, 0);
  } else {
    head::Pass{hidden, in.weight, in.bias, {}, weight_.scalar_type(), max_bytes}.run(rows);
  }
  // Where ignored tokens were not left out, what is not 0 by itself is made so.
  const bool ignores = !kept.defined() && (outputs & (kLogSumSquares | kMeanLogit | kIsTop1));
  const Tensor ignored = ignores ? ids.eq(ignore_index) : Tensor();
  const auto shaped = [&](const Tensor& t, int64_t output) {
    if (!(outputs & output)) return at::empty({0}, type_of(output));
    if (ignores && output != kEntropy) t.masked_fill_(ignored, 0);
    return head::scatter(kept, t, tokens, 0).view(ids_.sizes());
  };
  return {head::scatter(kept, logp, tokens, 0).view(ids_.sizes()), shaped(entropy, kEntropy), shaped(squares, kLogSumSquares), shaped(means, kMeanLogit), shaped(top, kIsTop1),
          stats, logits};
}

using Gradients = std::tuple<Tensor, Tensor, Tensor>;

/// (dhidden, dweight, dbias), empty unless wanted.
template <bool kOverwriteLogits>
Gradients backward(const OptTensor& dlogp, const OptTensor& dentropy, const Tensor& hidden_, const Tensor& weight_, const OptTensor& bias_, const Tensor& ids_,
                   const Tensor& stats, const Tensor& kept_logits, double temperature, double softcap, double logit_scale, int64_t ignore_index, int64_t valid_count,
                   int64_t max_bytes, std::optional<at::ScalarType> asked, bool with_dhidden, bool with_dweight, bool with_dbias) {
  const Logits of_logits{temperature, softcap, logit_scale};
  const Wants wants{with_dhidden, with_dweight, with_dbias};
  check(hidden_, weight_, bias_, ids_, of_logits, asked);
  const Arguments arguments("linear_log_prob_backward", "hidden", hidden_);
  arguments.shaped("dlogp", dlogp, ids_.sym_sizes(), Type::Floating).shaped("dentropy", dentropy, ids_.sym_sizes(), Type::Floating)
      .count("stats", stats, 3 * ids_.sym_numel()).present("with_dbias", wants.bias, "bias", bias_);
  const auto dtype = asked.value_or(hidden_.scalar_type());
  TORCH_CHECK_TYPE(kept_logits.scalar_type() == dtype, "linear_log_prob_backward: logits must be of ", dtype, ", got ", kept_logits.scalar_type());
  TORCH_CHECK(kept_logits.device() == hidden_.device() && kept_logits.dim() == 2 && kept_logits.sym_size(1) == weight_.sym_size(0) &&
                  (kept_logits.sym_size(0) == 0 || kept_logits.sym_size(0) == ids_.sym_numel()),
              "linear_log_prob_backward: logits must be [", ids_.sym_numel(), " or 0, ", weight_.sym_size(0), "] on ", hidden_.device(), ", got ", kept_logits.sym_sizes(), " on ",
              kept_logits.device());
  const auto none = [&] { return at::empty({0}, hidden_.options()); };
  if (hidden_.is_meta()) {
    const auto like = [&](bool wanted, const OptTensor& t) { return wanted ? at::empty_symint(t->sym_sizes(), t->options()) : none(); };
    return {like(wants.hidden, hidden_), like(wants.weight, weight_), like(wants.bias, bias_)};
  }
  const Operands in(hidden_, weight_, bias_, ids_, asked);
  const int64_t tokens = in.ids.numel(), counted = count_tokens(in.ids, in.weight, ignore_index, valid_count);
  const Tensor kept = head::kept_tokens(in.ids, ignore_index, counted);
  const Tensor ids = head::gather(kept, in.ids), hidden = head::gather(kept, in.hidden);
  const auto upstream = [&](const OptTensor& g) { return g ? head::gather(kept, g->reshape(-1).to(at::kFloat)).contiguous() : at::zeros({counted}, stats.options()); };
  Tensor g = upstream(dlogp), h = upstream(dentropy), power;
  const Tensor of_rows = stats.contiguous();
  if (dtype == at::kHalf) {  // what a mean over many tokens asks for would vanish, and what a loss scale has been multiplied into overflow
    power = head::unit_power(at::maximum(g.abs(), h.abs()).div_(of_logits.rest())).mul_(2048);
    g = g.mul(power), h = h.mul(power);
  }
  const Tensor logits = kept_logits.size(0) > 0 ? kept_logits.narrow(0, 0, counted) : Tensor();
  const auto rows = [&](const Tensor& z, int64_t begin) {
    const auto of = [&](const Tensor& t) { return t.narrow(0, begin, z.size(0)); };
    if (!logits.defined()) of_logits.cap(z);
    const Tensor slope = of_logits.slope(z);
    selective_log_softmax::run_backward(z, z.stride(0), of(ids), of(g), of(h), of(of_rows), z, of_logits.rest(), ignore_index);
    if (slope.defined()) z.mul_(slope);
  };
  const auto d = head::Pass{hidden, in.weight, in.bias, wants, weight_.scalar_type(), max_bytes, logits, !kOverwriteLogits}.run(rows, power);
  const auto rounded = [&](const Tensor& t, const OptTensor& like) { return t.defined() ? t.to(like->scalar_type()) : none(); };
  return {d.hidden.defined() ? rounded(head::scatter(kept, d.hidden, tokens, 0), hidden_).view(hidden_.sizes()) : none(), rounded(d.weight, weight_), rounded(d.bias, bias_)};
}

Results inference(const Tensor& hidden, const Tensor& weight, const OptTensor& bias, const Tensor& ids, double temperature, double softcap, double logit_scale,
                  int64_t ignore_index, int64_t outputs, int64_t valid_count, int64_t max_bytes, std::optional<at::ScalarType> dtype) {
  auto [logp, entropy, squares, means, top, stats, logits] =
      forward(hidden, weight, bias, ids, temperature, softcap, logit_scale, ignore_index, outputs, valid_count, max_bytes, dtype, false);
  return {logp, entropy, squares, means, top};
}

constexpr Op<"liger::linear_log_prob", inference> public_op;
constexpr Op<"liger::linear_log_prob_forward", forward> forward_op;
constexpr Op<"liger::linear_log_prob_backward", backward<false>> backward_op;
constexpr Op<"liger::linear_log_prob_backward_", backward<true>> backward_over_op;

/// Logits that fit into the budget wait for backward, others are made again.
struct Autograd {
  using Attributes = std::tuple<double, double, double, int64_t, bool, int64_t, int64_t, std::optional<int64_t>, bool, bool, bool>;

  static variable_list forward(AutogradContext* ctx, const Tensor& hidden, const Tensor& weight, const OptTensor& bias, const Tensor& ids, double temperature,
                               double softcap, double logit_scale, int64_t ignore_index, int64_t outputs, int64_t valid_count, int64_t max_bytes,
                               std::optional<at::ScalarType> dtype, Results* results) {
    // Both passes must agree on it; where it is not known what ids hold, both ask.
    if (is_plain(ids) && is_plain(hidden) && weight.dim() == 2) valid_count = count_tokens(ids, weight, ignore_index, valid_count);
    auto [logp, entropy, squares, means, top, stats, logits] =
        forward_op(hidden, weight, bias, ids, temperature, softcap, logit_scale, ignore_index, outputs, valid_count, max_bytes, dtype, true);
    ctx->save_for_backward({hidden, weight, value_or_undefined(bias), ids, stats, logits});
    ctx->saved_data["attrs"] = Attributes(temperature, softcap, logit_scale, ignore_index, (outputs & kEntropy) != 0, valid_count, max_bytes,
                                          dtype ? std::optional<int64_t>(int64_t(*dtype)) : std::nullopt, wants_grad(hidden), wants_grad(weight), wants_grad(bias));
    ctx->set_materialize_grads(false);
    *results = {logp, entropy, squares, means, top};
    return {logp, entropy};
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const auto saved = ctx->get_saved_variables();
    const auto [temperature, softcap, logit_scale, ignore_index, entropy, valid_count, max_bytes, dtype_, dh, dw, db] = ctx->saved_data["attrs"].to<Attributes>();
    const auto dtype = dtype_ ? std::optional<at::ScalarType>(at::ScalarType(*dtype_)) : std::nullopt;
    variable_list d(13);
    if (!entropy) grads[1].reset();
    if (!grads[0].defined() && !grads[1].defined()) return d;
    const auto plain = [](const Tensor& t) { return !t.defined() || is_plain(t); };
    const bool overwrite = !torch::autograd::get_current_graph_task_keep_graph() && plain(saved[5]) && plain(grads[0]) && plain(grads[1]);
    const auto run = [&](const auto& op) {
      return op(optional(grads[0]), optional(grads[1]), saved[0], saved[1], optional(saved[2]), saved[3], saved[4], saved[5], temperature, softcap, logit_scale, ignore_index, valid_count, max_bytes,
                dtype, dh, dw, db);
    };
    auto [dhidden, dweight, dbias] = overwrite ? run(backward_over_op) : run(backward_op);
    d[0] = if_wanted(dh, dhidden), d[1] = if_wanted(dw, dweight), d[2] = if_wanted(db, dbias);
    return d;
  }
};

/// The op takes the float weight and the dtype to compute in, so that its gradient comes back in float, not rounded on the way.
template <c10::DeviceType kDevice>
Results autocast(const Tensor& hidden, const Tensor& weight, const OptTensor& bias, const Tensor& ids, double temperature, double softcap, double logit_scale,
                 int64_t ignore_index, int64_t outputs, int64_t valid_count, int64_t max_bytes, std::optional<at::ScalarType> dtype) {
  const c10::impl::ExcludeDispatchKeyGuard below_autocast(c10::autocast_dispatch_keyset);
  return public_op(hidden, weight, bias, ids, temperature, softcap, logit_scale, ignore_index, outputs, valid_count, max_bytes, dtype ? dtype : at::autocast::get_autocast_dtype(kDevice));
}

}  // namespace op::linear_log_prob

LogProbResult linear_log_prob(const Tensor& hidden, const Tensor& weight, const Tensor& ids, const LogProbOptions& o, const OptTensor& bias) {
  using namespace op::linear_log_prob;
  const int64_t outputs = kEntropy * o.entropy | kLogSumSquares * o.log_sum_squares | kMeanLogit * o.mean_logit | kIsTop1 * o.is_top1;
  auto [logp, entropy, squares, means, top] =
      public_op(hidden, weight, bias, ids, o.temperature, o.softcap, o.logit_scale, o.ignore_index, outputs, o.valid_count, o.max_bytes, std::nullopt);
  return {logp, if_wanted(o.entropy, entropy), if_wanted(o.log_sum_squares, squares), if_wanted(o.mean_logit, means), if_wanted(o.is_top1, top)};
}

#define LIGER_LOG_PROB_INPUTS "Tensor hidden, Tensor weight, Tensor? bias, Tensor ids"
#define LIGER_LOG_PROB_RESULTS "(Tensor logp, Tensor entropy, Tensor log_sum_squares, Tensor mean_logit, Tensor is_top1"
#define LIGER_LOG_PROB_BACKWARD(logits)                                                                                                             \
  "(Tensor? dlogp, Tensor? dentropy, " LIGER_LOG_PROB_INPUTS ", Tensor stats, " logits ", float temperature, float softcap, float logit_scale, " \
  "int ignore_index, int valid_count, int max_bytes, "                                                                                             \
  "ScalarType? dtype, bool with_dhidden, bool with_dweight, bool with_dbias) -> (Tensor dhidden, Tensor dweight, Tensor dbias)"
TORCH_LIBRARY_FRAGMENT(liger, m) {
  m.def("linear_log_prob(" LIGER_LOG_PROB_INPUTS ", float temperature=1.0, float softcap=0.0, float logit_scale=1.0, int ignore_index=-100, int outputs=0, "
        "int valid_count=-1, int max_bytes=0, ScalarType? dtype=None) -> " LIGER_LOG_PROB_RESULTS ")");
  m.def("linear_log_prob_forward(" LIGER_LOG_PROB_INPUTS ", float temperature, float softcap, float logit_scale, int ignore_index, int outputs, "
        "int valid_count, int max_bytes, ScalarType? dtype, bool keep) -> " LIGER_LOG_PROB_RESULTS ", Tensor stats, Tensor logits)");
  m.def("linear_log_prob_backward" LIGER_LOG_PROB_BACKWARD("Tensor logits"));
  m.def("linear_log_prob_backward_" LIGER_LOG_PROB_BACKWARD("Tensor(a!) logits"));
}
LIGER_IMPL(linear_log_prob, m) {
  m.impl("linear_log_prob", op::linear_log_prob::inference);
  m.impl("linear_log_prob_forward", op::linear_log_prob::forward);
  m.impl("linear_log_prob_backward", op::linear_log_prob::backward<false>);
  m.impl("linear_log_prob_backward_", op::linear_log_prob::backward<true>);
}
TORCH_LIBRARY_IMPL(liger, Autograd, m) {
  m.impl("linear_log_prob", differentiated<op::linear_log_prob::Autograd, 3>(op::linear_log_prob::public_op));
  refuse_derivative(m, {"linear_log_prob_forward", "linear_log_prob_backward", "linear_log_prob_backward_"});
}
TORCH_LIBRARY_IMPL(liger, AutocastCUDA, m) { m.impl("linear_log_prob", op::linear_log_prob::autocast<c10::DeviceType::CUDA>); }
TORCH_LIBRARY_IMPL(liger, AutocastCPU, m) { m.impl("linear_log_prob", op::linear_log_prob::autocast<c10::DeviceType::CPU>); }

}  // namespace liger
