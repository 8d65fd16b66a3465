#include "liger/core/cpu/row.h"
#include "liger/ops/research/connections/mhc_coefficients.h"

namespace LIGER_CPU::mhc_coefficients {
namespace {

constexpr int kMost = MHCCoefficientsForward::kMostStreams;
using Column = std::array<float, kMost>;

/// A row's softmax p, and the factors R and C after the steps so far.
struct Sinkhorn {
  int s;
  float eps;
  std::array<Column, kMost> p;
  Column r, c;

  template <class L>
  Sinkhorn(int s, float eps, L logit) : s(s), eps(eps) {
    r.fill(1), c.fill(1);
    for (int i = 0; i < s; ++i) {
      float max = -INFINITY, sum = 0;
      for (int j = 0; j < s; ++j) p[i][j] = logit(i, j), max = std::max(max, p[i][j]);
      for (int j = 0; j < s; ++j) sum += p[i][j] = std::exp(p[i][j] - max);
      for (int j = 0; j < s; ++j) p[i][j] /= sum;
    }
  }
  float a(int i, int j) const { return p[i][j] + eps; }

  void step(bool rows_too) {
    for (int i = 0; rows_too && i < s; ++i) {
      float sum = 0;
      for (int j = 0; j < s; ++j) sum += a(i, j) * c[j];
      r[i] /= r[i] * sum + eps;
    }
    for (int j = 0; j < s; ++j) {
      float sum = 0;
      for (int i = 0; i < s; ++i) sum += r[i] * a(i, j);
      c[j] /= c[j] * sum + eps;
    }
  }
};

template <class T>
void forward(const MHCCoefficientsForward& a) {
  const int s = a.streams, columns = s * (s + 2);
  for_rows(a.rows, a.cols + s * s * a.iterations, [&](int64_t row) {
    const double squares = row_sum(a.cols, [](Vec x) { return x * x; }, row_of<T>(a.x, row, a.cols));
    const float rstd = a.rstd[row] = float(1 / std::sqrt(squares / a.cols + a.rms_eps));
    const auto logit = [&](float alpha, int column) {
      return alpha * (rstd * a.y[row * columns + column]) + a.b[column];
    };
    for (int i = 0; i < s; ++i) {
      a.pre[row * s + i] = sigmoid(logit(*a.alpha_pre, i)) + a.pre_eps;
      a.post[row * s + i] = sigmoid(logit(*a.alpha_post, s + i)) * a.post_scale;
    }
    Sinkhorn of(s, a.sinkhorn_eps, [&](int i, int j) { return logit(*a.alpha_res, (2 + i) * s + j); });
    for (int64_t t = 0; t < a.iterations; ++t) of.step(t > 0);
    for (int i = 0; i < s; ++i)
      for (int j = 0; j < s; ++j) a.res[(row * s + i) * s + j] = of.r[i] * of.a(i, j) * of.c[j];
  });
}

/// Partial sum n is that of a run of rows.
void backward(const MHCCoefficientsBackward& a) {
  const int s = a.streams, columns = s * (s + 2);
  const int64_t run = ceil_div(a.rows, a.partials);
  for_rows(a.partials, run * s * s * a.iterations, [&](int64_t n) {
    std::array<double, kMost*(kMost + 2)> db{};
    std::array<double, 3> dalpha{};
    for (int64_t row = n * run; row < std::min(a.rows, (n + 1) * run); ++row) {
      const float *y = a.y + row * columns, rstd = a.rstd[row];
      float* dy = a.dy + row * columns;
      const float alphas[] = {*a.alpha_pre, *a.alpha_post, *a.alpha_res};
      const auto logit = [&](int group, int column) { return alphas[group] * (rstd * y[column]) + a.b[column]; };
      double along = 0;
      const auto put = [&](int group, int column, float dl) {
        db[column] += dl, dalpha[group] += double(dl) * rstd * y[column];
        dy[column] = rstd * alphas[group] * dl, along += double(alphas[group]) * dl * y[column];
      };
      for (int i = 0; i < s; ++i) {
        const float pre = sigmoid(logit(0, i)), post = sigmoid(logit(1, s + i));
        put(0, i, a.dpre[row * s + i] * pre * (1 - pre));
        put(1, s + i, a.dpost[row * s + i] * a.post_scale * post * (1 - post));
      }

      Sinkhorn of(s, a.sinkhorn_eps, [&](int i, int j) { return logit(2, (2 + i) * s + j); });
      const auto factors = [&](int64_t t) { return a.factors + (t * a.rows + row) * 2 * s; };
      for (int64_t t = 0; t < a.iterations; ++t) {
        of.step(t > 0);
        std::copy_n(of.r.data(), s, factors(t)), std::copy_n(of.c.data(), s, factors(t) + s);
      }
      std::array<Column, kMost> g;
      for (int i = 0; i < s; ++i)
        for (int j = 0; j < s; ++j) g[i][j] = a.dres[(row * s + i) * s + j] * of.r[i] * of.c[j];
      for (int64_t t = a.iterations - 1; t >= 0; --t) {
        const float *r = factors(t), *c = r + s;
        for (int j = 0; j < s; ++j) {
          float dot = 0;
          for (int i = 0; i < s; ++i) dot += of.a(i, j) * g[i][j];
          for (int i = 0; i < s; ++i) g[i][j] -= r[i] * c[j] * dot;
        }
        if (t == 0) break;
        const float* before = factors(t - 1) + s;
        for (int i = 0; i < s; ++i) {
          float dot = 0;
          for (int j = 0; j < s; ++j) dot += of.a(i, j) * g[i][j];
          for (int j = 0; j < s; ++j) g[i][j] -= r[i] * before[j] * dot;
        }
      }
      for (int i = 0; i < s; ++i) {
        float dot = 0;
        for (int j = 0; j < s; ++j) dot += of.p[i][j] * g[i][j];
        for (int j = 0; j < s; ++j) put(2, (2 + i) * s + j, of.p[i][j] * (g[i][j] - dot));
      }
      a.scale[row] = float(-along * rstd * rstd * rstd / a.cols);
    }
    std::copy_n(db.data(), columns, a.db + n * columns);
    for (int group = 0; group < 3; ++group) a.dalpha[group * a.partials + n] = float(dalpha[group]);
  });
}

}  // namespace

LIGER_REGISTER(mhc_coefficients_forward,
               [](const MHCCoefficientsForward& a, Stream) { dispatch(a.dtype, [&]<class T>() { forward<T>(a); }); });
LIGER_REGISTER(mhc_coefficients_backward, [](const MHCCoefficientsBackward& a, Stream) { backward(a); });

}  // namespace LIGER_CPU::mhc_coefficients
