#include "liger/core/cpu/router_scores.h"
#include "liger/ops/router/route.h"

namespace LIGER_CPU::route {
namespace {

using router::scores;

/// What one thread works with.
struct Scratch {
  std::vector<float> scores, keys, groups;
  std::vector<int64_t> ranked;

  explicit Scratch(const RouteForward& a)
      : scores(size_t(a.experts)), keys(size_t(a.experts)), groups(size_t(a.groups)), ranked(size_t(a.experts)) {}

  /// The experts of all groups that are kept, each with its key.
  void rank(const RouteForward& a) {
    const int64_t size = a.experts / a.groups;
    ranked.clear();
    if (a.groups > 1) {
      for (int64_t g = 0; g < a.groups; ++g) {
        GroupScore score;
        for (int64_t e = g * size; e < (g + 1) * size; ++e) score.push(keys[e]);
        groups[g] = score.value(a.group_best);
      }
    }
    for (int64_t g = 0; g < a.groups; ++g) {
      if (a.groups > 1 && !is_kept(groups.data(), a.groups, a.kept_groups, g)) continue;
      for (int64_t e = g * size; e < (g + 1) * size; ++e) ranked.push_back(liger::ranked(order_of(keys[e]), e));
    }
  }
};

bool is_given(const RouteForward& a, int64_t token) {
  bool is = a.given.of;
  for (int64_t i = 0; is && i < a.k; ++i) is = a.given.is_new(token, i, a.experts);
  return is;
}

template <class T>
void forward(const RouteForward& a) {
  for_runs(a.tokens, a.experts * 16, [&](int64_t begin, int64_t end) {
    Scratch of(a);
    for (int64_t t = begin; t < end; ++t) {
      const T* z = row_of<T>(a.z, t, a.stride);
      scores(a.form.score, z, of.scores.data(), a.experts);
      int64_t* index = a.index + t * a.k;
      if (is_given(a, t)) {
        for (int64_t i = 0; i < a.k; ++i) index[i] = a.given(t, i);
      } else {
        for (int64_t e = 0; e < a.experts; ++e)
          of.keys[e] = a.by_score() ? of.scores[e] + (a.bias ? a.bias[e] : 0) : float(z[e]);
        of.rank(a);
        std::partial_sort(of.ranked.begin(), of.ranked.begin() + a.k, of.ranked.end(), std::greater<>());
        for (int64_t i = 0; i < a.k; ++i) index[i] = expert_of(of.ranked[i]);
      }
      float sum = 0;
      for (int64_t i = 0; i < a.k; ++i) sum += of.scores[index[i]];
      const float by = a.form.divisor(sum);
      dispatch(a.weights_dtype, [&]<class W>() {
        W* weights = row_of<W>(a.weights, t, a.k);
        for (int64_t i = 0; i < a.k; ++i) weights[i] = W(of.scores[index[i]] / by * a.form.scale);
      });
    }
  });
  std::fill_n(a.counts, a.experts, 0);
  for (int64_t i = 0; i < a.tokens * a.k; ++i) ++a.counts[a.index[i]];
}

template <class T>
void backward(const RouteBackward& a) {
  for_runs(a.tokens, a.experts * 8, [&](int64_t begin, int64_t end) {
    std::vector<float> s(size_t(a.experts));
    for (int64_t t = begin; t < end; ++t) {
      const T* z = row_of<T>(a.z, t, a.stride);
      T* dz = row_of<T>(a.dz, t, a.experts);
      scores(a.form.score, z, s.data(), a.experts);
      const auto for_chosen = [&](auto f) {
        for (int64_t i = t * a.k; i < (t + 1) * a.k; ++i)
          if (const int64_t e = a.index[i]; e >= 0 && e < a.experts) f(e, number(a.dweights, i));
      };
      double sum = 0, dot = 0;
      for_chosen([&](int64_t e, float g) { sum += s[e], dot += double(g) * s[e]; });
      const RouterSlope slope(a.form, float(sum), float(dot));
      for (int64_t e = 0; e < a.experts; ++e) dz[e] = T(slope.other(s[e]));
      for_chosen([&](int64_t e, float g) { dz[e] = T(slope.chosen(float(z[e]), s[e], g)); });
    }
  });
}

}  // namespace

LIGER_REGISTER(route_forward,
               [](const RouteForward& a, Stream) { dispatch(a.dtype, [&]<class T>() { forward<T>(a); }); });
LIGER_REGISTER(route_backward,
               [](const RouteBackward& a, Stream) { dispatch(a.dtype, [&]<class T>() { backward<T>(a); }); });

}  // namespace LIGER_CPU::route
