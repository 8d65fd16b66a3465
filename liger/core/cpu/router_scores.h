#pragma once
#include "liger/core/cpu/row.h"
#include "liger/options.h"

namespace LIGER_CPU::router {

/// The scores of a row of logits.
template <class T>
void scores(RouterScore kind, const T* z, float* s, int64_t n) {
  if (kind == RouterScore::Softmax) {
    const Vec max(row_reduce(n, -INFINITY, Max{}, [](Vec z) { return z; }, z));
    row_map(n, s, [&](Vec z) { return Math::exp(z - max); }, z);
    const Vec sum(row_sum(n, [](Vec e) { return e; }, s));
    row_map(n, s, [&](Vec e) { return e / sum; }, s);
  } else if (kind == RouterScore::Sigmoid) {
    // From e^-|z|, which is 0 where z is large: exp is never infinite.
    const auto sigmoid = [](Vec z) {
      const Vec e = Math::exp(Vec(0.f) - z.abs()), larger = Vec(1.f) / (Vec(1.f) + e);
      return Vec::blendv(larger, e * larger, z < Vec(0.f));
    };
    row_map(n, s, sigmoid, z);
  } else {
    const auto softplus = [](Vec z) { return at::vec::maximum(z, Vec(0.f)) + Math::exp(Vec(0.f) - z.abs()).log1p(); };
    row_map(n, s, [&](Vec z) { return softplus(z).sqrt(); }, z);
  }
}

}  // namespace LIGER_CPU::router
