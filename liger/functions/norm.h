#pragma once
#include <ATen/core/Tensor.h>
#include <optional>
#include <tuple>
#include "liger/options.h"

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

}  // namespace liger
