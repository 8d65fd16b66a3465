#include "liger/ops/head/head_op.h"

namespace liger::op::head {
namespace {

constexpr int64_t kTrainableChunk = 4096, kFrozenChunk = 2048;  // tokens: from here on the GEMMs run at full speed on a GPU
constexpr int64_t kHostBytes = 64 << 20, kHostChunk = 512;      // on a CPU smaller chunks stay nearer to the caches
constexpr double kWorthReadingCount = 1e12;                     // FLOP from which waiting for a count on the device pays

bool capturing(const Tensor& t) {
  bool yes = false;
  run(stream_capturing, t, {.yes = &yes});
  return yes;
}

}  // namespace

int64_t chunk_tokens(int64_t tokens, const Tensor& hidden, const Tensor& weight, bool trains_weight, int64_t max_bytes) {
  const int64_t a_token = weight.size(0) * hidden.element_size(), width = hidden.size(1);
  int64_t chunk = trains_weight ? kTrainableChunk : kFrozenChunk;
  if (max_bytes > 0) chunk = std::max<int64_t>(1, max_bytes / a_token);
  else if (hidden.is_cpu()) chunk = std::max(kHostBytes / a_token, kHostChunk);
  else if (trains_weight && tokens <= std::max(chunk + width, 2 * width)) chunk = tokens;
  const int64_t chunks = std::max<int64_t>(1, (tokens + chunk - 1) / std::max<int64_t>(1, chunk));
  return (tokens + chunks - 1) / chunks;
}

at::ScalarType compute_dtype(const char* op, const Tensor& hidden, const Tensor& weight, std::optional<at::ScalarType> asked) {
  TORCH_CHECK_TYPE(!asked || has_dtype(*asked), op, ": dtype, in which it computes, must be float32, float16 or bfloat16, got ", *asked);
  if (asked) return *asked;
  TORCH_CHECK_TYPE(hidden.scalar_type() == weight.scalar_type(), op, ": hidden is ", hidden.scalar_type(), ", weight is ", weight.scalar_type(),
                   "; give them one dtype or run under autocast");
  return hidden.scalar_type();
}

int64_t kept_count(const Tensor& labels, const Tensor& weight, int64_t valid_count, const std::function<int64_t()>& valid) {
  const int64_t tokens = labels.numel(), worthwhile = tokens - std::max<int64_t>(1, tokens / 64);
  const double work = 6. * double(tokens) * double(weight.size(0)) * double(weight.size(1));
  if (labels.is_cpu() || (valid_count < 0 && work >= kWorthReadingCount && !capturing(labels))) valid_count = valid();
  return valid_count < 0 || valid_count > worthwhile ? tokens : valid_count;
}

Tensor kept_tokens(const Tensor& labels, int64_t ignore_index, int64_t count) {
  return count < labels.numel() ? at::nonzero_static(labels.ne(ignore_index), count).view(-1) : Tensor();
}

Tensor scatter(const Tensor& kept, const Tensor& values, int64_t tokens, double fill) {
  if (!kept.defined()) return values;
  auto shape = values.sizes().vec();
  shape[0] = tokens;
  return at::full(shape, fill, values.options()).index_copy_(0, kept, values);
}

Tensor unit_power(const Tensor& g) {
  return g.numel() > 0 ? at::exp2(at::clamp(-at::ceil(at::log2(g.abs().amax())), -100, 100)) : at::ones({}, g.options());
}

Gradients Pass::run(const Rows& rows, const Tensor& divisor) const {
  const bool there = logits.defined() && !copy_logits;
  const int64_t tokens = hidden.size(0), chunk = there ? tokens : chunk_tokens(tokens, hidden, weight, wants.weight, max_bytes);
  const bool whole = chunk == tokens;
  const auto options = hidden.options();
  const auto dtype = hidden.scalar_type();
  Gradients d;
  if (wants.hidden) d.hidden = output(at::empty(hidden.sizes(), options.dtype(gradient_dtype(dtype, dtype))));
  // One chunk needs no accumulator where the result has the GEMM's dtype: it sums in float and rounds once.
  if (wants.weight) d.weight = output(at::empty(weight.sizes(), options.dtype(whole && weight_dtype == dtype ? gradient_dtype(dtype, dtype) : at::kFloat)));
  if (wants.bias) d.bias = at::zeros({weight.size(0)}, options.dtype(at::kFloat));
  if (tokens == 0 && wants.weight) d.weight.zero_();
  Tensor buffer = there ? logits : output(at::empty({chunk, weight.size(0)}, options.dtype(logits_dtype.value_or(dtype))));
  for_chunks(tokens, chunk, [&](int64_t begin, int64_t n) {
    const Tensor x = hidden.narrow(0, begin, n), z = buffer.narrow(0, 0, n);
    if (!logits.defined()) project(z, x, weight, bias);
    else if (copy_logits) z.copy_(logits.narrow(0, begin, n));
    rows(z, begin);
    if (wants.bias) d.bias.add_(z.sum(0, false, at::kFloat));
    const Tensor dz = wants.weight || wants.hidden ? z.to(dtype) : Tensor();
    if (wants.weight) accumulate(d.weight, dz, x, begin == 0);
    if (wants.hidden) {
      Tensor dx = d.hidden.narrow(0, begin, n);
      accumulate(dx, dz.t(), weight, true);
    }
  });
  buffer.reset();  // before the accumulator is rounded, so that the two never meet
  for (Tensor* t : {&d.hidden, &d.weight, &d.bias})
    if (divisor.defined() && t->defined()) t->div_(divisor);
  if (wants.weight) d.weight = d.weight.to(gradient_dtype(dtype, weight_dtype));
  return d;
}

}  // namespace liger::op::head
