#include "liger/core/torch/options.h"
#include "liger/ops.h"
#include "liger/ops/head/head_op.h"
#include "liger/ops/loss/selective_log_softmax_op.h"

namespace liger {
namespace op::linear_log_prob {

using head::Wants;
constexpr auto kName = "linear_log_prob";

/// Bits of Options::outputs.
enum Output : int64_t { kEntropy = 1, kLogSumSquares = 2, kMeanLogit = 4, kIsTop1 = 8, kLse = 16, kArgmax = 32 };

struct Options {
  double temperature = 1, softcap = 0, logit_scale = 1;
  int64_t ignore_index = -100, outputs = 0, top_k = 0, valid_count = -1, max_bytes = 0;
  bool batch_invariant = false;
  LIGER_OPTIONS(temperature, softcap, logit_scale, ignore_index, outputs, top_k, valid_count, max_bytes,
                batch_invariant)

  bool wants(Output output) const { return outputs & output; }
  /// The logits are map's of what the GEMM gives, divided by rest. A scale without a softcap is a part of the
  /// temperature.
  LogitMap map() const { return softcap > 0 ? LogitMap{float(logit_scale), float(softcap)} : LogitMap{}; }
  double rest() const { return softcap > 0 ? temperature : temperature / logit_scale; }
};

using Dtype = std::optional<at::ScalarType>;

void check(const Options& o, const Tensor& hidden, const Tensor& weight, const OptTensor& bias, const Tensor& ids,
           const OptTensor& low_hidden, const OptTensor& low_weight, const OptTensor& main_grad, const Dtype& dtype) {
  const Arguments arguments(kName, "hidden", hidden);
  TORCH_CHECK(weight.dim() == 2, kName, ": weight must be [classes, width], got ", weight.sym_sizes());
  const c10::SymInt classes = weight.sym_size(0);
  const auto tokens = hidden.sym_sizes().slice(0, hidden.dim() - 1);
  arguments.shaped("weight", weight, {classes, hidden.sym_size(-1)}, Type::Kernels)
      .vector("bias", bias, classes, Type::Kernels)
      .shaped("ids", ids, tokens, Type::Integer)
      .present("low_hidden", low_hidden.has_value(), "low_weight", low_weight)
      .present("low_weight", low_weight.has_value(), "low_hidden", low_hidden)
      .shaped("main_grad", main_grad, weight.sym_sizes(), Type::Float);
  if (low_weight) {
    TORCH_CHECK(low_weight->dim() == 2, kName, ": low_weight must be [classes, rank], got ", low_weight->sym_sizes());
    auto shape = tokens.vec();
    shape.push_back(low_weight->sym_size(1));
    arguments.shaped("low_hidden", low_hidden, shape, Type::Kernels)
        .shaped("low_weight", low_weight, {classes, low_weight->sym_size(1)}, Type::Kernels);
  }
  TORCH_CHECK_VALUE(o.temperature > 0, kName, ": temperature must be positive, got ", o.temperature);
  TORCH_CHECK_VALUE(o.logit_scale > 0, kName, ": logit_scale must be positive, got ", o.logit_scale);
  TORCH_CHECK_VALUE(o.softcap >= 0 && std::isfinite(o.softcap), kName,
                    ": softcap must be positive, or 0 for none, got ", o.softcap);
  TORCH_CHECK_VALUE(classes > 0, kName, ": there must be at least one class");
  TORCH_CHECK_VALUE(o.top_k >= 0 && o.top_k <= classes, kName,
                    ": top_k must be between 0 and the number of classes, got ", o.top_k);
  TORCH_CHECK_TYPE(!dtype || has_dtype(*dtype), kName,
                   ": dtype, in which it computes, must be float32, float16 or bfloat16");
}

int64_t count_tokens(const Options& o, const Tensor& ids, const Tensor& weight) {
  return head::kept_count(ids, weight, o.valid_count, [&] { return ids.ne(o.ignore_index).sum().item<int64_t>(); });
}

/// The operands of the tokens that count, in the dtype of the GEMMs, and which tokens those are.
struct Kept {
  head::Operands operands;
  Tensor ids, all_ids, which;
  int64_t tokens;

  Kept(const Options& o, const Tensor& hidden, const Tensor& weight, const OptTensor& bias, const Tensor& ids_,
       const OptTensor& low_hidden, const OptTensor& low_weight, at::ScalarType dtype) {
    all_ids = ids_.reshape(-1).to(at::kLong).contiguous(), tokens = all_ids.numel();
    which = head::kept_tokens(all_ids, o.ignore_index, count_tokens(o, all_ids, weight));
    ids = head::gather(which, all_ids);
    const auto rows = [&](const Tensor& t) {
      return head::gather(which, t.reshape({-1, t.size(-1)})).to(dtype).contiguous();
    };
    const auto all = [&](const OptTensor& t) { return t ? t->to(dtype).contiguous() : Tensor(); };
    operands = {rows(hidden), all(weight), all(bias), low_hidden ? rows(*low_hidden) : Tensor(), all(low_weight)};
  }
};

/// The numbers of each token, those that have a derivative first; empty unless asked for. The last two are [...,
/// top_k].
struct Columns {
  Tensor logp, entropy, lse, mean_logit, log_sum_squares, is_top1, argmax, top_logp, top_ids;
  auto tuple() const {
    return std::make_tuple(logp, entropy, lse, mean_logit, log_sum_squares, is_top1, argmax, top_logp, top_ids);
  }
};
using Results = decltype(std::declval<Columns>().tuple());
using Forward = decltype(std::tuple_cat(std::declval<Results>(), std::make_tuple(Tensor(), Tensor())));

/// Columns of `shape`, filled with 0 on a device.
Columns make_columns(const Options& o, c10::SymIntArrayRef shape, const at::TensorOptions& floats) {
  const auto column = [&](bool wanted, at::ScalarType dtype = at::kFloat, bool wide = false) {
    auto sizes = shape.vec();
    if (wide) sizes.push_back(o.top_k);
    return wanted ? at::zeros_symint(sizes, floats.dtype(dtype)) : at::empty({0}, floats.dtype(dtype));
  };
  return {column(true),
          column(o.wants(kEntropy)),
          column(o.wants(kLse)),
          column(o.wants(kMeanLogit)),
          column(o.wants(kLogSumSquares)),
          column(o.wants(kIsTop1), at::kBool),
          column(o.wants(kArgmax), at::kLong),
          column(o.top_k > 0, at::kFloat, true),
          column(o.top_k > 0, at::kLong, true)};
}

/// Fills the columns of tokens [begin, begin + z's rows) from what the GEMM gave.
void fill(const Options& o, const Tensor& z, int64_t begin, const Tensor& all_ids, const Columns& to,
          const Tensor& stats) {
  // Which thread sums what depends on where in 16 bytes a row begins: here all begin alike.
  constexpr int64_t kAlike = 8, kRows = 512;
  const int64_t n = z.size(0), width = z.size(1);
  if (o.batch_invariant && z.stride(0) % kAlike != 0) {
    const Tensor alike = at::empty({std::min(n, kRows), round_up(width, kAlike)}, z.options()).narrow(1, 0, width);
    return for_chunks(n, kRows, [&](int64_t first, int64_t rows) {
      fill(o, alike.narrow(0, 0, rows).copy_(z.narrow(0, first, rows)), begin + first, all_ids, to, stats);
    });
  }
  const auto rows = [&](const Tensor& t) { return t.narrow(0, begin, n); };
  const auto if_wanted = [&](bool wanted, const Tensor& t) { return wanted ? rows(t) : Tensor(); };
  const Tensor ids = rows(all_ids), entropy = o.wants(kEntropy) ? rows(to.entropy) : at::empty({n}, stats.options());
  selective_log_softmax::LogitRows of{z, z.stride(0), ids, o.rest(), o.ignore_index, o.map(), o.batch_invariant};
  const Tensor lse = o.wants(kLse) ? rows(to.lse) : o.top_k > 0 ? at::empty({n}, stats.options()) : Tensor();
  selective_log_softmax::run_rows(
      of, {rows(to.logp), entropy, rows(stats), lse, if_wanted(o.wants(kMeanLogit), to.mean_logit)});
  if (o.wants(kLogSumSquares)) {  // ln Σ exp(2 (z − m)) − 2 ln Σ exp(z − m)
    const Tensor scratch = at::empty({n}, stats.options()), twice = at::empty({n, 3}, stats.options());
    of.temperature /= 2;
    selective_log_softmax::run_rows(of, {scratch, at::empty_like(scratch), twice});
    rows(to.log_sum_squares).copy_(twice.select(1, 1).log().sub_(rows(stats).select(1, 1).log(), 2));
  }
  // What the softcap does to logits keeps their order: these need not see it, and are not misled by two that it rounds
  // to one.
  if (o.wants(kIsTop1) || o.wants(kArgmax)) {
    const Tensor argmax = z.argmax(-1);
    if (o.wants(kArgmax)) rows(to.argmax).copy_(argmax);
    if (o.wants(kIsTop1)) rows(to.is_top1).copy_(argmax.eq_(ids));
  }
  if (o.top_k > 0) {
    auto [y, at] = z.topk(o.top_k, -1);
    const LogitMap map = o.map();
    Tensor top = y.to(at::kFloat);
    if (!is_plain(map)) top.mul_(map.scale / map.softcap).tanh_().mul_(map.softcap);
    rows(to.top_logp).copy_(top.div_(o.rest()).sub_(lse.unsqueeze(1))), rows(to.top_ids).copy_(at);
  }
}

/// The results, and stats [tokens, 3] and logits [tokens, classes] or none, of which the first rows are those of the
/// kept tokens.
Forward forward(const Options& o, const Tensor& hidden, const Tensor& weight, const OptTensor& bias, const Tensor& ids,
                const OptTensor& low_hidden, const OptTensor& low_weight, Dtype asked, bool keep) {
  check(o, hidden, weight, bias, ids, low_hidden, low_weight, std::nullopt, asked);
  const auto floats = hidden.options().dtype(at::kFloat);
  const auto dtype = asked.value_or(hidden.scalar_type());
  const c10::SymInt all_tokens = ids.sym_numel();
  const int64_t most = o.max_bytes > 0 ? o.max_bytes : head::default_bytes(hidden.is_cpu());
  keep = keep && all_tokens * weight.sym_size(0) * int64_t(c10::elementSize(dtype)) <= most;
  const Tensor logits =
      output(at::empty_symint({keep ? all_tokens : c10::SymInt(0), weight.sym_size(0)}, hidden.options().dtype(dtype)));
  const Tensor stats = at::empty_symint({all_tokens, 3}, floats);
  if (hidden.is_meta())
    return std::tuple_cat(make_columns(o, ids.sym_sizes(), floats).tuple(), std::make_tuple(stats, logits));

  const Kept in(o, hidden, weight, bias, ids, low_hidden, low_weight, dtype);
  const int64_t n = in.ids.numel();
  const Columns columns = make_columns(o, {n}, floats);
  const auto rows = [&](const Tensor& z, int64_t begin, int64_t = 0) { fill(o, z, begin, in.ids, columns, stats); };
  if (keep) {
    const Tensor z = logits.narrow(0, 0, n);
    if (n > 0) in.operands.project(z, 0, o.batch_invariant), rows(z, 0);
  } else {
    head::Pass{.of = in.operands,
               .wants = {},
               .weight_dtype = weight.scalar_type(),
               .max_bytes = o.max_bytes,
               .in_blocks = o.batch_invariant}
        .run(rows);
  }
  // Where ignored tokens were not left out, what is not 0 by itself is made so.
  const bool ignores = !in.which.defined() && (o.outputs & (kLogSumSquares | kIsTop1 | kArgmax) || o.top_k > 0);
  const Tensor ignored = ignores ? in.ids.eq(o.ignore_index) : Tensor();
  const auto shaped = [&](const Tensor& t, bool wanted) {
    if (!wanted) return t;
    if (ignores) t.masked_fill_(t.dim() > 1 ? ignored.unsqueeze(1) : ignored, 0);
    auto sizes = ids.sizes().vec();
    if (t.dim() > 1) sizes.push_back(o.top_k);
    return head::scatter(in.which, t, in.tokens, 0).view(sizes);
  };
  const auto& c = columns;
  return std::tuple_cat(
      Columns{shaped(c.logp, true), shaped(c.entropy, o.wants(kEntropy)), shaped(c.lse, o.wants(kLse)),
              shaped(c.mean_logit, o.wants(kMeanLogit)), shaped(c.log_sum_squares, o.wants(kLogSumSquares)),
              shaped(c.is_top1, o.wants(kIsTop1)), shaped(c.argmax, o.wants(kArgmax)), shaped(c.top_logp, o.top_k > 0),
              shaped(c.top_ids, o.top_k > 0)}
          .tuple(),
      std::make_tuple(stats, logits));
}

/// (dhidden, dweight, dbias, dlow_hidden, dlow_weight), empty unless wanted.
using Gradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

/// kInPlace: overwrites the kept logits, and adds the weight's gradient to main_grad where it is given. The other one
/// changes none of its arguments, so that torch can batch it (is_grads_batched).
template <bool kInPlace>
Gradients backward(const Options& o, const OptTensor& dlogp, const OptTensor& dentropy, const OptTensor& dlse,
                   const OptTensor& dmean_logit, const Tensor& hidden, const Tensor& weight, const OptTensor& bias,
                   const Tensor& ids, const OptTensor& low_hidden, const OptTensor& low_weight,
                   const OptTensor& main_grad, const Tensor& stats, const Tensor& kept_logits, Dtype asked,
                   bool with_dhidden, bool with_dweight, bool with_dbias, bool with_dlow_hidden,
                   bool with_dlow_weight) {
  constexpr auto op = "linear_log_prob_backward";
  const Wants wants{with_dhidden, with_dweight, with_dbias, with_dlow_hidden, with_dlow_weight};
  check(o, hidden, weight, bias, ids, low_hidden, low_weight, main_grad, asked);
  TORCH_CHECK(kInPlace || !main_grad, op, ": main_grad must be None, ", op, "_ adds to it");
  const Arguments arguments(op, "hidden", hidden);
  arguments.shaped("dlogp", dlogp, ids.sym_sizes(), Type::Floating)
      .shaped("dentropy", dentropy, ids.sym_sizes(), Type::Floating)
      .shaped("dlse", dlse, ids.sym_sizes(), Type::Floating)
      .shaped("dmean_logit", dmean_logit, ids.sym_sizes(), Type::Floating)
      .count("stats", stats, 3 * ids.sym_numel())
      .present("with_dbias", wants.bias, "bias", bias)
      .present("with_dlow_hidden", wants.low_hidden, "low_hidden", low_hidden)
      .present("with_dlow_weight", wants.low_weight, "low_weight", low_weight);
  const auto dtype = asked.value_or(hidden.scalar_type());
  TORCH_CHECK_TYPE(kept_logits.scalar_type() == dtype, op, ": logits must be of ", dtype, ", got ",
                   kept_logits.scalar_type());
  TORCH_CHECK(kept_logits.device() == hidden.device() && kept_logits.dim() == 2 &&
                  kept_logits.sym_size(1) == weight.sym_size(0) &&
                  (kept_logits.sym_size(0) == 0 || kept_logits.sym_size(0) == ids.sym_numel()),
              op, ": logits must be [", ids.sym_numel(), " or 0, ", weight.sym_size(0), "] on ", hidden.device(),
              ", got ", kept_logits.sym_sizes(), " on ", kept_logits.device());
  const auto none = [&] { return at::empty({0}, hidden.options()); };
  const bool returns_dweight = wants.weight && !main_grad;
  if (hidden.is_meta()) {
    const auto like = [&](bool wanted, const OptTensor& t) {
      return wanted ? at::empty_symint(t->sym_sizes(), t->options()) : none();
    };
    return {like(wants.hidden, hidden), like(returns_dweight, weight), like(wants.bias, bias),
            like(wants.low_hidden, low_hidden), like(wants.low_weight, low_weight)};
  }

  const Kept in(o, hidden, weight, bias, ids, low_hidden, low_weight, dtype);
  const int64_t n = in.ids.numel();
  const auto upstream = [&](const OptTensor& g) {
    return g ? head::gather(in.which, g->reshape(-1).to(at::kFloat)).contiguous() : Tensor();
  };
  const auto or_zero = [&](const Tensor& g) { return g.defined() ? g : at::zeros({n}, stats.options()); };
  Tensor all[] = {or_zero(upstream(dlogp)), or_zero(upstream(dentropy)), upstream(dlse), upstream(dmean_logit)};
  Tensor power;
  // In float16 what a mean over many tokens asks for would vanish, and what a loss scale has been multiplied into
  // overflow.
  if (dtype == at::kHalf) {
    Tensor largest = all[0].abs();
    for (const Tensor& g : all)
      if (g.defined()) largest = at::maximum(largest, g.abs());
    power = head::unit_power(largest.div_(o.rest())).mul_(2048);
    for (Tensor& g : all)
      if (g.defined()) g = g.mul(power);
  }
  const Tensor of_rows = stats.contiguous(), logits = kept_logits.size(0) > 0 ? kept_logits.narrow(0, 0, n) : Tensor();
  const auto work = [&](const Tensor& z, int64_t begin, int64_t first) {
    const auto part = [&](const Tensor& t) { return t.defined() ? t.narrow(0, begin, z.size(0)) : Tensor(); };
    selective_log_softmax::run_backward({z, z.stride(0), part(in.ids), o.rest(), o.ignore_index, o.map()},
                                        {part(all[0]), part(all[1]), part(all[2]), part(all[3])}, part(of_rows), z,
                                        first, weight.size(0));
  };
  const auto d = head::Pass{.of = in.operands,
                            .wants = wants,
                            .weight_dtype = weight.scalar_type(),
                            .max_bytes = o.max_bytes,
                            .logits = logits,
                            .copy_logits = !kInPlace,
                            .in_blocks = o.batch_invariant,
                            .by_class = !o.batch_invariant,
                            .main_grad = value_or_undefined(main_grad)}
                     .run(work, power);
  const auto rounded = [&](const Tensor& t, const OptTensor& like) {
    return t.defined() ? t.to(like->scalar_type()) : none();
  };
  const auto of_tokens = [&](const Tensor& t, const OptTensor& like) {
    return t.defined() ? rounded(head::scatter(in.which, t, in.tokens, 0), like).view(like->sizes()) : none();
  };
  return {of_tokens(d.hidden, hidden), rounded(d.weight, weight), rounded(d.bias, bias),
          of_tokens(d.low_hidden, low_hidden), rounded(d.low_weight, low_weight)};
}

/// main_grad: float, where backward adds the weight's gradient, which is not returned then.
Results inference(const Options& o, const Tensor& hidden, const Tensor& weight, const OptTensor& bias,
                  const Tensor& ids, const OptTensor& low_hidden, const OptTensor& low_weight,
                  const OptTensor& main_grad, Dtype dtype) {
  check(o, hidden, weight, bias, ids, low_hidden, low_weight, main_grad, dtype);
  const auto all = forward(o, hidden, weight, bias, ids, low_hidden, low_weight, dtype, false);
  return [&]<size_t... i>(std::index_sequence<i...>) {
    return Results(std::get<i>(all)...);
  }(std::make_index_sequence<std::tuple_size_v<Results>>());
}

constexpr Op<"liger::linear_log_prob", flat<inference>> public_op;
constexpr Op<"liger::linear_log_prob_forward", flat<forward>> forward_op;
constexpr Op<"liger::linear_log_prob_backward", flat<backward<false>>> backward_op;
constexpr Op<"liger::linear_log_prob_backward_", flat<backward<true>>> backward_in_place_op;

/// Logits that fit into the budget wait for backward, others are made again.
struct Autograd {
  using Wanted = std::tuple<bool, bool, bool, bool, bool, std::optional<int64_t>>;

  static variable_list forward(AutogradContext* ctx, Results* results, const Options& given, const Tensor& hidden,
                               const Tensor& weight, const OptTensor& bias, const Tensor& ids,
                               const OptTensor& low_hidden, const OptTensor& low_weight, const OptTensor& main_grad,
                               Dtype dtype) {
    if (main_grad) check(given, hidden, weight, bias, ids, low_hidden, low_weight, main_grad, dtype);
    Options o = given;
    // Both passes must agree on it; where it is not known what ids hold, both ask.
    if (is_plain(ids) && is_plain(hidden) && weight.dim() == 2) o.valid_count = count_tokens(o, ids, weight);
    const auto all = with_options(forward_op, o, hidden, weight, bias, ids, low_hidden, low_weight, dtype, true);
    [&]<size_t... i>(std::index_sequence<i...>) {
      *results = Results(std::get<i>(all)...);
    }(std::make_index_sequence<std::tuple_size_v<Results>>());
    ctx->save_for_backward({hidden, weight, value_or_undefined(bias), ids, value_or_undefined(low_hidden),
                            value_or_undefined(low_weight), std::get<9>(all), std::get<10>(all)});
    ctx->saved_data["main_grad"] = main_grad;  // not saved as a variable: backward changes it
    save_options(ctx, o);
    ctx->saved_data["wanted"] =
        Wanted(wants_grad(hidden), wants_grad(weight), wants_grad(bias), wants_grad(low_hidden), wants_grad(low_weight),
               dtype ? std::optional<int64_t>(int64_t(*dtype)) : std::nullopt);
    ctx->set_materialize_grads(false);
    return {std::get<0>(*results), std::get<1>(*results), std::get<2>(*results), std::get<3>(*results)};
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const auto saved = ctx->get_saved_variables();
    const Options o = load_options<Options>(ctx);
    const auto [dh, dw, db, dlh, dlw, dtype_] = ctx->saved_data["wanted"].to<Wanted>();
    const OptTensor main_grad = ctx->saved_data["main_grad"].to<OptTensor>();
    const Dtype dtype = dtype_ ? Dtype(at::ScalarType(*dtype_)) : std::nullopt;
    variable_list d(6);
    const Output optional_outputs[] = {kEntropy, kLse, kMeanLogit};
    for (int i = 1; i < 4; ++i)
      if (!o.wants(optional_outputs[i - 1])) grads[i].reset();
    bool any = false, plain = is_plain(saved[7]);
    for (const Tensor& g : grads)
      if (g.defined()) any = true, plain = plain && is_plain(g);
    if (!any) return d;
    const bool overwrite = plain && !torch::autograd::get_current_graph_task_keep_graph();
    const Tensor logits = main_grad && !overwrite ? saved[7].clone() : saved[7];
    const auto run = [&](const auto& op) {
      return with_options(op, o, optional(grads[0]), optional(grads[1]), optional(grads[2]), optional(grads[3]),
                          saved[0], saved[1], optional(saved[2]), saved[3], optional(saved[4]), optional(saved[5]),
                          main_grad, saved[6], logits, dtype, dh, dw, db, dlh, dlw);
    };
    auto [dhidden, dweight, dbias, dlow_hidden, dlow_weight] =
        overwrite || main_grad ? run(backward_in_place_op) : run(backward_op);
    d[0] = if_wanted(dh, dhidden), d[1] = if_wanted(dw && !main_grad, dweight), d[2] = if_wanted(db, dbias);
    d[4] = if_wanted(dlh, dlow_hidden), d[5] = if_wanted(dlw, dlow_weight);
    return d;
  }
};

/// The op takes the float weight and the dtype to compute in, so that its gradient comes back in float, not rounded on
/// the way.
template <c10::DeviceType kDevice>
Results autocast(const Options& o, const Tensor& hidden, const Tensor& weight, const OptTensor& bias, const Tensor& ids,
                 const OptTensor& low_hidden, const OptTensor& low_weight, const OptTensor& main_grad, Dtype dtype) {
  const c10::impl::ExcludeDispatchKeyGuard below_autocast(c10::autocast_dispatch_keyset);
  return with_options(public_op, o, hidden, weight, bias, ids, low_hidden, low_weight, main_grad,
                      dtype ? dtype : at::autocast::get_autocast_dtype(kDevice));
}

}  // namespace op::linear_log_prob

LogProbResult linear_log_prob(const Tensor& hidden, const Tensor& weight, const Tensor& ids, const LogProbOptions& o,
                              const OptTensor& bias, const LowRank& low) {
  using namespace op::linear_log_prob;
  const Options options{.temperature = o.temperature,
                        .softcap = o.softcap,
                        .logit_scale = o.logit_scale,
                        .ignore_index = o.ignore_index,
                        .outputs = kEntropy * o.entropy | kLogSumSquares * o.log_sum_squares |
                                   kMeanLogit * o.mean_logit | kIsTop1 * o.is_top1 | kLse * o.lse | kArgmax * o.argmax,
                        .top_k = o.top_k,
                        .valid_count = o.valid_count,
                        .max_bytes = o.max_bytes,
                        .batch_invariant = o.batch_invariant};
  const OptTensor low_hidden = low.a ? OptTensor(at::linear(hidden, *low.a).mul(low.scale)) : std::nullopt;
  auto [logp, entropy, lse, mean_logit, squares, is_top1, argmax, top_logp, top_ids] = with_options(
      public_op, options, hidden, weight, bias, ids, low_hidden, low.b, o.main_grad, std::optional<at::ScalarType>());
  const auto wanted = [&](Output output, const Tensor& t) { return if_wanted(options.wants(output), t); };
  return {logp,
          wanted(kEntropy, entropy),
          wanted(kLogSumSquares, squares),
          wanted(kMeanLogit, mean_logit),
          wanted(kIsTop1, is_top1),
          wanted(kLse, lse),
          wanted(kArgmax, argmax),
          if_wanted(o.top_k > 0, top_logp),
          if_wanted(o.top_k > 0, top_ids)};
}

#define LIGER_INPUTS "Tensor hidden, Tensor weight, Tensor? bias, Tensor ids, Tensor? low_hidden, Tensor? low_weight"
#define LIGER_RESULTS                                                                                           \
  "Tensor logp, Tensor entropy, Tensor lse, Tensor mean_logit, Tensor log_sum_squares, Tensor is_top1, Tensor " \
  "argmax, Tensor top_logp, Tensor top_ids"
TORCH_LIBRARY_FRAGMENT(liger, m) {
  using op::linear_log_prob::Options;
  m.def(schema<Options>("linear_log_prob(" LIGER_INPUTS ", Tensor? main_grad, ScalarType? dtype", LIGER_RESULTS));
  m.def(schema<Options>("linear_log_prob_forward(" LIGER_INPUTS ", ScalarType? dtype, bool keep",
                        LIGER_RESULTS ", Tensor stats, Tensor logits"));
  const auto define_backward = [&](const std::string& name, const std::string& main_grad, const std::string& logits) {
    m.def(schema<Options>("linear_log_prob_" + name +
                              "(Tensor? dlogp, Tensor? dentropy, Tensor? dlse, Tensor? dmean_logit, " LIGER_INPUTS
                              ", " +
                              main_grad + " main_grad, Tensor stats, " + logits +
                              " logits, ScalarType? dtype, bool with_dhidden, bool with_dweight, bool with_dbias, bool "
                              "with_dlow_hidden, bool with_dlow_weight",
                          "Tensor dhidden, Tensor dweight, Tensor dbias, Tensor dlow_hidden, Tensor dlow_weight"));
  };
  define_backward("backward", "Tensor?", "Tensor"), define_backward("backward_", "Tensor(m!)?", "Tensor(a!)");
}
#undef LIGER_INPUTS
#undef LIGER_RESULTS
LIGER_IMPL(linear_log_prob, m) {
  m.impl("linear_log_prob", flat<op::linear_log_prob::inference>);
  m.impl("linear_log_prob_forward", flat<op::linear_log_prob::forward>);
  m.impl("linear_log_prob_backward", flat<op::linear_log_prob::backward<false>>);
  m.impl("linear_log_prob_backward_", flat<op::linear_log_prob::backward<true>>);
}
TORCH_LIBRARY_IMPL(liger, Autograd, m) {
  m.impl("linear_log_prob",
         differentiated<OptionsNode<op::linear_log_prob::Autograd>, 6>(op::linear_log_prob::public_op));
  refuse_derivative(m, {"linear_log_prob_forward", "linear_log_prob_backward", "linear_log_prob_backward_"});
}
TORCH_LIBRARY_IMPL(liger, AutocastCUDA, m) {
  m.impl("linear_log_prob", flat<op::linear_log_prob::autocast<c10::DeviceType::CUDA>>);
}
TORCH_LIBRARY_IMPL(liger, AutocastCPU, m) {
  m.impl("linear_log_prob", flat<op::linear_log_prob::autocast<c10::DeviceType::CPU>>);
}

}  // namespace liger
