#pragma once
// Products of floats on tensor cores. An operand is a sum of kTerms bfloat16 numbers, each what the ones before it
// leave over: 8 bits of the float per term, so that one term holds a bfloat16 number exactly, two a float16 one and
// three a float. The products of terms are added in float; those that are below the last term's own rounding are left
// out.
#include "liger/core/cuda/async_copy.cuh"
#include "liger/core/cuda/mma.cuh"

namespace liger::cuda::split {

/// Two floats as pairs of terms.
template <int kTerms>
__device__ void split_pair(float low, float high, unsigned (&terms)[kTerms]) {
#pragma unroll
  for (int t = 0; t < kTerms; ++t) {
    terms[t] = to_word<bfloat16>(low, high);
    const float2 held = to_floats<bfloat16>(terms[t]);
    low -= held.x, high -= held.y;
  }
}

/// The same, written as the pair at `to`; a term's numbers lie `plane` after those of the term before.
template <int kTerms>
__device__ void write_pair(float low, float high, bfloat16* to, int64_t plane) {
  unsigned terms[kTerms];
  split_pair(low, high, terms);
#pragma unroll
  for (int t = 0; t < kTerms; ++t) *reinterpret_cast<unsigned*>(to + t * plane) = terms[t];
}

/// The tensor core's product of a 16 x 16 and a 16 x 8 matrix, added to sum (mma.cuh).
__device__ inline void multiply_add(float (&sum)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  multiply_numbers<bfloat16>(sum, a, b0, b1);
}

/// A matrix in shared memory, as kTerms planes of bfloat16 numbers. Rows are 16 bytes longer than they need to be:
/// where their length is an odd multiple of it, eight of them are read without conflicts.
template <int terms, int rows, int cols>
struct Tile {
  static constexpr int kTerms = terms, kStride = cols + 8, kPlane = rows * kStride, kBytes = terms * kPlane * 2;
  bfloat16* numbers;

  __device__ static Tile at_front(char*& shared) {
    const Tile tile{reinterpret_cast<bfloat16*>(shared)};
    shared += kBytes;
    return tile;
  }
  __device__ bfloat16* at(int row, int col, int term = 0) const {
    return numbers + term * kPlane + row * kStride + col;
  }
  /// Where at(r + down, c + right, term) lies if the tile lies at `from`; down and right depend on the lane, and the
  /// rest is known to the compiler.
  __device__ unsigned address(unsigned from, int term, int r, int c, int down, int right) const {
    return from + 2 * (down * kStride + right) + 2 * (term * kPlane + r * kStride + c);
  }
};

/// Four 8 x 8 blocks of a tile at rows and columns (r, c), (r + down, c + right) and so on: a lane gets the pair
/// lane % 4 of row lane / 4 of each, or of column lane / 4 where they are transposed. Block i is moved by `down` where
/// i & kDown, and by `right` where i & kRight.
template <bool kTransposed, int kDown, int kRight, class Tile>
__device__ void load_blocks(unsigned (&words)[4], const Tile& tile, int term, int r, int c) {
  const int lane = threadIdx.x % 32;
#if __CUDA_ARCH__ >= 800
  const int i = lane / 8;
  const unsigned from =
      tile.address(shared_address(tile.numbers), term, r, c, (i & kDown ? 8 : 0) + lane % 8, i & kRight ? 8 : 0);
  if constexpr (kTransposed)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(from)
                 : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(from)
                 : "memory");
#else
  for (int i = 0; i < 4; ++i) {
    const int row = r + (i & kDown ? 8 : 0), col = c + (i & kRight ? 8 : 0), major = lane / 4, minor = lane % 4 * 2;
    const auto number = [&](int minor) {
      return *reinterpret_cast<const uint16_t*>(
          tile.at(row + (kTransposed ? minor : major), col + (kTransposed ? major : minor), term));
    };
    words[i] = number(minor) | unsigned(number(minor + 1)) << 16;
  }
#endif
}

/// Of an 8 x 8 block of 16-bit numbers, of which a lane has the pair lane % 4 of row lane / 4, the same of its columns.
__device__ inline unsigned transposed(unsigned word) {
#if __CUDA_ARCH__ >= 750
  unsigned out;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(word));
  return out;
#else
  const int lane = threadIdx.x % 32, row = lane / 4, low = lane % 4 * 2;
  const WarpWords<1> all(word);
  const int shift = row % 2 * 16;
  const unsigned first = all.of(0, low * 4 + row / 2) >> shift, second = all.of(0, (low + 1) * 4 + row / 2) >> shift;
  return (first & 0xffff) | second << 16;
#endif
}

/// 16 columns of a left operand, 16 rows of it, as lanes hold them.
template <int kTerms>
struct Left {
  unsigned of[kTerms][4];

  /// Rows r to r + 15 and columns c to c + 15 of a tile that has [rows, k], or with kTransposed [k, rows].
  template <bool kTransposed, class Tile>
  __device__ void load(const Tile& tile, int r, int c) {
    static_assert(Tile::kTerms == kTerms);
#pragma unroll
    for (int t = 0; t < kTerms; ++t)
      if constexpr (kTransposed) load_blocks<true, 2, 1>(of[t], tile, t, c, r);
      else load_blocks<false, 1, 2>(of[t], tile, t, r, c);
  }
};

/// 16 rows of kCols numbers in float, of which a lane holds for each eight columns what the tensor core's sums have.
template <int kCols>
struct Panel {
  static constexpr int kEights = kCols / 8;
  float of[kEights][4];

  __device__ void clear() {
#pragma unroll
    for (int e = 0; e < kEights; ++e)
#pragma unroll
      for (int i = 0; i < 4; ++i) of[e][i] = 0;
  }

  /// f(number, row 0 to 15, column) for the lane's own numbers.
  template <class F>
  __device__ void each(F f) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int e = 0; e < kEights; ++e)
#pragma unroll
      for (int i = 0; i < 4; ++i) f(of[e][i], lane / 4 + i / 2 * 8, 8 * e + lane % 4 * 2 + i % 2);
  }

  /// Columns 16 k to 16 k + 15 as a left operand.
  template <int kTerms>
  __device__ Left<kTerms> left(int k) const {
    Left<kTerms> l;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      unsigned terms[kTerms];
      split_pair(of[2 * k + i / 2][i % 2 * 2], of[2 * k + i / 2][i % 2 * 2 + 1], terms);
#pragma unroll
      for (int t = 0; t < kTerms; ++t) l.of[t][i] = terms[t];
    }
    return l;
  }
};

/// Which products of terms count.
constexpr bool counts(int a, int b, int a_terms, int b_terms) {
  return a + b < (a_terms > b_terms ? a_terms : b_terms);
}

/// sums += left · right for 8 kEights columns, from column n on; of right, rows k to k + 15. kAlongK: the tile has
/// right's columns as rows. Of the sums, those from `first` to `last`. Each is added to once in a round over all: a
/// product takes as long as several can be begun.
template <bool kAlongK, int kEights, int kA, class Tile>
__device__ void multiply(float (*sums)[4], const Left<kA>& left, const Tile& right, int k, int n, int first = 0,
                         int last = kEights) {
  constexpr int kB = Tile::kTerms;
  // The tensor core does not round to the nearest. Where sums are to be as good as float's, it adds 16 products at a
  // time and no more, those of first terms apart from the others.
  constexpr bool kApart = kA == 3 || kB == 3;
  float small[kApart ? kEights : 1][4] = {}, large[kApart ? kEights : 1][4] = {};
#pragma unroll
  for (int b = 0; b < kB; ++b) {
    unsigned words[kEights / 2][4];
#pragma unroll
    for (int e = 0; e < kEights; e += 2) {
      if (e < first || e >= last) continue;
      if constexpr (kAlongK) load_blocks<false, 2, 1>(words[e / 2], right, b, n + 8 * e, k);
      else load_blocks<true, 1, 2>(words[e / 2], right, b, k, n + 8 * e);
    }
#pragma unroll
    for (int a = 0; a < kA; ++a) {
      if (!counts(a, b, kA, kB)) continue;
#pragma unroll
      for (int e = 0; e < kEights; ++e)
        if (e >= first && e < last) {
          float (&to)[4] = kApart ? (a + b == 0 ? large : small)[kApart ? e : 0] : sums[e];
          multiply_add(to, left.of[a], words[e / 2][e % 2 * 2], words[e / 2][e % 2 * 2 + 1]);
        }
    }
  }
  if constexpr (kApart)
#pragma unroll
    for (int e = 0; e < kEights; ++e)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (e >= first && e < last) sums[e][i] += large[e][i] + small[e][i];
}

}  // namespace liger::cuda::split
