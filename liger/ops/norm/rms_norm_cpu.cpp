#include "liger/core/cpu/row.h"
#include "liger/ops/norm/rms_norm.h"

namespace LIGER_CPU::rms_norm {
namespace {

/// x̂ as the reference has it when it meets the weight.
template <class T>
Vec normalise(const Vec& x, const Vec& rstd, Casting casting) { return casting == Casting::Gemma ? x * rstd : round_to<T>(x * rstd); }

/// w + offset for a whole call, as floats; empty where there is no weight.
template <class T, class W>
std::vector<float> weights(const void* w, int64_t cols, float offset, Casting casting) {
  std::vector<float> sum(w ? cols : 0);
  if (w) row_map(cols, sum.data(), [&](Vec w) { return casting == Casting::None ? round_to<T>(w + Vec(offset)) : w + Vec(offset); }, static_cast<const W*>(w));
  return sum;
}

template <class T, class W>
void forward(const RmsNormForward& a) {
  const auto weight = weights<T, W>(a.w, a.cols, a.offset, a.casting);
  for_rows(a.rows, a.cols, [&](int64_t r) {
    const T* x = row_of<T>(a.x, r, a.cols);
    T* y = row_of<T>(a.y, r, a.cols);
    const float rstd = 1 / std::sqrt(row_sum(a.cols, [](Vec x) { return x * x; }, x) / a.cols + a.eps);
    const Vec by(a.rstd[r] = a.casting == Casting::None ? round_to<T>(rstd) : rstd);
    if (a.w) row_map(a.cols, y, [&](Vec x, Vec w) { return normalise<T>(x, by, a.casting) * w; }, x, weight.data());
    else row_map(a.cols, y, [&](Vec x) { return x * by; }, x);
  });
}

/// Share s owns a run of rows: no two threads add to the same dw.
template <class T, class W>
void backward(const RmsNormBackward& a) {
  auto weight = weights<T, W>(a.w, a.cols, a.offset, Casting::Gemma);
  if (!a.w) weight.assign(a.cols, 1.f);
  const float* w = weight.data();
  const int64_t run = (a.rows + a.shares - 1) / a.shares;
  for_rows(a.shares, run * a.cols, [&](int64_t s) {
    float* dw = a.dw ? a.dw + s * a.cols : nullptr;
    if (dw) std::fill_n(dw, a.cols, 0.f);
    for (int64_t r = s * run; r < std::min(a.rows, (s + 1) * run); ++r) {
      const T *x = row_of<T>(a.x, r, a.cols), *dy = row_of<T>(a.dy, r, a.cols);
      T* dx = row_of<T>(a.dx, r, a.cols);
      const Vec rstd(a.rstd[r]);
      const Vec mean(row_sum(a.cols, [&](Vec dy, Vec x, Vec w) { return dy * w * (x * rstd); }, dy, x, w) / a.cols);
      for_each(a.cols, [&](int64_t c, int64_t n) {
        const Vec xv = read(x + c, n), dyv = read(dy + c, n);
        if (dw) write(read(dw + c, n) + dyv * normalise<T>(xv, rstd, a.casting), dw + c, n);
        if (a.dx) write(rstd * (dyv * read(w + c, n) - xv * rstd * mean), dx + c, n);
      });
    }
  });
}

}  // namespace

LIGER_REGISTER(rms_norm_forward, [](const RmsNormForward& a, Stream) {
  dispatch_weighted(a.dtype, a.w_dtype, [&]<class T, class W>() { forward<T, W>(a); });
});
LIGER_REGISTER(rms_norm_backward, [](const RmsNormBackward& a, Stream) {
  dispatch_weighted(a.dtype, a.w_dtype, [&]<class T, class W>() { backward<T, W>(a); });
});

}  // namespace LIGER_CPU::rms_norm
