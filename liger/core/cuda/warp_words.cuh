#pragma once
#include "liger/core/cuda/launch.h"

namespace liger::cuda {

/// A few words that each lane of a warp shows to the others.
template <int n>
class WarpWords {
 public:
  template <class... W>
  __device__ explicit WarpWords(W... words) : words_{unsigned(words)...} {}
  /// Word i of a lane; all lanes ask for the same i at once.
  __device__ unsigned of(int i, int lane) const { return __shfl_sync(~0u, words_[i], lane); }

 private:
  unsigned words_[n];
};

}  // namespace liger::cuda
