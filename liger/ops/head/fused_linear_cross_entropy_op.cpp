#include "liger/ops/loss/cross_entropy_op.h"
#include "liger/ops.h"

namespace liger {
namespace op::fused_linear_cross_entropy {

using cross_entropy::Batch;
using cross_entropy::Results;

/// What is to be computed besides the loss.
struct Wants { bool hidden, weight, bias; };

constexpr int64_t kTrainableChunk = 4096, kFrozenChunk = 2048;  // tokens: from here on the GEMMs run at full speed on a GPU
constexpr int64_t kHostBytes = 64 << 20, kHostChunk = 512;      // on a CPU smaller chunks stay nearer to the caches
constexpr double kWorthReadingCount = 1e12;                     // FLOP from which waiting for a count on the device pays

/// How many of `tokens` meet the vocabulary at once. A caller's budget in bytes decides first. Else all of them, where that takes
/// less memory than a float accumulator beside the weight's gradient; else a chunk.
int64_t chunk_tokens(int64_t tokens, const Tensor& hidden, const Tensor& weight, bool trains_weight, int64_t max_bytes) {
  const int64_t a_token = weight.size(0) * hidden.element_size(), width = hidden.size(1);
  int64_t chunk = trains_weight ? kTrainableChunk : kFrozenChunk;
  if (max_bytes > 0) chunk = std::max<int64_t>(1, max_bytes / a_token);
  else if (hidden.is_cpu()) chunk = std::max(kHostBytes / a_token, kHostChunk);
  else if (trains_weight && tokens <= std::max(chunk + width, 2 * width)) chunk = tokens;
  const int64_t chunks = std::max<int64_t>(1, (tokens + chunk - 1) / std::max<int64_t>(1, chunk));
  return (tokens + chunks - 1) / chunks;
}

struct Gradients { Tensor hidden, weight, bias; };

/// Logits, losses and gradients of the batch, chunk by chunk: three GEMMs a chunk, and one pass that turns the logits into their gradient.
Gradients pass(const Tensor& hidden, const Tensor& weight, const Tensor& bias, Batch& batch, const Tensor& upstream, Wants wants,
               at::ScalarType weight_dtype, int64_t max_bytes) {
  const int64_t tokens = hidden.size(0), chunk = chunk_tokens(tokens, hidden, weight, wants.weight, max_bytes);
  const bool gradient = wants.hidden || wants.weight || wants.bias, whole = chunk == tokens;
  const auto options = hidden.options();
  Gradients d;
  if (wants.hidden) d.hidden = output(at::empty_like(hidden));
  // One chunk needs no accumulator: its GEMM sums in float and rounds once.
  if (wants.weight) d.weight = output(at::empty(weight.sizes(), options.dtype(whole ? weight_dtype : at::kFloat)));
  if (wants.bias) d.bias = at::zeros({weight.size(0)}, options.dtype(at::kFloat));
  if (tokens == 0 && wants.weight) d.weight.zero_();
  Tensor logits = output(at::empty({chunk, weight.size(0)}, options));
  for (int64_t begin = 0; begin < tokens; begin += chunk) {
    const int64_t n = std::min(chunk, tokens - begin);
    const Tensor x = hidden.narrow(0, begin, n);
    Tensor z = logits.narrow(0, 0, n);
    if (bias.defined()) at::addmm_out(z, bias, x, weight.t());
    else at::mm_out(z, x, weight.t());
    batch.run_rows(z, gradient ? z : Tensor(), begin, upstream);
    if (wants.weight) accumulate(d.weight, z, x, begin == 0);
    if (wants.bias) d.bias.add_(z.sum(0, false, at::kFloat));
    if (wants.hidden) {
      Tensor dx = d.hidden.narrow(0, begin, n);
      at::mm_out(dx, z, weight);
    }
  }
  logits.reset();  // before the accumulator is rounded, so that the two never meet
  if (wants.weight) d.weight = d.weight.to(weight_dtype);
  return d;
}

bool capturing(const Tensor& t) {
  bool yes = false;
  run(stream_capturing, t, {.yes = &yes});
  return yes;
}

/// The indices of the tokens that are not ignored; undefined where leaving the others out saves too little, or where their number is
/// not known and not to be waited for.
Tensor kept_tokens(const Tensor& target, const Tensor& weight, const Batch& batch, int64_t ignore_index, int64_t valid_count) {
  const int64_t tokens = target.size(0), worthwhile = tokens - std::max<int64_t>(1, tokens / 64);
  const double work = 6. * double(tokens) * double(weight.size(0)) * double(weight.size(1));
  if (target.is_cpu() || (valid_count < 0 && work >= kWorthReadingCount && !capturing(target))) valid_count = batch.valid();
  if (valid_count < 0 || valid_count > worthwhile) return {};
  return at::nonzero_static(target.ne(ignore_index), valid_count).view(-1);
}

/// Values of the kept tokens among `fill` for the others.
Tensor scatter(const Tensor& kept, const Tensor& values, int64_t tokens, double fill) {
  if (!kept.defined()) return values;
  auto shape = values.sizes().vec();
  shape[0] = tokens;
  return at::full(shape, fill, values.options()).index_copy_(0, kept, values);
}

void check(const Tensor& hidden, const Tensor& weight, const OptTensor& bias, const Tensor& target, const OptTensor& class_weight, const CrossEntropyOptions& options) {
  constexpr auto op = "fused_linear_cross_entropy";
  check_rows(op, hidden);
  dtype_of(weight);
  TORCH_CHECK(hidden.dim() == 2 && weight.dim() == 2 && hidden.sym_size(1) == weight.sym_size(1), op,
              ": expected hidden [tokens, width] and weight [classes, width], got ", hidden.sym_sizes(), " and ", weight.sym_sizes());
  TORCH_CHECK(weight.device() == hidden.device(), op, ": weight is on ", weight.device(), ", hidden on ", hidden.device());
  if (bias) TORCH_CHECK(bias->dim() == 1 && bias->sym_size(0) == weight.sym_size(0), op, ": bias must be [", weight.sym_size(0), "], got ", bias->sym_sizes());
  cross_entropy::check_target(op, target, hidden.sym_size(0), hidden.device());
  cross_entropy::check_options(op, options, class_weight, weight.sym_size(0));
}

at::ScalarType compute_dtype(const Tensor& hidden, const Tensor& weight, std::optional<at::ScalarType> asked) {
  if (asked) return *asked;
  TORCH_CHECK_TYPE(hidden.scalar_type() == weight.scalar_type(), "fused_linear_cross_entropy: hidden is ", hidden.scalar_type(), ", weight is ",
                   weight.scalar_type(), "; give them one dtype or run under autocast");
  return hidden.scalar_type();
}

using Forward = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

/// The results, then dhidden, dweight, dbias (undefined unless wanted) and the number that these are still to be divided by.
Forward forward(const Tensor& hidden_, const Tensor& weight_, const OptTensor& bias_, const Tensor& target_, const OptTensor& class_weight,
                const OptTensor& normalizer, at::IntArrayRef flags, at::ArrayRef<double> scales, int64_t valid_count, int64_t max_bytes,
                std::optional<at::ScalarType> asked, bool with_dhidden, bool with_dweight, bool with_dbias) {
  const CrossEntropyOptions options = cross_entropy::unpack(flags, scales);
  check(hidden_, weight_, bias_, target_, class_weight, options);
  const auto dtype = compute_dtype(hidden_, weight_, asked);
  if (hidden_.is_meta()) {
    const auto like = [&](bool wanted, const Tensor& t) { return wanted ? at::empty_symint(t.sym_sizes(), t.options()) : Tensor(); };
    return std::tuple_cat(cross_entropy::empty_results(target_, options, at::kFloat, dtype, hidden_.options()),
                          std::make_tuple(like(with_dhidden, hidden_), like(with_dweight, weight_), like(with_dbias && bias_, bias_ ? *bias_ : hidden_),
                                          at::empty({}, hidden_.options().dtype(at::kFloat))));
  }
  const int64_t tokens = hidden_.size(0);
  const auto of_labels = [&](const Tensor& target) { return Batch(target, class_weight, normalizer, weight_.size(0), options, at::kFloat); };
  Batch batch = of_labels(target_);
  const Tensor kept = kept_tokens(target_, weight_, batch, options.ignore_index, valid_count);
  if (kept.defined()) batch = of_labels(target_.index_select(0, kept));
  const Tensor hidden = (kept.defined() ? hidden_.index_select(0, kept) : hidden_.contiguous()).to(dtype);
  const Tensor weight = weight_.contiguous().to(dtype), bias = bias_ ? bias_->to(dtype) : Tensor();
  // In half precision a mean's gradients would vanish before a loss scale reaches them: they stay those of the sum until backward.
  const bool undivided = dtype == at::kHalf && (with_dhidden || with_dweight || with_dbias);
  const Tensor divisor = undivided ? batch.divisor() : at::ones({}, hidden.options().dtype(at::kFloat));
  auto d = pass(hidden, weight, bias, batch, undivided ? divisor.expand({hidden.size(0)}).contiguous() : Tensor(),
                {with_dhidden, with_dweight, with_dbias && bias.defined()}, weight_.scalar_type(), max_bytes);
  auto [loss, z_loss, accuracy, predicted] = batch.results(dtype);
  if (options.predicted) predicted = scatter(kept, predicted, tokens, -1);
  if (options.reduction == Reduction::None) {
    loss = scatter(kept, loss, tokens, 0);
    if (options.z_loss) z_loss = scatter(kept, z_loss, tokens, 0);
    if (options.accuracy) accuracy = scatter(kept, accuracy, tokens, 0);
  }
  return {loss, z_loss, accuracy, predicted,
          d.hidden.defined() ? scatter(kept, d.hidden.to(hidden_.scalar_type()), tokens, 0) : Tensor(), d.weight,
          d.bias.defined() ? d.bias.to(bias_->scalar_type()) : Tensor(), divisor};
}

/// The gradients where every token has its own upstream gradient: the logits are made again.
std::tuple<Tensor, Tensor, Tensor> backward(const Tensor& g, const Tensor& hidden, const Tensor& weight, const OptTensor& bias_, const Tensor& target,
                                            const OptTensor& class_weight, at::IntArrayRef flags, at::ArrayRef<double> scales, int64_t max_bytes,
                                            std::optional<at::ScalarType> asked, bool with_dhidden, bool with_dweight, bool with_dbias) {
  const auto empty = [](bool wanted, const Tensor& t) { return wanted ? at::empty_symint(t.sym_sizes(), t.options()) : Tensor(); };
  if (hidden.is_meta()) return {empty(with_dhidden, hidden), empty(with_dweight, weight), empty(with_dbias && bias_, bias_ ? *bias_ : hidden)};
  CrossEntropyOptions options = cross_entropy::unpack(flags, scales);
  options.z_loss = options.accuracy = options.predicted = false;
  const auto dtype = compute_dtype(hidden, weight, asked);
  const Tensor bias = bias_ ? bias_->to(dtype) : Tensor();
  Batch batch(target, class_weight, {}, weight.size(0), options, at::kFloat);
  auto d = pass(hidden.contiguous().to(dtype), weight.contiguous().to(dtype), bias, batch, g.to(at::kFloat).contiguous(),
                {with_dhidden, with_dweight, with_dbias && bias.defined()}, weight.scalar_type(), max_bytes);
  return {d.hidden.defined() ? d.hidden.to(hidden.scalar_type()) : Tensor(), d.weight, d.bias.defined() ? d.bias.to(bias_->scalar_type()) : Tensor()};
}

Results inference(const Tensor& hidden, const Tensor& weight, const OptTensor& bias, const Tensor& target, const OptTensor& class_weight,
                  const OptTensor& normalizer, at::IntArrayRef flags, at::ArrayRef<double> scales, int64_t valid_count, int64_t max_bytes,
                  std::optional<at::ScalarType> dtype) {
  const auto all = forward(hidden, weight, bias, target, class_weight, normalizer, flags, scales, valid_count, max_bytes, dtype, false, false, false);
  return {std::get<0>(all), std::get<1>(all), std::get<2>(all), std::get<3>(all)};
}

constexpr Op<"liger::fused_linear_cross_entropy", inference> public_op;
constexpr Op<"liger::fused_linear_cross_entropy_forward", forward> forward_op;
constexpr Op<"liger::fused_linear_cross_entropy_backward", backward> backward_op;

struct Autograd : torch::autograd::Function<Autograd> {
  using Attributes = std::tuple<std::vector<int64_t>, std::vector<double>, int64_t, std::optional<int64_t>, bool, bool, bool>;

  static variable_list forward(AutogradContext* ctx, const Tensor& hidden, const Tensor& weight, const OptTensor& bias, const Tensor& target,
                               const OptTensor& class_weight, const OptTensor& normalizer, at::IntArrayRef flags,
                               at::ArrayRef<double> scales, int64_t valid_count, int64_t max_bytes, std::optional<at::ScalarType> dtype, Results* results) {
    const bool reduced = cross_entropy::unpack(flags, scales).reduction != Reduction::None;
    const bool dh = wants_grad(hidden), dw = wants_grad(weight), db = wants_grad(bias);
    auto [loss, z_loss, accuracy, predicted, dhidden, dweight, dbias, divisor] =
        forward_op(hidden, weight, bias, target, class_weight, normalizer, flags, scales, valid_count, max_bytes, dtype,
                          dh && reduced, dw && reduced, db && reduced);
    if (reduced) ctx->save_for_backward({dhidden, dweight, dbias, divisor});
    else ctx->save_for_backward({hidden, weight, value_or_undefined(bias), target, value_or_undefined(class_weight)});
    ctx->saved_data["attrs"] = Attributes(flags.vec(), scales.vec(), max_bytes, dtype ? std::optional<int64_t>(int64_t(*dtype)) : std::nullopt, dh, dw, db);
    ctx->saved_data["divided"] = !(dtype == at::kHalf || (!dtype && hidden.scalar_type() == at::kHalf));
    *results = {loss, z_loss, accuracy, predicted};
    return {loss};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const auto [flags, scales, max_bytes, dtype, dh, dw, db] = ctx->saved_data["attrs"].to<Attributes>();
    variable_list d(12);
    if (cross_entropy::unpack(flags, scales).reduction != Reduction::None) {
      const Tensor g = ctx->saved_data["divided"].toBool() ? grads[0] : grads[0] / saved[3];
      for (int i : {0, 1, 2})
        if (i == 0 ? dh : i == 1 ? dw : db) d[i] = scaled(saved[i], g);
      return d;
    }
    const auto asked = dtype ? std::optional<at::ScalarType>(at::ScalarType(*dtype)) : std::nullopt;
    auto [dhidden, dweight, dbias] = backward_op(grads[0], saved[0], saved[1], optional(saved[2]), saved[3], optional(saved[4]), flags, scales,
                                                        max_bytes, asked, dh, dw, db);
    if (dh) d[0] = dhidden;
    if (dw) d[1] = dweight;
    if (db) d[2] = dbias;
    return d;
  }
};

/// The op takes the float weight and the dtype to compute in, so that its gradient comes back in float, not rounded on the way.
template <c10::DeviceType kDevice>
Results autocast(const Tensor& hidden, const Tensor& weight, const OptTensor& bias, const Tensor& target, const OptTensor& class_weight,
                 const OptTensor& normalizer, at::IntArrayRef flags, at::ArrayRef<double> scales, int64_t valid_count, int64_t max_bytes,
                 std::optional<at::ScalarType> dtype) {
  const c10::impl::ExcludeDispatchKeyGuard below_autocast(c10::autocast_dispatch_keyset);
  return public_op(hidden, weight, bias, target, class_weight, normalizer, flags, scales, valid_count, max_bytes,
                          dtype ? dtype : at::autocast::get_autocast_dtype(kDevice));
}

}  // namespace op::fused_linear_cross_entropy

CrossEntropyResult fused_linear_cross_entropy(const Tensor& hidden, const Tensor& weight, const Tensor& target, const HeadOptions& options,
                                              const OptTensor& bias, const OptTensor& class_weight, const OptTensor& normalizer) {
  using namespace op::cross_entropy;
  auto [loss, z_loss, accuracy, predicted] = op::fused_linear_cross_entropy::public_op(
      hidden, weight, bias, target, class_weight, normalizer, flags(options), scales(options), options.valid_count, options.max_bytes, std::nullopt);
  return {loss, z_loss, accuracy, predicted};
}

#define LIGER_HEAD_ARGUMENTS "Tensor? class_weight, Tensor? normalizer, int[] flags, float[] scales, int valid_count, int max_bytes, ScalarType? dtype"
TORCH_LIBRARY_FRAGMENT(liger, m) {
  // flags and scales as in cross_entropy.
  m.def("fused_linear_cross_entropy(Tensor hidden, Tensor weight, Tensor? bias, Tensor target, " LIGER_HEAD_ARGUMENTS
        ") -> (Tensor loss, Tensor z_loss, Tensor accuracy, Tensor predicted)");
  m.def("fused_linear_cross_entropy_forward(Tensor hidden, Tensor weight, Tensor? bias, Tensor target, " LIGER_HEAD_ARGUMENTS
        ", bool with_dhidden, bool with_dweight, bool with_dbias) "
        "-> (Tensor loss, Tensor z_loss, Tensor accuracy, Tensor predicted, Tensor dhidden, Tensor dweight, Tensor dbias, Tensor divisor)");
  m.def("fused_linear_cross_entropy_backward(Tensor g, Tensor hidden, Tensor weight, Tensor? bias, Tensor target, Tensor? class_weight, int[] flags, "
        "float[] scales, int max_bytes, ScalarType? dtype, bool with_dhidden, bool with_dweight, bool with_dbias) "
        "-> (Tensor dhidden, Tensor dweight, Tensor dbias)");
}
LIGER_IMPL(fused_linear_cross_entropy, m) {
  m.impl("fused_linear_cross_entropy", op::fused_linear_cross_entropy::inference);
  m.impl("fused_linear_cross_entropy_forward", op::fused_linear_cross_entropy::forward);
  m.impl("fused_linear_cross_entropy_backward", op::fused_linear_cross_entropy::backward);
}
TORCH_LIBRARY_IMPL(liger, Autograd, m) {
  m.impl("fused_linear_cross_entropy", differentiated<op::fused_linear_cross_entropy::Autograd, 3>(op::fused_linear_cross_entropy::public_op));
  refuse_derivative(m, {"fused_linear_cross_entropy_forward", "fused_linear_cross_entropy_backward"});
}
TORCH_LIBRARY_IMPL(liger, AutocastCUDA, m) { m.impl("fused_linear_cross_entropy", op::fused_linear_cross_entropy::autocast<c10::DeviceType::CUDA>); }
TORCH_LIBRARY_IMPL(liger, AutocastCPU, m) { m.impl("fused_linear_cross_entropy", op::fused_linear_cross_entropy::autocast<c10::DeviceType::CPU>); }

}  // namespace liger
