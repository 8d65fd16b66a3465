#pragma once
#ifdef __CUDACC__
#define LIGER_HD __host__ __device__
#else
#define LIGER_HD
#endif

namespace liger {

// Activations f and their derivatives, for a float or a vector V of them. M brings exp, tanh, erf and division for V
// (liger/core/cuda/math.cuh, liger/core/cpu/row.h).

/// silu(x) = x · σ(x).
struct SiLU {
  template <class M, class V>
  static LIGER_HD V value(V x) { return M::div(x, V(1) + M::exp(V(0) - x)); }

  template <class M, class V>
  static LIGER_HD V derivative(V x) {
    const V s = M::div(V(1), V(1) + M::exp(V(0) - x));
    return s * (V(1) + x * (V(1) - s));
  }
};

/// gelu(x) = x/2 · (1 + tanh(√(2/π) (x + 0.044715 x³))).
struct GeLUTanh {
  static constexpr float kBeta = 0.79788456080286536f, kCubic = 0.044715f;

  template <class M, class V>
  static LIGER_HD V value(V x) {
    return V(0.5f) * x * (V(1) + M::tanh(V(kBeta) * (x + V(kCubic) * (x * x * x))));
  }

  template <class M, class V>
  static LIGER_HD V derivative(V x) {
    const V x2 = x * x, t = M::tanh(V(kBeta) * (x + V(kCubic) * (x2 * x)));
    return V(0.5f) * (V(1) + t) + V(0.5f) * x * (V(1) - t * t) * (V(kBeta) * (V(1) + V(3 * kCubic) * x2));
  }
};

/// gelu(x) = x/2 · (1 + erf(x/√2)).
struct GeLUErf {
  static constexpr float kSqrtHalf = 0.70710678118654752f, kNormal = 0.39894228040143268f;  // √½, 1/√(2π)

  template <class M, class V>
  static LIGER_HD V value(V x) { return V(0.5f) * x * (V(1) + M::erf(x * V(kSqrtHalf))); }

  template <class M, class V>
  static LIGER_HD V derivative(V x) {
    return V(0.5f) * (V(1) + M::erf(x * V(kSqrtHalf))) + x * (V(kNormal) * M::exp(V(-0.5f) * x * x));
  }
};

/// relu(x) = max(x, 0), squared.
struct ReLUSquared {
  template <class M, class V>
  static LIGER_HD V value(V x) { const V r = M::max(x, V(0)); return r * r; }

  template <class M, class V>
  static LIGER_HD V derivative(V x) { return V(2) * M::max(x, V(0)); }
};

}  // namespace liger
