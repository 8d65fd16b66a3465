#pragma once
#include <mutex>
#include <set>
#include <type_traits>
#include <utility>
#include "liger/core/kernel.h"
#ifdef __HIP__
#include "liger/core/cuda/amd.h"
#else
#include "liger/core/cuda/nvidia.h"
#endif

namespace liger::cuda {

inline constexpr Backend kBackend = kCUDA;
inline int rank() { return 0; }

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
/// Shared memory of a multiprocessor, and how much of it a block can ask for, which needs a little itself.
inline int shared_bytes() { return attribute<cudaDevAttrMaxSharedMemoryPerMultiprocessor>(); }
inline int shared_bytes_of_block() { return attribute<cudaDevAttrMaxSharedMemoryPerBlockOptin>() - 3072; }
inline bool has_clusters() { return kHasClusters && attribute<cudaDevAttrComputeCapabilityMajor>() >= 9; }

/// The bytes of static shared memory of a kernel's code for the current device, by which it tells what it was compiled
/// for; -1 where it has no code for that. `known` is the kernel's own, so that it is asked once per device.
inline int shared_bytes_of(void (*kernel)(), int (&known)[kMaxDevices]) {
  int& value = known[current_device()];  // 0: not asked; less than 0: no code; else one more than the bytes
  if (value == 0) {
    cudaFuncAttributes of{};
    const bool found = cudaFuncGetAttributes(&of, kernel) == cudaSuccess;
    if (!found) (void)cudaGetLastError();  // which a later launch would report as its own
    value = found ? int(of.sharedSizeBytes) + 1 : -1;
  }
  return value < 0 ? -1 : value - 1;
}

template <int>
__global__ void nothing_kernel() {}

/// Whether the current device is of an architecture that kernels were compiled for, or can compile their PTX.
inline bool has_code() {
  static int known[kMaxDevices];
  return shared_bytes_of(nothing_kernel<0>, known) >= 0;
}

inline constexpr int kByteMmaMarks = 16;

template <int>
__global__ void has_byte_mma_kernel() {
#if __CUDA_ARCH__ >= 890
  __shared__ volatile int marks[kByteMmaMarks];  // by whose size it is known
  marks[0] = 1;
#elif __CUDA_ARCH__ >= 800
  __shared__ volatile int mark;
  mark = 1;
#endif
}

/// Whether the warps of the current device (mma) multiply 8-bit numbers at twice the rate of 16-bit ones, and kernels
/// were compiled for that: integers from compute capability 8.0 on, floats (E4M3) from 8.9 on, and both on 12. On 9 and
/// 10 that rate is reached by other instructions (wgmma, tcgen05).
inline bool has_byte_mma(bool floats) {
  static int known[kMaxDevices];
  const int major = attribute<cudaDevAttrComputeCapabilityMajor>(),
            marked = shared_bytes_of(has_byte_mma_kernel<0>, known);
  return (major == 8 || major == 12) && marked >= (floats ? kByteMmaMarks * int(sizeof(int)) : 1);
}

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

extern __shared__ float4 dynamic_shared[];

/// The block's dynamic shared memory.
template <class T>
__device__ T* shared_memory() {
  return reinterpret_cast<T*>(dynamic_shared);
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
