#include "liger/core/cpu/row.h"
#include "liger/ops/research/norm/group_norm.h"

namespace LIGER_CPU::group_norm {
namespace {

/// f(channel among all, where it begins) for each channel of a group.
template <class F>
void for_channels(const GroupNorm& a, int64_t row, F f) {
  for (int64_t c = 0; c < a.channels; ++c) f(row % a.groups * a.channels + c, (row * a.channels + c) * a.spatial);
}

template <class T, class W>
void forward(const GroupNormForward& a) {
  const int64_t n = a.channels * a.spatial;
  const W *w = static_cast<const W*>(a.w), *b = static_cast<const W*>(a.b);
  for_rows(a.samples * a.groups, n, [&](int64_t r) {
    const T* x = row_of<T>(a.x, r, n);
    const auto [mean, squares] = moments(n, x);
    const float rstd = float(1 / std::sqrt(squares / n + a.eps));
    a.mean[r] = mean, a.rstd[r] = rstd;
    for_channels(a, r, [&](int64_t c, int64_t at) {
      const Vec scale(w ? float(w[c]) : 1), bias(b ? float(b[c]) : 0);
      row_map(
          a.spatial, static_cast<T*>(a.y) + at, [&](Vec x) { return (x - Vec(mean)) * Vec(rstd) * scale + bias; },
          static_cast<const T*>(a.x) + at);
    });
  });
}

template <class T, class W>
void backward(const GroupNormBackward& a) {
  const int64_t n = a.channels * a.spatial, all = a.groups * a.channels;
  const auto weight = [w = static_cast<const W*>(a.w)](int64_t c) { return w ? float(w[c]) : 1; };
  const T *x = static_cast<const T*>(a.x), *dy = static_cast<const T*>(a.dy);
  for_rows(a.samples * a.groups, n, [&](int64_t r) {
    const Vec mean(a.mean[r]), rstd(a.rstd[r]);
    double sum = 0, onto = 0;
    for_channels(a, r, [&](int64_t c, int64_t at) {
      for (int64_t s = 0; s < a.segments(); ++s) {
        const int64_t begin = at + s * kGroupSegment, count = std::min(kGroupSegment, a.spatial - s * kGroupSegment),
                      to = (r / a.groups * a.segments() + s) * all + c;
        const auto [db, dw] = row_sums<2>(
            count, [&](Vec dy, Vec x) { return std::array{dy, dy * ((x - mean) * rstd)}; }, dy + begin, x + begin);
        if (a.dw) a.dw[to] = float(dw);
        if (a.db) a.db[to] = float(db);
        sum += weight(c) * db, onto += weight(c) * dw;
      }
    });
    if (!a.dx) return;
    const Vec mean_g(float(sum / n)), mean_onto(float(onto / n));
    for_channels(a, r, [&](int64_t c, int64_t at) {
      const Vec w(weight(c));
      row_map(
          a.spatial, static_cast<T*>(a.dx) + at,
          [&](Vec dy, Vec x) { return rstd * (dy * w - mean_g - (x - mean) * rstd * mean_onto); }, dy + at, x + at);
    });
  });
}

}  // namespace

LIGER_REGISTER(group_norm_forward, [](const GroupNormForward& a, Stream) {
  dispatch_weighted(a.dtype, a.w_dtype, [&]<class T, class W>() { forward<T, W>(a); });
});
LIGER_REGISTER(group_norm_backward, [](const GroupNormBackward& a, Stream) {
  dispatch_weighted(a.dtype, a.w_dtype, [&]<class T, class W>() { backward<T, W>(a); });
});

}  // namespace LIGER_CPU::group_norm
