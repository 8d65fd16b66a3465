#include "liger/core/cuda/tile.cuh"
#include "liger/ops/matmul/int2_matmul.h"

// outᵀ = codesᵀ aᵀ on the tensor cores, less the sums of a's rows. Their register of weights holds four neighbours of k in one column of b,
// and any order of k will do that both operands share. So a lane takes four rows of b and four columns, whose bytes it transposes; each
// of the four planes of codes in a byte is then a mask away, and meets a's bytes as they lie: nothing is laid out anew.
namespace liger::cuda::int2_matmul {
namespace {

inline constexpr int kRows = 8;        // of a, in one product of a tensor core
inline constexpr unsigned kOnes = 0x01010101u;

/// Row i of a 4 x 4 matrix of bytes becomes column i.
__device__ inline void transpose(unsigned (&w)[4]) {
  const unsigned low01 = __byte_perm(w[0], w[1], 0x5140), high01 = __byte_perm(w[0], w[1], 0x7362);
  const unsigned low23 = __byte_perm(w[2], w[3], 0x5140), high23 = __byte_perm(w[2], w[3], 0x7362);
  w[0] = __byte_perm(low01, low23, 0x5410), w[1] = __byte_perm(low01, low23, 0x7632);
  w[2] = __byte_perm(high01, high23, 0x5410), w[3] = __byte_perm(high01, high23, 0x7632);
}

/// sums += the products of four rows of b, 32 columns of a warp in 4 a lane, and kEights · 8 rows of a, whose bytes in plane j
/// of(e, j) gives. Register 2 i + r of sums[h][e] is that of column 4 group + 2 h + i and row 8 e + 2 quad + r, with group = lane / 4 and
/// quad = lane % 4.
template <int kEights, class F>
__device__ void multiply_add(int (&sums)[2][kEights][4], unsigned (&b)[4], F of) {
  transpose(b);
#pragma unroll
  for (int j = 0; j < 4; j += 2)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const auto codes = [&](int i, int plane) { return b[2 * h + i] >> 2 * plane & 3 * kOnes; };
      const unsigned weights[4] = {codes(0, j), codes(1, j), codes(0, j + 1), codes(1, j + 1)};
#pragma unroll
      for (int e = 0; e < kEights; ++e) tensor_multiply_add(sums[h][e], weights, {of(e, j), of(e, j + 1)});
    }
}

/// kWords · 4 neighbouring bytes from `from` on, of which `n` are there. aligned: `from` is a multiple of as many.
template <int kWords, class Words>
__device__ Words load(const void* from, int64_t n, bool aligned) {
  if (aligned && n >= kWords * 4) return *static_cast<const Words*>(from);
  unsigned words[kWords] = {};
  if (n >= kWords * 4 + 4) {  // whole words around them
    const int shift = int(reinterpret_cast<uintptr_t>(from) % 4);
    const auto* whole = reinterpret_cast<const unsigned*>(static_cast<const uint8_t*>(from) - shift);
    unsigned read[kWords + 1];
#pragma unroll
    for (int i = 0; i <= kWords; ++i) read[i] = whole[i];
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = __funnelshift_r(read[i], read[i + 1], 8 * shift);
  } else {
#pragma unroll
    for (int i = 0; i < kWords; ++i)
#pragma unroll 1
      for (int j = 0; j < 4 && 4 * i + j < n; ++j) words[i] |= unsigned(static_cast<const uint8_t*>(from)[4 * i + j]) << 8 * j;
  }
  if constexpr (kWords == 1) return words[0];
  else return {words[0], words[1], words[2], words[3]};
}

/// Whether 16 neighbours of a, and so many of b, always begin at such a boundary.
bool aligned_a(const Int2Matmul& g) { return aligned16({g.a}) && g.packed % 16 == 0; }
bool aligned_b(const Int2Matmul& g, int bytes) { return reinterpret_cast<uintptr_t>(g.b) % bytes == 0 && g.b_stride % bytes == 0; }

// ---- few rows of a: b is read once and nothing else counts

inline constexpr int kFewColumns = 32, kWarps = 8;  // a warp takes 64 rows of b, 16 a lane; 8 warps of a block take turns

template <int kEights>
__global__ void __launch_bounds__(32 * kWarps) few_kernel(Int2Matmul g, bool aligned_a, bool aligned_b, int strips) {
  await_previous();
  __shared__ int partial[kWarps][8 * kEights][32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = lane / 4, quad = lane % 4;
  const int64_t m = int64_t(blockIdx.x / strips) * kRows * kEights, first = int64_t(blockIdx.x % strips) * kFewColumns, c = first + 4 * group;
  int sums[2][kEights][4] = {}, less[kEights] = {};
#pragma unroll 1
  for (int64_t p = warp * 64 + quad * 16; p - quad * 16 < g.packed; p += kWarps * 64) {
    unsigned b[4][4];
#pragma unroll
    for (int i = 0; i < 16; ++i)
      b[i / 4][i % 4] = load<1, unsigned>(g.b + (p + i) * g.b_stride + c, p + i < g.packed ? g.n - c : 0, aligned_b);
    uint4 a[kEights][4];
#pragma unroll
    for (int e = 0; e < kEights; ++e)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int64_t row = m + kRows * e + group;
        a[e][j] = load<4, uint4>(g.a + (row * 4 + j) * g.packed + p, row < g.m ? g.packed - p : 0, aligned_a);
      }
    const auto word = [](const uint4& v, int i) { return int(i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w); };
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      multiply_add(sums, b[i], [&](int e, int j) { return word(a[e][j], i); });
#pragma unroll
      for (int e = 0; e < kEights; ++e)
#pragma unroll
        for (int j = 0; j < 4; ++j) less[e] = __dp4a(word(a[e][j], i), int(kOnes), less[e]);
    }
  }
#pragma unroll
  for (int e = 0; e < kEights; ++e) {
    less[e] = reduce_lanes<SumOf<int>>(less[e], 4);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int of_row = __shfl_sync(~0u, less[e], (2 * quad + r) * 4);
#pragma unroll
      for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int i = 0; i < 2; ++i) partial[warp][(h * 2 + i) * 2 * kEights + e * 2 + r][lane] = sums[h][e][2 * i + r] - of_row;
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < kRows * kEights * kFewColumns; i += 32 * kWarps) {
    const int row = i / kFewColumns, column = i % kFewColumns;
    int total = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) total += partial[w][column % 4 * 2 * kEights + row / 8 * 2 + row % 2][column / 4 * 4 + row % 8 / 2];
    if (m + row < g.m && first + column < g.n) g.out[(m + row) * g.n + first + column] = total;
  }
}

// ---- many rows: both operands wait in shared memory

inline constexpr int kTile = 128, kStep = 32;  // a block's columns of b and rows of a; rows of b, a quarter of k, of one step
inline constexpr int kStages = 4, kChunks = kTile / 16;
inline constexpr int kManyEights = 8, kManyThreads = 2 * kTile / (kRows * kManyEights) * 32, kLines = kManyThreads / kChunks;

/// Chunks of 16 bytes, in an order in which the lanes of a warp meet different banks.
struct Stage {
  uint4 b[kStep][kChunks], a[kTile][kChunks];  // row of a: its chunks of 16 in plane 0, 1, 2, 3
  __device__ uint4& of_b(int row, int chunk) { return b[row][chunk ^ row / 4 % 4 * 2]; }
  __device__ uint4& of_a(int row, int chunk) { return a[row][chunk ^ row % 8]; }
};

/// Warps of 64 columns of b by kManyEights · 8 rows of a. kAligned: of both operands 16 neighbours always begin at such a boundary.
template <bool kAligned>
__global__ void __launch_bounds__(kManyThreads, 2) many_kernel(Int2Matmul g, int strips) {
  await_previous();
  auto* stages = shared_memory<Stage>();
  const int64_t n = int64_t(blockIdx.x % strips) * kTile, m = int64_t(blockIdx.x / strips) * kTile;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = lane / 4, quad = lane % 4;
  const int warp_n = warp % 2, warp_m = warp / 2;

  // A thread sends for one chunk of every kLines-th line, the next step's with each call.
  const int chunk = threadIdx.x % kChunks, line = threadIdx.x / kChunks;
  constexpr int64_t kMost = kAligned ? 16 : 32;  // bytes from a chunk's first on that matter
  const int left_b = int(max(int64_t(0), min(kMost, g.n - n - chunk * 16))), lines_a = int(min(int64_t(kTile), g.m - m - line));
  const uint8_t* from_b = g.b + line * g.b_stride + n + chunk * 16;
  const int8_t* from_a = g.a + ((m + line) * 4 + chunk / 2) * g.packed + chunk % 2 * 16;
  const int64_t stride_a = kLines * 4 * g.packed, stride_b = kLines * g.b_stride;
  int left = int(g.packed), turn = 0;
  const auto copy = [](uint4& to, const void* from, int there) {
    if (kAligned) copy_async16<false>(&to, from, there);
    else to = load<4, uint4>(from, there, false);
  };
  const auto send = [&] {
    Stage& s = stages[turn++ % kStages];
    const int left_a = max(0, min(int(kMost), left - chunk % 2 * 16));
#pragma unroll
    for (int i = 0; i < kStep / kLines; ++i) copy(s.of_b(line + kLines * i, chunk), from_b + i * stride_b, line + kLines * i < left ? left_b : 0);
#pragma unroll
    for (int i = 0; i < kTile / kLines; ++i) copy(s.of_a(line + kLines * i, chunk), from_a + i * stride_a, kLines * i < lines_a ? left_a : 0);
    close_copies();
    from_b += kStep / kLines * stride_b, from_a += kStep, left -= kStep;
  };

  int sums[2][2][kManyEights][4] = {}, less[kManyEights] = {};
  const int steps = int((g.packed + kStep - 1) / kStep);
  for (int step = 0; step < kStages - 1; ++step) send();
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    await_copies(kStages - 2);
    __syncthreads();  // and nobody still reads the stage that is sent for next
    send();
    Stage& s = stages[step % kStages];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      unsigned a[kManyEights][4];
#pragma unroll
      for (int e = 0; e < kManyEights; ++e)
        load_matrices(a[e], &s.of_a(warp_m * kRows * kManyEights + 8 * e + lane % 8, lane / 8 * 2 + half));
      if (half == warp_n)  // two warps have these rows: each sums half of them
#pragma unroll
        for (int e = 0; e < kManyEights; ++e)
#pragma unroll
          for (const unsigned word : a[e]) less[e] = __dp4a(int(word), int(kOnes), less[e]);
#pragma unroll
      for (int x = 0; x < 2; ++x) {
        unsigned b[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) b[i] = reinterpret_cast<const unsigned*>(&s.of_b(half * 16 + 4 * quad + i, warp_n * 4 + x * 2 + group / 4))[group % 4];
        multiply_add(sums[x], b, [&](int e, int j) { return int(a[e][j]); });
      }
    }
  }
  copies_done();
  __syncthreads();
  auto* halves = shared_memory<int>();
#pragma unroll
  for (int e = 0; e < kManyEights; ++e) {
    less[e] = reduce_lanes<SumOf<int>>(less[e], 4);
    if (quad == 0) halves[warp_n * kTile + warp_m * kRows * kManyEights + 8 * e + group] = less[e];
  }
  __syncthreads();
#pragma unroll
  for (int e = 0; e < kManyEights; ++e)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int in_tile = warp_m * kRows * kManyEights + 8 * e + 2 * quad + r, of_row = halves[in_tile] + halves[kTile + in_tile];
      const int64_t row = m + in_tile;
      if (row >= g.m) continue;
#pragma unroll
      for (int x = 0; x < 2; ++x) {
        const int64_t column = n + warp_n * 64 + x * 32 + 4 * group;
        int* out = g.out + row * g.n + column;
        const int four[4] = {sums[x][0][e][r] - of_row, sums[x][0][e][2 + r] - of_row, sums[x][1][e][r] - of_row, sums[x][1][e][2 + r] - of_row};
        if (g.n % 4 == 0) {
          if (column < g.n) *reinterpret_cast<int4*>(out) = {four[0], four[1], four[2], four[3]};
        } else {
#pragma unroll
          for (int c = 0; c < 4; ++c)
            if (column + c < g.n) out[c] = four[c];
        }
      }
    }
}

template <int kEights>
void launch_few(const Int2Matmul& g, Stream s) {
  const int64_t strips = (g.n + kFewColumns - 1) / kFewColumns;
  launch(few_kernel<kEights>, {.blocks = strips * ((g.m + kRows * kEights - 1) / (kRows * kEights)), .threads = 32 * kWarps}, s, g, aligned_a(g), aligned_b(g, 4), int(strips));
}

}  // namespace

LIGER_REGISTER(int2_matmul_kernel, [](const Int2Matmul& g, Stream s) {
  if (g.m <= 8) return launch_few<1>(g, s);
  if (g.m <= 16) return launch_few<2>(g, s);
  const int64_t strips = (g.n + kTile - 1) / kTile, blocks = strips * ((g.m + kTile - 1) / kTile);
  // Measured at 4096 x 4096: a wave of many's blocks takes .038 ms, few's .015 for every 64 rows.
  if (g.m <= 32 || 3 * blocks < multiprocessors(current_device())) return launch_few<4>(g, s);
  launch(aligned_a(g) && aligned_b(g, 16) ? many_kernel<true> : many_kernel<false>, {.blocks = blocks, .threads = kManyThreads, .shared_bytes = kStages * int(sizeof(Stage))}, s, g, int(strips));
});

}  // namespace liger::cuda::int2_matmul
