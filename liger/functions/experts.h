#pragma once
#include <ATen/core/Tensor.h>
#include <optional>
#include "liger/functions/activation.h"
#include "liger/options.h"

namespace liger {

struct ExpertsOptions {
  Activation activation = Activation::SiLU;
  bool transposed = false;                   // weights are [experts, in, out]
  bool interleaved = false;                  // gate and up are neighbouring columns; SiLU's
  GateOptions gate;                          // GPT-OSS: interleaved, {.limit = 7, .alpha = 1.702, .up_offset = 1}
  bool recompute = true;                     // backward recomputes gate and up; false: they are kept
  double gate_up_scale = 1, down_scale = 1;  // of adapters
  int64_t most_rows = -1;                    // pairs that buffers have room for; -1: all
  bool gated = true;                         // false: gate_up is up alone
  LIGER_OPTIONS(activation, transposed, interleaved, gate, recompute, gate_up_scale, down_scale, most_rows, gated)
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
/// Not gated, as in Nemotron-H, experts are plain MLPs, and gate_up is up: width rows in place of 2 width, in its bias,
/// adapter and scale, too.
///   E_e(x) = down_e act(up_e x)
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

}  // namespace liger
