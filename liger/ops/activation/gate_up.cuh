#pragma once
#include "liger/core/cuda/stream.cuh"
#include "liger/ops/activation/gated.h"

namespace liger::cuda {

/// A row of gates and their factors in turn, and rows of one number for each such pair, in steps of kPairs pairs.
template <class T>
struct Interleaved {
  static constexpr int kPairs = Row<T>::kWidth / 2;
  int64_t pairs;
  bool whole;  // all steps are, and begin at multiples of their size in memory

  /// Of rows of so many pairs, in matrices that begin at these addresses.
  Interleaved(int64_t pairs, std::initializer_list<const void*> matrices)
      : pairs(pairs), whole(pairs % kPairs == 0 && aligned16(matrices)) {}

  __host__ __device__ int64_t steps() const { return ceil_div(pairs, kPairs); }

  __device__ void load(const T* row, int64_t step, float (&a)[kPairs], float (&b)[kPairs]) const {
    float both[2 * kPairs];
    load_elements(row, step, both);
#pragma unroll
    for (int j = 0; j < kPairs; ++j) a[j] = both[2 * j], b[j] = both[2 * j + 1];
  }
  __device__ void load(const T* row, int64_t step, float (&of_pairs)[kPairs]) const {
    load_elements(row, step, of_pairs);
  }

  __device__ void store(T* row, int64_t step, const float (&a)[kPairs], const float (&b)[kPairs]) const {
    float both[2 * kPairs];
#pragma unroll
    for (int j = 0; j < kPairs; ++j) both[2 * j] = a[j], both[2 * j + 1] = b[j];
    store_elements(row, step, both);
  }
  __device__ void store(T* row, int64_t step, const float (&of_pairs)[kPairs]) const {
    store_elements(row, step, of_pairs);
  }

 private:
  template <int n>
  __device__ void load_elements(const T* row, int64_t step, float (&f)[n]) const {
    const T* p = row + step * n;
    if (whole) return Pack<T, n>::read(p).to_float(f);
    const int64_t count = (pairs - step * kPairs) * (n / kPairs);
#pragma unroll
    for (int j = 0; j < n; ++j) f[j] = j < count ? float(p[j]) : 0;
  }
  template <int n>
  __device__ void store_elements(T* row, int64_t step, const float (&f)[n]) const {
    T* p = row + step * n;
    if (whole) return Pack<T, n>::from_float(f).write(p);
    const int64_t count = (pairs - step * kPairs) * (n / kPairs);
#pragma unroll
    for (int j = 0; j < n; ++j)
      if (j < count) p[j] = T(f[j]);
  }
};

}  // namespace liger::cuda
