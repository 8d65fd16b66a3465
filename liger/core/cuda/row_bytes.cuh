#pragma once
// Rows in 8 bits (liger/core/eight_bit.h), made where a kernel has the rows in 16.
#include "liger/core/cuda/row_layout.cuh"
#include "liger/core/eight_bit.h"

namespace liger::cuda {

/// The largest magnitude; NaN if one is NaN, which fmaxf would leave out.
struct LargestMagnitude {
  using Value = float;
  static __device__ Value identity() { return 0; }
  __device__ Value operator()(Value a, Value b) const { return b > a || b != b ? b : a; }
  __device__ static Value shuffle(Value v, int lane) { return __shfl_xor_sync(~0u, v, lane); }
};

template <int kWidth>
__device__ float largest_magnitude(float most, const Vec<kWidth>& v) {
#pragma unroll
  for (int i = 0; i < kWidth; ++i) most = LargestMagnitude()(most, fabsf(v.v[i]));
  return most;
}

/// Four floats within ±largest as bytes.
__device__ inline unsigned to_bytes(EightBit format, const float (&v)[4]) {
#if __CUDA_ARCH__ >= 890
  if (format == EightBit::E4M3) {
    uint16_t low, high;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(v[1]), "f"(v[0]));
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(v[3]), "f"(v[2]));
    return low | unsigned(high) << 16;
  }
#endif
  unsigned word = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) word |= unsigned(to_byte(format, v[i])) << 8 * i;
  return word;
}

/// The scale of a row whose largest magnitude is known.
struct ByteScale {
  EightBit format;
  float scale, inverse;

  __device__ ByteScale(float most, EightBit format)
      : format(format),
        scale(most == 0         ? 1
              : most < INFINITY ? most / largest(format)
                                : NAN),
        inverse(1 / scale) {}

  /// 8 or 16 neighbours of the row, to an address that is a multiple of as many.
  template <int kWidth>
  __device__ void write(uint8_t* to, const Vec<kWidth>& v) const {
    // Not more than the largest number: a product with 1 / scale may round up.
    const auto four = [&](int i) {
      float scaled[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) scaled[j] = fminf(fmaxf(v.v[i + j] * inverse, -largest(format)), largest(format));
      return to_bytes(format, scaled);
    };
    static_assert(kWidth == 8 || kWidth == 16);
    if constexpr (kWidth == 16) store16(to, {four(0), four(4), four(8), four(12)});
    else *reinterpret_cast<uint64_t*>(to) = four(0) | uint64_t(four(4)) << 32;
  }
};

/// Rows of a kernel that has a block per row; they begin and end at 16-byte boundaries.
template <class T, int n>
struct RowsOut {
  AlignedRow<T> of[n];
  const float* factor[n];  // per column of what goes out in 8 bits, or null
  RowBytes bytes;          // of all side by side
};

/// map_packs (stream.cuh) of whole rows of 16-bit numbers, whose results also go out in 8 bits. Registers hold them
/// until the row's scale is known, kPacks packs of each row a thread: shared memory would take the place of the factors
/// in L1. kUnroll packs of each row in are loaded at once. The bytes may lie where a row in does, which has been read
/// by then.
template <int kPacks, int kUnroll, class T, int kOut, int kIn, class F>
__device__ void map_row_to_bytes(const RowsOut<T, kOut>& out, const AlignedRow<T> (&in)[kIn], int64_t row, F f) {
  using Row = AlignedRow<T>;
  constexpr int kWidth = Row::kWidth;
  static_assert(kPacks % kUnroll == 0);
  const int packs = out.of[0].packs();
  typename Row::Pack held[kPacks][kOut];
  const auto each = [&](int first, int count, auto g) {
#pragma unroll
    for (int p = first; p < first + count; ++p)
      if (const int k = threadIdx.x + p * int(blockDim.x); k < packs) g(p, k);
  };
  const auto factored = [&](int p, int o, int k) {
    const Vec<kWidth> v = to_vec(held[p][o]);
    return out.factor[o] ? v * to_vec(Pack<float, kWidth>::read(out.factor[o] + k * kWidth)) : v;
  };
  float most = 0;
#pragma unroll
  for (int first = 0; first < kPacks; first += kUnroll) {
    typename Row::Pack raw[kUnroll][kIn];
    each(first, kUnroll, [&](int p, int k) { unrolled<kIn>([&](int i) { raw[p - first][i] = in[i].load(k, T(0)); }); });
    each(first, kUnroll, [&](int p, int k) {
      float from[kIn][kWidth], to[kOut][kWidth];
      unrolled<kIn>([&](int i) { raw[p - first][i].to_float(from[i]); });
      unrolled<kWidth>([&](int j) {
        float x[kIn], y[kOut];
        unrolled<kIn>([&](int i) { x[i] = from[i][j]; });
        f(x, y);
        unrolled<kOut>([&](int o) { to[o][j] = y[o]; });
      });
      unrolled<kOut>([&](int o) {
        held[p][o] = Row::Pack::from_float(to[o]);
        out.of[o].store(k, held[p][o], out.of[o]);
        most = largest_magnitude(most, factored(p, o, k));
      });
    });
  }
  RowReduce<LargestMagnitude> reduce;
  const ByteScale by(reduce(most), out.bytes.format);
  if (threadIdx.x == 0) out.bytes.scale[row] = by.scale;
  uint8_t* const to = out.bytes.out + row * kOut * out.of[0].n;
  each(0, kPacks, [&](int p, int k) {
    unrolled<kOut>([&](int o) { by.write(to + o * out.of[0].n + k * kWidth, factored(p, o, k)); });
  });
}

}  // namespace liger::cuda
