#pragma once
// Copies from global to shared memory that a thread does not wait for (cp.async, from compute capability 8.0 on;
// elsewhere plain copies, which the thread does wait for).
#include "liger/core/cuda/launch.h"

namespace liger::cuda {

/// Copies `bytes` of 16 from global to shared memory, zeros for the rest; a thread's copies are there after
/// copies_done(), or those of all groups that it has closed but the last `pending`, 0 to 3, after await_copies().
/// kNear: through L1. Around it, the L2 is asked for every 64 bytes alone (ncu: four times the requests), which a
/// kernel then waits for (measured: a tenth of cross_entropy and of norms of 65536 columns); but what is in flight
/// takes room there, of which shared memory may leave too little.
template <bool kNear = true>
__device__ void copy_async16(void* shared, const void* global, int bytes = 16) {
#if __CUDA_ARCH__ >= 800
  const unsigned to = shared_address(shared);
  const size_t from = __cvta_generic_to_global(global);
  if (kNear) asm volatile("cp.async.ca.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
  else asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
#else
  uint4 v{};
  if (bytes == 16) v = *static_cast<const uint4*>(global);
  else memcpy(&v, global, bytes);
  *static_cast<uint4*>(shared) = v;
#endif
}

/// The same of one float, 0 where it is not there.
__device__ inline void copy_async4(float* shared, const float* global, bool there) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(shared)),
               "l"(__cvta_generic_to_global(global)), "r"(there ? 4 : 0)
               : "memory");
#else
  *shared = there ? *global : 0.f;
#endif
}

__device__ inline void copies_done() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

__device__ inline void close_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

__device__ inline void await_copies(int pending) {
#if __CUDA_ARCH__ >= 800
  if (pending == 3) asm volatile("cp.async.wait_group 3;" ::: "memory");
  else if (pending == 2) asm volatile("cp.async.wait_group 2;" ::: "memory");
  else if (pending == 1) asm volatile("cp.async.wait_group 1;" ::: "memory");
  else asm volatile("cp.async.wait_group 0;" ::: "memory");
#endif
}

}  // namespace liger::cuda
