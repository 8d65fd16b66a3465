#pragma once
// What the kernels of products of 8-bit rows share.
#include "liger/core/cuda/dispatch.h"
#include "liger/ops/linear/eight_bit.h"

namespace liger::cuda::scaled_matmul_ {

/// What two neighbouring columns of the result are made with: scale x, y and bias z, w.
template <class T>
__device__ float4 columns_of(const float* w_scale, const void* bias, int64_t cols, int64_t column) {
  float2 w = {1, 1}, b = {};
  if (column < cols) {
    if (w_scale) w = {w_scale[column], w_scale[column + 1]};
    if (bias) b = to_floats<T>(*reinterpret_cast<const unsigned*>(static_cast<const T*>(bias) + column));
  }
  return {w.x, w.y, b.x, b.y};
}

/// f.operator()<T, format>().
template <class F>
void dispatch(const ScaledMatmul& a, F f) {
  dispatch16(a.dtype, [&]<class T>() {
    a.format == EightBit::Int8 ? f.template operator()<T, EightBit::Int8>()
                               : f.template operator()<T, EightBit::E4M3>();
  });
}

}  // namespace liger::cuda::scaled_matmul_
