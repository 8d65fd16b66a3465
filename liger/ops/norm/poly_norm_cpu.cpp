#include "liger/core/cpu/row.h"
#include "liger/ops/norm/poly_norm.h"

namespace LIGER_CPU::poly_norm {
namespace {

template <class T>
void forward(const PolyNormForward& a) {
  for_rows(a.rows, a.cols, [&](int64_t r) {
    const T* x = row_of<T>(a.x, r, a.cols);
    float* rstd = a.rstd + r * 3;
    const auto inverse_root = [&](double sum) { return float(1 / std::sqrt(sum / a.cols + a.eps)); };
    const auto squares = row_sums<3>(
        a.cols,
        [](Vec x) {
          const Vec x2 = x * x;
          return std::array{x2 * x2 * x2, x2 * x2, x2};
        },
        x);
    std::transform(squares.begin(), squares.end(), rstd, inverse_root);
    const Vec k3(number(a.w, 0) * rstd[0]), k2(number(a.w, 1) * rstd[1]), k1(number(a.w, 2) * rstd[2]), b(number(a.b));
    row_map(a.cols, row_of<T>(a.y, r, a.cols), [&](Vec x) { return ((k3 * x + k2) * x + k1) * x + b; }, x);
  });
}

/// Partial sum s is that of a run of rows.
template <class T>
void backward(const PolyNormBackward& a) {
  const int64_t run = ceil_div(a.rows, a.partials);
  const float w[] = {number(a.w, 0), number(a.w, 1), number(a.w, 2)};
  for_rows(a.partials, run * a.cols, [&](int64_t s) {
    double sums[4] = {};
    for (int64_t r = s * run; r < std::min(a.rows, (s + 1) * run); ++r) {
      const T *x = row_of<T>(a.x, r, a.cols), *dy = row_of<T>(a.dy, r, a.cols);
      const float* rstd = a.rstd + r * 3;
      const auto [s3, s2, s1, db] =
          row_sums<4>(a.cols, [](Vec x, Vec dy) { return std::array{dy * x * x * x, dy * x * x, dy * x, dy}; }, x, dy);
      sums[0] += rstd[0] * s3, sums[1] += rstd[1] * s2, sums[2] += rstd[2] * s1, sums[3] += db;
      if (!a.dx) continue;
      const auto cubed = [](double v) { return v * v * v; };
      const Vec k3(3 * w[0] * rstd[0]), k2(2 * w[1] * rstd[1]), k1(w[2] * rstd[2]);
      const Vec c3(float(3 * w[0] * cubed(rstd[0]) * s3 / a.cols)), c2(float(2 * w[1] * cubed(rstd[1]) * s2 / a.cols)),
          c1(float(w[2] * cubed(rstd[2]) * s1 / a.cols));
      row_map(
          a.cols, row_of<T>(a.dx, r, a.cols),
          [&](Vec x, Vec dy) {
            const Vec x2 = x * x;
            return dy * (k3 * x2 + k2 * x + k1) - ((c3 * x2 + c2) * x2 + c1) * x;
          },
          x, dy);
    }
    std::copy(sums, sums + 3, a.dw + s * 3), a.db[s] = float(sums[3]);
  });
}

}  // namespace

LIGER_REGISTER(poly_norm_forward,
               [](const PolyNormForward& a, Stream) { dispatch(a.dtype, [&]<class T>() { forward<T>(a); }); });
LIGER_REGISTER(poly_norm_backward,
               [](const PolyNormBackward& a, Stream) { dispatch(a.dtype, [&]<class T>() { backward<T>(a); }); });

}  // namespace LIGER_CPU::poly_norm
