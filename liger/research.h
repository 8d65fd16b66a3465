#pragma once
#include <ATen/core/Tensor.h>
#include <optional>
#include <tuple>
#include <vector>
#include "liger/options.h"

#ifdef LIGER_NO_RESEARCH
#error "this libliger has no research operators: it was built with LIGER_RESEARCH=OFF"
#endif

/// Operators that hardly any model is trained with. liger/ops.h includes them unless LIGER_RESEARCH is off.
namespace liger {

///   y = weight · tanh(alpha · x) + bias
/// DyT, a norm's replacement without a reduction (Zhu et al. 2025, arXiv:2503.10622). alpha is one number, weight and
/// bias [n].
at::Tensor dyt(const at::Tensor& x, const at::Tensor& alpha, const at::Tensor& weight,
               const std::optional<at::Tensor>& bias = {});

///   y    = w₀ N(x³) + w₁ N(x²) + w₂ N(x) + bias
///   N(u) = u / sqrt(mean(u²) + eps)
/// over the last dimension of x (Zhuo et al. 2024, arXiv:2411.03884). weight w [3], bias one number.
at::Tensor poly_norm(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, double eps = 1e-6);

///   y = (x − mean) / sqrt(variance + eps) · weight + bias
/// over each of `groups` groups of neighbouring channels of a sample, with one weight and bias per channel (Wu & He
/// 2018, arXiv:1803.08494). x [N, channels, ...]; weight and bias [channels] in x's dtype or float, or none.
at::Tensor group_norm(const at::Tensor& x, const std::optional<at::Tensor>& weight,
                      const std::optional<at::Tensor>& bias, int64_t groups, double eps = 1e-6);

/// The residual stream's mean over the outputs of earlier blocks v_n = blocks[n], weighted by attention over depth
/// (Kimi Team 2026, Attention Residuals):
///   h = Σ_n α_n · v_n
///   α = softmax_n(Σ query · weight · v_n / rms(v_n))
/// blocks [n, ..., width], n of up to 32; query and weight, that of the keys' RMSNorm, [width] in blocks' dtype or
/// float. Computed in float and rounded once.
at::Tensor attention_residuals(const at::Tensor& blocks, const at::Tensor& query, const at::Tensor& weight,
                               double eps = 1e-6);

struct MHCOptions {
  int64_t iterations = 20;  // of Sinkhorn's algorithm
  double rms_eps = 1e-6, pre_eps = 0, sinkhorn_eps = 1e-6, post_scale = 2;
  LIGER_OPTIONS(iterations, rms_eps, pre_eps, sinkhorn_eps, post_scale)
};

/// The coefficients of manifold-constrained hyper-connections (Xie et al. 2025, arXiv:2512.24880) of a token's streams
/// x [..., streams, width], up to 16 of them:
///   mix   = (x phi) / rms(x), x as one row
///   pre   = σ(alpha_pre · mix + b) + pre_eps
///   post  = σ(alpha_post · mix + b) · post_scale
///   res   = Sinkhorn(alpha_res · mix + b)
/// phi [streams · width, 2 streams + streams²] has columns for pre, for post and for the rows of res, b a float for
/// each; alphas are one float. Sinkhorn is a softmax of rows, plus sinkhorn_eps, whose columns and rows are divided in
/// turn by their sum + sinkhorn_eps. Float results (pre, post, res): [..., streams], [..., streams] and
/// [..., streams, streams].
std::tuple<at::Tensor, at::Tensor, at::Tensor> mhc_coefficients(const at::Tensor& x, const at::Tensor& phi,
                                                                const at::Tensor& b, const at::Tensor& alpha_pre,
                                                                const at::Tensor& alpha_post,
                                                                const at::Tensor& alpha_res,
                                                                const MHCOptions& options = {});

/// A layer's input Σ_i pre_i · x_i, [..., width] in x's dtype, of x [..., streams, width], float pre [..., streams].
at::Tensor mhc_pre(const at::Tensor& x, const at::Tensor& pre);

/// The streams after a layer, whose result is f [..., width], in x's dtype or float:
///   y_o = Σ_i res_oi · x_i + post_o · f
/// for x [..., streams, width], float post [..., streams] and res [..., streams, streams]; y is as x.
at::Tensor mhc_post_res(const at::Tensor& x, const at::Tensor& f, const at::Tensor& post, const at::Tensor& res);

/// The exact product of a [m, 4 p], int8, and weights in {−1, 0, 1, 2} that int2_pack has packed into b [p, n], uint8:
/// int32 [m, n].
at::Tensor int2_matmul(const at::Tensor& a, const at::Tensor& b);

/// Integer weights [rows, ...] in {−1, 0, 1, 2}, four to a byte: bits 2i and 2i + 1 of row p are the code, weight + 1,
/// of row i P + p of P = ⌈rows/4⌉, 0 where that does not exist. int2_unpack gives int32 back.
at::Tensor int2_pack(const at::Tensor& weights);
at::Tensor int2_unpack(const at::Tensor& packed);

/// The probabilities nearest to x along dim, most of them 0 (Martins & Astudillo 2016, arXiv:1602.02068): max(x − τ, 0)
/// with τ such that they sum to 1; exact. causal, of the last dimension: as softmax.
at::Tensor sparsemax(const at::Tensor& x, int64_t dim = -1, bool causal = false);

struct MultiTokenAttentionOptions {
  std::vector<int64_t> stride = {1, 1}, padding = {0, 0}, dilation = {1, 1};
  int64_t groups = 1;
  bool sparse = false;  // sparsemax in place of softmax
};

/// Multi-token attention's weights (Golovneva et al. 2025, arXiv:2504.00927): a causal softmax of scores
/// [batch, channels, queries, keys], a convolution over queries, keys and heads, and 0 for keys behind their query.
/// weight [out, channels / groups, k, k] and bias [out], in scores' dtype.
at::Tensor multi_token_attention(const at::Tensor& scores, const at::Tensor& weight,
                                 const std::optional<at::Tensor>& bias = {},
                                 const MultiTokenAttentionOptions& options = {});

/// Attention of each query to the keys around it (Hassani et al. 2022, arXiv:2204.07143; dilated: arXiv:2209.15001):
///   out_i = Σ_j softmax_j(scale · q_i · k_j) · v_j
///   j     = i + t · dilation, |t| <= kernel_size / 2, inside the sequence
/// for q, k, v [batch, heads, seq, dim] of one dtype; scale: 1/√dim unless given. Statistics and sums are float, and
/// no more than kernel_size scores of a query exist.
at::Tensor neighborhood_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                  int64_t kernel_size = 7, int64_t dilation = 1, std::optional<double> scale = {});

}  // namespace liger
