#pragma once
#include <cmath>
#include "liger/options.h"

#if defined(__CUDACC__) || defined(__HIP__)
#define LIGER_HD __host__ __device__
#else
#define LIGER_HD
#endif

namespace liger {

// Formulas for a float or a vector V of them. M brings exp, log, tanh, erf, division and the like for V
// (liger/core/cuda/math.cuh, liger/core/cpu/row.h).

/// A column of a rotated pair, own · c + other · s; the second product is rounded, in every kernel that rotates.
template <class M, class V>
LIGER_HD V rotated(V own, V other, V c, V s) {
  return M::fma(own, c, M::rounded_product(other, s));
}

// Activations f and their derivatives.

/// silu(x) = x · σ(x).
struct SiLU {
  template <class M, class V>
  static LIGER_HD V value(V x) {
    return M::div(x, V(1) + M::exp(V(0) - x));
  }

  template <class M, class V>
  static LIGER_HD V derivative(V x) {
    const V s = M::div(V(1), V(1) + M::exp(V(0) - x));
    return s * (V(1) + x * (V(1) - s));
  }
};

///   gelu(x) = x/2 · (1 + tanh u)
///           = x · σ(2u)
///   u       = √(2/π) (x + 0.044715 x³)
/// As a sigmoid it takes one exponential, and loses nothing where tanh u is near −1.
struct GeLUTanh {
  static constexpr float kBeta = 0.79788456080286536f, kCubic = 0.044715f;

  template <class M, class V>
  static LIGER_HD V value(V x) {
    return M::div(x, V(1) + M::exp(V(0) - twice_u(x, x * x)));
  }

  ///   gelu'(x) = σ(2u) + 2x u' σ(2u) σ(−2u)
  ///   σ(−2u)   = e^(−2u) σ(2u)
  /// which keeps its digits, and 1 − σ(2u) does not.
  template <class M, class V>
  static LIGER_HD V derivative(V x) {
    const V x2 = x * x, e = M::exp(V(0) - M::max(twice_u(x, x2), V(-80))),
            s = M::div(V(1), V(1) + e);  // finite: e · 0 would be NaN
    return s + x * (s * s * e) * (V(2 * kBeta) + V(6 * kBeta * kCubic) * x2);
  }

 private:
  template <class V>
  static LIGER_HD V twice_u(V x, V x2) {
    return x * (V(2 * kBeta) + V(2 * kBeta * kCubic) * x2);
  }
};

/// gelu(x) = x/2 · (1 + erf(x/√2)).
struct GeLUErf {
  static constexpr float kSqrtHalf = 0.70710678118654752f, kNormal = 0.39894228040143268f;  // √½, 1/√(2π)

  template <class M, class V>
  static LIGER_HD V value(V x) {
    return V(0.5f) * x * (V(1) + M::erf(x * V(kSqrtHalf)));
  }

  template <class M, class V>
  static LIGER_HD V derivative(V x) {
    return V(0.5f) * (V(1) + M::erf(x * V(kSqrtHalf))) + x * (V(kNormal) * M::exp(V(-0.5f) * x * x));
  }
};

/// relu(x) = max(x, 0), squared.
struct ReLUSquared {
  template <class M, class V>
  static LIGER_HD V value(V x) {
    const V r = M::max(x, V(0));
    return r * r;
  }

  template <class M, class V>
  static LIGER_HD V derivative(V x) {
    return V(2) * M::max(x, V(0));
  }
};

/// σ(a) = 1 / (1 + e⁻ᵃ).
LIGER_HD inline float sigmoid(float a) { return 1 / (1 + expf(-a)); }
/// ln(1 + eᵃ).
LIGER_HD inline float softplus(float a) { return (a > 0 ? a : 0) + log1pf(expf(a > 0 ? -a : a)); }

// Divergences: an element's loss f of a prediction x and a target t, with parameter s, and df = ∂f/∂x. An element whose
// probability is 0 weighs nothing, whatever its logarithm is (M::product). x = t = kNothing has no loss.

template <class V>
struct Slope {
  V f, df;
};

/// t · (ln max(t, s) − x), x a logarithm and t a probability (Kullback & Leibler 1951).
struct KL {
  static constexpr float kNothing = 0;

  template <class M, class V>
  static LIGER_HD Slope<V> at(V x, V t, V s) {
    return {M::product(t, M::log(M::max(t, s)) - x), V(0) - t};
  }
};

/// eᵗ · (t − x): the same with both logarithms.
struct LogKL {
  static constexpr float kNothing = -INFINITY;

  template <class M, class V>
  static LIGER_HD Slope<V> at(V x, V t, V) {
    const V p = M::exp(t);
    return {M::product(p, t - x), V(0) - p};
  }
};

/// eˣ · (x − t).
struct ReverseKL {
  static constexpr float kNothing = -INFINITY;

  template <class M, class V>
  static LIGER_HD Slope<V> at(V x, V t, V) {
    const V q = M::exp(x), f = M::product(q, x - t);
    return {f, f + q};
  }
};

/// p (t − ln m) + q (x − ln m) (Lin 1991) with
///   p = s eᵗ
///   q = (1 − s) eˣ
///   m = p + q
struct JensenShannon {
  static constexpr float kNothing = -INFINITY;

  template <class M, class V>
  static LIGER_HD Slope<V> at(V x, V t, V s) {
    V q;
    return at<M>(x, t, s, q);
  }

  /// Also gives q.
  template <class M, class V>
  static LIGER_HD Slope<V> at(V x, V t, V s, V& q) {
    const V p = M::exp_times(s, t);
    q = M::exp_times(V(1) - s, x);
    const V log_m = M::log(p + q), df = M::product_less_log(q, x - log_m);
    return {M::product_less_log(p, t - log_m) + df, df};
  }
};

/// ½ |x − t| of probabilities.
struct TotalVariation {
  static constexpr float kNothing = 0;

  template <class M, class V>
  static LIGER_HD Slope<V> at(V x, V t, V) {
    const V d = x - t, half_sign = V(0.5f) * M::sign(d);
    return {d * half_sign, half_sign};
  }
};

/// Whether logits are what the GEMM gives.
LIGER_HD inline bool is_plain(const LogitMap& map) { return map.scale == 1 && map.softcap == 0; }

/// z of y, rounded: each pass over a row must find the z of which the first took the maximum.
template <class M, class V>
LIGER_HD V map_logit(const LogitMap& map, V y) {
  if (is_plain(map)) return y;
  return map.softcap > 0 ? M::rounded_product(V(map.softcap), M::tanh(y * V(map.scale / map.softcap)))
                         : M::rounded_product(y, V(map.scale));
}

/// ∂z/∂y.
template <class V>
LIGER_HD V map_slope(const LogitMap& map, V z) {
  const V t = z * V(map.softcap > 0 ? 1 / map.softcap : 0.f);
  return V(map.scale) * (V(1) - t * t);
}

// Losses of a token between a student's and a teacher's logits. In a pass over the classes each adds kSums numbers of
// one class; value() makes the loss of their sums, factors() what slope() needs of them, which is its derivative with
// respect to one of the student's logits. x and t are logits or, where kLogs says so, ln softmax of them; s is a
// parameter.

template <class V, int n>
struct Terms {
  V v[n];
};

/// A divergence Σ f of distributions, whose derivative with respect to the logit of a class is w − q Σ w:
///   w = ∂f/∂x
///   q = eˣ
template <class Term>
struct OfLogs {
  static constexpr bool kLogs = true;
  static constexpr int kSums = 2;

  template <class M, class V>
  static LIGER_HD Terms<V, 2> terms(V x, V t, V s) {
    V q, w;
    const V f = Term::template at<M>(x, t, s, q, w);
    return {{f, w}};
  }
  template <class S>
  static LIGER_HD float value(const S* sums) {
    return float(sums[0]);
  }
  template <class S>
  static LIGER_HD Terms<float, 2> factors(const S* sums) {
    return {{float(sums[1]), 0}};
  }
  template <class M, class V>
  static LIGER_HD V slope(V x, V t, V s, const Terms<float, 2>& factors) {
    V q, w;
    Term::template at<M>(x, t, s, q, w);
    return w - M::product(q, V(factors.v[0]));
  }
};

/// KL(T ‖ S).
struct ForwardKLTerm {
  template <class M, class V>
  static LIGER_HD V at(V x, V t, V, V& q, V& w) {
    const Slope<V> of = LogKL::at<M>(x, t, t);
    q = M::exp(x), w = of.df;
    return of.f;
  }
};

/// KL(S ‖ T). What is the same for all classes, 1 in ∂f/∂x = f + q, cancels in w − q Σ w.
struct ReverseKLTerm {
  template <class M, class V>
  static LIGER_HD V at(V x, V t, V, V& q, V& w) {
    q = M::exp(x);
    return w = M::product(q, x - t);
  }
};

/// s KL(T ‖ M) + (1 − s) KL(S ‖ M) for s in (0, 1), with
///   M = s T + (1 − s) S
struct JensenShannonTerm {
  template <class M, class V>
  static LIGER_HD V at(V x, V t, V s, V& q, V& w) {
    const Slope<V> of = JensenShannon::at<M>(x, t, s, q);
    q = M::div(q, V(1) - s), w = of.df;
    return of.f;
  }
};

/// ½ Σ |S − T|.
struct TotalVariationTerm {
  template <class M, class V>
  static LIGER_HD V at(V x, V t, V, V& q, V& w) {
    q = M::exp(x);
    const Slope<V> of = TotalVariation::at<M>(q, M::exp(t), q);
    w = q * of.df;
    return of.f;
  }
};

/// 1 − x · t / (max(‖x‖, 1e-12) max(‖t‖, 1e-12)) of the logits themselves.
struct CosineDistance {
  static constexpr bool kLogs = false;
  static constexpr int kSums = 3;

  template <class M, class V>
  static LIGER_HD Terms<V, 3> terms(V x, V t, V) {
    return {{x * x, t * t, x * t}};
  }
  template <class S>
  static LIGER_HD float value(const S* sums) {
    return float(1 - sums[2] * inverse(sums[0]) * inverse(sums[1]));
  }
  template <class S>
  static LIGER_HD Terms<float, 2> factors(const S* sums) {
    const S of_x = inverse(sums[0]), of_both = of_x * inverse(sums[1]);
    return {{sums[0] < S(kLeast) ? 0 : float(sums[2] * of_x * of_x * of_both), float(of_both)}};
  }
  template <class M, class V>
  static LIGER_HD V slope(V x, V t, V, const Terms<float, 2>& factors) {
    return x * V(factors.v[0]) - t * V(factors.v[1]);
  }

 private:
  static constexpr float kLeast = 1e-24f;
  template <class S>
  static LIGER_HD S inverse(S squares) {
    return S(1) / std::sqrt(squares < S(kLeast) ? S(kLeast) : squares);
  }
};

}  // namespace liger
