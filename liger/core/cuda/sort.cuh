#pragma once
#include "liger/core/cuda/launch.h"
#ifdef __HIP__
#include "liger/core/cuda/amd_sort.h"
#else
#include <cub/block/block_radix_sort.cuh>
#include <cub/device/device_radix_sort.cuh>
#endif

namespace liger::cuda {

/// keys in ascending order, by their lowest `bits`, and the values that belong to them; equal keys stay in order.
/// With scratch null, only tells of how many bytes it must be.
inline void sort_pairs(void* scratch, size_t& bytes, const int* keys, int* sorted_keys, const int* values,
                       int* sorted_values, int n, int bits, Stream s) {
  check(cub::DeviceRadixSort::SortPairs(scratch, bytes, keys, sorted_keys, values, sorted_values, n, 0, bits,
                                        cudaStream_t(s)));
}

/// One block's own way, of up to kMost keys, in kBytes of shared memory.
template <int kItems>
struct BlockSort {
  static constexpr int kThreads = 1024, kMost = kThreads * kItems;
  using Sort = cub::BlockRadixSort<unsigned, kThreads, kItems, int>;
  static constexpr int kBytes = sizeof(typename Sort::TempStorage);

  /// The keys key(0) to key(n - 1), none above 2^bits - 1, in ascending order, and of each which one it is; equal keys
  /// stay in order.
  template <class F>
  static __device__ void run(int n, int bits, F key, int* sorted_keys, int* order) {
    unsigned keys[kItems];
    int values[kItems];
#pragma unroll
    for (int j = 0; j < kItems; ++j) {
      values[j] = int(threadIdx.x) * kItems + j;
      keys[j] = values[j] < n ? unsigned(key(values[j])) : ~0u;
    }
    Sort(*shared_memory<typename Sort::TempStorage>()).SortBlockedToStriped(keys, values, 0, bits);
#pragma unroll
    for (int j = 0; j < kItems; ++j)
      if (const int i = j * kThreads + int(threadIdx.x); i < n) sorted_keys[i] = int(keys[j]), order[i] = values[j];
  }
};

}  // namespace liger::cuda
