#pragma once
#include <bit>
#include "liger/core/cuda/sort.cuh"

namespace liger::cuda {

/// keys[i] = key(i), order[i] = i. A thread has an item.
template <class Key>
__global__ void __launch_bounds__(256) keys_kernel(Key key, int n, int* keys, int* order) {
  await_previous();
  const int i = int(blockIdx.x * blockDim.x + threadIdx.x);
  if (i < n) keys[i] = key(i), order[i] = i;
}

/// All items, by one block.
template <class Sort, class Key>
__global__ void __launch_bounds__(Sort::kThreads)
    block_sort_kernel(Key key, int n, int bits, int* sorted_keys, int* order) {
  await_previous();
  Sort::run(n, bits, key, sorted_keys, order);
}

/// Sorts n items by key(i), which is 0 to most_key; items of equal keys stay in order. One launch of one block does it
/// for up to 1024 · kItems items where its shared memory has room, CUB for more.
template <int kItems>
class KeySort {
 public:
  KeySort(int n, int64_t most_key, Stream s) : n_(n), bits_(int(std::bit_width(uint64_t(most_key)))), stream_(s) {
    if (!by_block()) sort_pairs(nullptr, cub_bytes_, nullptr, nullptr, nullptr, nullptr, n_, bits_, stream_);
  }

  bool by_block() const {
    return n_ <= BlockSort<4>::kMost ||
           (n_ <= BlockSort<kItems>::kMost && BlockSort<kItems>::kBytes <= shared_bytes_of_block());
  }
  int64_t scratch_bytes() const { return by_block() ? 0 : 2 * array_bytes() + int64_t(cub_bytes_); }

  /// sorted_keys and order: n each; order[p] is the item at place p. Key is copied to the device and called there.
  template <class Key>
  void operator()(const Key& key, int* sorted_keys, int* order, void* scratch) const {
    if (n_ <= BlockSort<4>::kMost) return in_block<BlockSort<4>>(key, sorted_keys, order);
    if (by_block()) return in_block<BlockSort<kItems>>(key, sorted_keys, order);
    char* base = static_cast<char*>(scratch);
    int *keys = reinterpret_cast<int*>(base), *items = reinterpret_cast<int*>(base + array_bytes());
    size_t bytes = cub_bytes_;
    launch(keys_kernel<Key>, {.blocks = ceil_div(n_, 256), .threads = 256}, stream_, key, n_, keys, items);
    sort_pairs(base + 2 * array_bytes(), bytes, keys, sorted_keys, items, order, n_, bits_, stream_);
  }

 private:
  int64_t array_bytes() const { return round_up(int64_t(n_) * 4, 256); }
  template <class Sort, class Key>
  void in_block(const Key& key, int* sorted_keys, int* order) const {
    launch(block_sort_kernel<Sort, Key>, {.blocks = 1, .threads = Sort::kThreads, .shared_bytes = Sort::kBytes},
           stream_, key, n_, bits_, sorted_keys, order);
  }

  int n_, bits_;
  size_t cub_bytes_ = 0;
  Stream stream_;
};

}  // namespace liger::cuda
