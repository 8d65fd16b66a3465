#include <algorithm>
#include "liger/core/cuda/launch.h"
#include "liger/ops/matmul/int2_matmul.h"

namespace liger::cuda::int2_matmul {
namespace {

/// The four codes in byte `byte` of `word`, a byte each.
__device__ inline unsigned spread(unsigned word, int byte) {
  const unsigned codes = word >> 8 * byte & 0xff, nibbles = (codes | codes << 12) & 0x000f000fu;
  return (nibbles | nibbles << 6) & 0x03030303u;
}

/// Four neighbours of a row of b, from column c on; 0 where there are none.
__device__ inline unsigned load_columns(const Int2Matmul& g, int64_t p, int64_t c) {
  const uint8_t* b = g.b + p * g.b_stride + c;
  if (reinterpret_cast<uintptr_t>(b) % 4 == 0 && c + 4 <= g.n) return *reinterpret_cast<const unsigned*>(b);
  unsigned word = 0;
  for (int i = 0; i < 4 && c + i < g.n; ++i) word |= unsigned(b[i]) << 8 * i;
  return word;
}

__device__ inline const int* words(const Int2Matmul& g, int64_t m) { return reinterpret_cast<const int*>(g.a) + m * g.packed; }

// ---- few rows of a: b is read once and nothing else counts

inline constexpr int kFewColumns = 128, kFewThreads = 8;  // a warp reads 128 columns of one row of b, 8 warps of a block take turns

/// out = −Σ_k a, on which few_kernel adds.
__global__ void __launch_bounds__(256) few_begin_kernel(Int2Matmul g) {
  await_previous();
  const int64_t i = int64_t(blockIdx.x) * 256 + threadIdx.x;
  if (i < g.m * g.n) g.out[i] = -g.a_sum[i / g.n];
}

/// kM rows of a times a run of b's rows and kFewColumns of its columns. The runs meet in out: sums of integers, whose order is free.
template <int kM>
__global__ void __launch_bounds__(256) few_kernel(Int2Matmul g, int strips, int splits) {
  await_previous();
  __shared__ int partial[kFewThreads][kM * kFewColumns];
  const int strip = blockIdx.x % strips, split = blockIdx.x / strips % splits;
  const int64_t m = int64_t(blockIdx.x / strips / splits) * kM, c = int64_t(strip) * kFewColumns + threadIdx.x * 4;
  const int64_t run = (g.packed + splits - 1) / splits, end = min(g.packed, (split + 1) * run);
  int sum[kM][4] = {};
#pragma unroll (kM > 4 ? 2 : 4)
  for (int64_t p = split * run + threadIdx.y; p < end; p += kFewThreads) {
    const unsigned codes = load_columns(g, p, c);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int four = int(spread(codes, j));
#pragma unroll
      for (int i = 0; i < kM; ++i) sum[i][j] = __dp4a(m + i < g.m ? words(g, m + i)[p] : 0, four, sum[i][j]);
    }
  }
#pragma unroll
  for (int i = 0; i < kM; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) partial[threadIdx.y][i * kFewColumns + threadIdx.x * 4 + j] = sum[i][j];
  __syncthreads();
  for (int i = threadIdx.y * 32 + threadIdx.x; i < kM * kFewColumns; i += 32 * kFewThreads) {
    const int64_t row = m + i / kFewColumns, column = int64_t(strip) * kFewColumns + i % kFewColumns;
    int total = 0;
    for (int y = 0; y < kFewThreads; ++y) total += partial[y][i];
    if (row < g.m && column < g.n) atomicAdd(g.out + row * g.n + column, total);
  }
}

// ---- many rows: tensor cores

inline constexpr int kTileN = 128, kTileM = 128, kTileP = 32;  // a block's columns, its rows, and the rows of b (k = 128) of one step
inline constexpr int kStages = 2, kWordsRow = kTileP + 8;      // padded, so that the lanes of a warp meet different banks
inline constexpr int kBytesRow = kTileN + 16;

struct Stage {
  alignas(16) uint8_t b[kTileP][kBytesRow];
  alignas(16) int a[kTileM][kWordsRow];
};

/// What one thread fetches of a stage: 16 bytes of b and four times 16 of a.
struct Fetched { alignas(16) unsigned b[4]; alignas(16) int a[4][4]; };

__device__ inline Fetched fetch(const Int2Matmul& g, int64_t m, int64_t n, int64_t p) {
  Fetched f;
  const int t = threadIdx.x;
  const int64_t row = p + t / 8, column = n + t % 8 * 16;
#pragma unroll
  for (int i = 0; i < 4; ++i) f.b[i] = row < g.packed ? load_columns(g, row, column + 4 * i) : 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int64_t r = m + t / 8 + 32 * i, at = p + t % 8 * 4;
    if (r < g.m && at + 4 <= g.packed && g.packed % 4 == 0) {
      *reinterpret_cast<int4*>(f.a[i]) = *reinterpret_cast<const int4*>(words(g, r) + at);
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j) f.a[i][j] = r < g.m && at + j < g.packed ? words(g, r)[at + j] : 0;
    }
  }
  return f;
}

__device__ inline void keep(const Fetched& f, Stage& s) {
  const int t = threadIdx.x;
  *reinterpret_cast<int4*>(&s.b[t / 8][t % 8 * 16]) = *reinterpret_cast<const int4*>(f.b);
#pragma unroll
  for (int i = 0; i < 4; ++i) *reinterpret_cast<int4*>(&s.a[t / 8 + 32 * i][t % 8 * 4]) = *reinterpret_cast<const int4*>(f.a[i]);
}

/// outᵀ = wᵀ aᵀ: a byte of b, spread, is the register of four weights that the tensor core takes. 8 warps, each 64 columns of b by 32
/// rows of a. A lane takes 8 neighbouring columns, and of each 8 rows of b the two at 2 · (lane % 4): any order of k will do that both
/// operands share.
__global__ void __launch_bounds__(256) many_kernel(Int2Matmul g, int64_t strips) {
  await_previous();
  auto* stages = shared_memory<Stage>();
  const int64_t n = blockIdx.x % strips * kTileN, m = blockIdx.x / strips * kTileM;
  const int warp = threadIdx.x / 32, group = threadIdx.x % 32 / 4, quad = threadIdx.x % 4;
  const int warp_n = warp % 2 * 64, warp_m = warp / 2 * 32;
  int sum[4][4][4] = {};  // pairs of columns, eighths of rows, the accumulator's registers
  Fetched next = fetch(g, m, n, 0);
  for (int64_t p = 0, turn = 0; p < g.packed; p += kTileP, turn ^= 1) {
    Stage& s = stages[turn];
    keep(next, s);
    __syncthreads();  // and nobody still reads the stage that the next turn overwrites
    next = fetch(g, m, n, p + kTileP);
#pragma unroll
    for (int k = 0; k < kTileP; k += 8) {
      unsigned columns[2][2];
      int rows[4][2];
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int j = 0; j < 2; ++j) columns[i][j] = reinterpret_cast<const unsigned*>(&s.b[k + 2 * quad + i][warp_n + 8 * group])[j];
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 2; ++j) rows[i][j] = s.a[warp_m + 8 * i + group][k + 2 * quad + j];
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const int word = c / 2, byte = c % 2 * 2;
        const unsigned weights[4] = {spread(columns[0][word], byte), spread(columns[0][word], byte + 1), spread(columns[1][word], byte), spread(columns[1][word], byte + 1)};
#pragma unroll
        for (int r = 0; r < 4; ++r) tensor_multiply_add(sum[c][r], weights, rows[r]);
      }
    }
  }
#pragma unroll
  for (int r = 0; r < 4; ++r)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int64_t row = m + warp_m + 8 * r + 2 * quad + e, column = n + warp_n + 8 * group;
      if (row >= g.m) continue;
      int* out = g.out + row * g.n + column;
      const int less = g.a_sum[row];
      alignas(16) int four[2][4];
#pragma unroll
      for (int c = 0; c < 8; ++c) four[c / 4][c % 4] = sum[c / 2][r][2 * (c % 2) + e] - less;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if (g.n % 4 == 0) {
          if (column + 4 * h < g.n) *reinterpret_cast<int4*>(out + 4 * h) = *reinterpret_cast<const int4*>(four[h]);
        } else {
#pragma unroll
          for (int c = 0; c < 4; ++c)
            if (column + 4 * h + c < g.n) out[4 * h + c] = four[h][c];
        }
      }
    }
}

inline constexpr int64_t kFew = 32;  // rows of a up to which the tensor cores would wait for b

template <int kM>
void launch_few(const Int2Matmul& g, Stream s) {
  const int64_t strips = (g.n + kFewColumns - 1) / kFewColumns, groups = (g.m + kM - 1) / kM;
  // Four blocks an SM; but a thread should have a few rows of b.
  const int64_t wanted = 4 * multiprocessors(current_device()) / (strips * groups), splits = std::clamp<int64_t>(wanted, 1, std::max<int64_t>(1, g.packed / 64));
  launch(few_kernel<kM>, {.blocks = strips * splits * groups, .threads = {32, kFewThreads}}, s, g, int(strips), int(splits));
}

}  // namespace

LIGER_REGISTER(int2_matmul_kernel, [](const Int2Matmul& g, Stream s) {
  if (g.m > kFew) {
    const int64_t strips = (g.n + kTileN - 1) / kTileN;
    return launch(many_kernel, {.blocks = strips * ((g.m + kTileM - 1) / kTileM), .threads = 256, .shared_bytes = kStages * int(sizeof(Stage))}, s, g, strips);
  }
  launch(few_begin_kernel, {.blocks = (g.m * g.n + 255) / 256, .threads = 256}, s, g);
  g.m == 1 ? launch_few<1>(g, s) : g.m <= 4 ? launch_few<4>(g, s) : launch_few<8>(g, s);
});

}  // namespace liger::cuda::int2_matmul
