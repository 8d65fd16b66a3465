#pragma once
// What nvidia.h has, for AMD's GPUs through HIP, and CUDA's names for what HIP calls otherwise. They stand in this
// namespace, where they hide what a newer HIP may have under the same names. A warp is 32 lanes here too: where the
// hardware's has 64, each half is one, and no kernel shuffles past it. No cluster, no programmatic launch, no tensor
// cores: what kernels call for these has a portable body next to NVIDIA's (async_copy.cuh, cluster_exchange.cuh,
// mma.cuh).
#include <hip/hip_runtime.h>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

// The second bound of CUDA's counts blocks, HIP's warps; and neither is what these were measured for.
#undef __launch_bounds__
#define __launch_bounds__(threads, ...) __attribute__((amdgpu_flat_work_group_size(1, threads)))
#define __maxnreg__(...)

namespace liger::cuda {

using half = _Float16;

struct bfloat16 {
  uint16_t bits;
  bfloat16() = default;
  /// To the nearest, ties to even; NaN stays NaN.
  __host__ __device__ bfloat16(float v) {
    const auto word = __builtin_bit_cast(uint32_t, v);
    bits = uint16_t(v != v ? 0x7fff : (word + 0x7fff + (word >> 16 & 1)) >> 16);
  }
  __host__ __device__ operator float() const { return __builtin_bit_cast(float, uint32_t(bits) << 16); }
};

inline constexpr bool kHasClusters = false;

// The runtime's names that launch.h uses.
using cudaError_t = hipError_t;
using cudaStream_t = hipStream_t;
using cudaDeviceAttr = hipDeviceAttribute_t;
using cudaFuncAttributes = hipFuncAttributes;
using cudaStreamCaptureStatus = hipStreamCaptureStatus;
inline constexpr auto cudaSuccess = hipSuccess;
inline constexpr auto cudaStreamCaptureStatusNone = hipStreamCaptureStatusNone;
inline constexpr auto cudaFuncAttributeMaxDynamicSharedMemorySize = hipFuncAttributeMaxDynamicSharedMemorySize;
inline constexpr auto cudaDevAttrMultiProcessorCount = hipDeviceAttributeMultiprocessorCount,
                      cudaDevAttrMaxSharedMemoryPerMultiprocessor = hipDeviceAttributeMaxSharedMemoryPerMultiprocessor,
                      cudaDevAttrMaxSharedMemoryPerBlockOptin = hipDeviceAttributeMaxSharedMemoryPerBlock,
                      cudaDevAttrComputeCapabilityMajor = hipDeviceAttributeComputeCapabilityMajor;

inline const char* cudaGetErrorString(cudaError_t e) { return hipGetErrorString(e); }
inline cudaError_t cudaGetLastError() { return hipGetLastError(); }
inline cudaError_t cudaGetDevice(int* device) { return hipGetDevice(device); }
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  return hipDeviceGetAttribute(value, attribute, device);
}
inline cudaError_t cudaStreamIsCapturing(cudaStream_t s, cudaStreamCaptureStatus* status) {
  return hipStreamIsCapturing(s, status);
}
inline cudaError_t cudaMemsetAsync(void* p, int value, size_t bytes, cudaStream_t s) {
  return hipMemsetAsync(p, value, bytes, s);
}
template <class... P>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* of, void (*kernel)(P...)) {
  return hipFuncGetAttributes(of, reinterpret_cast<const void*>(kernel));
}
template <class... P>
cudaError_t cudaFuncSetAttribute(void (*kernel)(P...), hipFuncAttribute attribute, int value) {
  return hipFuncSetAttribute(reinterpret_cast<const void*>(kernel), attribute, value);
}

enum cudaLaunchAttributeID { cudaLaunchAttributeClusterDimension, cudaLaunchAttributeProgrammaticStreamSerialization };
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  struct {
    dim3 clusterDim;
    int programmaticStreamSerializationAllowed;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  const cudaLaunchAttribute* attrs;  // none of them is known here
  unsigned numAttrs;
};
template <class... P>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* to, void (*kernel)(P...), const P&... args) {
  void* pointers[] = {const_cast<void*>(static_cast<const void*>(&args))...};
  return hipLaunchKernel(reinterpret_cast<const void*>(kernel), to->gridDim, to->blockDim, pointers,
                         to->dynamicSmemBytes, to->stream);
}
inline cudaError_t cudaOccupancyMaxActiveClusters(int*, void (*)(), const cudaLaunchConfig_t*) {
  return hipErrorNotSupported;
}

// Built-in functions. Masks are always of all lanes.
template <class V>
__device__ V __shfl_xor_sync(unsigned, V v, int lane) {
  return __shfl_xor(v, lane, 32);
}
template <class V>
__device__ V __shfl_sync(unsigned, V v, int lane) {
  return __shfl(v, lane, 32);
}
__device__ inline unsigned __ballot_sync(unsigned, bool mine) { return unsigned(__ballot(mine) >> (__lane_id() & 32)); }
/// HIP's is a plain product, which may become part of a fused multiply-add.
__device__ inline float __fmul_rn(float a, float b) {
#pragma clang fp contract(off)
  const float product = a * b;
  return product;
}
__device__ inline int __dp4a(int a, int b, int sum) {
#pragma unroll
  for (int i = 0; i < 32; i += 8) sum += int8_t(a >> i) * int8_t(b >> i);
  return sum;
}
template <class V>
__device__ V __ldcg(const V* p) {
  return __builtin_nontemporal_load(p);
}
template <class V>
__device__ void __stcs(V* p, V v) {
  *p = v;
}

__device__ inline void await_previous() {}
/// No L1 shares its room with shared memory.
__device__ inline int shared_bytes_here() { return 0; }

template <class T>
struct Two {
  T low, high;
};

template <class T>
__device__ float2 to_floats(unsigned word) {
  const auto pair = __builtin_bit_cast(Two<T>, word);
  return {float(pair.low), float(pair.high)};
}
template <class T>
__device__ unsigned to_word(float low, float high) {
  return __builtin_bit_cast(unsigned, Two<T>{T(low), T(high)});
}

__device__ inline void store16(void* p, uint4 v) { *static_cast<uint4*>(p) = v; }

template <class V>
__device__ void forget(V&) {}
__device__ inline void prefetch(const void*) {}

/// A float holds the product of two 16-bit numbers exactly.
template <class T>
__device__ unsigned multiply_words(unsigned a, unsigned b) {
  const float2 x = to_floats<T>(a), y = to_floats<T>(b);
  return to_word<T>(x.x * y.x, x.y * y.y);
}
template <class T>
__device__ unsigned max_words(unsigned a, unsigned b) {
  const float2 x = to_floats<T>(a), y = to_floats<T>(b);
  return to_word<T>(fmaxf(x.x, y.x), fmaxf(x.y, y.y));
}

}  // namespace liger::cuda
