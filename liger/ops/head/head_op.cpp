#include "liger/ops/head/head_op.h"
#include <ATen/DeviceAccelerator.h>
#include <atomic>
#include <limits>
#include <mutex>
#include <unordered_map>
#include "liger/core/torch/batch_invariant.h"
#include "liger/functions/head.h"

namespace liger::op::head {
namespace {

constexpr int64_t kTrainableChunk = 4096,
                  kFrozenChunk = 2048;                      // tokens: from here on the GEMMs run at full speed on a GPU
constexpr int64_t kHostBytes = 64 << 20, kHostChunk = 512;  // on a CPU smaller chunks stay nearer to the caches
constexpr int64_t kStep = 128;                              // rows of a GEMM that one block works on
/// Of 8192 tokens and 16384 classes: adding to hidden's gradient costs 1 % of the GEMMs' time.
constexpr int64_t kTileBytes = 256 << 20;
constexpr int64_t kMostTiles = 64;           // terms of a float sum: more would show in float32's gradients
constexpr int64_t kBlock = 512;              // tokens of a GEMM whose result may not depend on their number
constexpr double kWorthReadingCount = 1e12;  // FLOP from which waiting for a count on the device pays
/// Of logits that wait for backward. A GPU keeps no more than a sixteenth of its memory for them: 1.5 GiB of 24.
constexpr int64_t kMostKept = int64_t(4) << 30, kMostKeptOnHost = 256 << 20, kShareKept = 16;

bool capturing(const Tensor& t) {
  bool yes = false;
  run(stream_capturing, t, {.yes = &yes});
  return yes;
}

std::atomic<int64_t> process_bytes = 0;

/// The memory of a GPU, asked for once; of one that is not there, or whose backend does not tell, the largest number.
int64_t memory_of(c10::Device device) {
  static std::mutex mutex;
  static std::unordered_map<c10::Device, int64_t> known;
  constexpr int64_t kUnknown = std::numeric_limits<int64_t>::max();
  if (at::accelerator::getAccelerator() != device.type() || at::accelerator::deviceCount() == 0) return kUnknown;
  if (!device.has_index()) device.set_index(at::accelerator::getDeviceIndex());
  const std::lock_guard lock(mutex);
  const auto [found, added] = known.try_emplace(device, kUnknown);
  if (added) {
    try {
      found->second = int64_t(at::accelerator::getMemoryInfo(device.index()).second);
    } catch (const c10::Error&) {  // an allocator that is plugged in need not tell
    }
  }
  return found->second;
}

/// The size of `whole`'s parts, of at most `most` each: even, and multiples of a GEMM's tile where they are larger than
/// that.
int64_t even_part(int64_t whole, int64_t most) {
  if (most >= whole) return whole;
  const int64_t step = most > kStep ? kStep : 1, largest = std::max<int64_t>(1, most / step * step);
  const int64_t even = ceil_div(whole, ceil_div(whole, largest));
  return round_up(even, step);
}

}  // namespace

int64_t default_bytes(c10::Device device) {
  if (const int64_t bytes = process_bytes) return bytes;
  return device.is_cpu() ? kMostKeptOnHost : std::min(kMostKept, memory_of(device) / kShareKept);
}

int64_t budget(int64_t max_bytes) { return max_bytes > 0 ? max_bytes : process_bytes.load(); }

int64_t chunk_tokens(const Sizes& of, bool trains_weight, int64_t max_bytes) {
  const int64_t a_token = of.classes * of.element_size;
  int64_t chunk = trains_weight ? kTrainableChunk : kFrozenChunk;
  if (const int64_t bytes = budget(max_bytes)) chunk = std::max<int64_t>(1, bytes / a_token);
  else if (of.cpu) chunk = std::max(kHostBytes / a_token, kHostChunk);
  else if (trains_weight && of.tokens <= std::max(chunk + of.width, 2 * of.width)) chunk = of.tokens;
  return even_part(of.tokens, chunk);
}

Plan plan(const Sizes& of, bool trains_weight, bool by_class, int64_t max_bytes) {
  const int64_t chunk = chunk_tokens(of, trains_weight, max_bytes);
  if (!by_class || !trains_weight || chunk >= of.tokens || of.tokens >= of.classes) return {chunk, of.classes};
  const int64_t most = of.cpu ? kHostBytes : kTileBytes,
                bytes = budget(max_bytes) > 0 ? std::min(budget(max_bytes), most) : most;
  // A tile has more classes than a chunk would have tokens, as there are more of them: its GEMMs are no slower.
  const int64_t tile = even_part(of.classes, bytes / (of.tokens * of.element_size));
  return tile * kMostTiles < of.classes ? Plan{chunk, of.classes} : Plan{of.tokens, tile};
}

/// The bytes beyond inputs that forward and backward of linear_log_prob (keeps) or fused_linear_cross_entropy take at
/// their peak, gradients included, but for tensors of a few numbers per token.
int64_t peak_bytes(int64_t tokens, int64_t width, int64_t classes, at::ScalarType dtype, c10::Device device,
                   bool trains_hidden, bool trains_weight, bool keeps, int64_t max_bytes) {
  const bool cpu = device.is_cpu();
  const Sizes of{tokens, width, classes, int64_t(c10::elementSize(dtype)), cpu};
  const int64_t a_float = 4, e = of.element_size, d_element = int64_t(c10::elementSize(gradient_dtype(dtype, dtype)));
  const int64_t logits = tokens * classes * e;
  const bool kept = keeps && logits <= (budget(max_bytes) > 0 ? budget(max_bytes) : default_bytes(device));
  const auto [chunk, tile] = kept ? Plan{tokens, classes} : plan(of, trains_weight, keeps, max_bytes);
  // Sums over several chunks are kept in float, with their rounded copies beside them; float16 gradients wait in float
  // in any case.
  const auto sum = [&](bool wanted, bool several, int64_t numbers) {
    return wanted ? numbers * (several ? a_float : d_element) : 0;
  };
  const auto rounded = [&](int64_t sum, int64_t numbers) { return sum > numbers * e ? numbers * e : 0; };
  const int64_t of_weight = sum(trains_weight, chunk < tokens, classes * width),
                of_hidden = sum(trains_hidden, tile < classes, tokens * width);
  const bool converts = cpu && e < a_float;  // operands, for a GEMM into float
  const auto converted = [&](bool wanted, bool several, int64_t other) {
    return converts && wanted && (several || d_element > e) ? (chunk * tile + other * width) * a_float : 0;
  };
  const int64_t scratch =
      std::max(converted(trains_weight, chunk < tokens, chunk), converted(trains_hidden && tile < classes, true, tile));
  // A gradient that forward has made waits as it is, and one that backward makes is rounded there.
  return of_weight + of_hidden +
         std::max(chunk * tile * e + scratch, (kept ? logits : 0) + rounded(of_weight, classes * width) +
                                                  (tile < classes ? rounded(of_hidden, tokens * width) : 0));
}

at::ScalarType compute_dtype(const char* op, const Tensor& hidden, const Tensor& weight,
                             std::optional<at::ScalarType> asked) {
  TORCH_CHECK_TYPE(!asked || has_dtype(*asked), op,
                   ": dtype, in which it computes, must be float32, float16 or bfloat16, got ", *asked);
  if (asked) return *asked;
  TORCH_CHECK_TYPE(hidden.scalar_type() == weight.scalar_type(), op, ": hidden is ", hidden.scalar_type(),
                   ", weight is ", weight.scalar_type(), "; give them one dtype or run under autocast");
  return hidden.scalar_type();
}

void check_class_ids(const char* op, const Arguments& arguments, const Tensor& hidden, const Tensor& class_ids) {
  auto shape = hidden.sym_sizes().slice(0, hidden.dim() - 1).vec();
  TORCH_CHECK(class_ids.dim() == hidden.dim(), op, ": class_ids must be ", c10::SymIntArrayRef(shape),
              " and one more dimension, got ", class_ids.sym_sizes());
  shape.push_back(class_ids.sym_size(-1));
  arguments.shaped("class_ids", class_ids, shape, Type::Integer);
}

int64_t kept_count(const Tensor& labels, const Tensor& weight, int64_t valid_count,
                   const std::function<int64_t()>& valid) {
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
  return g.numel() > 0 ? at::exp2(at::clamp(-at::ceil(at::log2(g.abs().amax())), -100, 100))
                       : at::ones({}, g.options());
}

void HeadOperands::project(const Tensor& z, int64_t begin, bool in_blocks, int64_t first_class) const {
  const auto of_classes = [&](const Tensor& t) { return t.defined() ? t.narrow(0, first_class, z.size(1)) : Tensor(); };
  const Tensor w = of_classes(weight), b = of_classes(bias), low_w = of_classes(low_weight);
  const auto make = [&](const Tensor& out, const Tensor& x, const Tensor& low) {
    if (!low_w.defined()) return liger::project(out, x, w, b);
    liger::project(out, low, low_w, b);
    at::addmm_out(const_cast<Tensor&>(out), out, x, w.t());
  };
  const auto rows = [&](const Tensor& t) { return t.defined() ? t.narrow(0, begin, z.size(0)) : Tensor(); };
  if (!in_blocks) return make(z, rows(hidden), rows(low_hidden));
  const AsAsked asked;
  liger::in_blocks<2>(z, {rows(hidden), rows(low_hidden)}, kBlock,
                      [&](const Tensor& out, const auto& of) { make(out, of[0], of[1]); });
}

namespace {

/// The gradients of a pass while its chunks add to them.
class Accumulators {
 public:
  Accumulators(const Pass& pass, const Plan& plan, bool divides)
      : pass_(pass),
        dtype_(pass.of.hidden.scalar_type()),
        adds_(pass.wants.weight && pass.main_grad.defined() && !divides) {
    const Wants& wants = pass.wants;
    const HeadOperands& of = pass.of;
    const int64_t tokens = of.hidden.size(0), classes = of.weight.size(0);
    // Several tiles of classes are summed in float.
    const auto of_tokens = plan.classes < classes ? at::kFloat : gradient_dtype(dtype_, dtype_);
    // One chunk needs no accumulator where the result has the GEMM's dtype: it sums in float and rounds once.
    const bool once = plan.tokens == tokens && pass.weight_dtype == dtype_ && !pass.main_grad.defined();
    if (wants.hidden) d_.hidden = empty(of.hidden, of_tokens);
    if (wants.low_hidden) d_.low_hidden = empty(of.low_hidden, of_tokens);
    if (adds_) d_.weight = pass.main_grad;
    else if (wants.weight) d_.weight = empty(of.weight, once ? gradient_dtype(dtype_, dtype_) : at::kFloat);
    if (wants.low_weight) d_.low_weight = empty(of.low_weight, at::kFloat);
    if (wants.bias) d_.bias = at::zeros({classes}, of.hidden.options().dtype(at::kFloat));
    if (tokens == 0 && wants.weight && !adds_) d_.weight.zero_();
    if (tokens == 0 && wants.low_weight) d_.low_weight.zero_();
  }

  /// Adds what z [n, width] gives, the gradient of the logits of tokens from `begin` and of classes from `first` on.
  void add(const Tensor& z, int64_t begin, int64_t first) {
    const Wants& wants = pass_.wants;
    const int64_t n = z.size(0), width = z.size(1);
    if (wants.bias) d_.bias.narrow(0, first, width).add_(z.sum(0, false, at::kFloat));
    const Tensor dz = z.to(dtype_), dz_t = dz.t();
    const auto of_classes = [&](const Tensor& t) { return t.narrow(0, first, width); };
    const auto of_rows = [&](const Tensor& t) { return t.narrow(0, begin, n); };
    const auto sum = [](Tensor part, const Tensor& a, const Tensor& b, bool is_first) {
      accumulate(part, a, b, is_first);
    };
    const HeadOperands& of = pass_.of;
    if (wants.weight) sum(of_classes(d_.weight), dz, of_rows(of.hidden), begin == 0 && !adds_);
    if (wants.low_weight) sum(of_classes(d_.low_weight), dz, of_rows(of.low_hidden), begin == 0);
    if (wants.hidden) sum(of_rows(d_.hidden), dz_t, of_classes(of.weight), first == 0);
    if (wants.low_hidden) sum(of_rows(d_.low_hidden), dz_t, of_classes(of.low_weight), first == 0);
  }

  /// The gradients, divided by a power of two, if any, before they are rounded.
  Gradients finish(const Tensor& divisor) {
    for (Tensor* t : {&d_.hidden, &d_.weight, &d_.bias, &d_.low_hidden, &d_.low_weight})
      if (divisor.defined() && t->defined()) t->div_(divisor);
    for (Tensor* t : {&d_.hidden, &d_.low_hidden})
      if (t->defined()) *t = t->to(gradient_dtype(dtype_, dtype_));
    if (!d_.weight.defined()) return d_;
    if (pass_.main_grad.defined()) {
      if (!adds_) pass_.main_grad.add_(d_.weight);
      d_.weight.reset();
    } else {
      d_.weight = d_.weight.to(gradient_dtype(dtype_, pass_.weight_dtype));
    }
    return d_;
  }

 private:
  Tensor empty(const Tensor& like, at::ScalarType dtype) const {
    return output(at::empty(like.sizes(), pass_.of.hidden.options().dtype(dtype)));
  }

  const Pass& pass_;
  at::ScalarType dtype_;
  bool adds_;  // straight to main_grad
  Gradients d_;
};

}  // namespace

Gradients Pass::run(const Work& work, const Tensor& divisor) const {
  const Tensor& hidden = of.hidden;
  const int64_t tokens = hidden.size(0), classes = of.weight.size(0);
  const bool there = logits.defined() && !copy_logits;
  const auto chunks = there ? Plan{tokens, classes}
                            : plan({tokens, hidden.size(1), classes, hidden.element_size(), hidden.is_cpu()},
                                   wants.weight, by_class && !logits.defined(), max_bytes);
  Accumulators sums(*this, chunks, divisor.defined());
  const auto logits_type = hidden.options().dtype(logits_dtype.value_or(hidden.scalar_type()));
  Tensor buffer = there ? logits : output(at::empty({chunks.tokens * chunks.classes}, logits_type));
  for_chunks(tokens, chunks.tokens, [&](int64_t begin, int64_t n) {
    for_chunks(classes, chunks.classes, [&](int64_t first, int64_t width) {
      const Tensor z = there ? buffer : buffer.narrow(0, 0, n * width).view({n, width});
      if (!logits.defined()) of.project(z, begin, in_blocks, first);
      else if (copy_logits) z.copy_(logits.narrow(0, begin, n));
      work(z, begin, first);
      if (wants.any()) sums.add(z, begin, first);
    });
  });
  buffer.reset();  // before the accumulators are rounded, so that they never meet
  return sums.finish(divisor);
}

int64_t set_default_bytes(int64_t bytes) {
  TORCH_CHECK_VALUE(bytes >= 0, "set_memory_budget: bytes must be positive, or 0 for the default, got ", bytes);
  return process_bytes.exchange(bytes);
}

}  // namespace liger::op::head

namespace liger {

int64_t set_memory_budget(int64_t bytes) { return op::head::set_default_bytes(bytes); }

int64_t head_peak_bytes(const HeadPeakOptions& o) {
  return op::head::peak_bytes(o.tokens, o.width, o.classes, o.dtype, o.device, o.trains_hidden, o.trains_weight,
                              o.keeps_logits, o.max_bytes);
}

TORCH_LIBRARY_FRAGMENT(liger, m) {
  m.def("set_memory_budget(int bytes) -> int", op::head::set_default_bytes);
  m.def(
      "head_peak_bytes(int tokens, int width, int classes, ScalarType dtype, Device device, bool trains_hidden, bool "
      "trains_weight, bool keeps_logits, int max_bytes) -> int",
      op::head::peak_bytes);
}

}  // namespace liger
