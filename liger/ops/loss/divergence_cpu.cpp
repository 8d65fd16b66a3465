#include "liger/core/cpu/row.h"
#include "liger/ops/loss/divergence.h"

namespace LIGER_CPU::divergence {
namespace {

template <class X, class T, class Formula>
void chunks(const DivergenceChunks& a) {
  const int64_t per_row = ceil_div(a.cols, a.chunk);
  const Vec parameter(a.parameter), scale(a.count ? a.scale / *a.count : a.scale), zero(0.f);
  for_row_chunks(
      a.rows, a.cols,
      [&](int64_t r, int64_t begin, int64_t n) {
        const bool ignored = a.labels && a.labels[r] == a.ignore_index;
        const X* x = static_cast<const X*>(a.x) + r * a.cols + begin;
        const int64_t offset = r * a.cols + begin;
        LongSum sum;
        for_each(n, [&](int64_t c, int64_t k) {
          Slope<Vec> at{zero, zero};
          if (!ignored)
            at = Formula::template at<Math>(read(x + c, k), read(static_cast<const T*>(a.target) + offset + c, k),
                                            parameter);
          sum.add(at.f, k);
          if (a.each) write(at.f, a.each + offset + c, k);
          if (a.dx)
            write(at.df * (a.upstream ? scale * read(a.upstream + offset + c, k) : scale),
                  static_cast<X*>(a.dx) + offset + c, k);
        });
        if (a.sums) a.sums[r * per_row + begin / a.chunk] = float(sum.value());
      },
      a.chunk);
}

}  // namespace

LIGER_REGISTER(divergence_count, [](const DivergenceCount& a, Stream) {
  int64_t n = 0;
  for (int64_t r = 0; r < a.rows; ++r) n += a.labels[r] != a.ignore_index;
  *a.count = float(std::max<int64_t>(n, 1));
});

LIGER_REGISTER(divergence_chunks, [](const DivergenceChunks& a, Stream) {
  dispatch_weighted(a.dtype, a.target_dtype, [&]<class X, class T>() {
    dispatch_divergence(a.kind, [&]<class Formula>() { chunks<X, T, Formula>(a); });
  });
});

LIGER_REGISTER(divergence_total, [](const DivergenceTotal& a, Stream) {
  double sum = 0;
  for (int64_t i = 0; i < a.chunks; ++i) sum += a.sums[i];
  dispatch(a.dtype, [&]<class T>() { *static_cast<T*>(a.total) = T(float(sum * a.scale / (a.count ? *a.count : 1))); });
});

}  // namespace LIGER_CPU::divergence
