#pragma once
#include "liger/core/grouped_gemm.h"
#include "liger/core/kernel.h"
#include "liger/ops/activation/gated.h"

namespace liger {

/// A pair is a token and one of its k experts. Pairs in the order of their experts, those of one expert in the order of
/// their tokens, and behind them those whose id is no expert:
///   order[p]        = the pair at place p
///   place[order[p]] = p, or −1 for a pair whose id is no expert
///   ends[e]         = the number of pairs of experts 0 to e
struct SortByExpert {
  const int64_t* index;    // [pairs]
  int *order, *place;      // [pairs], [pairs]
  int* ends;               // [experts]
  void* scratch;           // null: nothing is done, but *scratch_bytes told, at least 1, that are needed here
  int64_t* scratch_bytes;  // on the host
  int64_t pairs, experts;

  /// The key by which pairs are sorted.
  LIGER_HD int key(int64_t pair) const {
    const int64_t e = index[pair];
    return e >= 0 && e < experts ? int(e) : int(experts);
  }
};

///   rows[place[t, k]] = weights[t, k] · x[t]
struct SpreadTokens {
  const void* x;     // [tokens, cols]
  Numbers weights;   // [tokens, k] or null: 1
  const int* place;  // [tokens, k]
  void* rows;        // [pairs, cols]; rows of pairs without an expert are not written
  int64_t tokens, k, cols;
  DType dtype;
};

/// The formulas of experts without a gate: theirs is 1, and up is activated.
template <class Act>
struct NoGate {
  static constexpr bool kInterleaved = false;

  template <class M, class V>
  struct Of {
    LIGER_HD explicit Of(const GateForm&) {}
    LIGER_HD V act(V) const { return V(1); }
    LIGER_HD V slope(V) const { return V(0); }
    LIGER_HD V up(V b) const { return Act::template value<M>(b); }
    LIGER_HD V through_up(V b, V d) const { return d * Act::template derivative<M>(b); }
  };
};

template <class Gate>
inline constexpr bool kHasGate = true;
template <class Act>
inline constexpr bool kHasGate<NoGate<Act>> = false;

/// Calls f.operator()<Gate>() with the formulas of experts.
template <class F>
void dispatch_experts(bool gated, const GateForm& form, F&& f) {
  if (gated) return dispatch_gate(form, f);
  dispatch_activation(form.activation, [&]<class Act>() { f.template operator()<NoGate<Act>>(); });
}

///   a[r] = x[r] matrix[g] + bias[g]   for the rows r of each group g: gate, then up, or both in turn
///   h[r] = g(a[r]_gate) · u(a[r]_up)  or, not gated, g(a[r])
/// rounded as grouped_rows and gated_forward round them.
struct GroupedGated {
  GroupedRows product;  // its out, a, may be null: only h is written
  void* h;              // [rows, cols], half as many as the product's where it is gated; a multiple of 8
  GateForm form;
  bool gated;
};

///   y[t] = Σ_k weights[t, k] · rows[place[t, k]]
/// What experts make of a token's copies, summed in float. A place below 0 adds nothing.
struct CombineExperts {
  const void* rows;  // [pairs, cols]
  Numbers weights;   // [tokens, k] or null: 1
  const int* place;  // [tokens, k]
  void* y;           // [tokens, cols]
  int64_t tokens, k, cols;
  DType dtype;
};

/// The step back through an expert's output, weight · (h downᵀ), of the pairs in the order of their experts, with
///   h  = g(a_gate) · u(a_up)  or, not gated, g(a)
///   dh = dy down
/// which gives
///   dweight = Σ h · dh + Σ bias · dy, 0 for a pair without an expert
///   da = weight · dh · ∂h/∂a
///   dh ← weight · h, whose product with dy is the gradient of down
/// Pairs behind `valid` have no expert: of them only dweight is written.
struct ExpertsBackward {
  const void* a;     // [pairs, 2 cols]: gate, then up, or both in turn; not gated: [pairs, cols]
  void* da;          // as a, may be a
  void* dh;          // [pairs, cols]
  const int* order;  // [pairs], of SortByExpert
  const int* valid;  // [1]: the pairs that have an expert
  Numbers weights;   // of pair order[p]
  float* dweights;   // of pair order[p]
  int64_t pairs, cols;
  DType dtype;
  GateForm form;
  bool gated;
  const void *dy, *bias;  // [pairs, width], [experts, width]; null: the output has no bias
  const int* experts;     // [pairs], where there is a bias
  int64_t width;
};

inline constinit Kernel<SortByExpert> sort_by_expert{"sort_by_expert"};
inline constinit Kernel<SpreadTokens> spread_tokens{"spread_tokens"};
inline constinit Kernel<GroupedGated> grouped_gated{"grouped_gated"};  // where has_grouped says so
inline constinit Kernel<CombineExperts> combine_experts{"combine_experts"};
inline constinit Kernel<ExpertsBackward> experts_backward{"experts_backward"};

}  // namespace liger
