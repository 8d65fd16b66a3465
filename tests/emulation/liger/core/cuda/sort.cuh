#pragma once
// Stands in for liger/core/cuda/sort.cuh.
#include <algorithm>
#include <numeric>
#include "liger/core/cuda/launch.h"

namespace liger::cuda {

inline void sort_pairs(void* scratch, size_t& bytes, const int* keys, int* sorted_keys, const int* values,
                       int* sorted_values, int n, int bits, Stream) {
  if (!scratch) return void(bytes = n * sizeof(int));
  const auto key = [&](int i) { return keys[i] & ((int64_t(1) << bits) - 1); };
  int* order = static_cast<int*>(scratch);
  std::iota(order, order + n, 0);
  std::stable_sort(order, order + n, [&](int i, int j) { return key(i) < key(j); });
  for (int i = 0; i < n; ++i) sorted_keys[i] = keys[order[i]], sorted_values[i] = values[order[i]];
}

template <int kItems>
struct BlockSort {
  static constexpr int kThreads = 1024, kMost = kThreads * kItems, kBytes = kMost * int(sizeof(int));

  template <class F>
  static void run(int n, int bits, F key, int* sorted_keys, int* order) {
    int* values = shared_memory<int>();
    for (int i = int(threadIdx.x); i < n; i += kThreads) values[i] = key(i);
    __syncthreads();
    if (threadIdx.x > 0) return;
    std::iota(order, order + n, 0);
    std::stable_sort(order, order + n, [&](int i, int j) { return values[i] < values[j]; });
    for (int i = 0; i < n; ++i) sorted_keys[i] = values[order[i]];
    if (n > kMost || sorted_keys[n - 1] >> bits)
      throw std::runtime_error("emulation: more to sort than a block can, or greater");
  }
};

}  // namespace liger::cuda
