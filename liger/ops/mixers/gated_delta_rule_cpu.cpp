#include "liger/core/cpu/row.h"
#include "liger/ops/mixers/gated_delta_rule.h"

namespace LIGER_CPU::gated_delta_rule {
namespace {

// The cheapest size: longer chunks spend more on what lies inside of one than they save on the state.
constexpr int64_t kChunk = 16;
// Scratch rows are padded with zeros to whole vectors of either instruction set.
constexpr int64_t kPad = 16;

/// A scratch matrix of floats, its rows without gaps.
struct Matrix {
  std::vector<float> numbers;
  int64_t cols = 0;
  Matrix(int64_t rows, int64_t cols) : numbers(size_t(rows * cols)), cols(cols) {}
  float* operator[](int64_t row) { return numbers.data() + row * cols; }
  const float* operator[](int64_t row) const { return numbers.data() + row * cols; }
};

/// kRows rows of a · b in kVecs vectors, which stay in registers.
template <int kRows, int kVecs, bool kAdd>
void block(int64_t k, const float* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc) {
  Vec sums[kRows][kVecs];
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kVecs; ++v) sums[r][v] = kAdd ? Vec::loadu(c + r * ldc + v * kLanes) : Vec(0.f);
  for (int64_t i = 0; i < k; ++i) {
    Vec of_b[kVecs];
    for (int v = 0; v < kVecs; ++v) of_b[v] = Vec::loadu(b + i * ldb + v * kLanes);
    for (int r = 0; r < kRows; ++r) {
      const Vec of_a(a[r * lda + i]);
      for (int v = 0; v < kVecs; ++v) sums[r][v] = at::vec::fmadd(of_a, of_b[v], sums[r][v]);
    }
  }
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kVecs; ++v) sums[r][v].store(c + r * ldc + v * kLanes);
}

/// c = a · b, or c + a · b, of [m, k] and [k, n]; n is a multiple of kPad.
template <bool kAdd>
void multiply(int64_t m, int64_t n, int64_t k, const float* a, int64_t lda, const float* b, int64_t ldb, float* c,
              int64_t ldc) {
  constexpr int kRows = kLanes == 16 ? 8 : 4, kVecs = 2;
  for (int64_t j = 0; j < n;) {
    const bool wide = j + kVecs * kLanes <= n;
    int64_t i = 0;
    const auto rows = [&]<int kR>() {
      for (; i + kR <= m; i += kR)
        if (wide) block<kR, kVecs, kAdd>(k, a + i * lda, lda, b + j, ldb, c + i * ldc + j, ldc);
        else block<kR, 1, kAdd>(k, a + i * lda, lda, b + j, ldb, c + i * ldc + j, ldc);
    };
    rows.template operator()<kRows>();
    rows.template operator()<1>();
    j += wide ? kVecs * kLanes : kLanes;
  }
}

/// to [cols, rows] = from [rows, cols] transposed; both are multiples of kPad.
void transpose(int64_t rows, int64_t cols, const float* from, int64_t ld_from, float* to, int64_t ld_to) {
  for (int64_t i = 0; i < rows; i += 8)
    for (int64_t j = 0; j < cols; j += 8) {
#if defined(CPU_CAPABILITY_AVX2) || defined(CPU_CAPABILITY_AVX512)
      at::vec::transpose_mxn<float, 8, 8>(from + i * ld_from + j, ld_from, to + j * ld_to + i, ld_to);
#else
      for (int64_t r = 0; r < 8; ++r)
        for (int64_t c = 0; c < 8; ++c) to[(j + c) * ld_to + i + r] = from[(i + r) * ld_from + j + c];
#endif
    }
}

/// y += s · x of whole vectors.
void add_scaled(int64_t n, float s, const float* x, float* y) {
  for (int64_t c = 0; c < n; c += kLanes) at::vec::fmadd(Vec(s), Vec::loadu(x + c), Vec::loadu(y + c)).store(y + c);
}
void scale(int64_t n, float s, const float* x, float* y) {
  for (int64_t c = 0; c < n; c += kLanes) (Vec(s) * Vec::loadu(x + c)).store(y + c);
}
float dot(int64_t n, const float* a, const float* b) {
  Vec sums[2] = {Vec(0.f), Vec(0.f)};
  int64_t c = 0;
  for (; c + 2 * kLanes <= n; c += 2 * kLanes)
    for (int i = 0; i < 2; ++i)
      sums[i] = at::vec::fmadd(Vec::loadu(a + c + i * kLanes), Vec::loadu(b + c + i * kLanes), sums[i]);
  for (; c < n; c += kLanes) sums[0] = at::vec::fmadd(Vec::loadu(a + c), Vec::loadu(b + c), sums[0]);
  return reduce_lanes(sums[0] + sums[1], Plus{});
}

struct Document {
  int64_t row, begin, end, index;
};

/// A token without a document, which has a start below 0, is one by itself.
std::vector<Document> documents(const GatedDeltaRule& a) {
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

/// One head of one document, chunk by chunk. Members that a pass does not need stay empty.
template <class T>
class Head {
 public:
  Head(const GatedDeltaRule& a, const Document& d, int64_t head)
      : a_(a),
        d_(d),
        head_(head),
        key_head_(head / (a.heads / a.key_heads)),
        K_(round_up(a.K, kPad)),
        V_(round_up(a.V, kPad)),
        q_(kChunk, K_),
        k_(kChunk, K_),
        kt_(K_, kChunk),
        kk_(kChunk, kChunk),
        qk_(kChunk, kChunk),
        both_(2 * kChunk, K_),
        of_state_(2 * kChunk, V_),
        d_rows_(kChunk, V_),
        state_(K_, V_) {}

  int64_t chunks() const { return ceil_div(d_.end - d_.begin, kChunk); }

  /// The state that the document begins with.
  void begin() {
    std::fill(state_.numbers.begin(), state_.numbers.end(), 0.f);
    if (a_.state && d_.index < a_.documents) load(a_.state + (d_.index * a_.heads + head_) * a_.K * a_.V, state_);
  }

  /// k̂, q̂, their products and the decays of chunk c.
  void open(int64_t c) {
    first_ = d_.begin + c * kChunk, n_ = std::min(kChunk, d_.end - first_);
    for (int64_t i = 0; i < kChunk; ++i) {
      normed(a_.q, a_.q_row, a_.q_token, i, q_[i]), normed(a_.k, a_.k_row, a_.k_token, i, k_[i]);
      const int64_t at = (d_.row * a_.tokens + first_ + i) * a_.heads + head_;
      // In double, for decays are differences of sums; bounded, for no difference of infinities is a number.
      sum_[i] = (i ? sum_[i - 1] : 0.) + (i < n_ ? std::max(a_.g[at], -1000.f) : 0.f);
      beta_[i] = i < n_ ? a_.beta[at] : 0.f;
    }
    for (int64_t i = 0; i < kChunk; ++i) {
      from_start_[i] = std::exp(float(sum_[i])),
      to_end_[i] = i < n_ ? std::exp(float(sum_[kChunk - 1] - sum_[i])) : 0.f;
      for (int64_t j = 0; j < kChunk; ++j) decay_[i][j] = j <= i && i < n_ ? std::exp(float(sum_[i] - sum_[j])) : 0.f;
    }
    transpose(kChunk, K_, k_[0], K_, kt_[0], kChunk);
    multiply<false>(kChunk, kChunk, K_, k_[0], K_, kt_[0], kChunk, kk_[0], kChunk);
    multiply<false>(kChunk, kChunk, K_, q_[0], K_, kt_[0], kChunk, qk_[0], kChunk);
  }

  /// D of the open chunk, from the state before it; with kOut also O; then the state after it.
  template <bool kOut>
  void advance(T* o) {
    // X and the part of O that the state makes, together.
    for (int64_t i = 0; i < kChunk; ++i) {
      scale(K_, -from_start_[i], k_[i], both_[i]);
      if (kOut) scale(K_, a_.scale * from_start_[i], q_[i], both_[kChunk + i]);
      widen(a_.v, a_.v_row, a_.v_token, head_, a_.V, i, of_state_[i], V_);
    }
    if (a_.delta) multiply<true>(kChunk, V_, K_, both_[0], K_, state_[0], V_, of_state_[0], V_);
    if (kOut) multiply<false>(kChunk, V_, K_, both_[kChunk], K_, state_[0], V_, of_state_[kChunk], V_);
    for (int64_t i = 0; i < kChunk; ++i) {
      float* to = d_rows_[i];
      std::copy_n(of_state_[i], V_, to);
      for (int64_t j = 0; j < i && a_.delta; ++j) add_scaled(V_, -kk_[i][j] * decay_[i][j] * beta_[j], d_rows_[j], to);
    }
    if (kOut)
      for (int64_t i = 0; i < n_; ++i) {
        float* row = of_state_[kChunk + i];
        for (int64_t j = 0; j <= i; ++j)
          add_scaled(V_, a_.scale * qk_[i][j] * decay_[i][j] * beta_[j], d_rows_[j], row);
        T* to = o + ((d_.row * a_.tokens + first_ + i) * a_.heads + head_) * a_.V;
        for_each(a_.V, [&](int64_t c, int64_t n) { write(Vec::loadu(row + c), to + c, n); });
      }
    float weight[kChunk];
    for (int64_t j = 0; j < kChunk; ++j) weight[j] = to_end_[j] * beta_[j];
    add_to_state(state_, from_start_[kChunk - 1], weight);
  }

  void final_state(float* to) const {
    if (d_.index < a_.documents) store(state_, to + (d_.index * a_.heads + head_) * a_.K * a_.V);
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
    const int64_t state_at = (d_.index * a_.heads + head_) * a_.K * a_.V;
    const bool has_state = d_.index < a_.documents;
    if (b.dfinal && has_state) load(b.dfinal + state_at, dstate);
    Matrix dout(kChunk, V_), r(kChunk, V_), w(kChunk, kChunk), y(kChunk, kChunk), z(kChunk, kChunk), transposed(V_, K_),
        dt(V_, kChunk), by_state(2 * kChunk, K_), of_d(kChunk, K_), rows(2 * kChunk, V_), columns(K_, 2 * kChunk),
        mixed(kChunk, K_);
    for (int64_t c = chunks() - 1; c >= 0; --c) {
      open(c);
      const float *state = states_.data() + c * K_ * V_, *D = all_d_.data() + c * kChunk * V_;
      for (int64_t i = 0; i < kChunk; ++i) {
        widen(b.dout, a_.tokens * a_.heads * a_.V, a_.heads * a_.V, head_, a_.V, i, dout[i], V_);
        scale(V_, a_.scale, dout[i], dout[i]);
        scale(K_, to_end_[i], k_[i], both_[i]);
      }
      // R, by substitution from the last token.
      multiply<false>(kChunk, V_, K_, both_[0], K_, dstate[0], V_, r[0], V_);
      for (int64_t j = kChunk - 1; j >= 0; --j) {
        for (int64_t i = j; i < n_; ++i) add_scaled(V_, qk_[i][j] * decay_[i][j], dout[i], r[j]);
        for (int64_t i = j + 1; i < n_ && a_.delta; ++i)
          add_scaled(V_, -kk_[i][j] * decay_[i][j] * beta_[i], r[i], r[j]);
      }
      // W, Y and what both give for the decays.
      transpose(kChunk, V_, D, V_, dt[0], kChunk);
      multiply<false>(kChunk, kChunk, V_, dout[0], V_, dt[0], kChunk, w[0], kChunk);
      multiply<false>(kChunk, kChunk, V_, r[0], V_, dt[0], kChunk, y[0], kChunk);
      // In double: of what a token's decay gets, most cancels where decays are strong.
      double dsum[kChunk] = {};
      float dbeta[kChunk];
      for (int64_t i = 0; i < kChunk; ++i) {
        dbeta[i] = y[i][i];
        for (int64_t j = 0; j < kChunk; ++j) {
          w[i][j] *= beta_[j] * decay_[i][j];
          y[i][j] *= j < i && a_.delta ? -beta_[i] * beta_[j] * decay_[i][j] : 0.f;
          z[i][j] = j < i ? w[i][j] * qk_[i][j] + y[i][j] * kk_[i][j] : 0.f;
        }
      }
      for (int64_t i = 0; i < kChunk; ++i)
        for (int64_t j = 0; j < i; ++j) dsum[i] += z[i][j], dsum[j] -= z[i][j];
      // (dO Sᵀ) and (R Sᵀ), then (D dS'ᵀ).
      std::copy_n(dout[0], kChunk * V_, rows[0]), std::copy_n(r[0], kChunk * V_, rows[kChunk]);
      transpose(K_, V_, state, V_, transposed[0], K_);
      multiply<false>(2 * kChunk, K_, V_, rows[0], V_, transposed[0], K_, by_state[0], K_);
      transpose(K_, V_, dstate[0], V_, transposed[0], K_);
      multiply<false>(kChunk, K_, V_, D, V_, transposed[0], K_, of_d[0], K_);
      double ends = 0;
      for (int64_t i = 0; i < kChunk; ++i) {
        const float of_end = to_end_[i] * beta_[i], of_start = a_.delta ? from_start_[i] * beta_[i] : 0.f,
                    at_end = of_end * dot(K_, k_[i], of_d[i]);
        dsum[i] += from_start_[i] * dot(K_, q_[i], by_state[i]);
        dsum[i] -= at_end;
        dsum[i] -= of_start * dot(K_, k_[i], by_state[kChunk + i]);
        ends += at_end;
        scale(K_, from_start_[i], by_state[i], by_state[i]);
        scale(K_, of_end, of_d[i], of_d[i]);
        add_scaled(K_, -of_start, by_state[kChunk + i], of_d[i]);
      }
      const float kept = from_start_[kChunk - 1];
      dsum[n_ - 1] += ends + kept * dot(K_ * V_, state, dstate[0]);
      // dQ̂ and dK̂.
      multiply<true>(kChunk, K_, kChunk, w[0], kChunk, k_[0], K_, by_state[0], K_);
      transpose(kChunk, kChunk, w[0], kChunk, z[0], kChunk);
      multiply<true>(kChunk, K_, kChunk, z[0], kChunk, q_[0], K_, of_d[0], K_);
      transpose(kChunk, kChunk, y[0], kChunk, z[0], kChunk);
      for (int64_t i = 0; i < kChunk; ++i) add_scaled(kChunk, 1.f, y[i], z[i]);
      multiply<true>(kChunk, K_, kChunk, z[0], kChunk, k_[0], K_, of_d[0], K_);
      double dg = 0;
      for (int64_t i = n_ - 1; i >= 0; --i) {
        add_scaled(K_, 1.f, by_state[i], dq[first_ - d_.begin + i]);
        add_scaled(K_, 1.f, of_d[i], dk[first_ - d_.begin + i]);
        const int64_t at = (d_.row * a_.tokens + first_ + i) * a_.heads + head_;
        dg += dsum[i];
        // What decays before a document's first token is 0.
        b.dg[at] = c == 0 && i == 0 && !(a_.state && has_state) ? 0.f : float(dg);
        b.dbeta[at] = dbeta[i];
        T* dv = static_cast<T*>(b.dv) + at * a_.V;
        for_each(a_.V, [&](int64_t col, int64_t n) { write(Vec(beta_[i]) * Vec::loadu(r[i] + col), dv + col, n); });
      }
      // dS
      for (int64_t i = 0; i < kChunk; ++i) {
        scale(K_, from_start_[i], q_[i], both_[i]);
        scale(K_, a_.delta ? -from_start_[i] * beta_[i] : 0.f, k_[i], both_[kChunk + i]);
      }
      transpose(2 * kChunk, K_, both_[0], K_, columns[0], 2 * kChunk);
      scale(K_ * V_, kept, dstate[0], dstate[0]);
      multiply<true>(K_, V_, 2 * kChunk, columns[0], 2 * kChunk, rows[0], V_, dstate[0], V_);
    }
    if (b.dstate && has_state) store(dstate, b.dstate + state_at);
  }

  /// The derivative of the norm, as the gradient of q or k.
  void norm_backward(const void* of, int64_t row_stride, int64_t token_stride, const Matrix& normed_gradient,
                     void* out) {
    std::vector<float> x(size_t(K_), 0.f), dx(size_t(K_), 0.f);
    for (first_ = d_.begin; first_ < d_.end; ++first_) {
      n_ = 1;
      const float* dy = normed_gradient[first_ - d_.begin];
      const float r = normed(of, row_stride, token_stride, 0, x.data());
      const float onto = a_.eps < 0 ? 0.f : dot(K_, x.data(), dy);
      for (int64_t c = 0; c < K_; c += kLanes)
        (Vec(r) * (Vec::loadu(dy + c) - Vec(onto) * Vec::loadu(x.data() + c))).store(dx.data() + c);
      T* to = static_cast<T*>(out) + ((d_.row * a_.tokens + first_) * a_.key_heads + key_head_) * a_.K;
      for_each(a_.K, [&](int64_t c, int64_t n) { write(Vec::loadu(dx.data() + c), to + c, n); });
    }
  }

 private:
  /// Row i of the open chunk as floats, of `width` that are given and zeros up to `padded`; zeros past its end.
  void widen(const void* of, int64_t row_stride, int64_t token_stride, int64_t head, int64_t width, int64_t i,
             float* to, int64_t padded) const {
    std::fill(to, to + padded, 0.f);
    if (i >= n_) return;
    const T* from = static_cast<const T*>(of) + d_.row * row_stride + (first_ + i) * token_stride + head * width;
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

  /// S ← kept · S + Σ_j weight_j k̂_j D_jᵀ.
  void add_to_state(Matrix& state, float kept, const float* weight) {
    for (int64_t i = 0; i < K_; ++i)
      for (int64_t j = 0; j < kChunk; ++j) kt_[i][j] *= weight[j];
    scale(K_ * V_, kept, state[0], state[0]);
    multiply<true>(K_, V_, kChunk, kt_[0], kChunk, d_rows_[0], V_, state[0], V_);
  }

  void load(const float* from, Matrix& state) const {
    for (int64_t i = 0; i < a_.K; ++i) std::copy_n(from + i * a_.V, a_.V, state[i]);
  }
  void store(const Matrix& state, float* to) const {
    for (int64_t i = 0; i < a_.K; ++i) std::copy_n(state[i], a_.V, to + i * a_.V);
  }

  const GatedDeltaRule& a_;
  const Document d_;
  const int64_t head_, key_head_, K_, V_;
  int64_t first_ = 0, n_ = 0;  // the open chunk's first token, and how many it has
  Matrix q_, k_, kt_, kk_, qk_, both_, of_state_, d_rows_, state_;
  double sum_[kChunk];
  float beta_[kChunk], from_start_[kChunk], to_end_[kChunk];
  float decay_[kChunk][kChunk];
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

template <class T>
void forward(const GatedDeltaRuleForward& a) {
  for_heads(a, a.heads, [&](const Document& d, int64_t head) {
    Head<T> of(a, d, head);
    of.begin();
    for (int64_t c = 0; c < of.chunks(); ++c) of.open(c), of.template advance<true>(static_cast<T*>(a.o));
    if (a.final_state) of.final_state(a.final_state);
  });
}

template <class T>
void backward(const GatedDeltaRuleBackward& a) {
  const int64_t group = a.heads / a.key_heads;
  for_heads(a, a.key_heads, [&](const Document& d, int64_t key_head) {
    const int64_t K = round_up(a.K, kPad);
    Matrix dq(d.end - d.begin, K), dk(d.end - d.begin, K);
    for (int64_t h = 0; h < group; ++h) {
      Head<T> of(a, d, key_head * group + h);
      of.backward(a, dq, dk);
      if (h + 1 < group) continue;
      of.norm_backward(a.q, a.q_row, a.q_token, dq, a.dq);
      of.norm_backward(a.k, a.k_row, a.k_token, dk, a.dk);
    }
  });
}

}  // namespace

LIGER_REGISTER(gated_delta_rule_forward,
               [](const GatedDeltaRuleForward& a, Stream) { dispatch(a.dtype, [&]<class T>() { forward<T>(a); }); });
LIGER_REGISTER(gated_delta_rule_backward,
               [](const GatedDeltaRuleBackward& a, Stream) { dispatch(a.dtype, [&]<class T>() { backward<T>(a); }); });
LIGER_REGISTER(gated_delta_rule_workspace, [](const GatedDeltaRuleWorkspace& a, Stream) { *a.bytes = 0; });

}  // namespace LIGER_CPU::gated_delta_rule
