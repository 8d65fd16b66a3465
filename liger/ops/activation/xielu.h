#pragma once
#include "liger/core/kernel.h"
#include "liger/core/math.h"

namespace liger {

///   y = p x² + β x                        where x > 0
///   y = n (expm1(min(x, eps)) − x) + β x  elsewhere
///   p = softplus(alpha_p)
///   n = β + softplus(alpha_n)
/// element by element (Huang & Schlag 2024, arXiv:2411.13010).
struct XIELUForward {
  const void* x;                        // [count]
  Numbers alpha_p, alpha_n, beta, eps;  // one each
  void* y;                              // [count]
  int64_t count;
  DType dtype;
};

///   dx       = dy (2 p x + β)                             where x > 0
///   dx       = dy (n expm1(x) + β)                        where x < eps
///   dx       = dy (β − n)                                 between
///   dalpha_p = σ(alpha_p) Σ dy x²                         over x > 0
///   dalpha_n = σ(alpha_n) Σ dy (expm1(min(x, eps)) − x)   over the others
struct XIELUBackward {
  const void *dy, *x;
  Numbers alpha_p, alpha_n, beta, eps;
  void* dx;
  float *dalpha_p, *dalpha_n;  // [partials], for add_partials
  int64_t count, partials;
  DType dtype;
};

inline constinit Kernel<XIELUForward> xielu_forward{"xielu_forward"};
inline constinit Kernel<XIELUBackward> xielu_backward{"xielu_backward"};

/// The formulas for a float or a vector V of them.
template <class M, class V>
struct XIELU {
  V p, n, beta, eps;

  LIGER_HD XIELU(float alpha_p, float alpha_n, float beta, float eps)
      : p(softplus(alpha_p)), n(beta + softplus(alpha_n)), beta(beta), eps(eps) {}

  LIGER_HD V value(V x) const { return M::if_positive(x, p * x * x, n * (bend(x) - x)) + beta * x; }
  LIGER_HD V derivative(V x) const {
    return M::if_positive(x, V(2) * p * x, n * M::if_positive(eps - x, bend(x), V(-1))) + beta;
  }
  /// ∂y/∂p and ∂y/∂n.
  LIGER_HD V by_p(V x) const { return M::if_positive(x, x * x, V(0)); }
  LIGER_HD V by_n(V x) const { return M::if_positive(x, V(0), bend(x) - x); }

 private:
  LIGER_HD V bend(V x) const { return M::expm1(V(0) - M::max(V(0) - x, V(0) - eps)); }
};

}  // namespace liger
