#include "liger/core/cpu/row.h"
#include "liger/ops/norm/norm.h"

namespace LIGER_CPU::norm {
namespace {

/// sum = row `row` of m, plus a number.
void fill(std::vector<float>& sum, DType dtype, const void* m, int64_t row, float plus) {
  const int64_t cols = int64_t(sum.size());
  dispatch(dtype, [&]<class M>() {
    row_map(cols, sum.data(), [&](Vec v) { return v + Vec(plus); }, row_of<M>(m, row, cols));
  });
}

/// v + plus as floats; `absent` where there is no v.
template <class Args>
std::vector<float> floats(const Args& a, const void* v, float plus, float absent) {
  std::vector<float> sum(a.cols, absent);
  if (v) fill(sum, a.w_dtype, v, 0, plus);
  return sum;
}

/// The mean of f(a, b, …) along a row.
template <class F, class... In>
float mean_of(int64_t cols, F f, const In*... in) {
  return float(row_sum(cols, f, in...) / cols);
}

/// Rows of scale or shift, `plus` more, as floats: one at a time, which many rows share.
class Modulation {
 public:
  template <class Args>
  const float* row(const Args& a, const void* m, int64_t row, float plus) {
    if (!m) return nullptr;
    if (row / a.per_modulation == row_) return floats_.data();
    row_ = row / a.per_modulation, floats_.resize(a.cols);
    fill(floats_, a.modulation_dtype, m, row_, plus);
    return floats_.data();
  }

 private:
  int64_t row_ = -1;
  std::vector<float> floats_;
};

/// How x̂ is made of x, and where it is rounded.
template <class T, bool kCentred>
struct Normalised {
  Vec mean, rstd;
  Casting casting;

  Vec xhat(const Vec& x) const {
    if constexpr (kCentred) return (x - mean) * rstd;
    return x * rstd;
  }
  /// As it meets the weight.
  Vec rounded(const Vec& xhat) const { return kCentred || casting == Casting::Gemma ? xhat : round_to<T>(xhat); }
};

template <class T, bool kCentred, bool kModulated>
void forward(const NormForward& a) {
  auto weights = floats(a, a.w, a.offset, 1);
  if (a.casting == Casting::None) row_map(a.cols, weights.data(), [](Vec w) { return round_to<T>(w); }, weights.data());
  const auto biases = kCentred ? floats(a, a.b, 0, 0) : std::vector<float>();
  for_runs(a.rows, a.cols, [&](int64_t begin, int64_t end) {
    Modulation scales, shifts;
    for (int64_t r = begin; r < end; ++r) {
      const T* x = row_of<T>(a.x, r, a.cols);
      T* y = row_of<T>(a.y, r, a.cols);
      if (a.residual) {
        T* s = row_of<T>(a.s, r, a.cols);
        row_map(a.cols, s, [](Vec x, Vec residual) { return x + residual; }, x, row_of<T>(a.residual, r, a.cols));
        x = s;
      }
      const float *w = weights.data(), *b = biases.data();
      float mean = 0;
      double squares;
      if constexpr (kCentred) {
        const Moments of_row = moments(a.cols, x);
        a.mean[r] = mean = of_row.mean, squares = of_row.squares;
      } else {
        squares = row_sum(a.cols, [](Vec x) { return x * x; }, x);
      }
      float rstd = float(1 / std::sqrt(squares / a.cols + a.eps));
      a.rstd[r] = rstd = a.casting == Casting::None ? round_to<T>(rstd) : rstd;
      const Normalised<T, kCentred> row{Vec(mean), Vec(rstd), a.casting};
      const float *scale = scales.row(a, a.scale, r, 1), *shift = shifts.row(a, a.shift, r, 0);
      for_each(a.cols, [&](int64_t c, int64_t n) {
        Vec v = row.rounded(row.xhat(read(x + c, n))) * read(w + c, n);
        if constexpr (kCentred) v = v + read(b + c, n);
        if constexpr (kModulated) {
          v = round_to<T>(v) * read(scale + c, n);
          if (shift) v = v + read(shift + c, n);
        }
        write(v, y + c, n);
      });
    }
  });
}

/// The means along a row of g · x̂ and, where the mean counts, of g = dy · w · scale.
template <class T, bool kCentred>
std::array<Vec, 2> project(int64_t cols, const Normalised<T, kCentred>& row, const T* x, const T* dy, const float* w,
                           const float* scale) {
  if constexpr (kCentred) {
    const auto f = [&](Vec dy, Vec x, Vec w) {
      const Vec g = dy * w;
      return std::array{g * row.xhat(x), g};
    };
    const auto sums = row_sums<2>(cols, f, dy, x, w);
    return {Vec(float(sums[0] / cols)), Vec(float(sums[1] / cols))};
  }
  const auto f = [&](Vec dy, Vec x, Vec w) { return dy * w * row.xhat(x); };
  const auto modulated = [&](Vec dy, Vec x, Vec w, Vec m) { return dy * m * w * row.xhat(x); };
  return {Vec(scale ? mean_of(cols, modulated, dy, x, w, scale) : mean_of(cols, f, dy, x, w)), Vec(0.f)};
}

/// Partial sum s is that of a run of rows, within a modulation's: no two threads add to the same sum.
template <class T, bool kCentred, bool kModulated>
void backward(const NormBackward& a) {
  const auto weights = floats(a, a.w, a.offset, 1);
  const bool own = a.own_modulation();
  const int64_t sets = a.shared_modulation() ? a.modulations : 1;
  const int64_t set_rows = a.rows / sets, set_partials = a.partials / sets, run = ceil_div(set_rows, set_partials);
  for_rows(a.partials, run * a.cols, [&](int64_t s) {
    const int64_t set = s / set_partials, begin = s % set_partials * run;
    const float* w = weights.data();
    const auto part_of = [&](void* sums) { return sums ? static_cast<float*>(sums) + s * a.cols : nullptr; };
    float *dw = part_of(a.dw), *db = part_of(a.db);
    for (float* sums : {dw, db})
      if (sums) std::fill_n(sums, a.cols, 0.f);
    const auto add = [&](float* sums, int64_t c, int64_t n, Vec v) {
      if (sums) write(read(sums + c, n) + v, sums + c, n);
    };
    Modulation scales;
    for (int64_t i = begin; i < std::min(set_rows, begin + run); ++i) {
      const int64_t r = set * set_rows + i;
      const T *x = row_of<T>(a.x, r, a.cols), *dy = row_of<T>(a.dy, r, a.cols),
              *ds = a.ds ? row_of<T>(a.ds, r, a.cols) : nullptr;
      T* dx = a.dx ? row_of<T>(a.dx, r, a.cols) : nullptr;
      const Normalised<T, kCentred> row{Vec(kCentred ? a.mean[r] : 0), Vec(a.rstd[r]), a.casting};
      const float* scale = scales.row(a, a.scale, r, 1);
      const auto means = project(a.cols, row, x, dy, w, scale);
      const Vec onto = means[0], mean = means[1];
      for_each(a.cols, [&](int64_t c, int64_t n) {
        const Vec xv = read(x + c, n), wv = read(w + c, n), d = read(dy + c, n),
                  dn = kModulated ? d * read(scale + c, n) : d, xhat = row.xhat(xv), g = dn * wv;
        add(dw, c, n, (own ? dn : d) * row.rounded(xhat));
        if constexpr (kCentred || kModulated) add(db, c, n, d);
        Vec v = row.rstd * (g - mean - xhat * onto);
        if (ds) v = v + read(ds + c, n);
        if (dx) write(v, dx + c, n);
      });
      if (own)
        dispatch(a.modulation_dtype, [&]<class M>() {
          if (a.dscale)
            row_map(
                a.cols, row_of<M>(a.dscale, r, a.cols),
                [&](Vec dy, Vec x, Vec w) { return dy * round_to<T>(row.rounded(row.xhat(x)) * w); }, dy, x, w);
          if (a.dshift) row_map(a.cols, row_of<M>(a.dshift, r, a.cols), [](Vec dy) { return dy; }, dy);
        });
    }
  });
}

/// Calls f.operator()<T, kCentred, kModulated>().
template <class Args, class F>
void dispatch_norm(const Args& a, F&& f) {
  dispatch(a.dtype, [&]<class T>() {
    if (a.centred) f.template operator()<T, true, false>();
    else if (a.scale) f.template operator()<T, false, true>();
    else f.template operator()<T, false, false>();
  });
}

}  // namespace

LIGER_REGISTER(norm_forward, [](const NormForward& a, Stream) {
  dispatch_norm(a, [&]<class T, bool kCentred, bool kModulated>() { forward<T, kCentred, kModulated>(a); });
});
LIGER_REGISTER(norm_backward, [](const NormBackward& a, Stream) {
  dispatch_norm(a, [&]<class T, bool kCentred, bool kModulated>() { backward<T, kCentred, kModulated>(a); });
});

}  // namespace LIGER_CPU::norm
