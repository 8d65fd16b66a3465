#pragma once
#include <ATen/core/Tensor.h>
#include "liger/options.h"

namespace liger {

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

/// exp(x) / Σ exp(x) over the last dimension, summed in float, in x's dtype. causal: row i of x [..., queries, keys]
/// has the columns up to i, and 0 behind them.
at::Tensor softmax(const at::Tensor& x, bool causal = false);

}  // namespace liger
