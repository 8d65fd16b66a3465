#pragma once
#include <array>
#include "liger/core/kernel.h"
#include "liger/core/math.h"

namespace liger {

/// For each row:
///   rstd(u) = 1 / sqrt(mean(u²) + eps)
///   N(u)    = u · rstd(u)
///   y       = w₀ · N(x³) + w₁ · N(x²) + w₂ · N(x) + b
struct PolyNormForward {
  const void* x;  // [rows, cols]
  Numbers w, b;   // [3], [1]
  void* y;        // [rows, cols]
  float* rstd;    // [rows, 3], of x³, x², x
  int64_t rows, cols;
  DType dtype;
  float eps;
};

///   r_p   = rstd(xᵖ)
///   S_p   = Σ_cols dy · xᵖ
///   dx    = Σ_p w₃₋ₚ · (p · xᵖ⁻¹ · r_p · dy − p/cols · x²ᵖ⁻¹ · r_p³ · S_p)
///   dw₃₋ₚ = Σ_rows r_p · S_p
///   db    = Σ dy
struct PolyNormBackward {
  const void *dy, *x;
  Numbers w;
  const float* rstd;
  void* dx;        // null where x is frozen
  float *dw, *db;  // [partials, 3], [partials], for add_partials
  int64_t rows, cols, partials;
  DType dtype;
};

inline constinit Kernel<PolyNormForward> poly_norm_forward{"poly_norm_forward"};
inline constinit Kernel<PolyNormBackward> poly_norm_backward{"poly_norm_backward"};

/// The formulas for a float or a vector V of them; what there are three of is in the order x³, x², x.
struct PolyNorm {
  struct Squares {
    template <class V>
    LIGER_HD std::array<V, 3> operator()(V x) const {
      const V x2 = x * x;
      return {x2 * x2 * x2, x2 * x2, x2};
    }
  };

  /// The terms of S, and dy.
  struct Products {
    template <class V>
    LIGER_HD std::array<V, 4> operator()(V x, V dy) const {
      return {dy * x * x * x, dy * x * x, dy * x, dy};
    }
  };

  /// y of a row.
  template <class V>
  struct Value {
    V k3, k2, k1, b;
    LIGER_HD Value(const float* w, const float* r, float b) : k3(w[0] * r[0]), k2(w[1] * r[1]), k1(w[2] * r[2]), b(b) {}
    LIGER_HD V operator()(V x) const { return ((k3 * x + k2) * x + k1) * x + b; }
  };

  /// dx of a row, whose sums S have type N.
  template <class V>
  struct Slope {
    V k[3], c[3];
    template <class N>
    LIGER_HD Slope(const float* w, const float* r, const N* s, int64_t cols) {
      const N inv_cols = N(1) / cols;
      for (int i = 0; i < 3; ++i) {
        const N slope = N(3 - i) * w[i] * r[i];
        k[i] = V(float(slope)), c[i] = V(float(slope * r[i] * r[i] * s[i] * inv_cols));
      }
    }
    LIGER_HD V operator()(V x, V dy) const {
      const V x2 = x * x;
      return dy * (k[0] * x2 + k[1] * x + k[2]) - ((c[0] * x2 + c[1]) * x2 + c[2]) * x;
    }
  };
};

}  // namespace liger
