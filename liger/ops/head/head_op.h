#pragma once
#include "liger/core/torch/op.h"

/// What operators on the logits hidden weightᵀ + bias share, which are never held in full: the plan of chunks, the
/// tokens that count, the GEMMs and their accumulators.
namespace liger::op::head {

/// The gradients to compute besides the loss. low_hidden and low_weight: of the low-rank part of the weight.
struct Wants {
  bool hidden, weight, bias, low_hidden = false, low_weight = false;
  bool any() const { return hidden || weight || bias || low_hidden || low_weight; }
};
struct Gradients {
  Tensor hidden, weight, bias, low_hidden, low_weight;
};

/// The largest bytes of logits that wait for backward, or are worked on at once where the caller names none: what the
/// process was told, or a sixteenth of a GPU's memory but not more than 4 GiB, and 256 MiB on a CPU.
int64_t default_bytes(c10::Device device);

/// max_bytes or, where a caller names none (0), what the process was told; 0: neither.
int64_t budget(int64_t max_bytes);

/// The sizes of a head.
struct Sizes {
  int64_t tokens, width, classes, element_size;  // of the dtype that the GEMMs run in
  bool cpu;
};

/// How many of `tokens` meet the vocabulary at once. A caller's budget in bytes decides first. Else all of them, where
/// that takes less memory than a float accumulator next to the weight's gradient; else a chunk.
int64_t chunk_tokens(const Sizes& of, bool trains_weight, int64_t max_bytes);

/// How many tokens meet how many classes at once. Where not all tokens meet all classes, and the work on logits can be
/// done on some classes at a time, all tokens meet a tile of the classes: the GEMM of a tile is the final gradient of
/// its rows of the weight, so that the float accumulator is one of [tokens, width] next to the gradient of hidden
/// instead of one of [classes, width].
struct Plan {
  int64_t tokens, classes;
};
Plan plan(const Sizes& of, bool trains_weight, bool by_class, int64_t max_bytes);

/// The dtype that the GEMMs run in: `asked`, or that of hidden.
at::ScalarType compute_dtype(const char* op, const Tensor& hidden, const Tensor& weight,
                             std::optional<at::ScalarType> asked);

/// That class_ids are integers [..., K] of the tokens of hidden [..., width].
void check_class_ids(const char* op, const Arguments& arguments, const Tensor& hidden, const Tensor& class_ids);

/// How many tokens to work on: those whose label is not ignored, or all where leaving the others out saves too little,
/// or where their number is not known (valid_count -1) and not to be waited for. `valid` asks the device for it.
int64_t kept_count(const Tensor& labels, const Tensor& weight, int64_t valid_count,
                   const std::function<int64_t()>& valid);

/// The indices of the `count` tokens whose label is not ignored; undefined where all are kept.
Tensor kept_tokens(const Tensor& labels, int64_t ignore_index, int64_t count);

/// Values of the kept tokens among `fill` for the others; the values where `kept` is undefined.
Tensor scatter(const Tensor& kept, const Tensor& values, int64_t tokens, double fill);

/// t's kept tokens; t where `kept` is undefined.
inline Tensor gather(const Tensor& kept, const Tensor& t) { return kept.defined() ? t.index_select(0, kept) : t; }

/// Gradients that float16 GEMMs make stay in float until a power of two is divided out of them: sums over tokens
/// overflow, and a mean's terms vanish.
inline at::ScalarType gradient_dtype(at::ScalarType compute, at::ScalarType own) {
  return compute == at::kHalf ? at::kFloat : own;
}

/// The power of two, on the device, that brings the largest of |g| into (½, 1]: float16 gradients of logits are made of
/// g times it.
Tensor unit_power(const Tensor& g);

/// hidden [tokens, width], weight [classes, width], bias [classes] or undefined, low_hidden [tokens, rank] and
/// low_weight [classes, rank] or undefined (LoRA: Hu et al. 2021, arXiv:2106.09685), in one dtype and contiguous, whose
/// logits are
///   hidden weightᵀ + bias + low_hidden low_weightᵀ
struct HeadOperands {
  Tensor hidden, weight, bias, low_hidden = {}, low_weight = {};

  /// z = the logits of tokens [begin, begin + z's rows) and classes [first, first + z's columns). in_blocks: by GEMMs
  /// of one shape, so that a token's logits have the same bits whatever the others are.
  void project(const Tensor& z, int64_t begin, bool in_blocks = false, int64_t first = 0) const;
};

/// Calls work(logits, first token, first class) with each chunk's logits and makes the gradients that are wanted of
/// what it leaves in their place: three GEMMs a chunk. They are of gradient_dtype, that of bias is float.
struct Pass {
  using Work = std::function<void(const Tensor& logits, int64_t token, int64_t first)>;
  HeadOperands of;
  Wants wants;
  at::ScalarType weight_dtype;  // of the weight as the caller holds it
  int64_t max_bytes;
  Tensor logits = {};        // [tokens, classes], which may be overwritten; undefined: they are made
  bool copy_logits = false;  // they may not
  /// Of the logits, on a GPU: float or hidden's; what is left in their place is rounded to hidden's.
  std::optional<at::ScalarType> logits_dtype = {};
  bool in_blocks = false;  // see HeadOperands::project
  bool by_class = false;   // work can be done on some of the classes at a time; otherwise the first class is always 0
  Tensor main_grad = {};   // float, where the weight's gradient is added; it is not returned then

  /// divisor: a power of two, if any, that the gradients are divided by before they are rounded.
  Gradients run(const Work& work, const Tensor& divisor = {}) const;
};

}  // namespace liger::op::head
