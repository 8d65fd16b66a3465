#pragma once
#include <ATen/core/Tensor.h>
#include <optional>
#include <tuple>
#include "liger/options.h"

namespace liger {

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

}  // namespace liger
