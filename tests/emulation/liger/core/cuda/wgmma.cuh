#pragma once
// Stands in for liger/core/cuda/wgmma.cuh: copies and products are done at once, by the thread that asks for them.
#include "liger/core/cuda/mma.cuh"
#include "liger/core/eight_bit.h"

#define __grid_constant__

namespace liger::cuda {

inline bool has_wgmma() { return emulation::device().capability_major == 9; }

enum class Layout { AlongK, AcrossK };

struct TensorMap {
  const uint16_t* data;
  int64_t sizes[3], strides[2];
  int box_rows;
};

inline TensorMap tensor_map(DType, const void* data, const int64_t (&sizes)[3], const int64_t (&strides)[2],
                            int box_rows) {
  if (reinterpret_cast<uintptr_t>(data) % 16 != 0 || strides[0] % 8 != 0 || strides[1] % 8 != 0)
    throw std::runtime_error("emulation: a matrix that the Tensor Memory Accelerator does not take");
  return {static_cast<const uint16_t*>(data), {sizes[0], sizes[1], sizes[2]}, {strides[0], strides[1]}, box_rows};
}

struct CopyBarrier {
  int arrivals, arrived, bytes, phase;

  void init(int n) { arrivals = n, arrived = bytes = phase = 0; }
  void count(int arrived_here, int bytes_here) {
    arrived += arrived_here, bytes += bytes_here;
    if (arrived == arrivals && bytes == 0) arrived = 0, ++phase;
  }
  void arrive() { count(1, 0); }
  void arrive_expecting(int n) { count(1, n); }
  void await(int parity) const {
    while (phase % 2 == parity) emulation::switch_away();
  }
};
inline void barriers_initialised() {}

inline void copy_box(void* to, const TensorMap& map, int x, int y, int z, CopyBarrier& barrier) {
  auto* numbers = static_cast<uint16_t*>(to);
  for (int64_t row = 0; row < map.box_rows; ++row)
    for (int64_t i = 0; i < 64; ++i) {
      const bool there = x + i < map.sizes[0] && y + row < map.sizes[1] && z < map.sizes[2];
      numbers[row * 64 + ((i / 8) ^ row % 8) * 8 + i % 8] =
          there ? map.data[x + i + (y + row) * map.strides[0] + z * map.strides[1]] : 0;
    }
  barrier.count(0, -map.box_rows * 128);
}

inline void store_box(const TensorMap& map, const void* from, int x, int y, int z) {
  const auto* numbers = static_cast<const uint16_t*>(from);
  for (int64_t row = 0; row < map.box_rows; ++row)
    for (int64_t i = 0; i < 64; ++i)
      if (x + i < map.sizes[0] && y + row < map.sizes[1] && z < map.sizes[2])
        const_cast<uint16_t*>(map.data)[x + i + (y + row) * map.strides[0] + z * map.strides[1]] =
            numbers[row * 64 + ((i / 8) ^ row % 8) * 8 + i % 8];
}
inline void stores_issued() {}
template <int kPending>
void await_stores() {}

inline void await_threads(int number, int threads) {
  static thread_local emulation::Barrier barriers[16];
  barriers[number].expected = threads;
  barriers[number].wait();
}

template <int n, bool kTake>
void resize_registers() {}

/// Number (row, k) of an operand, of the 16 k of `step`.
template <Layout kLayout, class T>
float operand(const T* tile, int row, int k) {
  return kLayout == Layout::AlongK ? float(tile[row * 64 + ((k / 8) ^ row % 8) * 8 + k % 8])
                                   : float(tile[row / 64 * 4096 + k * 64 + ((row % 64 / 8) ^ k % 8) * 8 + row % 8]);
}

template <class T, Layout kA, Layout kB, int kColumns>
void multiply_add(float (&sums)[32][4], const T* a, const T* b, int step) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  for (int c = 0; c < kColumns / 8; ++c)
    for (int i = 0; i < 4; ++i)
      for (int k = 16 * step; k < 16 * step + 16; ++k)
        sums[c][i] +=
            operand<kA>(a, 16 * warp + lane / 4 + i / 2 * 8, k) * operand<kB>(b, 8 * c + 2 * (lane % 4) + i % 2, k);
}

/// An operand's first row, its chunk and the bytes to the next panel across k, in one word, as the hardware has them.
inline uint64_t matrix_from(const void* row, int chunk, int bytes_across) {
  return reinterpret_cast<uintptr_t>(row) | uint64_t(chunk) << 48 | uint64_t(bytes_across / 16) << 51;
}

/// Number (row, k) of an operand that matrix_from describes.
template <Layout kLayout>
float operand(uint64_t matrix, int row, int k) {
  const auto* numbers = reinterpret_cast<const bfloat16*>(matrix & 0xffffffffffff);
  const int chunk = matrix >> 48 & 7, across = int(matrix >> 51) * 8;
  if (kLayout == Layout::AlongK) return float(numbers[row * 64 + ((chunk + k / 8) ^ row % 8) * 8 + k % 8]);
  const int at = chunk * 8 + row;
  return float(numbers[at / 64 * across + k * 64 + ((at % 64 / 8) ^ k % 8) * 8 + at % 8]);
}

template <class T, Layout kA, Layout kB, int kColumns>
void multiply_add(float (*sums)[4], uint64_t a, uint64_t b) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  for (int c = 0; c < kColumns / 8; ++c)
    for (int i = 0; i < 4; ++i)
      for (int k = 0; k < 16; ++k)
        sums[c][i] +=
            operand<kA>(a, 16 * warp + lane / 4 + i / 2 * 8, k) * operand<kB>(b, 8 * c + 2 * (lane % 4) + i % 2, k);
}

template <Layout kB, int kColumns>
void multiply_add(float (*sums)[4], const unsigned (&a)[4], uint64_t b) {
  const int lane = threadIdx.x % 32;
  float rows[2][16];
  for (int i = 0; i < 4; ++i)
    for (int quad = 0; quad < 4; ++quad) {
      const float2 pair = to_floats<bfloat16>(__shfl_sync(~0u, a[i], lane / 4 * 4 + quad));
      rows[i % 2][i / 2 * 8 + 2 * quad] = pair.x, rows[i % 2][i / 2 * 8 + 2 * quad + 1] = pair.y;
    }
  for (int c = 0; c < kColumns / 8; ++c)
    for (int i = 0; i < 4; ++i)
      for (int k = 0; k < 16; ++k) sums[c][i] += rows[i / 2][k] * operand<kB>(b, 8 * c + 2 * (lane % 4) + i % 2, k);
}

template <int n>
void hold(float (&)[n][4]) {}

/// Number (row, k) of an operand of 8-bit numbers: an integer or a float, as Sum is.
template <class Sum>
Sum byte_operand(const uint8_t* tile, int row, int k) {
  const uint8_t byte = tile[row * 128 + ((k / 16) ^ row % 8) * 16 + k % 16];
  if constexpr (std::is_same_v<Sum, int>) return int8_t(byte);
  else return from_e4m3(byte);
}

template <class Sum>
void multiply_add_bytes(Sum (&sums)[32][4], const uint8_t* a, const uint8_t* b, int step) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  for (int c = 0; c < 32; ++c)
    for (int i = 0; i < 4; ++i)
      for (int k = 32 * step; k < 32 * step + 32; ++k)
        sums[c][i] += byte_operand<Sum>(a, 16 * warp + lane / 4 + i / 2 * 8, k) *
                      byte_operand<Sum>(b, 8 * c + 2 * (lane % 4) + i % 2, k);
}

template <bool kTransposed>
void store_matrices(void* row, const unsigned (&words)[4]) {
  const int lane = threadIdx.x % 32, at = lane / 4, pair = lane % 4;
  for (int j = 0; j < 4; ++j)
    for (int i = 0; i < 2; ++i) {
      const uint16_t number = uint16_t(words[j] >> 16 * i);
      const int column = 2 * pair + i;
      auto* to = reinterpret_cast<uint16_t*>(
          __shfl_sync(~0u, reinterpret_cast<uintptr_t>(row), 8 * j + (kTransposed ? column : at)));
      to[kTransposed ? at : column] = number;
    }
  __syncwarp();
}

}  // namespace liger::cuda
