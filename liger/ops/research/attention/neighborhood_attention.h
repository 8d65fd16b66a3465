#pragma once
#include "liger/core/kernel.h"
#include "liger/core/math.h"

namespace liger {

/// For each query i of a sequence, over the keys j around it:
///   s_ij  = scale · q_i · k_j
///   max_i = max_j s_ij
///   sum_i = Σ_j exp(s_ij − max_i)
///   p_ij  = exp(s_ij − max_i) / sum_i
///   out_i = Σ_j p_ij · v_j
/// where j − i is a multiple of dilation from −half · dilation to half · dilation, and j is inside the sequence.
/// Backward gets max and sum apart, so that p adds up to 1 beside scores of any size.
struct NeighborhoodAttentionForward {
  static constexpr int kMostColumns = 1024;
  const void *q, *k, *v;  // [rows, cols], of which each `seq` rows are a sequence; CUDA: whole packs
  void* out;              // [rows, cols]
  float* stats;           // [rows, 2], max and sum
  int64_t rows, seq, cols, half, dilation;
  DType dtype;
  float scale;
};

///   dp_ij   = dout_i · v_j
///   delta_i = Σ_j p_ij · dp_ij
///   dq_i    = scale · Σ_j p_ij · (dp_ij − delta_i) · k_j
///   dk_j    = scale · Σ_i p_ij · (dp_ij − delta_i) · q_i
///   dv_j    = Σ_i p_ij · dout_i
struct NeighborhoodAttentionBackward {
  const void *dout, *q, *k, *v;
  const float* stats;
  void *dq, *dk, *dv;
  float* delta;  // [rows], scratch
  int64_t rows, seq, cols, half, dilation;
  DType dtype;
  float scale;
};

inline constinit Kernel<NeighborhoodAttentionForward> neighborhood_attention_forward{"neighborhood_attention_forward"};
inline constinit Kernel<NeighborhoodAttentionBackward> neighborhood_attention_backward{
    "neighborhood_attention_backward"};

/// Row `row`'s neighbour t of −half to half, a row too, or −1 where that is outside of the sequence.
template <class Args>
LIGER_HD int64_t neighbor(const Args& a, int64_t row, int64_t t) {
  const int64_t at = row % a.seq + t * a.dilation;
  return at >= 0 && at < a.seq ? row + t * a.dilation : -1;
}

}  // namespace liger
