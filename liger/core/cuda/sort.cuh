#pragma once
#include <cub/device/device_radix_sort.cuh>
#include "liger/core/cuda/launch.h"

namespace liger::cuda {

/// keys in ascending order, by their lowest `bits`, and the values that stand beside them; equal keys stay in order. With scratch null, only
/// tells of how many bytes it must be.
inline void sort_pairs(void* scratch, size_t& bytes, const int* keys, int* sorted_keys, const int* values, int* sorted_values, int n, int bits, Stream s) {
  check(cub::DeviceRadixSort::SortPairs(scratch, bytes, keys, sorted_keys, values, sorted_values, n, 0, bits, cudaStream_t(s)));
}

}  // namespace liger::cuda
