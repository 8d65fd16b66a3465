#include "liger/core/cuda/dispatch.h"
#include "liger/core/cuda/row_bytes.cuh"
#include "liger/ops/linear/eight_bit.h"

namespace liger::cuda::eight_bit {
namespace {

constexpr int kWidth = 16, kThreads = 256;  // numbers of a pack, threads of a row

/// f(values, column) for the packs of a row that this thread has, with the column in the row of all parts.
template <class T, class F>
__device__ void for_packs(const QuantiseRows& a, int64_t row, F f) {
  int64_t first = 0;
  for (int i = 0; i < a.count; ++i) {
    const QuantiseRows::Part& part = a.parts[i];
    const T* x = static_cast<const T*>(part.x) + row * part.stride;
    for (int64_t column = threadIdx.x * kWidth; column < part.cols; column += kThreads * kWidth) {
      Vec<kWidth> v = to_vec(Pack<T, kWidth>::read(x + column));
      if (part.factor) v = v * to_vec(Pack<float, kWidth>::read(part.factor + column));
      f(v, first + column);
    }
    first += part.cols;
  }
}

/// A block per row, which the second pass reads from a cache.
template <class T>
__global__ void __launch_bounds__(kThreads) eight_bit_rows_kernel(QuantiseRows a) {
  await_previous();
  RowReduce<LargestMagnitude> reduce;
  const int64_t row = blockIdx.x;
  int64_t cols = 0;
  for (int i = 0; i < a.count; ++i) cols += a.parts[i].cols;
  float most = 0;
  for_packs<T>(a, row, [&](const Vec<kWidth>& v, int64_t) { most = largest_magnitude(most, v); });
  const ByteScale by(reduce(most), a.to.format);
  if (threadIdx.x == 0) a.to.scale[row] = by.scale;
  for_packs<T>(a, row, [&](const Vec<kWidth>& v, int64_t column) { by.write(a.to.out + row * cols + column, v); });
}

constexpr int kRowsOfBlock = 16, kAtOnce = 4;  // and packs that a thread has in flight

/// A thread has packs of neighbouring columns, of all rows of its block.
template <class T>
__global__ void __launch_bounds__(kThreads) dequantise_rows_kernel(DequantiseRows a) {
  await_previous();
  const int64_t first = int64_t(blockIdx.x) * kRowsOfBlock;
  const unsigned packs = unsigned(a.cols / kWidth), all = unsigned(min(a.rows - first, int64_t(kRowsOfBlock))) * packs;
  const uint8_t* numbers = a.numbers + first * a.cols;
  T* out = static_cast<T*>(a.out) + first * a.cols;
  for (unsigned begin = threadIdx.x; begin < all; begin += kAtOnce * kThreads) {
    uint4 bytes[kAtOnce];
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u)
      if (begin + u * kThreads < all)
        bytes[u] = *reinterpret_cast<const uint4*>(numbers + int64_t(begin + u * kThreads) * kWidth);
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      const unsigned pack = begin + u * kThreads;
      if (pack >= all) break;
      const unsigned words[] = {bytes[u].x, bytes[u].y, bytes[u].z, bytes[u].w};
      Vec<kWidth> v;
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        const uint8_t byte = uint8_t(words[j / 4] >> 8 * (j % 4));
        v.v[j] = a.format == EightBit::E4M3 ? from_e4m3(byte) : float(int8_t(byte));
      }
      packed<T>(v * a.scale[first + pack / packs]).write(out + int64_t(pack) * kWidth);
    }
  }
}

constexpr int kSide = 128;  // of a tile of bytes

/// Blocks of 4 x 4 bytes are transposed in registers, and the blocks of a tile in shared memory, whose words lie at
/// word ^ row / 4.
__global__ void __launch_bounds__(256) transpose_bytes_kernel(TransposeBytes a) {
  await_previous();
  __shared__ unsigned tile[kSide][kSide / 4];
  const int64_t tiles = ceil_div(a.cols, kSide), row = blockIdx.x / tiles * kSide, column = blockIdx.x % tiles * kSide;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int of = warp; of < kSide / 4; of += 8) {
    unsigned words[4], turned[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int64_t r = row + 4 * of + i, c = column + 4 * lane;
      words[i] = r < a.rows && c < a.cols ? *reinterpret_cast<const unsigned*>(a.x + r * a.cols + c) : 0;
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      turned[j] = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) turned[j] |= (words[i] >> 8 * j & 255) << 8 * i;
      tile[4 * lane + j][of ^ lane] = turned[j];
    }
  }
  __syncthreads();
  for (int c = warp; c < kSide; c += 8) {
    const int64_t r = row + 4 * lane;
    if (column + c < a.cols && r < a.rows)
      *reinterpret_cast<unsigned*>(a.out + (column + c) * a.stride + a.first + r) = tile[c][lane ^ c / 4];
  }
}

}  // namespace

LIGER_REGISTER(eight_bit_rows, [](const QuantiseRows& a, Stream s) {
  dispatch(a.dtype,
           [&]<class T>() { launch(eight_bit_rows_kernel<T>, {.blocks = a.rows, .threads = kThreads}, s, a); });
});
LIGER_REGISTER(dequantise_rows, [](const DequantiseRows& a, Stream s) {
  const Grid grid{.blocks = ceil_div(a.rows, kRowsOfBlock), .threads = kThreads};
  dispatch(a.dtype, [&]<class T>() { launch(dequantise_rows_kernel<T>, grid, s, a); });
});
LIGER_REGISTER(transpose_bytes, [](const TransposeBytes& a, Stream s) {
  launch(transpose_bytes_kernel, {.blocks = ceil_div(a.rows, kSide) * ceil_div(a.cols, kSide), .threads = 256}, s, a);
});

}  // namespace liger::cuda::eight_bit
