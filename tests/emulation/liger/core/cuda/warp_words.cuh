#pragma once
// Stands in for liger/core/cuda/warp_words.cuh: two barriers for all words, where a shuffle takes two for each.
#include "liger/core/cuda/launch.h"

namespace liger::cuda {

template <int n>
class WarpWords {
 public:
  template <class... W>
  explicit WarpWords(W... words) {
    const unsigned mine[] = {unsigned(words)...};
    std::copy_n(mine, n, shown_[emulation::linear_thread()]);
    __syncwarp();
  }
  WarpWords(const WarpWords&) = delete;
  ~WarpWords() { __syncwarp(); }
  unsigned of(int i, int lane) const { return shown_[emulation::linear_thread() / 32 * 32 + lane][i]; }

 private:
  static inline thread_local unsigned shown_[1024][n];
};

}  // namespace liger::cuda
