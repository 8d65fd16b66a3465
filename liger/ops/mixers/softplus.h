#pragma once
#include "liger/core/math.h"

namespace liger {

/// softplus(x) = ln(1 + eˣ) and its derivative σ(x), of one exponential, for a float or a vector V of them (M as in
/// liger/core/math.h). What 1 + e rounds away of e is added to the logarithm.
template <class M, class V>
struct Softplus {
  V value, slope;
  explicit LIGER_HD Softplus(V x) {
    const V e = M::exp(V(0) - M::max(x, V(0) - x)), u = V(1) + e;
    value = M::max(x, V(0)) + M::log(u) + M::div(e - (u - V(1)), u);
    slope = M::div(M::if_positive(x, V(1), e), u);
  }
};

}  // namespace liger
