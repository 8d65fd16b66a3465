#pragma once
#include <array>
#include "liger/core/cuda/launch.h"

namespace liger::cuda {

/// Calls f.operator()<T>() with the CUDA type of `t`.
template <class F>
void dispatch(DType t, F&& f) {
  switch (t) {
    case DType::F32: return f.template operator()<float>();
    case DType::F16: return f.template operator()<half>();
    case DType::BF16: return f.template operator()<bfloat16>();
  }
}

/// As dispatch, for a 16-bit type.
template <class F>
void dispatch16(DType t, F&& f) {
  t == DType::F16 ? f.template operator()<half>() : f.template operator()<bfloat16>();
}

/// As dispatch, for a weight that has x's dtype or is float.
template <class F>
void dispatch_weighted(DType x, DType w, F&& f) {
  dispatch(x, [&]<class T>() { w == DType::F32 ? f.template operator()<T, float>() : f.template operator()<T, T>(); });
}

__device__ inline float number(const Numbers& n, int64_t i = 0) {
  if (n.dtype == DType::F32) return static_cast<const float*>(n.of)[i];
  return n.dtype == DType::F16 ? float(static_cast<const half*>(n.of)[i])
                               : float(static_cast<const bfloat16*>(n.of)[i]);
}

/// The first n.
template <int n>
__device__ std::array<float, n> numbers(const Numbers& of) {
  std::array<float, n> v;
  for (int i = 0; i < n; ++i) v[i] = number(of, i);
  return v;
}

__device__ inline void write_number(void* p, DType t, int64_t i, float v) {
  if (t == DType::F32) static_cast<float*>(p)[i] = v;
  else if (t == DType::F16) static_cast<half*>(p)[i] = half(v);
  else static_cast<bfloat16*>(p)[i] = bfloat16(v);
}

}  // namespace liger::cuda
