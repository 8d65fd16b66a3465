#pragma once
#include <ATen/core/Tensor.h>
#include <limits>
#include <optional>
#include <tuple>
#include <vector>
#include "liger/options.h"
#include "liger/ops/head/options.h"
#include "liger/ops/loss/options.h"
#include "liger/ops/preference/distillation.h"
#include "liger/ops/preference/policy.h"
#include "liger/ops/preference/preference.h"
#ifndef LIGER_NO_RESEARCH
#include "liger/research.h"
#endif

/// The operators as C++ functions, differentiable. A light header: no torch/nn.h.
namespace liger {

///   y = x / rms(x) · (weight + offset)
/// over the last dimension of x [..., n] (Zhang & Sennrich 2019, arXiv:1910.07467). weight [n] in x's dtype or float,
/// or none; the result has x's dtype. casting says where the model that is matched rounds.
at::Tensor rms_norm(const at::Tensor& x, const std::optional<at::Tensor>& weight, double eps = 1e-6, double offset = 0,
                    Casting casting = Casting::Llama);

/// (rms_norm(s), s) for s = x + residual, rounded to x's dtype: the step between two blocks of a transformer, in one
/// pass.
std::tuple<at::Tensor, at::Tensor> fused_add_rms_norm(const at::Tensor& x, const at::Tensor& residual,
                                                      const std::optional<at::Tensor>& weight, double eps = 1e-6,
                                                      double offset = 0, Casting casting = Casting::Llama);

/// rms_norm(x) · (1 + scale) + shift: adaptive norm (Peebles & Xie 2022, arXiv:2212.09748). scale [..., n], and shift
/// as large, hold a row for every row of x, or one for each of equal runs of rows (one a sample, or one for all); in
/// x's dtype or float.
at::Tensor modulated_rms_norm(const at::Tensor& x, const std::optional<at::Tensor>& weight, const at::Tensor& scale,
                              const std::optional<at::Tensor>& shift = {}, double eps = 1e-6, double offset = 0,
                              Casting casting = Casting::Llama);

struct GatedNormOptions {
  Gate activation = Gate::SiLU;
  bool norm_before_gate = true;
  int64_t groups = 1;
  Casting casting = Casting::Llama;
  LIGER_OPTIONS(activation, norm_before_gate, groups, casting)
};

///   y = x / rms(x) · weight · act(gate)
/// or, where the gate comes before the norm,
///   y = u / rms(u) · weight
///   u = x · act(gate)
/// with means over each of `groups` groups of neighbouring columns of x [..., n]: the norms of gated linear attention
/// (Yang et al. 2024, arXiv:2312.06635) and of Mamba-2 (Dao & Gu 2024, arXiv:2405.21060). gate as x; weight [n] in x's
/// dtype or float. casting is Llama or Gemma.
at::Tensor gated_rms_norm(const at::Tensor& x, const at::Tensor& gate, const at::Tensor& weight, double eps = 1e-6,
                          const GatedNormOptions& options = {});

///   y = (x − mean) / sqrt(variance + eps) · weight + bias
/// over the last dimension of x (Ba et al. 2016, arXiv:1607.06450); weight and bias [n] in x's dtype or float, or none.
/// Computed in float, the variance from the centred row.
at::Tensor layer_norm(const at::Tensor& x, const std::optional<at::Tensor>& weight,
                      const std::optional<at::Tensor>& bias, double eps = 1e-6);

/// act(x), element by element: ReLUSquared is relu² (So et al. 2021, arXiv:2109.08668).
at::Tensor activate(const at::Tensor& x, Activation activation = Activation::ReLUSquared);

///   y = p x² + beta x                          where x > 0
///   y = n (expm1(min(x, eps)) − x) + beta x    elsewhere
///   p = softplus(alpha_p)
///   n = beta + softplus(alpha_n)
/// element by element: xIELU (Huang & Schlag 2024, arXiv:2411.13010). alpha_p, alpha_n, beta and eps are one number
/// each; the last two have no gradient.
at::Tensor xielu(const at::Tensor& x, const at::Tensor& alpha_p, const at::Tensor& alpha_n, const at::Tensor& beta,
                 const at::Tensor& eps);

/// The clamped SwiGLU of GPT-OSS and DeepSeek-V4 in place of silu(a) · b:
///   y  = a' · σ(alpha · a') · (b' + up_offset)
///   a' = min(a, limit)
///   b' = clamp(b, −limit, limit)
struct GateOptions {
  double limit = 0;  // 0: none
  double alpha = 1, up_offset = 0;
  LIGER_OPTIONS(limit, alpha, up_offset)
};

///   y = act(gate_multiplier · a) · b
/// for a, b of one shape and dtype: SwiGLU and its relatives (Shazeer 2020, arXiv:2002.05202).
at::Tensor gated(const at::Tensor& a, const at::Tensor& b, Activation activation = Activation::SiLU,
                 double gate_multiplier = 1, const GateOptions& options = {});

struct GatedPackedOptions {
  bool interleaved = false;  // gate and up are neighbouring columns; SiLU's
  GateOptions gate;
  LIGER_OPTIONS(interleaved, gate)
};

/// The same for a fused product y [..., 2F] whose first half is the gate; the result is [..., F].
at::Tensor gated_packed(const at::Tensor& y, Activation activation = Activation::SiLU, double gate_multiplier = 1,
                        const GatedPackedOptions& options = {});

/// A linear layer, perhaps with a low-rank adapter (Hu et al. 2021, arXiv:2106.09685):
///   y = x weightᵀ + bias + scale · (x aᵀ) bᵀ
/// weight [out, in] and bias [out] in x's dtype; a [rank, in] and b [out, rank], given together, in x's dtype or in
/// float32: the operators then take them in x's dtype, and make their gradients in float.
///
/// With weight_scale, float32 [out], the weight is frozen and in 8 bits: int8, or uint8 with the bits of E4M3
/// (float8_e4m3fn), and stands for weight_scale[i] · weight[i]. On Hopper, for x in 16 bits, each row of x and of the
/// gradients is rounded to the same 8 bits, with one scale per row, and products are those of 8-bit numbers; elsewhere
/// the weight is multiplied in x's dtype. Products are then off by 1 % (int8) to 4 % (E4M3) of their norm.
struct AdaptedLinear {
  at::Tensor weight;
  std::optional<at::Tensor> bias{}, a{}, b{};
  double scale = 1;
  std::optional<at::Tensor> weight_scale{};
};

/// A matrix as `weight` and `weight_scale` of an AdaptedLinear, rounded to nearest:
///   weight_scale[i] = max |matrix[i]| / largest     1 for a row of zeros; largest is 448 for E4M3, 127 for Int8
///   weight[i]       = matrix[i] / weight_scale[i]
std::tuple<at::Tensor, at::Tensor> quantise_rows(const at::Tensor& matrix, EightBit format);

/// y of x [..., in]: [..., out]. The low-rank term is added inside the GEMM of the weight, in float. `dropped`, x after
/// a dropout, is what the adapter sees instead of x. Backward keeps x and x aᵀ.
at::Tensor linear(const at::Tensor& x, const AdaptedLinear& layer, const std::optional<at::Tensor>& dropped = {});

/// The same of three layers of one input: one GEMM reads x for the three a, and GEMMs add up the gradient of x. With
/// head_dim the results for x [..., seq, in] are [..., heads, seq, head_dim], laid out as [..., seq, heads, head_dim].
std::tuple<at::Tensor, at::Tensor, at::Tensor> qkv(const at::Tensor& x, const AdaptedLinear& q, const AdaptedLinear& k,
                                                   const AdaptedLinear& v, int64_t head_dim = 0);

struct MLPOptions {
  Activation activation = Activation::SiLU;
  double gate_multiplier = 1, down_multiplier = 1;  // m and d
  int64_t chunk = 0;                                // tokens worked on at once, which bounds the memory; 0: all
  bool recompute = false;                           // backward makes gate and up again
  LIGER_OPTIONS(activation, gate_multiplier, down_multiplier, chunk, recompute)
};

/// A gated MLP of such layers:
///   y = d · down(act(m · gate(x)) · up(x))
/// Backward keeps x, gate and up, or only x with `recompute`, and makes the rest again. Sums over chunks are in float.
at::Tensor gated_mlp(const at::Tensor& x, const AdaptedLinear& gate, const AdaptedLinear& up, const AdaptedLinear& down,
                     const MLPOptions& options = {});

[[deprecated("liger::linear")]] inline at::Tensor lora_linear(const at::Tensor& x, const AdaptedLinear& layer,
                                                              const std::optional<at::Tensor>& dropped = {}) {
  return linear(x, layer, dropped);
}
[[deprecated("liger::qkv")]] inline auto lora_qkv(const at::Tensor& x, const AdaptedLinear& q, const AdaptedLinear& k,
                                                  const AdaptedLinear& v, int64_t head_dim = 0) {
  return qkv(x, q, k, v, head_dim);
}
[[deprecated("liger::gated_mlp")]] inline at::Tensor lora_mlp(const at::Tensor& x, const AdaptedLinear& gate,
                                                              const AdaptedLinear& up, const AdaptedLinear& down,
                                                              Activation activation = Activation::SiLU,
                                                              bool recompute = false) {
  return gated_mlp(x, gate, up, down, {.activation = activation, .recompute = recompute});
}
[[deprecated("liger::gated_mlp")]] inline at::Tensor fused_mlp(const at::Tensor& x, const at::Tensor& gate,
                                                               const at::Tensor& up, const at::Tensor& down,
                                                               MLPOptions options = {},
                                                               const std::optional<at::Tensor>& gate_bias = {},
                                                               const std::optional<at::Tensor>& up_bias = {},
                                                               const std::optional<at::Tensor>& down_bias = {}) {
  options.recompute = true;
  return gated_mlp(x, {gate, gate_bias}, {up, up_bias}, {down, down_bias}, options);
}

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
/// weights; backward makes the scores again.
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

struct ExpertsOptions {
  Activation activation = Activation::SiLU;
  bool transposed = false;                   // weights are [experts, in, out]
  bool interleaved = false;                  // gate and up are neighbouring columns; SiLU's
  GateOptions gate;                          // GPT-OSS: interleaved, {.limit = 7, .alpha = 1.702, .up_offset = 1}
  bool recompute = true;                     // backward makes gate and up again; false: they are kept
  double gate_up_scale = 1, down_scale = 1;  // of adapters
  int64_t most_rows = -1;                    // pairs that buffers have room for; -1: all
  LIGER_OPTIONS(activation, transposed, interleaved, gate, recompute, gate_up_scale, down_scale, most_rows)
};

/// LoRA adapters (Hu et al. 2021, arXiv:2106.09685) of experts, which add scale · b_e a_e to the matrices of expert e:
/// gate_up_a [experts, rank, n] and gate_up_b [experts, 2 width, rank], down_a [experts, rank, width] and down_b
/// [experts, n, rank], each pair given together, in x's dtype.
struct ExpertsAdapters {
  std::optional<at::Tensor> gate_up_a, gate_up_b, down_a, down_b;
};

/// Scales of frozen matrices in 8 bits, one per row of each expert: float [experts, 2 width] and [experts, n], with
/// transposed weights [experts, n] and [experts, width].
struct ExpertsScales {
  std::optional<at::Tensor> gate_up, down;
};

/// A mixture of experts (Shazeer et al. 2017, arXiv:1701.06538), whose expert e is a gated MLP:
///   y[t]   = Σ_k weights[t, k] · E_e(x[t])
///   e      = index[t, k]
///   E_e(x) = down_e (act(gate_e x) · up_e x)
/// x [tokens, n], gate_up [experts, 2 width, n], gate above up, down [experts, n, width], biases [experts, 2 width] and
/// [experts, n] in one dtype; index [tokens, k] integers, of which those that are no expert add nothing, weights
/// [tokens, k], floating. Tokens are sorted by expert for grouped GEMMs; copies are summed in float, in their order.
/// Backward keeps x and the routing. On CUDA in bfloat16, with widths and ranks that are multiples of 8, nothing is
/// read on the host, and a graph can capture it; otherwise the counts of tokens are. Tokens are multiplied by the
/// matrices of adapters: no weight is changed or copied, and a frozen one has no gradient.
///
/// With a scale, gate_up or down is numbers · scale: int8, or uint8 with the bits of E4M3 floats. Each pass rounds it
/// to x's dtype. It has no gradient.
///
/// most_rows bounds what forward and backward allocate by the number of pairs (t, k) that have an expert, where that is
/// known to be below tokens · k, as under expert parallelism. No pair is ever dropped: where more have an expert, it is
/// an error, on CUDA a device assertion that the next synchronisation reports, with its message printed.
at::Tensor fused_experts(const at::Tensor& x, const at::Tensor& gate_up, const at::Tensor& down,
                         const at::Tensor& index, const at::Tensor& weights, const ExpertsOptions& options = {},
                         const std::optional<at::Tensor>& gate_up_bias = {},
                         const std::optional<at::Tensor>& down_bias = {}, const ExpertsAdapters& adapters = {},
                         const ExpertsScales& scales = {});

/// Rotary position embedding (Su et al. 2021, arXiv:2104.09864) of q [batch, heads, seq, dim] and k [batch, k_heads,
/// seq, dim], with any strides. cos, sin [seq, d], [1, seq, d] or [batch, seq, d]: the leading rotary_dim columns of a
/// head are rotated, as the two halves that Hugging Face's models have. d is rotary_dim, where the first half of the
/// columns counts, or half of it. Fresh results, laid out as [batch, seq, heads, dim].
///   inverse             turns back
///   interleaved         neighbouring columns turn, by d/2 angles per token, as in Llama 4; the two views of a complex
///                       tensor's parts are read in place
///   sections (t, h, w)  cos and sin are [3, batch, seq, d], and pair i turns by plane 0 where i < t, 1 where
///                       i < t + h, else 2 (Qwen2-VL, Wang et al. 2024, arXiv:2409.12191)
///   rotary_dim          -1 stands for d
std::tuple<at::Tensor, at::Tensor> rope(const at::Tensor& q, const at::Tensor& k, const at::Tensor& cos,
                                        const at::Tensor& sin, bool inverse = false, bool interleaved = false,
                                        at::IntArrayRef sections = {}, int64_t rotary_dim = -1);

/// RMSNorm of each head's row of q and k and the rotation of the results by one operator: (q, k), each
///   rope(x · rstd · (weight + offset))
///   rstd = 1 / sqrt(mean(x²) + eps)
/// with the normalised rows rounded to x's dtype, as rms_norm and rope one after the other give them. q, k, cos, sin
/// and rotary_dim as in rope; q_weight and k_weight [dim] in q's dtype or float, or none for 1. Fresh results, laid out
/// as [batch, seq, heads, dim]. Backward keeps q and k; sums over rows are made in a fixed order.
std::tuple<at::Tensor, at::Tensor> qk_norm_rope(const at::Tensor& q, const at::Tensor& k,
                                                const std::optional<at::Tensor>& q_weight,
                                                const std::optional<at::Tensor>& k_weight, const at::Tensor& cos,
                                                const at::Tensor& sin, double eps = 1e-6, double offset = 0,
                                                Casting casting = Casting::Llama, int64_t rotary_dim = -1);

/// rope for the result of one projection, qkv [batch, seq, (heads + 2 k_heads) · dim]: q and k are rotated, v is
/// copied.
at::Tensor rope_packed(const at::Tensor& qkv, const at::Tensor& cos, const at::Tensor& sin, int64_t heads,
                       int64_t k_heads, bool inverse = false);

///   y[t] = act(bias + Σ_i weight[width − 1 − i] · x[t − i])
/// for each channel of x [batch, channels, time] and 0 <= i < width: a short causal convolution, as linear attention
/// and state-space models have one before the recurrence (Poli et al. 2023, arXiv:2302.10866). weight [channels,
/// width], width 1 to 8, and bias [channels] in x's dtype or float; act is silu or nothing. Only tokens t − i of t's
/// document count: starts [batch, time], int32, says where in the row that begins, and is negative for a token of none,
/// whose y is 0; without it a row is one document. The result has x's layout: that of [batch, time, channels] where
/// channels are neighbours, as a projection gives them, also as a slice of a wider one; else it is contiguous. The sum
/// is in float and rounded once. Backward keeps x.
at::Tensor causal_conv1d(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias = {},
                         bool silu = false, const std::optional<at::Tensor>& starts = {});

/// Rows ids of weight [classes, n]: the result is [*ids, n], in weight's dtype. ids int64 or int32. The gradient of
/// weight is summed in float, in a fixed order, and is 0 for the row padding_idx. An id outside [0, classes) is an
/// error: c10::IndexError on the CPU, a device assertion on CUDA. As torch::embedding.
at::Tensor embedding(const at::Tensor& weight, const at::Tensor& ids, int64_t padding_idx = -1);

/// What cross_entropy and fused_linear_cross_entropy return. Only the loss is differentiable.
struct CrossEntropyResult {
  at::Tensor loss;       // a scalar, or [rows] without reduction
  at::Tensor z_loss;     // as loss: the part of it that lse_square_scale adds; undefined unless asked for
  at::Tensor accuracy;   // as loss; undefined unless asked for
  at::Tensor predicted;  // [rows], int64; undefined unless asked for
  LIGER_FIELDS(loss, z_loss, accuracy, predicted)
};

/// Cross entropy of logits x [rows, classes] with labels target [rows]; class_weight [classes]. The gradient is made in
/// the same pass. A label that is neither a class nor ignore_index is an error: c10::IndexError on the CPU, a device
/// assertion on CUDA.
CrossEntropyResult cross_entropy(const at::Tensor& x, const at::Tensor& target, const CrossEntropyOptions& options = {},
                                 const std::optional<at::Tensor>& class_weight = {});

/// Cross entropy of the logits hidden weightᵀ + bias, which are never held in full: hidden [tokens, width], weight
/// [classes, width]. The loss and the gradients are those of cross_entropy on the logits; the weight's gradient is
/// summed in float. Tokens that are ignored cost nothing. With `normalizer`, one number on the device, the losses are
/// summed and divided by it. Under autocast the GEMMs run in its dtype and the gradients come back in the parameters'.
/// The loss is float.
CrossEntropyResult fused_linear_cross_entropy(const at::Tensor& hidden, const at::Tensor& weight,
                                              const at::Tensor& target, const HeadOptions& options = {},
                                              const std::optional<at::Tensor>& bias = {},
                                              const std::optional<at::Tensor>& class_weight = {},
                                              const std::optional<at::Tensor>& normalizer = {});

/// The bytes of logits that heads work on at once, or keep for backward, where a caller names no max_bytes: for the
/// whole process; 0: the defaults. Returns what it was. Code that torch.compile has traced keeps what was set then.
int64_t set_memory_budget(int64_t bytes);

struct HeadPeakOptions {
  int64_t tokens, width, classes;        // of hidden [tokens, width] that count, and weight [classes, width]
  at::ScalarType dtype = at::kBFloat16;  // of both
  at::Device device = at::kCUDA;
  bool trains_hidden = true, trains_weight = true;
  bool keeps_logits = true;  // linear_log_prob; false: fused_linear_cross_entropy
  int64_t max_bytes = 0;
};

/// The bytes beyond hidden and weight that a head's forward and backward pass take at their peak, the gradients among
/// them.
int64_t head_peak_bytes(const HeadPeakOptions& options);

struct LogProbOptions {
  double temperature = 1;  // T
  double softcap = 0;      // c; 0: none
  double logit_scale = 1;  // s
  int64_t ignore_index = -100;
  bool entropy = false;          // what else to return: −Σ p ln p,
  bool log_sum_squares = false;  // ln Σ p²,
  bool mean_logit = false;       // the mean of z,
  bool is_top1 = false;          // whether the id is the first of the largest z,
  bool lse = false;              // ln Σ exp z,
  bool argmax = false;           // the first class of the largest z,
  int64_t top_k = 0;             // and so many of the largest ln p
  /// [..., K] integers: classes of each token, whose ln p to return too; −1 for none.
  std::optional<at::Tensor> class_ids = {};
  bool log_tail = false;  // and ln Σ p of all other classes
  /// How many ids are not ignored, where the host knows it: then the device is not asked; -1: unknown.
  int64_t valid_count = -1;
  /// Of logits at once, and of those that wait for backward; 0: set_memory_budget's, or 4 GiB on a GPU, 256 MiB on a
  /// CPU.
  int64_t max_bytes = 0;
  /// A token's results have the same bits whatever else is in the batch: GEMMs of one shape.
  bool batch_invariant = false;
  /// [classes, width], float: backward adds the weight's gradient to it and returns none.
  std::optional<at::Tensor> main_grad = {};
};

struct LogProbResult {
  at::Tensor logp;             // [...], float
  at::Tensor entropy;          // as logp, and as the following undefined unless asked for
  at::Tensor log_sum_squares;  // as logp, not differentiable
  at::Tensor mean_logit;       // as logp
  at::Tensor is_top1;          // [...], bool
  at::Tensor lse;              // as logp
  at::Tensor argmax;           // [...], int64
  at::Tensor top_logp;         // [..., top_k], float, not differentiable
  at::Tensor top_ids;          // [..., top_k], int64
  at::Tensor class_logp;       // [..., K], float, 0 where the class is −1
  at::Tensor log_tail;         // as logp; −inf where all classes are among class_ids
};

/// A low-rank part scale · b a of a head's weight (LoRA: Hu et al. 2021, arXiv:2106.09685): a [rank, width], b
/// [classes, rank], or none.
struct LowRank {
  std::optional<at::Tensor> a = {}, b = {};
  double scale = 1;
};

/// ln p_id for the logits y of a head, which are never held in full:
///   y = hidden (weight + low_rank)ᵀ + bias
///   z = c tanh(s y / c) / T, or s y / T without a softcap
///   p = softmax(z)
/// hidden [..., width], weight [classes, width], ids [...] integers. logp, entropy, mean_logit, lse, class_logp and
/// log_tail are differentiable, with any upstream gradient; absent ones cost nothing. log_tail is a separate sum, so
/// that it is exact where next to nothing is left; its gradient is that of a mass of at least exp(−80). A class that a
/// token has twice gets both gradients. All results are 0 where the id is
/// ignore_index, and such tokens cost nothing. Logits that fit into max_bytes wait for backward, others are made again
/// there. The weight's gradient is summed in float. An id that is neither a class nor ignore_index is an error:
/// c10::IndexError on the CPU, a device assertion on CUDA. Mixed dtypes compute in hidden's, or in autocast's.
LogProbResult linear_log_prob(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& ids,
                              const LogProbOptions& options = {}, const std::optional<at::Tensor>& bias = {},
                              const LowRank& low_rank = {});

/// Logits of a head at a few classes of each token, float [..., K]:
///   y = hidden weight_c + bias_c for each class c of class_ids
/// hidden [..., width], weight [classes, width], bias [classes], of one dtype; class_ids [..., K] integers, -1 for
/// none, whose logit is 0. For losses that are normalised over given classes: no other class is computed. The gradient
/// of a class is summed in float over its tokens, in their order. A class outside [-1, classes) is an error, as in
/// linear_log_prob.
at::Tensor class_logits(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& class_ids,
                        const std::optional<at::Tensor>& bias = {});

struct DistillationOptions {
  Distillation kind = Distillation::JensenShannon;
  double beta = 0.5;       // of JensenShannon, in [0, 1]
  double temperature = 1;  // T, of the soft loss
  double soft_weight = 1, hard_weight = 0;
  LogitMap student, teacher;  // what their models do to the logits
  int64_t ignore_index = -100;
  int64_t max_bytes = 0;  // of both heads' logits at once; 0: what is fastest
};

struct DistillationResult {
  at::Tensor loss;  // soft_weight · soft + hard_weight · hard, a float scalar; only this is differentiable
  at::Tensor soft;  // the mean divergence of softmax(z / T), or of z / T for Cosine
  at::Tensor hard;  // the mean of −ln softmax(z)_label; undefined without labels
};

/// Distillation of a teacher's head into a student's (Hinton et al. 2015, arXiv:1503.02531; Agarwal et al. 2024,
/// arXiv:2306.13649), whose logits are never held in full: student [..., width], student_weight [classes, width],
/// teacher [..., another width], teacher_weight [classes, that width], labels [...] or none. Means are over the tokens
/// whose label is not ignore_index, or all; others cost nothing; 0 where there are none. token_weight [...] multiplies
/// each token's terms. Forward makes the gradients of the student's tensors, the weight's summed in float; the
/// teacher's and token_weight get none. Under autocast the GEMMs run in its
/// dtype, otherwise in the student's. A label that is neither a class nor ignore_index is an error: c10::IndexError on
/// the CPU, a device assertion on CUDA.
DistillationResult linear_distillation(const at::Tensor& student, const at::Tensor& student_weight,
                                       const at::Tensor& teacher, const at::Tensor& teacher_weight,
                                       const std::optional<at::Tensor>& labels = {},
                                       const DistillationOptions& options = {},
                                       const std::optional<at::Tensor>& student_bias = {},
                                       const std::optional<at::Tensor>& teacher_bias = {},
                                       const std::optional<at::Tensor>& token_weight = {});

/// Kullback-Leibler divergence of log-probabilities x [rows, cols] from a target t (Kullback & Leibler 1951):
///   Σ t (ln max(t, eps) − x)   for probabilities t
///   Σ eᵗ (t − x)               where log_target says that t holds logarithms
/// target may have another dtype than x and gets no gradient. The loss is float: a scalar, or [rows, cols] without
/// reduction.
at::Tensor kl_div(const at::Tensor& x, const at::Tensor& target, Reduction reduction = Reduction::Mean,
                  bool log_target = false, double eps = 1e-10);

/// Generalised Jensen-Shannon divergence (Lin 1991) of log-probabilities x = ln Q and target = ln P [rows, cols]:
///   0 < β < 1  β KL(P ‖ M) + (1 − β) KL(Q ‖ M), M = β P + (1 − β) Q
///   β = 0      KL(P ‖ Q)
///   β = 1      KL(Q ‖ P)
/// Rows whose label [rows] is ignore_index do not count. The loss has x's dtype; target gets no gradient.
at::Tensor jsd(const at::Tensor& x, const at::Tensor& target, const std::optional<at::Tensor>& labels = {},
               double beta = 0.5, int64_t ignore_index = -100, Reduction reduction = Reduction::BatchMean);

/// Total variation distance ½ Σ |x − target| of probabilities [rows, cols] (Wen et al. 2023, arXiv:2307.15190). Rows
/// whose label [rows] is ignore_index do not count. The loss is float; target gets no gradient.
at::Tensor tvd(const at::Tensor& x, const at::Tensor& target, const std::optional<at::Tensor>& labels = {},
               Reduction reduction = Reduction::BatchMean, int64_t ignore_index = -100);

/// exp(x) / Σ exp(x) over the last dimension, summed in float, in x's dtype. causal: row i of x [..., queries, keys]
/// has the columns up to i, and 0 behind them.
at::Tensor softmax(const at::Tensor& x, bool causal = false);

/// (ln p_id, −Σ p ln p), both float, for logits x [..., classes] and ids [...]: the log-probability of each token and
/// the entropy of its distribution
///   p = softmax(x / temperature)
/// 0 where the id is ignore_index, whose logits are not read. An id that is neither a class nor ignore_index is an
/// error: c10::IndexError on the CPU, a device assertion on CUDA.
std::tuple<at::Tensor, at::Tensor> selective_log_softmax(const at::Tensor& x, const at::Tensor& ids,
                                                         double temperature = 1, int64_t ignore_index = -100);

struct AdamWOptions {
  double lr = 1e-3, beta1 = 0.9, beta2 = 0.999, weight_decay = 1e-2, eps = 1e-8;
  bool maximize = false;
  // One float each, read where the parameters are: instead of lr; what gradients are multiplied by; no step is taken
  // where found_inf is not 0.
  std::optional<at::Tensor> lr_tensor, factor, found_inf;
};

/// A step of AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101) on all parameters, in a fixed order, by one launch
/// for each 60 of a kind on a GPU; liger/ops/optimizer/adamw.h has the formula. Writes to parameters, means (m),
/// squares (v) and masters. gradients: in the parameter's dtype or float. means and squares: both in the parameter's
/// dtype, or both float. masters: none, or the parameters in float, which are updated and then rounded to the
/// parameters. steps: the number of this step for each parameter, one float where it is. All tensors of a parameter
/// lie as it does: dense, with its strides.
void adamw_(at::TensorList parameters, at::TensorList gradients, at::TensorList means, at::TensorList squares,
            at::TensorList masters, at::TensorList steps, const AdamWOptions& options = {});

/// The gates of gated_delta_rule, float:
///   dt   = clamp(softplus(a + dt_bias), low, high)
///   g    = −exp(A) dt
///   beta = σ(b)
/// With `log` false g is A dt; without b beta is dt, as Mamba-2 has it. a [..., heads] and b, as large, of one dtype; A
/// and dt_bias [heads], floating. The result is (g, beta).
std::tuple<at::Tensor, at::Tensor> delta_gates(const at::Tensor& a, const at::Tensor& A,
                                               const std::optional<at::Tensor>& dt_bias = {},
                                               const std::optional<at::Tensor>& b = {}, bool log = true, double low = 0,
                                               double high = std::numeric_limits<double>::infinity());

/// The gates of gated_delta_rule for each channel of the keys, as Kimi delta attention has them (Kimi Team 2025,
/// arXiv:2510.26692):
///   x = a + dt_bias
///   g = −exp(A_log) softplus(x), or low σ(exp(A_log) x) with a lower bound
/// a [..., heads K], A_log [heads] and dt_bias [heads K], floating. g has a's shape, and is float, or of `dtype`: a's.
at::Tensor channel_gates(const at::Tensor& a, const at::Tensor& A_log, const std::optional<at::Tensor>& dt_bias = {},
                         std::optional<double> low = {}, std::optional<at::ScalarType> dtype = {});

/// The gated delta rule (Yang et al. 2024, arXiv:2412.06464), token by token of each document, with a state S [K, V]:
///   S ← eᵍ S
///   S ← S + k̂ (beta (v − Sᵀ k̂))ᵀ
///   o  = scale Sᵀ q̂
/// q and k [rows, tokens, key_heads, K], v [rows, tokens, heads, V], g and beta [rows, tokens, heads]; g is float and
/// at most 0. With g [rows, tokens, heads, K], of any floating dtype, each row of S has its own decay, as in Kimi
/// delta attention (Kimi Team 2025, arXiv:2510.26692):
///   S ← diag(eᵍ) S
/// Head h reads key head h / (heads / key_heads). x̂ = x / √(Σ x² + eps), or x where eps < 0; scale is 1/√K
/// unless given. Without `delta` the second line is that of gated linear attention:
///   S ← S + k̂ (beta v)ᵀ
/// of which Mamba-2 (Dao & Gu 2024, arXiv:2405.21060) is the case
///   q    = C
///   k    = B
///   beta = dt
///   g    = dt A
/// state [documents, heads, K, V] in float is what each document begins with, 0 where it is missing; with final_state
/// the second result is what it ends with. starts [rows, tokens] says for each token where, in its row, its document
/// begins; without it a row is one document. A document's results are, bit for bit, those that it has alone.
std::tuple<at::Tensor, at::Tensor> gated_delta_rule(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                                    const at::Tensor& g, const at::Tensor& beta,
                                                    const std::optional<at::Tensor>& state = {},
                                                    const std::optional<at::Tensor>& starts = {},
                                                    std::optional<double> scale = {}, double eps = 1e-6,
                                                    bool delta = true, bool final_state = false);

}  // namespace liger
