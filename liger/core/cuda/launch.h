#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <mutex>
#include <set>
#include <type_traits>
#include <utility>
#include "liger/core/kernel.h"

extern "C" __device__ void __assertfail(const char* message, const char* file, unsigned line, const char* function,
                                        size_t char_size);

namespace liger::cuda {

inline constexpr Backend kBackend = kCUDA;
inline int rank() { return 0; }

using half = __half;
using bfloat16 = __nv_bfloat16;

inline void check(cudaError_t e) {
  if (e != cudaSuccess) throw std::runtime_error(std::string("CUDA: ") + cudaGetErrorString(e));
}

/// What a launch asks of the device. threads.x threads work on a row, threads.y rows a block.
struct Grid {
  int64_t blocks;
  dim3 threads;
  int shared_bytes = 0;
  int cluster = 1;  // neighbouring blocks that share a row (compute capability 9.0 and newer)
};

inline constexpr int kMaxDevices = 64;

inline int current_device() {
  int device;
  check(cudaGetDevice(&device));
  return device;
}

/// An attribute of a device, asked for once.
template <cudaDeviceAttr kAttribute>
int attribute(int device = current_device()) {
  static int known[kMaxDevices];
  int& value = known[device];
  if (value == 0) check(cudaDeviceGetAttribute(&value, kAttribute, device));
  return value;
}

inline int multiprocessors(int device) { return attribute<cudaDevAttrMultiProcessorCount>(device); }
/// Shared memory of a multiprocessor, and how much of it a block can ask for beside a little of its own.
inline int shared_bytes() { return attribute<cudaDevAttrMaxSharedMemoryPerMultiprocessor>(); }
inline int shared_bytes_of_block() { return attribute<cudaDevAttrMaxSharedMemoryPerBlockOptin>() - 3072; }
inline bool has_clusters() { return attribute<cudaDevAttrComputeCapabilityMajor>() >= 9; }

template <int>
__global__ void nothing_kernel() {}

/// How many clusters of so many blocks run at once, one block a multiprocessor: a cluster must fit into a part of the
/// chip, and not every part has a multiple of its blocks.
inline int clusters_at_once(int cluster, int device = current_device()) {
  if (cluster == 1 || !has_clusters()) return multiprocessors(device) / cluster;
  static int known[kMaxDevices][9];
  int& value = known[device][cluster];
  if (value == 0) {
    cudaLaunchAttribute size{};
    size.id = cudaLaunchAttributeClusterDimension;
    size.val.clusterDim = {unsigned(cluster), 1, 1};
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(unsigned(cluster));
    config.blockDim = dim3(32);
    config.dynamicSmemBytes = attribute<cudaDevAttrMaxSharedMemoryPerBlockOptin>();  // which a multiprocessor has once
    config.attrs = &size;
    config.numAttrs = 1;
    check(cudaFuncSetAttribute(nothing_kernel<0>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               int(config.dynamicSmemBytes)));
    check(cudaOccupancyMaxActiveClusters(&value, nothing_kernel<0>, &config));
  }
  return value;
}

inline bool capturing(Stream s) {
  cudaStreamCaptureStatus status;
  check(cudaStreamIsCapturing(cudaStream_t(s), &status));
  return status != cudaStreamCaptureStatusNone;
}

inline void clear(void* p, int64_t bytes, Stream s) { check(cudaMemsetAsync(p, 0, size_t(bytes), cudaStream_t(s))); }

/// Starts a kernel, whose first words are await_previous(), without waiting for the one before it in the stream.
template <class... P>
void launch(void (*kernel)(P...), const Grid& grid, Stream s, const P&... args) {
  if (grid.blocks == 0) return;
  if (grid.blocks > 2147483647) throw std::runtime_error("liger: more blocks than one launch can have");
  if (grid.shared_bytes > 32 * 1024) {
    // Raised once per kernel and device: a block gets no more than 48 KiB unasked, its static variables among them.
    // Kernels of one signature share this function.
    static std::mutex mutex;
    static std::set<std::pair<const void*, int>> raised;
    const std::lock_guard lock(mutex);
    if (raised.insert({reinterpret_cast<const void*>(kernel), current_device()}).second) {
      cudaFuncAttributes of{};
      check(cudaFuncGetAttributes(&of, kernel));
      check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 attribute<cudaDevAttrMaxSharedMemoryPerBlockOptin>() - int(of.sharedSizeBytes)));
    }
  }
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned(grid.blocks));
  config.blockDim = grid.threads;
  config.dynamicSmemBytes = grid.shared_bytes;
  config.stream = cudaStream_t(s);
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {unsigned(grid.cluster), 1, 1};
  config.attrs = attributes;
  config.numAttrs = has_clusters() ? 1 + (grid.cluster > 1) : 0;
  check(cudaLaunchKernelEx(&config, kernel, args...));
}

/// Waits until the kernels before this one are done and what they wrote can be seen; from then on the next one's blocks
/// may come where there is room for them, and wait here: the end of one kernel and the beginning of the next overlap
/// (compute capability 9.0 and newer).
__device__ inline void await_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

extern __shared__ float4 dynamic_shared[];

/// The block's dynamic shared memory.
template <class T>
__device__ T* shared_memory() {
  return reinterpret_cast<T*>(dynamic_shared);
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

/// p, worked out here and no more: as parts of a sum that each access makes anew it takes several instructions a time.
template <class T>
__device__ inline T* pinned(T* p) {
#ifdef __CUDA_ARCH__
  asm("" : "+l"(p));
  __builtin_assume(__isGlobal(p));
#endif
  return p;
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

/// Device assertions with a message, as torch's own kernels raise them on a bad index.
__device__ inline void fail_index(const char* what, int64_t index, int64_t size) {
  printf("liger: %s %lld is outside [0, %lld)\n", what, (long long)index, (long long)size);
  __assertfail("index is in range", __FILE__, __LINE__, "fail_index", 1);
}

__device__ inline void fail_label(int64_t label, int64_t classes) {
  printf("liger: label %lld is outside [0, %lld) and not ignore_index\n", (long long)label, (long long)classes);
  __assertfail("label is in range or ignore_index", __FILE__, __LINE__, "fail_label", 1);
}

}  // namespace liger::cuda
