#pragma once
#include "liger/core/math.h"

namespace liger {

/// ln(1 + e) for 0 <= e <= 1, within 2 units in the last place:
///   e + e² Q(e)
/// Q is the polynomial of degree 8 whose relative error is least (Remez): 5·10⁻⁹ of the logarithm.
template <class M, class V>
LIGER_HD V log1p_of_fraction(V e) {
  constexpr float kQ[] = {-0.00331847458f, 0.0202045941f, -0.0576644616f, 0.106805573f, -0.153553974f,
                          0.196954009f,    -0.249585875f, 0.333305113f,   -0.499999328f};
  V q = V(kQ[0]);
#if defined(__CUDACC__) || defined(__HIP__)
#pragma unroll
#endif
  for (int i = 1; i < 9; ++i) q = M::fma(q, e, V(kQ[i]));
  return M::fma(e * e, q, e);
}

/// softplus(x) = ln(1 + eˣ) and its derivative σ(x), of one exponential, for a float or a vector V of them (M as in
/// liger/core/math.h).
template <class M, class V>
struct Softplus {
  V value, slope;
  explicit LIGER_HD Softplus(V x) {
    const V e = M::exp(V(0) - M::abs(x));
    value = M::if_positive(x, x, V(0)) + log1p_of_fraction<M>(e);
    slope = M::div_ordinary(M::if_positive(x, V(1), e), V(1) + e);
  }
};

}  // namespace liger
