#pragma once
#include <ATen/core/Tensor.h>
#include <limits>
#include <optional>
#include <tuple>

namespace liger {

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
/// where skip [heads], of any floating dtype, may add a skip connection:
///   o  = scale Sᵀ q̂ + skip v
/// of which Mamba-2 (Dao & Gu 2024, arXiv:2405.21060) is the case
///   q    = C
///   k    = B
///   beta = dt
///   g    = dt A
///   skip = D
/// state [documents, heads, K, V] in float is what each document begins with, 0 where it is missing; with final_state
/// the second result is what it ends with. starts [rows, tokens] says for each token where, in its row, its document
/// begins; without it a row is one document. A document's results are, bit for bit, those that it has alone.
std::tuple<at::Tensor, at::Tensor> gated_delta_rule(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                                    const at::Tensor& g, const at::Tensor& beta,
                                                    const std::optional<at::Tensor>& state = {},
                                                    const std::optional<at::Tensor>& starts = {},
                                                    std::optional<double> scale = {}, double eps = 1e-6,
                                                    bool delta = true, bool final_state = false,
                                                    const std::optional<at::Tensor>& skip = {});

}  // namespace liger
