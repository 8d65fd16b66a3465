#pragma once
// What NVIDIA's compiler and GPUs have: types, and instructions that CUDA C++ has no name for. amd.h has the same
// names.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <type_traits>

extern "C" __device__ void __assertfail(const char* message, const char* file, unsigned line, const char* function,
                                        size_t char_size);

namespace liger::cuda {

using half = __half;
using bfloat16 = __nv_bfloat16;

inline constexpr bool kHasClusters = true;  // from compute capability 9.0 on

/// Waits until the kernels before this one are done and what they wrote can be seen; from then on the next one's blocks
/// may come where there is room for them, and wait here: the end of one kernel and the beginning of the next overlap
/// (compute capability 9.0 and newer).
__device__ inline void await_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/// Bytes of shared memory that this block has, static and dynamic.
__device__ inline int shared_bytes_here() {
  unsigned bytes;
  asm("mov.u32 %0, %%total_smem_size;" : "=r"(bytes));
  return int(bytes);
}

__device__ inline unsigned shared_address(const void* p) { return unsigned(__cvta_generic_to_shared(p)); }

/// Two neighbours of a row in one register. They stay so until the arithmetic: an array of 16-bit values would take a
/// register each.
template <class T>
__device__ inline float2 to_floats(unsigned word) {
  if constexpr (std::is_same_v<T, bfloat16>) return {__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u)};
  else return __half22float2(*reinterpret_cast<const __half2*>(&word));
}

template <class T>
__device__ inline unsigned to_word(float low, float high) {
  const auto pair = [&] {
    if constexpr (std::is_same_v<T, bfloat16>) return __floats2bfloat162_rn(low, high);
    else return __floats2half2_rn(low, high);
  }();
  return *reinterpret_cast<const unsigned*>(&pair);
}

/// Writes 16 bytes of global memory in one access, into which the compiler does not always make an assignment (it split
/// those of stream.cuh in four, measured on nvcc 13.0).
__device__ inline void store16(void* p, uint4 v) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(p)), "r"(v.x), "r"(v.y),
               "r"(v.z), "r"(v.w)
               : "memory");
}

/// What follows from v is computed again after this: in a loop, carrying it along would take registers.
template <class V>
__device__ inline void forget(V& v) {
  if constexpr (sizeof(V) == 4) asm volatile("" : "+r"(reinterpret_cast<unsigned&>(v)));
}

/// Brings what lies at p to the L2 cache.
__device__ inline void prefetch(const void* p) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(p)));
}

/// The product of each neighbour, rounded once.
template <class T>
__device__ inline unsigned multiply_words(unsigned a, unsigned b) {
  using Pair = std::conditional_t<std::is_same_v<T, bfloat16>, __nv_bfloat162, __half2>;
  const Pair p = __hmul2(*reinterpret_cast<const Pair*>(&a), *reinterpret_cast<const Pair*>(&b));
  return *reinterpret_cast<const unsigned*>(&p);
}

/// The larger of each neighbour; of a number and NaN, the number.
template <class T>
__device__ inline unsigned max_words(unsigned a, unsigned b) {
  using Pair = std::conditional_t<std::is_same_v<T, bfloat16>, __nv_bfloat162, __half2>;
  const Pair m = __hmax2(*reinterpret_cast<const Pair*>(&a), *reinterpret_cast<const Pair*>(&b));
  return *reinterpret_cast<const unsigned*>(&m);
}

}  // namespace liger::cuda
