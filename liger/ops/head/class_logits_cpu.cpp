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

/// Σ factor · row of rows that are added one by one.
class WeightedSum {
 public:
  explicit WeightedSum(int64_t cols) : cols_(cols), part_(size_t(cols)), total_(size_t(cols)) {}

  template <class T>
  void add(float factor, const T* row) {
    const Vec by(factor);
    row_map(cols_, part_.data(), [&](Vec sum, Vec x) { return Math::fma(by, x, sum); }, of(part_), row);
    if (++terms_ % kClassTerms == 0) meet();
  }

  /// The sum in y; the next begins.
  template <class T>
  void take(T* y) {
    meet();
    row_map(cols_, y, [](Vec x) { return x; }, of(total_));
    std::fill(total_.begin(), total_.end(), 0.f);
    terms_ = 0;
  }

 private:
  static const float* of(const std::vector<float>& v) { return v.data(); }
  void meet() {
    row_map(cols_, total_.data(), [](Vec a, Vec b) { return a + b; }, of(total_), of(part_));
    std::fill(part_.begin(), part_.end(), 0.f);
  }
  int64_t cols_, terms_ = 0;
  std::vector<float> part_, total_;
};

template <class T>
void dx(const ClassLogitsDx& a) {
  for_runs(a.rows, a.count * a.cols, [&](int64_t begin, int64_t end) {
    WeightedSum sum(a.cols);
    for (int64_t r = begin; r < end; ++r) {
      for (int64_t i = r * a.count; i < (r + 1) * a.count; ++i)
        if (a.ids[i] >= 0) sum.add(a.dy[i], row_of<T>(a.w, a.ids[i], a.cols));
      sum.take(row_of<T>(a.dx, r, a.cols));
    }
  });
}

template <class T>
void dw(const ClassLogitsDw& a) {
  for_runs(a.pairs, a.cols, [&](int64_t begin, int64_t end) {
    WeightedSum sum(a.cols);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t c = a.ids[i];
      if (c < 0 || (i > 0 && a.ids[i - 1] == c)) continue;  // another's first pair has them all
      double bias = 0;
      for (int64_t j = i; j < a.pairs && a.ids[j] == c; ++j) {
        const float dy = a.dy[a.from[j]];
        bias += dy;
        if (a.dw) sum.add(dy, row_of<T>(a.x, a.from[j] / a.count, a.cols));
      }
      if (a.dw) sum.take(row_of<T>(a.dw, c, a.cols));
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
