#pragma once
// Stands in for liger/core/cuda/mma.cuh.
#include "liger/core/cuda/launch.h"

namespace liger::cuda {

/// The lanes of a column or row of sum gather its operands from the lanes that hold them.
inline void tensor_multiply_add(int (&sum)[4], const unsigned (&a)[4], const int (&b)[2]) {
  const int lane = emulation::linear_thread() % 32, group = lane / 4, quad = lane % 4;
  const auto byte = [](unsigned word, int i) { return word >> 8 * i & 0xff; };
  for (int half = 0; half < 2; ++half)
    for (int q = 0; q < 4; ++q)
      for (int column = 0; column < 2; ++column) {
        const int of_b = __shfl_sync(~0u, b[half], (2 * quad + column) * 4 + q);
        for (int row = 0; row < 2; ++row) {
          const unsigned of_a = __shfl_sync(~0u, a[2 * half + row], group * 4 + q);
          for (int i = 0; i < 4; ++i) sum[2 * row + column] += int(byte(of_a, i)) * int8_t(byte(of_b, i));
        }
      }
}

template <int kEights>
void tensor_multiply_add(int (&sums)[2][kEights][4], const unsigned (&a)[2][4], const uint4 (*columns)[8], int chunk) {
  const int lane = emulation::linear_thread() % 32, group = lane / 4, quad = lane % 4;
  for (int e = 0; e < kEights; ++e) {
    const auto of_b = [&](int half) {
      return int(reinterpret_cast<const unsigned*>(&columns[8 * e + group][(chunk + half) ^ group])[quad]);
    };
    for (int h = 0; h < 2; ++h) tensor_multiply_add(sums[h][e], a[h], {of_b(0), of_b(1)});
  }
}

template <bool kButLast>
void await_products() {}
inline void show_tensor_core() {}

}  // namespace liger::cuda
