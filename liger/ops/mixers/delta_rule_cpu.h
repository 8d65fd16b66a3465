#pragma once
// Delta rules on the CPU, chunk by chunk, for any kind of gates. `Gates` has what is of the gates alone:
//   open(rows)                reads them for the open chunk
//   a, p                      A and P / s of its tokens
//   from_start(i, s, x, y)    y = s e^(G_i) ⊙ x
//   to_end(i, s, x, y)        y = s e^(G_C − G_i) ⊙ x
//   keep(state)               S ← e^(G_C) S
//   gradients(…), write(…)    their part of backward
#include "liger/core/cpu/matrix.h"
#include "liger/ops/mixers/gated_delta_rule.h"

namespace LIGER_CPU::delta_rule {

using namespace matrix;

// The cheapest size: longer chunks spend more on what lies inside of one than they save on the state.
inline constexpr int64_t kChunk = 16;

struct Document {
  int64_t row, begin, end, index;
};

/// A token without a document, which has a start below 0, is one by itself.
inline std::vector<Document> documents(const GatedDeltaRule& a) {
  std::vector<Document> found;
  for (int64_t row = 0; row < a.rows; ++row) {
    const int32_t* starts = a.starts ? a.starts + row * a.tokens : nullptr;
    for (int64_t begin = 0; begin < a.tokens;) {
      int64_t end = begin + 1;
      while (end < a.tokens && (!starts || (starts[end] >= 0 && starts[end] != end && starts[end - 1] >= 0))) ++end;
      found.push_back({row, begin, end, int64_t(found.size())});
      begin = end;
    }
  }
  return found;
}

/// q̂, k̂ and β of one head of one document, in the chunk that is open. Rows past its end, and columns past K, are 0.
struct Rows {
  const GatedDeltaRule& a;
  const Document d;
  const int64_t head, K, V;  // widths, padded
  int64_t first = 0, n = 0;  // its first token, and how many it has
  Matrix q, k;
  float beta[kChunk] = {};

  Rows(const GatedDeltaRule& a, const Document& d, int64_t head)
      : a(a), d(d), head(head), K(round_up(a.K, kPad)), V(round_up(a.V, kPad)), q(kChunk, K), k(kChunk, K) {}

  /// The place of token i among those of all rows and heads.
  int64_t at(int64_t i) const { return (d.row * a.tokens + first + i) * a.heads + head; }
  bool has_state() const { return d.index < a.documents; }
};

/// What a chunk's tokens give for the gradients of q̂, k̂ and the gates: [kChunk, ...], in place.
struct ChunkGradients {
  Matrix &w, &y;       // dO Dᵀ and R Dᵀ; become W and Y, less their decays where these are of channels
  Matrix& by_state;    // dO Sᵀ, and below it R Sᵀ; its first half becomes dQ̂
  Matrix& of_d;        // D dS'ᵀ; becomes dK̂
  const float* state;  // S [K, V], as is
  const float* after;  // dS'
};

/// One head of one document. Members that a pass does not need stay empty.
template <class T, class Gates>
class Head {
 public:
  Head(const GatedDeltaRule& a, const Document& d, int64_t head)
      : a_(a),
        rows_(a, d, head),
        gates_(rows_),
        key_head_(head / (a.heads / a.key_heads)),
        K_(rows_.K),
        V_(rows_.V),
        kt_(K_, kChunk),
        both_(2 * kChunk, K_),
        of_state_(2 * kChunk, V_),
        d_rows_(kChunk, V_),
        state_(K_, V_) {}

  int64_t chunks() const { return ceil_div(rows_.d.end - rows_.d.begin, kChunk); }

  /// The state that the document begins with.
  void begin() {
    std::fill(state_.numbers.begin(), state_.numbers.end(), 0.f);
    if (a_.state && rows_.has_state()) load(a_.state + state_at(), state_);
  }

  void open(int64_t c) {
    rows_.first = rows_.d.begin + c * kChunk, rows_.n = std::min(kChunk, rows_.d.end - rows_.first);
    for (int64_t i = 0; i < kChunk; ++i) {
      normed(a_.q, a_.q_row, a_.q_token, i, rows_.q[i]), normed(a_.k, a_.k_row, a_.k_token, i, rows_.k[i]);
      rows_.beta[i] = i < rows_.n ? a_.beta[rows_.at(i)] : 0.f;
    }
    gates_.open(rows_);
  }

  /// D of the open chunk, from the state before it; with kOut also O; then the state after it.
  template <bool kOut>
  void advance(T* o) {
    const float* beta = rows_.beta;
    // X and the part of O that the state makes, together.
    for (int64_t i = 0; i < kChunk; ++i) {
      gates_.from_start(i, -1.f, rows_.k[i], both_[i]);
      if (kOut) gates_.from_start(i, a_.scale, rows_.q[i], both_[kChunk + i]);
      widen(a_.v, a_.v_row, a_.v_token, rows_.head, a_.V, i, of_state_[i], V_);
    }
    if (a_.delta) multiply<true>(kChunk, V_, K_, both_[0], K_, state_[0], V_, of_state_[0], V_);
    if (kOut) multiply<false>(kChunk, V_, K_, both_[kChunk], K_, state_[0], V_, of_state_[kChunk], V_);
    for (int64_t i = 0; i < kChunk; ++i) {
      float* to = d_rows_[i];
      std::copy_n(of_state_[i], V_, to);
      for (int64_t j = 0; j < i && a_.delta; ++j) add_scaled(V_, -gates_.a[i][j] * beta[j], d_rows_[j], to);
    }
    if (kOut)
      for (int64_t i = 0; i < rows_.n; ++i) {
        float* row = of_state_[kChunk + i];
        for (int64_t j = 0; j <= i; ++j) add_scaled(V_, a_.scale * gates_.p[i][j] * beta[j], d_rows_[j], row);
        if (a_.skip) add_scaled(V_, skip(), d_rows_[i], row);
        T* to = o + rows_.at(i) * a_.V;
        for_each(a_.V, [&](int64_t c, int64_t n) { write(Vec::loadu(row + c), to + c, n); });
      }
    // S ← e^(G_C) S + Σ_j β_j e^(G_C − G_j) k̂_j D_jᵀ
    for (int64_t i = 0; i < kChunk; ++i) gates_.to_end(i, beta[i], rows_.k[i], both_[i]);
    transpose(kChunk, K_, both_[0], K_, kt_[0], kChunk);
    gates_.keep(state_);
    multiply<true>(K_, V_, kChunk, kt_[0], kChunk, d_rows_[0], V_, state_[0], V_);
  }

  void final_state(float* to) const {
    if (rows_.has_state()) store(state_, to + state_at());
  }

  // What follows is backward's.

  /// The states before each chunk and the rows D, which a pass forward leaves behind.
  void remember() {
    const int64_t count = chunks();
    states_.assign(size_t(count * K_ * V_), 0.f), all_d_.assign(size_t(count * kChunk * V_), 0.f);
    begin();
    for (int64_t c = 0; c < count; ++c) {
      open(c);
      std::copy_n(state_[0], K_ * V_, states_.data() + c * K_ * V_);
      advance<false>(nullptr);
      std::copy_n(d_rows_[0], kChunk * V_, all_d_.data() + c * kChunk * V_);
    }
  }

  /// Gradients of all chunks, from the last to the first. dq and dk [tokens of the document, K_] get those of the
  /// normed q and k added.
  void backward(const GatedDeltaRuleBackward& b, Matrix& dq, Matrix& dk) {
    remember();
    Matrix& dstate = state_;
    std::fill(dstate.numbers.begin(), dstate.numbers.end(), 0.f);
    if (b.dfinal && rows_.has_state()) load(b.dfinal + state_at(), dstate);
    Matrix dout(kChunk, V_), r(kChunk, V_), w(kChunk, kChunk), y(kChunk, kChunk), transposed(V_, K_), dt(V_, kChunk),
        by_state(2 * kChunk, K_), of_d(kChunk, K_), rows(2 * kChunk, V_), columns(K_, 2 * kChunk);
    const float* beta = rows_.beta;
    for (int64_t c = chunks() - 1; c >= 0; --c) {
      open(c);
      const int64_t n = rows_.n;
      const float *state = states_.data() + c * K_ * V_, *D = all_d_.data() + c * kChunk * V_;
      for (int64_t i = 0; i < kChunk; ++i) {
        widen(b.dout, a_.tokens * a_.heads * a_.V, a_.heads * a_.V, rows_.head, a_.V, i, dout[i], V_);
        scale(V_, a_.scale, dout[i], dout[i]);
        gates_.to_end(i, 1.f, rows_.k[i], both_[i]);
      }
      // R, by substitution from the last token.
      multiply<false>(kChunk, V_, K_, both_[0], K_, dstate[0], V_, r[0], V_);
      for (int64_t j = kChunk - 1; j >= 0; --j) {
        for (int64_t i = j; i < n; ++i) add_scaled(V_, gates_.p[i][j], dout[i], r[j]);
        for (int64_t i = j + 1; i < n && a_.delta; ++i) add_scaled(V_, -gates_.a[i][j] * beta[i], r[i], r[j]);
      }
      // dO Dᵀ and R Dᵀ, (dO Sᵀ) and (R Sᵀ), then (D dS'ᵀ).
      transpose(kChunk, V_, D, V_, dt[0], kChunk);
      multiply<false>(kChunk, kChunk, V_, dout[0], V_, dt[0], kChunk, w[0], kChunk);
      multiply<false>(kChunk, kChunk, V_, r[0], V_, dt[0], kChunk, y[0], kChunk);
      std::copy_n(dout[0], kChunk * V_, rows[0]), std::copy_n(r[0], kChunk * V_, rows[kChunk]);
      transpose(K_, V_, state, V_, transposed[0], K_);
      multiply<false>(2 * kChunk, K_, V_, rows[0], V_, transposed[0], K_, by_state[0], K_);
      transpose(K_, V_, dstate[0], V_, transposed[0], K_);
      multiply<false>(kChunk, K_, V_, D, V_, transposed[0], K_, of_d[0], K_);
      float dbeta[kChunk];
      for (int64_t i = 0; i < kChunk; ++i) dbeta[i] = y[i][i];
      gates_.gradients(rows_, ChunkGradients{w, y, by_state, of_d, state, dstate[0]});
      for (int64_t i = 0; i < n; ++i) {
        add_scaled(K_, 1.f, by_state[i], dq[rows_.first - rows_.d.begin + i]);
        add_scaled(K_, 1.f, of_d[i], dk[rows_.first - rows_.d.begin + i]);
        b.dbeta[rows_.at(i)] = dbeta[i];
        const int64_t at = rows_.at(i) * a_.V;
        T* dv = static_cast<T*>(b.dv) + at;
        const T* o = static_cast<const T*>(b.dout) + at;  // its gradient, without the scale
        LongSum of_skip;
        for_each(a_.V, [&](int64_t col, int64_t n) {
          Vec of_v = Vec(beta[i]) * Vec::loadu(r[i] + col);
          if (a_.skip) {
            const Vec of_o = read(o + col, n);
            of_v = of_v + Vec(skip()) * of_o, of_skip.add(of_o * Vec::loadu(D + i * V_ + col), n);
          }
          write(of_v, dv + col, n);
        });
        if (a_.skip) b.dskip[rows_.at(i)] = float(of_skip.value());
      }
      // What decays before a document's first token is 0.
      gates_.write(rows_, c == 0 && !(a_.state && rows_.has_state()), b.dg);
      // dS
      for (int64_t i = 0; i < kChunk; ++i) {
        gates_.from_start(i, 1.f, rows_.q[i], both_[i]);
        gates_.from_start(i, a_.delta ? -beta[i] : 0.f, rows_.k[i], both_[kChunk + i]);
      }
      transpose(2 * kChunk, K_, both_[0], K_, columns[0], 2 * kChunk);
      gates_.keep(dstate);
      multiply<true>(K_, V_, 2 * kChunk, columns[0], 2 * kChunk, rows[0], V_, dstate[0], V_);
    }
    if (b.dstate && rows_.has_state()) store(dstate, b.dstate + state_at());
  }

  /// The derivative of the norm, as the gradient of q or k.
  void norm_backward(const void* of, int64_t row_stride, int64_t token_stride, const Matrix& normed_gradient,
                     void* out) {
    std::vector<float> x(size_t(K_), 0.f), dx(size_t(K_), 0.f);
    for (rows_.first = rows_.d.begin; rows_.first < rows_.d.end; ++rows_.first) {
      rows_.n = 1;
      const float* dy = normed_gradient[rows_.first - rows_.d.begin];
      const float r = normed(of, row_stride, token_stride, 0, x.data());
      const float onto = a_.eps < 0 ? 0.f : dot(K_, x.data(), dy);
      for (int64_t c = 0; c < K_; c += kLanes)
        (Vec(r) * (Vec::loadu(dy + c) - Vec(onto) * Vec::loadu(x.data() + c))).store(dx.data() + c);
      T* to = static_cast<T*>(out) + ((rows_.d.row * a_.tokens + rows_.first) * a_.key_heads + key_head_) * a_.K;
      for_each(a_.K, [&](int64_t c, int64_t n) { write(Vec::loadu(dx.data() + c), to + c, n); });
    }
  }

 private:
  /// Row i of the open chunk as floats, of `width` that are given and zeros up to `padded`; zeros past its end.
  void widen(const void* of, int64_t row_stride, int64_t token_stride, int64_t head, int64_t width, int64_t i,
             float* to, int64_t padded) const {
    std::fill(to, to + padded, 0.f);
    if (i >= rows_.n) return;
    const T* from =
        static_cast<const T*>(of) + rows_.d.row * row_stride + (rows_.first + i) * token_stride + head * width;
    for_each(width, [&](int64_t c, int64_t n) { write(read(from + c, n), to + c, n); });
  }

  /// The same of a row of q or k, normed; returns what it was multiplied by.
  float normed(const void* of, int64_t row_stride, int64_t token_stride, int64_t i, float* to) const {
    widen(of, row_stride, token_stride, key_head_, a_.K, i, to, K_);
    if (a_.eps < 0) return 1;
    const float r = 1 / std::sqrt(dot(K_, to, to) + a_.eps);
    scale(K_, r, to, to);
    return r;
  }

  float skip() const { return a_.skip[rows_.head]; }
  int64_t state_at() const { return (rows_.d.index * a_.heads + rows_.head) * a_.K * a_.V; }
  void load(const float* from, Matrix& state) const {
    for (int64_t i = 0; i < a_.K; ++i) std::copy_n(from + i * a_.V, a_.V, state[i]);
  }
  void store(const Matrix& state, float* to) const {
    for (int64_t i = 0; i < a_.K; ++i) std::copy_n(state[i], a_.V, to + i * a_.V);
  }

  const GatedDeltaRule& a_;
  Rows rows_;
  Gates gates_;
  const int64_t key_head_, K_, V_;
  Matrix kt_, both_, of_state_, d_rows_, state_;
  std::vector<float> states_, all_d_;
};

/// f(document, head) for all, a document's longest first would gain little: they are taken in order.
template <class F>
void for_heads(const GatedDeltaRule& a, int64_t heads, F f) {
  const auto all = documents(a);
  at::parallel_for(0, int64_t(all.size()) * heads, 1, [&](int64_t begin, int64_t end) {
    run_range(
        [&](int64_t begin, int64_t end) {
          for (int64_t i = begin; i < end; ++i) f(all[size_t(i / heads)], i % heads);
        },
        begin, end);
  });
}

template <class T, class Gates>
void forward(const GatedDeltaRuleForward& a) {
  for_heads(a, a.heads, [&](const Document& d, int64_t head) {
    Head<T, Gates> of(a, d, head);
    of.begin();
    for (int64_t c = 0; c < of.chunks(); ++c) of.open(c), of.template advance<true>(static_cast<T*>(a.o));
    if (a.final_state) of.final_state(a.final_state);
  });
}

template <class T, class Gates>
void backward(const GatedDeltaRuleBackward& a) {
  const int64_t group = a.heads / a.key_heads;
  for_heads(a, a.key_heads, [&](const Document& d, int64_t key_head) {
    const int64_t K = round_up(a.K, kPad);
    Matrix dq(d.end - d.begin, K), dk(d.end - d.begin, K);
    for (int64_t h = 0; h < group; ++h) {
      Head<T, Gates> of(a, d, key_head * group + h);
      of.backward(a, dq, dk);
      if (h + 1 < group) continue;
      of.norm_backward(a.q, a.q_row, a.q_token, dq, a.dq);
      of.norm_backward(a.k, a.k_row, a.k_token, dk, a.dk);
    }
  });
}

}  // namespace LIGER_CPU::delta_rule
