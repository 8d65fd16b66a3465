#include "liger/core/cpu/row.h"
#include "liger/ops/research/connections/attention_residuals.h"

namespace LIGER_CPU::attention_residuals {
namespace {

template <class T, class W>
void forward(const AttentionResidualsForward& a) {
  const auto *query = static_cast<const W*>(a.query), *weight = static_cast<const W*>(a.weight);
  for_rows(a.rows, a.blocks * a.cols * 2, [&](int64_t r) {
    const auto v = [&](int n) { return row_of<T>(a.v, n * a.rows + r, a.cols); };
    float *alpha = a.alpha + r * a.blocks, *rstd = a.rstd + r * a.blocks, max = -INFINITY;
    for (int n = 0; n < a.blocks; ++n) {
      const auto sums = row_sums<2>(a.cols, AttentionResiduals::Scores{}, v(n), query, weight);
      const double r_n = 1 / std::sqrt(sums[0] / a.cols + a.eps);
      rstd[n] = float(r_n), alpha[n] = float(r_n * sums[1]), max = Max{}(max, alpha[n]);
    }
    double total = 0;
    for (int n = 0; n < a.blocks; ++n) total += alpha[n] = std::exp(alpha[n] - max);
    for (int n = 0; n < a.blocks; ++n) alpha[n] = float(alpha[n] / total);
    T* h = row_of<T>(a.h, r, a.cols);
    for_each(a.cols, [&](int64_t c, int64_t k) {
      Vec sum(0.f);
      for (int n = 0; n < a.blocks; ++n) sum = Math::fma(Vec(alpha[n]), read(v(n) + c, k), sum);
      write(sum, h + c, k);
    });
  });
}

/// Partial sum s is that of a run of rows.
template <class T, class W>
void backward(const AttentionResidualsBackward& a) {
  const auto *query = static_cast<const W*>(a.query), *weight = static_cast<const W*>(a.weight);
  const int64_t run = ceil_div(a.rows, a.partials);
  for_rows(a.partials, run * a.blocks * a.cols * 2, [&](int64_t s) {
    float* const g = a.g + s * a.cols;
    std::fill_n(g, a.cols, 0.f);
    for (int64_t r = s * run; r < std::min(a.rows, (s + 1) * run); ++r) {
      const T* dh = row_of<T>(a.dh, r, a.cols);
      const auto v = [&](int n) { return n * a.rows + r; };
      const float *alpha = a.alpha + r * a.blocks, *rstd = a.rstd + r * a.blocks;
      std::array<double, AttentionResiduals::kMostBlocks> dalpha, score;
      for (int n = 0; n < a.blocks; ++n) {
        const auto sums = row_sums<2>(
            a.cols, [](Vec v, Vec dh, Vec query, Vec weight) { return std::array{v * dh, v * (query * weight)}; },
            row_of<T>(a.v, v(n), a.cols), dh, query, weight);
        dalpha[n] = sums[0], score[n] = sums[1];
      }
      const double mean = AttentionResiduals::mean_from_heaviest(alpha, dalpha.data(), a.blocks);
      std::array<float, AttentionResiduals::kMostBlocks> of_u, of_v;
      for (int n = 0; n < a.blocks; ++n) {
        const double ds = alpha[n] * (dalpha[n] - mean) * rstd[n];
        of_u[n] = float(ds), of_v[n] = float(ds * rstd[n] * rstd[n] / a.cols * score[n]);
      }
      for_each(a.cols, [&](int64_t c, int64_t k) {
        const Vec d = read(dh + c, k), u = read(query + c, k) * read(weight + c, k);
        Vec of_row(0.f);
        for (int n = 0; n < a.blocks; ++n) {
          const Vec x = read(row_of<T>(a.v, v(n), a.cols) + c, k);
          of_row = Math::fma(Vec(of_u[n]), x, of_row);
          if (a.dv)
            write(Vec(alpha[n]) * d + Vec(of_u[n]) * u - Vec(of_v[n]) * x, row_of<T>(a.dv, v(n), a.cols) + c, k);
        }
        write(read(g + c, k) + of_row, g + c, k);
      });
    }
  });
}

}  // namespace

LIGER_REGISTER(attention_residuals_forward, [](const AttentionResidualsForward& a, Stream) {
  dispatch_weighted(a.dtype, a.weight_dtype, [&]<class T, class W>() { forward<T, W>(a); });
});
LIGER_REGISTER(attention_residuals_backward, [](const AttentionResidualsBackward& a, Stream) {
  dispatch_weighted(a.dtype, a.weight_dtype, [&]<class T, class W>() { backward<T, W>(a); });
});

}  // namespace LIGER_CPU::attention_residuals
