#pragma once
#include <ATen/Parallel.h>
#include <ATen/cpu/vec/vec.h>
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <vector>
#include <type_traits>
#include "liger/core/cpu/isa.h"
#include "liger/core/kernel.h"
#include "liger/core/math.h"
#include "liger/core/partial_sums.h"

namespace LIGER_CPU {

inline constexpr Backend kBackend = kCPU;
using Vec = at::vec::Vectorized<float>;
inline constexpr int64_t kLanes = Vec::size();

template <class F>
void dispatch(DType t, F&& f) {
  switch (t) {
    case DType::F32: return f.template operator()<float>();
    case DType::F16: return f.template operator()<c10::Half>();
    case DType::BF16: return f.template operator()<c10::BFloat16>();
  }
}

/// As dispatch, for a weight that has x's dtype or is float.
template <class F>
void dispatch_weighted(DType x, DType w, F&& f) {
  dispatch(x, [&]<class T>() { w == DType::F32 ? f.template operator()<T, float>() : f.template operator()<T, T>(); });
}

inline float number(const Numbers& n, int64_t i = 0) {
  float v = 0;
  dispatch(n.dtype, [&]<class T>() { v = float(static_cast<const T*>(n.of)[i]); });
  return v;
}
/// The first n.
template <int n>
std::array<float, n> numbers(const Numbers& of) {
  std::array<float, n> v;
  for (int i = 0; i < n; ++i) v[i] = number(of, i);
  return v;
}

template <class T>
const T* row_of(const void* m, int64_t row, int64_t cols) {
  return static_cast<const T*>(m) + row * cols;
}
template <class T>
T* row_of(void* m, int64_t row, int64_t cols) {
  return static_cast<T*>(m) + row * cols;
}

/// The first n of p as floats, the rest 0.
template <class T>
Vec read(const T* p, int64_t n = kLanes) {
  if constexpr (std::is_same_v<T, float>) return n == kLanes ? Vec::loadu(p) : Vec::loadu(p, n);
  if (n < kLanes) {
    T part[kLanes] = {};
    std::copy_n(p, n, part);
    return read(part);
  }
  Vec v;
#if defined(CPU_CAPABILITY_AVX2) || defined(CPU_CAPABILITY_AVX512)
  if constexpr (std::is_same_v<T, c10::BFloat16>) at::vec::load_fp32_from_bf16(p, v);
  if constexpr (std::is_same_v<T, c10::Half>) at::vec::load_fp32_from_fp16(p, v);
#else
  float f[kLanes];
  std::copy_n(p, kLanes, f);
  v = Vec::loadu(f);
#endif
  return v;
}

template <class T>
void write(const Vec& v, T* p, int64_t n = kLanes) {
  if constexpr (std::is_same_v<T, float>) return n == kLanes ? v.store(p) : v.store(p, n);
  if (n < kLanes) {
    T part[kLanes];
    write(v, part);
    std::copy_n(part, n, p);
    return;
  }
#if defined(CPU_CAPABILITY_AVX2) || defined(CPU_CAPABILITY_AVX512)
  const auto half = [&] {
    if constexpr (std::is_same_v<T, c10::Half>) return at::vec::cvtfp32_fp16(v);
    else return at::vec::cvtfp32_bf16(v);
  }();
  std::memcpy(p, &half, sizeof(half));
#else
  float f[kLanes];
  v.store(f);
  std::copy_n(f, kLanes, p);
#endif
}

template <class T>
Vec round_to(const Vec& v) {
  if constexpr (std::is_same_v<T, float>) return v;
  alignas(64) T t[kLanes];
  write(v, t);
  return read(t);
}

template <class T>
float round_to(float v) {
  return float(T(v));
}

/// eˣ within 1 unit in the last place (1.2 without FMA), inline:
///   eˣ = 2ⁿ · eʳ
///   r  = x − n ln 2
/// with a polynomial for eʳ in |r| <= ½ ln 2 whose relative error is at most 3.1e-9 (r and 1 exactly, the others fitted
/// for the least largest error); 0 below 2^-125.5. What is added to x / ln 2 rounds it to n and leaves n + 126 in the
/// last bits, the exponent of 2ⁿ⁻¹, or of 0; the 2 that is missing is in the polynomial. NaN stays what it is.
inline Vec exp(const Vec& x) {
  const Vec in = at::vec::clamp(x, Vec(-87.3f), Vec(88.7228f)), rounding(12582912.f + 126);
  const Vec t = at::vec::fmadd(in, Vec(1.4426950408889634f), rounding), n = t - rounding;
  const Vec r = at::vec::fmadd(n, Vec(2.12194440e-4f), at::vec::fmadd(n, Vec(-0.693359375f), in));
  Vec p(2 * 0.00138145399f);
  for (const float c : {0.00836874513f, 0.0416683908f, 0.166665204f, 0.499999934f, 1.f, 1.f})
    p = at::vec::fmadd(p, r, Vec(2 * c));
  const auto exponent = at::vec::cast<int32_t>(t);
  return p * at::vec::cast<float>(exponent << std::decay_t<decltype(exponent)>(23));
}

/// ln x within 1 unit in the last place, inline, for x >= 0 (of subnormal numbers -88 or so):
///   x    = 2ⁿ · m, m in [√½, √2)
///   ln m = f − ½ f² + f³ P(f)
///   f    = m − 1
/// with P fitted for the least largest relative error, 5.9e-9. NaN and infinity stay what they are.
inline Vec log(const Vec& x) {
  using Int = at::vec::Vectorized<int32_t>;
  const Int bits = at::vec::cast<int32_t>(x), n = (bits - Int(0x3f3504f3)) >> Int(23);
  const Vec f = at::vec::cast<float>(bits - (n << Int(23))) - Vec(1.f),
            e = at::vec::convert_to_fp_of_same_size<float>(n), f2 = f * f;
  Vec p(-0.0763654586f);
  for (const float c :
       {0.127646717f, -0.131608896f, 0.142013954f, -0.166232531f, 0.200012384f, -0.25000824f, 0.333333316f})
    p = at::vec::fmadd(p, f, Vec(c));
  const Vec rest = at::vec::fmadd(f2, at::vec::fmadd(p, f, Vec(-0.5f)), e * Vec(-2.12194440e-4f)),
            ln = at::vec::fmadd(e, Vec(0.693359375f), f + rest);
  return Vec::blendv(Vec::blendv(x, ln, x < Vec(INFINITY)), Vec(-INFINITY), x == Vec(0.f));
}

/// 0 for what is below a float's normal numbers: GEMMs over such numbers, of which the gradients of a confident model's
/// logits are full, take several times as long. It changes a sum by less than its rounding, unless all of it is that
/// small.
inline Vec flushed(const Vec& x) { return Vec::blendv(x, Vec(0.f), x.abs() < Vec(1.17549435e-38f)); }

/// The functions behind liger/core/math.h.
struct Math {
  static Vec exp(const Vec& x) { return cpu::exp(x); }
  static Vec exp_times(const Vec& s, const Vec& x) { return s * exp(x); }
  static Vec expm1(const Vec& x) { return x.expm1(); }
  static Vec log(const Vec& x) { return cpu::log(x); }
  static Vec tanh(const Vec& x) { return x.tanh(); }
  static Vec erf(const Vec& x) { return x.erf(); }
  static Vec div(const Vec& a, const Vec& b) { return a / b; }
  static Vec div_ordinary(const Vec& a, const Vec& b) { return a / b; }
  static Vec abs(const Vec& x) { return x.abs(); }
  /// a · b, which the compiler cannot merge with what is added to it.
  static Vec rounded_product(const Vec& a, const Vec& b) { return at::vec::fmadd(a, b, Vec(-0.f)); }
  static Vec fma(const Vec& a, const Vec& b, const Vec& c) { return at::vec::fmadd(a, b, c); }
  static Vec max(const Vec& a, const Vec& b) { return at::vec::maximum(a, b); }
  /// a where x > 0, b elsewhere.
  static Vec if_positive(const Vec& x, const Vec& a, const Vec& b) { return Vec::blendv(b, a, x > Vec(0.f)); }
  static Vec sign(const Vec& x) { return Vec::blendv(Vec::blendv(x, Vec(1.f), x > Vec(0.f)), Vec(-1.f), x < Vec(0.f)); }
  /// p · l, and 0 where p is 0.
  static Vec product(const Vec& p, const Vec& l) { return Vec::blendv(p * l, Vec(0.f), p == Vec(0.f)); }
  static Vec product_less_log(const Vec& p, const Vec& l) { return product(p, l); }
};

/// f(column, n) for each vector of a row.
template <class F>
void for_each(int64_t cols, F f) {
  int64_t c = 0;
  for (; c + kLanes <= cols; c += kLanes) f(c, kLanes);
  if (c < cols) f(c, cols - c);
}

template <class Op>
float reduce_lanes(const Vec& v, Op op) {
  float lanes[kLanes];
  v.store(lanes);
  for (int64_t width = kLanes / 2; width > 0; width /= 2)
    for (int64_t i = 0; i < width; ++i) lanes[i] = op(lanes[i], lanes[i + width]);
  return lanes[0];
}

/// Op over f(a, b, …) along a row, from `identity`: four chains, so that one's latency hides behind the others, and a
/// total of type Total over blocks of columns, so that a sum's error does not grow with the row. Lanes past the end do
/// not count.
template <class Total = float, class Op, class F, class... In>
Total row_reduce(int64_t cols, float identity, Op op, F f, const In*... in) {
  constexpr int64_t kStep = 4 * kLanes, kBlock = 32 * kStep;
  Total total(identity);
  int64_t c = 0;
  while (c + kLanes <= cols) {
    Vec acc[4] = {Vec(identity), Vec(identity), Vec(identity), Vec(identity)};
    const int64_t end = std::min(cols, c + kBlock);
    for (; c + kStep <= end; c += kStep)
      for (int i = 0; i < 4; ++i) acc[i] = op(acc[i], f(read(in + c + i * kLanes)...));
    for (; c + kLanes <= end; c += kLanes) acc[0] = op(acc[0], f(read(in + c)...));
    total = op(total, Total(reduce_lanes(op(op(acc[0], acc[1]), op(acc[2], acc[3])), op)));
  }
  if (c < cols) {
    float lanes[kLanes];
    f(read(in + c, cols - c)...).store(lanes);
    for (int64_t i = 0; i < cols - c; ++i) total = op(total, Total(lanes[i]));
  }
  return total;
}

struct Plus {
  template <class V>
  V operator()(const V& a, const V& b) const {
    return a + b;
  }
};
struct Max {
  Vec operator()(const Vec& a, const Vec& b) const { return at::vec::maximum(a, b); }
  float operator()(float a, float b) const { return a > b || std::isnan(a) ? a : b; }
};

/// Σ f(a, b, …) along a row.
template <class F, class... In>
double row_sum(int64_t cols, F f, const In*... in) {
  return row_reduce<double>(cols, 0.f, Plus{}, f, in...);
}

/// Σ of each of the n vectors that f(a, b, …) gives along a row, in one pass: of short chains, whose sums meet in float
/// first and then in double. Static, so that its one caller inlines it where f is no lambda: 1.2 times as fast.
template <size_t n, class F, class... In>
static std::array<double, n> row_sums(int64_t cols, F f, const In*... in) {
  constexpr int64_t kStep = 2 * kLanes, kChain = 8 * kStep, kBlock = 8 * kChain;
  std::array<double, n> totals{};
  for (int64_t c = 0; c < cols;) {
    const int64_t block = std::min(cols, c + kBlock);
    Vec sums[n];
    for (Vec& v : sums) v = Vec(0.f);
    while (c < block) {
      const int64_t end = std::min(block, c + kChain);
      Vec acc[2][n];
      for (auto& chain : acc)
        for (Vec& v : chain) v = Vec(0.f);
      const auto add = [&](int chain, int64_t k) {
        const std::array<Vec, n> v = f(read(in + c, k)...);
        for (size_t i = 0; i < n; ++i)
          acc[chain][i] = acc[chain][i] + (k == kLanes ? v[i] : Vec::set(Vec(0.f), v[i], k));
        c += k;
      };
      while (c + kStep <= end) add(0, kLanes), add(1, kLanes);
      while (c < end) add(0, std::min(kLanes, end - c));
      for (size_t i = 0; i < n; ++i) sums[i] = sums[i] + (acc[0][i] + acc[1][i]);
    }
    for (size_t i = 0; i < n; ++i) totals[i] += reduce_lanes(sums[i], Plus{});
  }
  return totals;
}

struct Moments {
  float mean;
  double squares;
};

/// A row's mean and Σ (x − mean)². The first mean is the rounded sum's; what the deviations from it still add up to
/// belongs to it, so that those of a constant row are 0.
template <class T>
Moments moments(int64_t cols, const T* x) {
  const double n = double(std::max<int64_t>(cols, 1));
  const float about = float(row_sum(cols, [](Vec x) { return x; }, x) / n);
  const auto sums = row_sums<2>(
      cols,
      [&](Vec x) {
        const Vec d = x - Vec(about);
        return std::array{d, d * d};
      },
      x);
  return {float(about + sums[0] / n), std::max(0., sums[1] - sums[0] * sums[0] / n)};
}

/// A sum of vectors whose error does not grow with their number: short chains in float, their sums in double.
class LongSum {
 public:
  /// Adds the first n of v.
  void add(const Vec& v, int64_t n = kLanes) {
    Vec& chain = chains_[added_ % 4];
    chain = chain + (n == kLanes ? v : Vec::set(Vec(0.f), v, n));
    if (++added_ == 64) value();
  }

  double value() {
    total_ += reduce_lanes((chains_[0] + chains_[1]) + (chains_[2] + chains_[3]), Plus{});
    for (Vec& chain : chains_) chain = Vec(0.f);
    added_ = 0;
    return total_;
  }

 private:
  Vec chains_[4] = {Vec(0.f), Vec(0.f), Vec(0.f), Vec(0.f)};
  int added_ = 0;
  double total_ = 0;
};

/// out = f(a, b, …) along a row. Static as row_sums is.
template <class Out, class F, class... In>
static void row_map(int64_t cols, Out* out, F f, const In*... in) {
  for_each(cols, [&](int64_t c, int64_t n) { write(f(read(in + c, n)...), out + c, n); });
}

/// n floats: y's own, or scratch.
template <class T>
float* float_row(T* y, int64_t n, std::vector<float>& scratch) {
  if constexpr (std::is_same_v<T, float>) return y;
  scratch.resize(size_t(n));
  return scratch.data();
}

/// Not inlined: at::parallel_for calls f from two places, for one thread and for several. Two copies of a formula may
/// round differently, for the compiler is free to contract products and sums in each as it likes.
template <class F>
#ifdef __clang__
[[gnu::noinline]]
#else
[[gnu::noinline, gnu::noclone]]
#endif
void run_range(const F& f, int64_t begin, int64_t end) {
  f(begin, end);
}

/// f(begin, end) over runs of rows, in parallel; a row is worth `cost` elements of work.
template <class F>
void for_runs(int64_t rows, int64_t cost, F f) {
  at::parallel_for(0, rows, std::max<int64_t>(1, 32768 / std::max<int64_t>(cost, 1)),
                   [&f](int64_t begin, int64_t end) { run_range(f, begin, end); });
}

/// f(row) for all rows, in parallel.
template <class F>
void for_rows(int64_t rows, int64_t cost, F f) {
  for_runs(rows, cost, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) f(r);
  });
}

/// f(row, first column, columns) over chunks of all rows, in parallel.
template <class F>
void for_row_chunks(int64_t rows, int64_t cols, F f, int64_t chunk = 8192) {
  const int64_t per_row = ceil_div(cols, chunk);
  for_rows(rows * per_row, std::min(cols, chunk) * 8, [&](int64_t i) {
    const int64_t begin = i % per_row * chunk;
    f(i / per_row, begin, std::min(chunk, cols - begin));
  });
}

}  // namespace LIGER_CPU
