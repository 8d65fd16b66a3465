#include "liger/core/cpu/row.h"
#include "liger/ops/research/norm/dyt.h"

namespace LIGER_CPU::dyt {
namespace {

std::vector<float> floats(DType dtype, const void* v, int64_t cols) {
  std::vector<float> of(cols);
  if (v)
    dispatch(dtype, [&]<class W>() { row_map(cols, of.data(), [](Vec w) { return w; }, static_cast<const W*>(v)); });
  return of;
}

template <class T>
void forward(const DyTForward& a) {
  const auto w = floats(a.w_dtype, a.w, a.cols), b = floats(a.w_dtype, a.b, a.cols);
  const Vec alpha(number(a.alpha));
  for_rows(a.rows, a.cols, [&](int64_t r) {
    row_map(
        a.cols, row_of<T>(a.y, r, a.cols), [&](Vec x, Vec w, Vec b) { return Math::tanh(x * alpha) * w + b; },
        row_of<T>(a.x, r, a.cols), w.data(), b.data());
  });
}

/// Partial sum s is that of a run of rows: no two threads add to the same sum.
template <class T>
void backward(const DyTBackward& a) {
  const auto w = floats(a.w_dtype, a.w, a.cols);
  const Vec alpha(number(a.alpha));
  const int64_t run = ceil_div(a.rows, a.partials);
  for_rows(a.partials, run * a.cols, [&](int64_t s) {
    float *dw = a.dw ? a.dw + s * a.cols : nullptr, *db = a.db ? a.db + s * a.cols : nullptr;
    for (float* sums : {dw, db})
      if (sums) std::fill_n(sums, a.cols, 0.f);
    const auto add = [](float* sums, int64_t c, int64_t n, Vec v) {
      if (sums) write(read(sums + c, n) + v, sums + c, n);
    };
    LongSum dalpha;
    for (int64_t r = s * run; r < std::min(a.rows, (s + 1) * run); ++r) {
      const T *x = row_of<T>(a.x, r, a.cols), *dy = row_of<T>(a.dy, r, a.cols);
      T* dx = a.dx ? row_of<T>(a.dx, r, a.cols) : nullptr;
      for_each(a.cols, [&](int64_t c, int64_t n) {
        const Vec xv = read(x + c, n), d = read(dy + c, n), t = Math::tanh(xv * alpha),
                  slope = (Vec(1.f) - t * t) * (d * read(w.data() + c, n));
        add(dw, c, n, d * t);
        add(db, c, n, d);
        if (a.dalpha) dalpha.add(xv * slope, n);
        if (dx) write(slope * alpha, dx + c, n);
      });
    }
    if (a.dalpha) a.dalpha[s] = float(dalpha.value());
  });
}

}  // namespace

LIGER_REGISTER(dyt_forward, [](const DyTForward& a, Stream) { dispatch(a.dtype, [&]<class T>() { forward<T>(a); }); });
LIGER_REGISTER(dyt_backward,
               [](const DyTBackward& a, Stream) { dispatch(a.dtype, [&]<class T>() { backward<T>(a); }); });

}  // namespace LIGER_CPU::dyt
