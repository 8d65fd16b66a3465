#pragma once
#include "liger/core/cuda/launch.h"
#include "liger/core/math.h"

namespace liger::cuda {

inline constexpr float kLog2e = 1.4426950408889634f;

/// 2^x in one instruction, 0 where the result would be subnormal.
__device__ inline float exp2_approx(float x) {
#ifdef __CUDA_ARCH__
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return exp2f(x);
#endif
}

/// log2(x) in one instruction.
__device__ inline float log2_approx(float x) {
#ifdef __CUDA_ARCH__
  asm("lg2.approx.ftz.f32 %0, %0;" : "+f"(x));
  return x;
#else
  return log2f(x);
#endif
}

/// ln x in three instructions; that of what is less than the smallest normal float is that one's.
__device__ inline float log_approx(float x) { return log2_approx(fmaxf(x, 1.17549435e-38f)) * .6931471805599453f; }

/// The functions behind liger/core/math.h. Results that are rounded to 16 bits take the hardware's approximations,
/// whose error (2 units in the last place of a float) disappears in that rounding; float results take the accurate
/// forms.
template <class T>
struct Math {
  static constexpr bool kFast = sizeof(T) == 2;
  static __device__ float exp(float x) { return kFast ? exp2_approx(x * kLog2e) : expf(x); }
  /// s · exp(x): in the fast form no product, and the logarithm of an s that stays the same in a loop is taken before
  /// it.
  static __device__ float exp_times(float s, float x) {
    return kFast ? exp2_approx(fmaf(x, kLog2e, log2_approx(s))) : s * expf(x);
  }
  /// Near 0, where eˣ − 1 loses digits, the fast form is the series.
  static __device__ float expm1(float x) {
    if (!kFast) return expm1f(x);
    const float series = x * fmaf(x, fmaf(x, fmaf(x, fmaf(x, 1 / 120.f, 1 / 24.f), 1 / 6.f), .5f), 1);
    return fabsf(x) < .25f ? series : exp(x) - 1;
  }
  static __device__ float log(float x) { return kFast ? log_approx(x) : logf(x); }
  static __device__ float div(float a, float b) { return kFast ? __fdividef(a, b) : a / b; }
  /// a / b for 2^-126 <= |b| <= 2^126, within 2 units in the last place.
  static __device__ float div_ordinary(float a, float b) { return __fdividef(a, b); }
  static __device__ float abs(float x) { return fabsf(x); }
  /// As torch's: NaN if a is; fmaxf would drop it.
  static __device__ float max(float a, float b) { return a >= b || a != a ? a : b; }
  /// a · b, never part of a fused multiply-add.
  static __device__ float rounded_product(float a, float b) { return __fmul_rn(a, b); }
  static __device__ float fma(float a, float b, float c) { return fmaf(a, b, c); }
  static __device__ float erf(float x) { return erff(x); }
  /// a where x > 0, b elsewhere.
  static __device__ float if_positive(float x, float a, float b) { return x > 0 ? a : b; }
  static __device__ float sign(float x) { return x > 0 ? 1 : x < 0 ? -1 : x; }
  /// p · l, and 0 where p is 0.
  static __device__ float product(float p, float l) { return p == 0 ? 0 : p * l; }
  /// The same for an l from which a logarithm was taken away: a fast one is finite, so that l is not +∞.
  static __device__ float product_less_log(float p, float l) { return kFast ? p * fmaxf(l, -3e38f) : product(p, l); }
  /// tanh.approx is off by 2^-11 of the result, which bf16 would show. 1 − 2 / (1 + e^2x) is off by 2^-22 of one, which
  /// is all of a small x. Such an x is its own tanh but for x²/3 of it: where both are as far off, by 2^-15.
  static __device__ float tanh(float x) {
    if (!kFast) return tanhf(x);
    const float y = fmaf(-2, div(1, 1 + exp2_approx(2 * kLog2e * x)), 1);
    return fabsf(x) < .009f ? x : y;
  }
};

}  // namespace liger::cuda
