#include "liger/ops/mixers/delta_rule_cpu.h"

namespace LIGER_CPU::gated_delta_rule {
namespace {

using namespace delta_rule;

/// One gate for each token of a head.
struct HeadGates {
  explicit HeadGates(const Rows& rows)
      : K_(rows.K), kt_(rows.K, kChunk), products_(kChunk, kChunk), square_(kChunk, kChunk) {}

  float a[kChunk][kChunk], p[kChunk][kChunk];

  void open(const Rows& rows) {
    double sum[kChunk];
    for (int64_t i = 0; i < kChunk; ++i)
      // In double, for decays are differences of sums; bounded, for no difference of infinities is a number.
      sum[i] = (i ? sum[i - 1] : 0.) + (i < rows.n ? std::max(rows.a.g[rows.at(i)], -1000.f) : 0.f);
    for (int64_t i = 0; i < kChunk; ++i) {
      from_start_[i] = std::exp(float(sum[i]));
      to_end_[i] = i < rows.n ? std::exp(float(sum[kChunk - 1] - sum[i])) : 0.f;
      for (int64_t j = 0; j < kChunk; ++j) decay_[i][j] = j <= i && i < rows.n ? std::exp(float(sum[i] - sum[j])) : 0.f;
    }
    transpose(kChunk, rows.K, rows.k[0], rows.K, kt_[0], kChunk);
    const auto times_keys = [&](const Matrix& of, float (&to)[kChunk][kChunk], int64_t diagonal) {
      multiply<false>(kChunk, kChunk, rows.K, of[0], rows.K, kt_[0], kChunk, products_[0], kChunk);
      for (int64_t i = 0; i < kChunk; ++i)
        for (int64_t j = 0; j < kChunk; ++j) to[i][j] = j < i + diagonal ? products_[i][j] * decay_[i][j] : 0.f;
    };
    times_keys(rows.k, a, 0), times_keys(rows.q, p, 1);
  }

  void from_start(int64_t i, float s, const float* x, float* y) const { scale(K_, s * from_start_[i], x, y); }
  void to_end(int64_t i, float s, const float* x, float* y) const { scale(K_, s * to_end_[i], x, y); }
  void keep(Matrix& state) const { scale(int64_t(state.numbers.size()), from_start_[kChunk - 1], state[0], state[0]); }

  void gradients(const Rows& rows, const ChunkGradients& of) {
    auto& [w, y, by_state, of_d, state, after] = of;
    const int64_t K = rows.K;
    const float* beta = rows.beta;
    // In double: of what a token's decay gets, most cancels where decays are strong.
    std::fill_n(dsum_, kChunk, 0.);
    for (int64_t i = 0; i < kChunk; ++i)
      for (int64_t j = 0; j < kChunk; ++j) {
        const float by = y[i][j] * (rows.a.delta ? -beta[i] * beta[j] : 0.f);
        w[i][j] *= beta[j];
        if (j < i) {
          const float z = w[i][j] * p[i][j] + by * a[i][j];
          dsum_[i] += z, dsum_[j] -= z;
        }
        w[i][j] *= decay_[i][j], y[i][j] = j < i ? by * decay_[i][j] : 0.f;
      }
    double ends = 0;
    for (int64_t i = 0; i < kChunk; ++i) {
      const float of_end = to_end_[i] * beta[i], of_start = rows.a.delta ? from_start_[i] * beta[i] : 0.f,
                  at_end = of_end * dot(K, rows.k[i], of_d[i]);
      dsum_[i] += from_start_[i] * dot(K, rows.q[i], by_state[i]);
      dsum_[i] -= at_end;
      dsum_[i] -= of_start * dot(K, rows.k[i], by_state[kChunk + i]);
      ends += at_end;
      scale(K, from_start_[i], by_state[i], by_state[i]);
      scale(K, of_end, of_d[i], of_d[i]);
      add_scaled(K, -of_start, by_state[kChunk + i], of_d[i]);
    }
    dsum_[rows.n - 1] += ends + from_start_[kChunk - 1] * dot(K * rows.V, state, after);
    // dQ̂ and dK̂.
    multiply<true>(kChunk, K, kChunk, w[0], kChunk, rows.k[0], K, by_state[0], K);
    transpose(kChunk, kChunk, w[0], kChunk, square_[0], kChunk);
    multiply<true>(kChunk, K, kChunk, square_[0], kChunk, rows.q[0], K, of_d[0], K);
    transpose(kChunk, kChunk, y[0], kChunk, square_[0], kChunk);
    for (int64_t i = 0; i < kChunk; ++i) add_scaled(kChunk, 1.f, y[i], square_[i]);
    multiply<true>(kChunk, K, kChunk, square_[0], kChunk, rows.k[0], K, of_d[0], K);
  }

  /// dg of the chunk, 0 for the first token of a document that begins with nothing.
  void write(const Rows& rows, bool begins, float* dg) const {
    double sum = 0;
    for (int64_t i = rows.n - 1; i >= 0; --i) {
      sum += dsum_[i];
      dg[rows.at(i)] = begins && i == 0 ? 0.f : float(sum);
    }
  }

 private:
  const int64_t K_;
  Matrix kt_, products_, square_;
  float from_start_[kChunk], to_end_[kChunk], decay_[kChunk][kChunk];
  double dsum_[kChunk];
};

}  // namespace

LIGER_REGISTER(gated_delta_rule_forward, [](const GatedDeltaRuleForward& a, Stream) {
  dispatch(a.dtype, [&]<class T>() { forward<T, HeadGates>(a); });
});
LIGER_REGISTER(gated_delta_rule_backward, [](const GatedDeltaRuleBackward& a, Stream) {
  dispatch(a.dtype, [&]<class T>() { backward<T, HeadGates>(a); });
});
LIGER_REGISTER(gated_delta_rule_workspace, [](const GatedDeltaRuleWorkspace& a, Stream) { *a.bytes = 0; });

}  // namespace LIGER_CPU::gated_delta_rule
