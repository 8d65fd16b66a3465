#pragma once
#include "liger/core/kernel.h"
#include "liger/ops/mixers/softplus.h"

namespace liger {

/// The logarithms of the decay of Kimi delta attention (Kimi Team 2025, arXiv:2510.26692), for each token, head h and
/// channel:
///   x = a + dt_bias
///   g = −exp(A_h) softplus(x), or low σ(exp(A_h) x) with a lower bound
struct ChannelGates {
  const void* a;     // [rows, heads, channels]
  int64_t a_stride;  // elements from one row to the next
  Numbers A;         // [heads]
  Numbers dt_bias;   // [heads, channels]; null: 0
  int64_t rows, heads, channels;
  float low;             // 0: no bound
  DType dtype, g_dtype;  // of a and da; of g and dg: float or the same
};

struct ChannelGatesForward : ChannelGates {
  void* g;  // [rows, heads, channels]
};

///   da       = dg ∂g/∂x
///   dA_h     = Σ_(rows, channels) dg ∂g/∂A_h
///   ddt_bias = Σ_rows da
struct ChannelGatesBackward : ChannelGates {
  const void* dg;        // [rows, heads, channels]
  void* da;              // [rows, heads, channels]
  float *dA, *ddt_bias;  // [partials, heads] and [partials, heads, channels], for add_partials; may be null
  int64_t partials;
};

inline constinit Kernel<ChannelGatesForward> channel_gates_forward{"channel_gates_forward"};
inline constinit Kernel<ChannelGatesBackward> channel_gates_backward{"channel_gates_backward"};

/// The formulas of a head, for a float or a vector V of them:
///   ∂g/∂x = −r σ(x), or low r s (1 − s)
///   ∂g/∂A = g,       or x ∂g/∂x
/// with
///   r = exp(A)
///   s = σ(r x)
/// 1 − s = σ(−r x) keeps its digits where s is nearly 1.
template <class M, class V>
struct ChannelGate {
  V rate, low;
  bool bounded;

  LIGER_HD ChannelGate(float rate, float low) : rate(rate), low(low), bounded(low != 0) {}

  LIGER_HD V value(V x) const {
    if (!bounded) return V(0) - rate * Softplus<M, V>(x).value;
    const V z = rate * x, e = small(z);
    return low * M::div_ordinary(M::if_positive(z, V(1), e), V(1) + e);
  }

  struct Slopes {
    V by_x, by_A;
  };
  LIGER_HD Slopes slopes(V x) const {
    if (!bounded) {
      const Softplus<M, V> of(x);
      return {V(0) - rate * of.slope, V(0) - rate * of.value};
    }
    const V e = small(rate * x), t = M::div_ordinary(V(1), V(1) + e), by_x = low * rate * (e * t * t);
    return {by_x, by_x * x};
  }

 private:
  /// exp(−|z|).
  static LIGER_HD V small(V z) { return M::exp(V(0) - M::abs(z)); }
};

}  // namespace liger
