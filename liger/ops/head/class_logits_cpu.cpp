#include "liger/core/cpu/row.h"
#include "liger/ops/head/class_logits.h"

namespace LIGER_CPU::class_logits {
namespace {

template <class T>
void forward(const ClassLogits& a) {
  for (int64_t i = 0; i < a.rows * a.count; ++i)
    if (a.ids[i] < -1 || a.ids[i] >= a.classes) return void(*a.bad_class = a.ids[i]);
  for_rows(a.rows, a.count * a.cols, [&](int64_t r) {
    const T *x = row_of<T>(a.x, r, a.cols), *bias = static_cast<const T*>(a.bias);
    for (int64_t i = r * a.count; i < (r + 1) * a.count; ++i) {
      const int64_t c = a.ids[i];
      a.y[i] = c < 0 ? 0
                     : float(row_sum(
                                 a.cols, [](Vec x, Vec w) { return x * w; }, x, row_of<T>(a.w, c, a.cols)) +
                             (bias ? float(bias[c]) : 0));
    }
  });
}

/// to += by · row
template <class T>
void add(int64_t cols, float by, const T* row, float* to) {
  const Vec factor(by);
  row_map(cols, to, [&](Vec sum, Vec x) { return Math::fma(factor, x, sum); }, static_cast<const float*>(to), row);
}

template <class T>
void dx(const ClassLogitsDx& a) {
  for_runs(a.rows, a.count * a.cols, [&](int64_t begin, int64_t end) {
    std::vector<float> sum(static_cast<size_t>(a.cols));
    for (int64_t r = begin; r < end; ++r) {
      std::fill(sum.begin(), sum.end(), 0.f);
      for (int64_t i = r * a.count; i < (r + 1) * a.count; ++i)
        if (a.ids[i] >= 0) add(a.cols, a.dy[i], row_of<T>(a.w, a.ids[i], a.cols), sum.data());
      row_map(a.cols, row_of<T>(a.dx, r, a.cols), [](Vec x) { return x; }, static_cast<const float*>(sum.data()));
    }
  });
}

template <class T>
void dw(const ClassLogitsDw& a) {
  for_runs(a.pairs, a.cols, [&](int64_t begin, int64_t end) {
    std::vector<float> sum(static_cast<size_t>(a.cols));
    for (int64_t i = begin; i < end; ++i) {
      const int64_t c = a.ids[i];
      if (c < 0 || (i > 0 && a.ids[i - 1] == c)) continue;  // another's first pair has them all
      std::fill(sum.begin(), sum.end(), 0.f);
      double bias = 0;
      for (int64_t j = i; j < a.pairs && a.ids[j] == c; ++j) {
        const float dy = a.dy[a.from[j]];
        bias += dy;
        if (a.dw) add(a.cols, dy, row_of<T>(a.x, a.from[j] / a.count, a.cols), sum.data());
      }
      if (a.dw)
        row_map(a.cols, row_of<T>(a.dw, c, a.cols), [](Vec x) { return x; }, static_cast<const float*>(sum.data()));
      if (a.db) a.db[c] = float(bias);
    }
  });
}

}  // namespace

LIGER_REGISTER(class_logits_forward,
               [](const ClassLogits& a, Stream) { dispatch(a.dtype, [&]<class T>() { forward<T>(a); }); });
LIGER_REGISTER(class_logits_dx,
               [](const ClassLogitsDx& a, Stream) { dispatch(a.dtype, [&]<class T>() { dx<T>(a); }); });
LIGER_REGISTER(class_logits_dw,
               [](const ClassLogitsDw& a, Stream) { dispatch(a.dtype, [&]<class T>() { dw<T>(a); }); });

}  // namespace LIGER_CPU::class_logits
