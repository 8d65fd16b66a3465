#include "liger/ops/router/expert_load.h"
#include "liger/core/cpu/router_scores.h"

namespace LIGER_CPU::expert_load {
namespace {

template <class T>
void softmax(const T* z, float* p, int64_t n) {
  router::scores(RouterScore::Softmax, z, p, n);
}

template <class T>
void forward(const ExpertLoadForward& a) {
  std::vector<int> counts(size_t(a.partials * a.experts));
  for_rows(a.partials, ceil_div(a.tokens, a.partials) * a.experts * 16, [&](int64_t part) {
    std::vector<float> p(size_t(a.experts));
    std::vector<int64_t> keys(size_t(a.experts));
    float* load = a.load + part * a.experts;
    std::fill_n(load, a.experts, 0.f);
    for (int64_t t = part; t < a.tokens; t += a.partials) {
      if (a.mask && !a.mask[t]) continue;
      const T* z = row_of<T>(a.z, t, a.stride);
      softmax(z, p.data(), a.experts);
      row_map(a.experts, load, [](Vec sum, Vec p) { return sum + p; }, load, p.data());
      for (int64_t e = 0; e < a.experts; ++e) keys[e] = ranked(order_of(float(z[e])), e);
      std::nth_element(keys.begin(), keys.begin() + a.k - 1, keys.end(), std::greater<>());
      for (int64_t i = 0; i < a.k; ++i) ++counts[part * a.experts + expert_of(keys[i])];
    }
  });
  for (int64_t e = 0; e < a.experts; ++e) {
    a.counts[e] = 0;
    for (int64_t part = 0; part < a.partials; ++part) a.counts[e] += counts[part * a.experts + e];
  }
}

template <class T>
void backward(const ExpertLoadBackward& a) {
  for_runs(a.tokens, a.experts * 8, [&](int64_t begin, int64_t end) {
    std::vector<float> p(size_t(a.experts));
    for (int64_t t = begin; t < end; ++t) {
      T* dz = row_of<T>(a.dz, t, a.experts);
      if (a.mask && !a.mask[t]) {
        std::fill_n(dz, a.experts, T(0));
        continue;
      }
      softmax(row_of<T>(a.z, t, a.stride), p.data(), a.experts);
      const Vec mean(row_sum(a.experts, [](Vec p, Vec g) { return p * g; }, p.data(), a.dload));
      row_map(a.experts, dz, [&](Vec p, Vec g) { return p * (g - mean); }, p.data(), a.dload);
    }
  });
}

}  // namespace

LIGER_REGISTER(expert_load_forward,
               [](const ExpertLoadForward& a, Stream) { dispatch(a.dtype, [&]<class T>() { forward<T>(a); }); });
LIGER_REGISTER(expert_load_backward,
               [](const ExpertLoadBackward& a, Stream) { dispatch(a.dtype, [&]<class T>() { backward<T>(a); }); });

}  // namespace LIGER_CPU::expert_load
