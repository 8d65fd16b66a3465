#pragma once
#include "liger/core/torch/op.h"

/// What operators on the logits hidden weightᵀ + bias share, which are never held in full: the plan of chunks, the tokens that count, the GEMMs and their
/// accumulators.
namespace liger::op::head {

/// What is to be computed besides the loss.
struct Wants {
  bool hidden, weight, bias;
  bool any() const { return hidden || weight || bias; }
};
struct Gradients { Tensor hidden, weight, bias; };

/// How many of `tokens` meet the vocabulary at once. A caller's budget in bytes decides first. Else all of them, where that takes
/// less memory than a float accumulator beside the weight's gradient; else a chunk.
int64_t chunk_tokens(int64_t tokens, const Tensor& hidden, const Tensor& weight, bool trains_weight, int64_t max_bytes);

/// The dtype that the GEMMs run in: `asked`, or that of hidden.
at::ScalarType compute_dtype(const char* op, const Tensor& hidden, const Tensor& weight, std::optional<at::ScalarType> asked);

/// How many tokens to work on: those whose label is not ignored, or all where leaving the others out saves too little, or where their number is not known
/// (valid_count -1) and not to be waited for. `valid` asks the device for it.
int64_t kept_count(const Tensor& labels, const Tensor& weight, int64_t valid_count, const std::function<int64_t()>& valid);

/// The indices of the `count` tokens whose label is not ignored; undefined where all are kept.
Tensor kept_tokens(const Tensor& labels, int64_t ignore_index, int64_t count);

/// Values of the kept tokens among `fill` for the others; the values where `kept` is undefined.
Tensor scatter(const Tensor& kept, const Tensor& values, int64_t tokens, double fill);

/// t's kept tokens; t where `kept` is undefined.
inline Tensor gather(const Tensor& kept, const Tensor& t) { return kept.defined() ? t.index_select(0, kept) : t; }

/// Gradients that float16 GEMMs make stay in float until a power of two is divided out of them: sums over tokens overflow, and a mean's terms vanish.
inline at::ScalarType gradient_dtype(at::ScalarType compute, at::ScalarType own) { return compute == at::kHalf ? at::kFloat : own; }

/// The power of two, on the device, that brings the largest of |g| into (½, 1]: float16 gradients of logits are made of g times it.
Tensor unit_power(const Tensor& g);

/// Calls rows(logits, first token) with each chunk's logits and makes the gradients that are wanted of what it leaves in their place:
/// three GEMMs a chunk. They are of gradient_dtype, that of bias is float. The logits are those of hidden [tokens, width], weight [classes, width] and bias,
/// of one dtype and contiguous, unless they are there already.
struct Pass {
  using Rows = std::function<void(const Tensor& logits, int64_t begin)>;
  Tensor hidden, weight, bias;
  Wants wants;
  at::ScalarType weight_dtype;  // of the weight as the caller holds it
  int64_t max_bytes;
  Tensor logits = {};           // [tokens, classes], which may be overwritten
  bool copy_logits = false;     // they may not
  std::optional<at::ScalarType> logits_dtype = {};  // of the logits, on a GPU: float or hidden's; what is left in their place is rounded to hidden's

  /// divisor: a power of two, if any, that the gradients are divided by before they are rounded.
  Gradients run(const Rows& rows, const Tensor& divisor = {}) const;
};

}  // namespace liger::op::head
