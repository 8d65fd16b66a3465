#pragma once
// What sort.cuh takes of CUB, from AMD's rocPRIM.
#include <rocprim/rocprim.hpp>
#include "liger/core/cuda/launch.h"

namespace liger::cuda::cub {

struct DeviceRadixSort {
  static cudaError_t SortPairs(void* scratch, size_t& bytes, const int* keys, int* sorted_keys, const int* values,
                               int* sorted_values, int n, int first_bit, int end_bit, cudaStream_t s) {
    return rocprim::radix_sort_pairs(scratch, bytes, keys, sorted_keys, values, sorted_values, n, unsigned(first_bit),
                                     unsigned(end_bit), s);
  }
};

template <class Key, int kThreads, int kItems, class Value>
struct BlockRadixSort {
  using Sort = rocprim::block_radix_sort<Key, kThreads, kItems, Value>;
  struct TempStorage {
    typename Sort::storage_type storage;
    char rest[256];  // the host, which does not know how wide a wave is, finds fewer bytes than a device of 32 lanes
  };
  TempStorage& scratch;

  __device__ explicit BlockRadixSort(TempStorage& scratch) : scratch(scratch) {}
  __device__ void SortBlockedToStriped(Key (&keys)[kItems], Value (&values)[kItems], int first_bit, int end_bit) {
    Sort().sort_to_striped(keys, values, scratch.storage, unsigned(first_bit), unsigned(end_bit));
  }
};

}  // namespace liger::cuda::cub
