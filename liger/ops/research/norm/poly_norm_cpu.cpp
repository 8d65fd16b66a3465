#include "liger/core/cpu/row.h"
#include "liger/ops/research/norm/poly_norm.h"

namespace LIGER_CPU::poly_norm {
namespace {

template <class T>
void forward(const PolyNormForward& a) {
  for_rows(a.rows, a.cols, [&](int64_t r) {
    const T* x = row_of<T>(a.x, r, a.cols);
    float* rstd = a.rstd + r * 3;
    const auto squares = row_sums<3>(a.cols, PolyNorm::Squares{}, x);
    for (int i = 0; i < 3; ++i) rstd[i] = float(1 / std::sqrt(squares[i] / a.cols + a.eps));
    row_map(a.cols, row_of<T>(a.y, r, a.cols), PolyNorm::Value<Vec>(numbers<3>(a.w).data(), rstd, number(a.b)), x);
  });
}

/// Partial sum s is that of a run of rows.
template <class T>
void backward(const PolyNormBackward& a) {
  const int64_t run = ceil_div(a.rows, a.partials);
  const auto w = numbers<3>(a.w);
  for_rows(a.partials, run * a.cols, [&](int64_t s) {
    double total[4] = {};
    for (int64_t r = s * run; r < std::min(a.rows, (s + 1) * run); ++r) {
      const T *x = row_of<T>(a.x, r, a.cols), *dy = row_of<T>(a.dy, r, a.cols);
      const float* rstd = a.rstd + r * 3;
      const auto sums = row_sums<4>(a.cols, PolyNorm::Products{}, x, dy);
      for (int i = 0; i < 4; ++i) total[i] += i < 3 ? rstd[i] * sums[i] : sums[i];
      const PolyNorm::Slope<Vec> slope(w.data(), rstd, sums.data(), a.cols);
      if (a.dx) row_map(a.cols, row_of<T>(a.dx, r, a.cols), slope, x, dy);
    }
    std::copy(total, total + 3, a.dw + s * 3), a.db[s] = float(total[3]);
  });
}

}  // namespace

LIGER_REGISTER(poly_norm_forward,
               [](const PolyNormForward& a, Stream) { dispatch(a.dtype, [&]<class T>() { forward<T>(a); }); });
LIGER_REGISTER(poly_norm_backward,
               [](const PolyNormBackward& a, Stream) { dispatch(a.dtype, [&]<class T>() { backward<T>(a); }); });

}  // namespace LIGER_CPU::poly_norm
