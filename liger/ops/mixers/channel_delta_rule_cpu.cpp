#include "liger/ops/mixers/delta_rule_cpu.h"

namespace LIGER_CPU::channel_delta_rule {
namespace {

using namespace delta_rule;

/// to = a ⊙ b.
void times(int64_t n, const float* a, const float* b, float* to) {
  for (int64_t c = 0; c < n; c += kLanes) (Vec::loadu(a + c) * Vec::loadu(b + c)).store(to + c);
}

/// f<vectors>(column) over all columns, in runs of as many vectors as registers hold.
template <class F>
void for_columns(int64_t n, F f) {
  constexpr int kMost = kLanes == 16 ? 8 : 2;
  int64_t c = 0;
  for (; c + kMost * kLanes <= n; c += kMost * kLanes) f.template operator()<kMost>(c);
  if constexpr (kMost == 8)
    for (; c + 2 * kLanes <= n; c += 2 * kLanes) f.template operator()<2>(c);
  for (; c < n; c += kLanes) f.template operator()<1>(c);
}

template <int n>
void load(Vec (&v)[n], const float* from) {
  for (int i = 0; i < n; ++i) v[i] = Vec::loadu(from + i * kLanes);
}

/// One gate for each token and channel of a head's keys. Decays are products of a token's own, e^g, which are at most
/// 1 and may be 0: no difference of sums is taken.
struct ChannelGates {
  explicit ChannelGates(const Rows& rows)
      : K_(rows.K),
        decay_(kChunk, rows.K),
        from_start_(kChunk, rows.K),
        to_end_(kChunk, rows.K),
        dsum_(kChunk, rows.K),
        columns_(kChunk, rows.K) {}

  float a[kChunk][kChunk], p[kChunk][kChunk];

  void open(const Rows& rows) {
    std::fill(decay_.numbers.begin(), decay_.numbers.end(), 1.f);
    for (int64_t i = 0; i < rows.n; ++i) {
      const float* g = rows.a.g + rows.at(i) * rows.a.K;
      for_each(rows.a.K, [&](int64_t c, int64_t n) { exp(read(g + c, n)).store(decay_[i] + c); });
    }
    std::copy_n(decay_[0], K_, from_start_[0]);
    for (int64_t i = 1; i < kChunk; ++i) times(K_, from_start_[i - 1], decay_[i], from_start_[i]);
    std::fill_n(to_end_[kChunk - 1], K_, 1.f);
    for (int64_t i = kChunk - 1; i > 0; --i) times(K_, to_end_[i], decay_[i], to_end_[i - 1]);
    std::fill_n(a[0], kChunk * kChunk, 0.f), std::fill_n(p[0], kChunk * kChunk, 0.f);
    for_columns(K_, [&]<int kVecs>(int64_t c) { add_products<kVecs>(rows, c); });
  }

  void from_start(int64_t i, float s, const float* x, float* y) const {
    times(K_, from_start_[i], x, y);
    if (s != 1) scale(K_, s, y, y);
  }
  void to_end(int64_t i, float s, const float* x, float* y) const {
    times(K_, to_end_[i], x, y);
    if (s != 1) scale(K_, s, y, y);
  }
  void keep(Matrix& state) const {
    for (int64_t d = 0; d < K_; ++d) scale(state.cols, from_start_[kChunk - 1][d], state[d], state[d]);
  }

  void gradients(const Rows& rows, const ChunkGradients& of) {
    auto& [w, y, by_state, of_d, state, after] = of;
    const float* beta = rows.beta;
    for (int64_t i = 0; i < kChunk; ++i)
      for (int64_t j = 0; j <= i; ++j) w[i][j] *= beta[j], y[i][j] *= j < i && rows.a.delta ? -beta[i] * beta[j] : 0.f;
    // What the states give.
    float* ends = columns_[0];
    std::fill_n(ends, K_, 0.f);
    for (int64_t i = 0; i < kChunk; ++i) {
      const Vec be(beta[i]), delta(rows.a.delta ? beta[i] : 0.f);
      for (int64_t c = 0; c < K_; c += kLanes) {
        const Vec start = Vec::loadu(from_start_[i] + c), k = Vec::loadu(rows.k[i] + c),
                  dq = start * Vec::loadu(by_state[i] + c),
                  end = be * Vec::loadu(to_end_[i] + c) * Vec::loadu(of_d[i] + c),
                  begin = delta * start * Vec::loadu(by_state[kChunk + i] + c);
        dq.store(by_state[i] + c), (end - begin).store(of_d[i] + c);
        (Vec::loadu(rows.q[i] + c) * dq - k * (end + begin)).store(dsum_[i] + c);
        at::vec::fmadd(k, end, Vec::loadu(ends + c)).store(ends + c);
      }
    }
    for (int64_t d = 0; d < K_; ++d)
      dsum_[rows.n - 1][d] +=
          ends[d] + from_start_[kChunk - 1][d] * dot(rows.V, state + d * rows.V, after + d * rows.V);
    // What the chunk's tokens give each other.
    std::fill(columns_.numbers.begin(), columns_.numbers.end(), 0.f);
    for_columns(K_, [&]<int kVecs>(int64_t c) { add_pairs<kVecs>(rows, of, c); });
    for (int64_t i = 0; i < kChunk; ++i)
      for (int64_t c = 0; c < K_; c += kLanes) {
        const Vec column = Vec::loadu(columns_[i] + c), q = Vec::loadu(rows.q[i] + c), k = Vec::loadu(rows.k[i] + c),
                  own(w[i][i]);
        (Vec::loadu(dsum_[i] + c) - k * column).store(dsum_[i] + c);
        // A token's own key, which does not decay, is in no sum for the gates.
        at::vec::fmadd(own, k, Vec::loadu(by_state[i] + c)).store(by_state[i] + c);
        (at::vec::fmadd(own, q, Vec::loadu(of_d[i] + c)) + column).store(of_d[i] + c);
      }
  }

  /// dg of the chunk, 0 for the first token of a document that begins with nothing.
  void write(const Rows& rows, bool begins, float* dg) {
    for (int64_t i = rows.n - 1; i >= 0; --i) {
      if (i + 1 < rows.n) add_scaled(K_, 1.f, dsum_[i + 1], dsum_[i]);
      float* to = dg + rows.at(i) * rows.a.K;
      if (begins && i == 0) std::fill_n(to, rows.a.K, 0.f);
      else std::copy_n(dsum_[i], rows.a.K, to);
    }
  }

 private:
  /// Of columns c on: A_ij += Σ k̂_i k̂_j E_ij, and P the same of q̂.
  template <int kVecs>
  void add_products(const Rows& rows, int64_t c) {
    Vec q[kVecs], k[kVecs], decay[kVecs];
    for (int64_t i = 0; i < rows.n; ++i) {
      load(q, rows.q[i] + c), load(k, rows.k[i] + c);
      for (auto& d : decay) d = Vec(1.f);
      for (int64_t j = i; j >= 0; --j) {
        Vec of_a(0.f), of_p(0.f);
        for (int v = 0; v < kVecs; ++v) {
          const Vec key = Vec::loadu(rows.k[j] + c + v * kLanes) * decay[v];
          of_p = at::vec::fmadd(q[v], key, of_p), of_a = at::vec::fmadd(k[v], key, of_a);
          decay[v] = decay[v] * Vec::loadu(decay_[j] + c + v * kLanes);
        }
        p[i][j] += reduce_lanes(of_p, Plus{});
        if (j < i) a[i][j] += reduce_lanes(of_a, Plus{});
      }
    }
  }

  /// Of columns c on, for i > j: dQ̂_i += W_ij k̂_j E_ij, dK̂_i += Y_ij k̂_j E_ij, and column j += (W_ij q̂_i + Y_ij k̂_i)
  /// E_ij.
  template <int kVecs>
  void add_pairs(const Rows& rows, const ChunkGradients& of, int64_t c) {
    Vec q[kVecs], k[kVecs], decay[kVecs], dq[kVecs], dk[kVecs];
    for (int64_t i = 1; i < rows.n; ++i) {
      load(q, rows.q[i] + c), load(k, rows.k[i] + c), load(decay, decay_[i] + c);
      for (int v = 0; v < kVecs; ++v) dq[v] = dk[v] = Vec(0.f);
      for (int64_t j = i - 1; j >= 0; --j) {
        const Vec w(of.w[i][j]), y(of.y[i][j]);
        for (int v = 0; v < kVecs; ++v) {
          const int64_t at = c + v * kLanes;
          const Vec key = Vec::loadu(rows.k[j] + at) * decay[v];
          dq[v] = at::vec::fmadd(w, key, dq[v]), dk[v] = at::vec::fmadd(y, key, dk[v]);
          at::vec::fmadd(at::vec::fmadd(w, q[v], y * k[v]), decay[v], Vec::loadu(columns_[j] + at))
              .store(columns_[j] + at);
          decay[v] = decay[v] * Vec::loadu(decay_[j] + at);
        }
      }
      for (int v = 0; v < kVecs; ++v) {
        const int64_t at = c + v * kLanes;
        (Vec::loadu(of.by_state[i] + at) + dq[v]).store(of.by_state[i] + at);
        (Vec::loadu(of.of_d[i] + at) + dk[v]).store(of.of_d[i] + at);
        (Vec::loadu(dsum_[i] + at) + q[v] * dq[v] + k[v] * dk[v]).store(dsum_[i] + at);
      }
    }
  }

  const int64_t K_;
  Matrix decay_, from_start_, to_end_;  // e^g, and e^G and e^(G_C − G)
  Matrix dsum_, columns_;               // dG, and what columns of W and Y add up to
};

}  // namespace

LIGER_REGISTER(channel_delta_rule_forward, [](const GatedDeltaRuleForward& a, Stream) {
  dispatch(a.dtype, [&]<class T>() { forward<T, ChannelGates>(a); });
});
LIGER_REGISTER(channel_delta_rule_backward, [](const GatedDeltaRuleBackward& a, Stream) {
  dispatch(a.dtype, [&]<class T>() { backward<T, ChannelGates>(a); });
});
LIGER_REGISTER(channel_delta_rule_workspace, [](const GatedDeltaRuleWorkspace& a, Stream) { *a.bytes = 0; });

}  // namespace LIGER_CPU::channel_delta_rule
