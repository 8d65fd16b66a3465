#include <algorithm>
#include "liger/core/cuda/async_copy.cuh"
#include "liger/core/cuda/mma.cuh"
#include "liger/core/cuda/pack.cuh"
#include "liger/core/cuda/reduce.cuh"
#include "liger/ops/research/matmul/int2_matmul.h"

// outᵀ = codesᵀ aᵀ on the tensor cores, less the sums of a's rows. Their register of weights holds four neighbours of k
// in one column of b, and any order of k will do that both operands share. So a lane takes four rows of b and four
// columns, whose bytes it transposes; each of the four planes of codes in a byte is then a mask away, and meets a's
// bytes as they lie: nothing is laid out anew.
namespace liger::cuda::int2_matmul {
namespace {

inline constexpr int kRows = 8;  // of a, in one product of a tensor core
inline constexpr unsigned kOnes = 0x01010101u;

/// Where a thread is in its block, and in the tensor core's operands.
struct Lane {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = lane / 4, quad = lane % 4;
};

/// Row i of a 4 x 4 matrix of bytes becomes column i.
__device__ inline void transpose(unsigned (&w)[4]) {
  const unsigned low01 = __byte_perm(w[0], w[1], 0x5140), high01 = __byte_perm(w[0], w[1], 0x7362);
  const unsigned low23 = __byte_perm(w[2], w[3], 0x5140), high23 = __byte_perm(w[2], w[3], 0x7362);
  w[0] = __byte_perm(low01, low23, 0x5410), w[1] = __byte_perm(low01, low23, 0x7632);
  w[2] = __byte_perm(high01, high23, 0x5410), w[3] = __byte_perm(high01, high23, 0x7632);
}

/// sums += the products of four rows of b, 32 columns of a warp in 4 per lane, and kEights · 8 rows of a, whose bytes
/// in plane j of(e, j) gives. Register 2 i + r of sums[h][e] is that of column 4 group + 2 h + i and row
/// 8 e + 2 quad + r:
///   group = lane / 4
///   quad  = lane % 4
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
      for (int j = 0; j < 4 && 4 * i + j < n; ++j)
        words[i] |= unsigned(static_cast<const uint8_t*>(from)[4 * i + j]) << 8 * j;
  }
  if constexpr (kWords == 1) return words[0];
  else return {words[0], words[1], words[2], words[3]};
}

/// Whether 16 neighbours of a, and so many of b, always begin at such a boundary.
bool aligned_a(const Int2Matmul& g) { return aligned16({g.a}) && g.packed % 16 == 0; }
bool aligned_b(const Int2Matmul& g, int bytes) {
  return reinterpret_cast<uintptr_t>(g.b) % bytes == 0 && g.b_stride % bytes == 0;
}

// ---- few rows of a: b is read once and nothing else counts

/// A warp takes 64 rows of b, 16 per lane; the warps of a block alternate.
inline constexpr int kFewColumns = 32, kWarps = 8;

/// out for few rows of a. A block has kFewColumns columns of b and kRows · kEights rows of a. A warp takes every
/// kWarps-th 64 rows of b, a lane 16 of those in 4 columns, from memory to registers; the warps' sums add up in shared
/// memory. The limit is memory: b is read once.
template <int kEights>
__global__ void __launch_bounds__(32 * kWarps) few_kernel(Int2Matmul g, bool aligned_a, bool aligned_b, int strips) {
  await_previous();
  __shared__ int partial[kWarps][8 * kEights][32];
  const auto [lane, warp, group, quad] = Lane();
  const int64_t m = int64_t(blockIdx.x / strips) * kRows * kEights, first = int64_t(blockIdx.x % strips) * kFewColumns,
                c = first + 4 * group;
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
        for (int i = 0; i < 2; ++i)
          partial[warp][(h * 2 + i) * 2 * kEights + e * 2 + r][lane] = sums[h][e][2 * i + r] - of_row;
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < kRows * kEights * kFewColumns; i += 32 * kWarps) {
    const int row = i / kFewColumns, column = i % kFewColumns;
    int total = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w)
      total += partial[w][column % 4 * 2 * kEights + row / 8 * 2 + row % 2][column / 4 * 4 + row % 8 / 2];
    if (m + row < g.m && first + column < g.n) g.out[(m + row) * g.n + first + column] = total;
  }
}

// ---- many rows: both operands wait in shared memory, to which chunks that are aligned are copied

inline constexpr int kTileColumns = 256, kStep = 64;             // of a block; rows of b, a quarter of k, of one step
inline constexpr int kManyThreads = kTileColumns, kChunks = 16;  // chunks of 16 bytes in a line of a stage

/// Chunks of 16 bytes. Of a, as the tensor core wants them; of b, in an order in which the lanes of a warp meet
/// different banks.
template <int kEights>
struct alignas(1024) Stage {
  uint4 a[2][kRows * kEights][8],
      b[kStep][kTileColumns / 16];  // row of a: its four chunks in planes 0 and 1; in 2 and 3
  __device__ uint4& of_a(int row, int chunk) { return a[chunk / 8][row][chunk % 8 ^ row % 8]; }
  __device__ uint4& of_b(int row, int chunk) { return b[row][chunk ^ row / 4 % 4 * 2]; }
};

/// Brings both operands of a tile to shared memory, step by step. A thread copies one chunk of every kLines-th line of
/// each operand, a quarter of a step's with each call of send. Chunks of both operands begin at multiples of 16 bytes.
template <int kEights, int kStages>
class OperandStages {
 public:
  using Stage = int2_matmul::Stage<kEights>;
  static constexpr int kTileRows = kRows * kEights, kLines = kManyThreads / kChunks;
  static_assert(kStep == 4 * kLines && kTileRows % (4 * kLines) == 0 && kTileColumns == 16 * kChunks);

  __device__ explicit OperandStages(const Int2Matmul& g)
      : g_(g),
        stages_(reinterpret_cast<Stage*>((reinterpret_cast<uintptr_t>(shared_memory<Stage>()) + alignof(Stage) - 1) /
                                         alignof(Stage) * alignof(Stage))),
        stride_a_(kLines * 4 * g.packed),
        stride_b_(kLines * g.b_stride) {}

  __device__ Stage& stage(int step) const { return stages_[step % kStages]; }

  /// Sends for the first steps of the tile that begins there.
  __device__ void start(int64_t first_row, int64_t first_column) {
    const int64_t n = first_column + chunk_ * 16, m = first_row + line_;
    left_ = int(g_.packed), left_b_ = int(max(int64_t(0), min(int64_t(16), g_.n - n))),
    lines_ = int(min(int64_t(kTileRows), g_.m - m)), step_ = 0;
    from_b_ = g_.b + line_ * g_.b_stride + n;
    from_a_ = g_.a + (m * 4 + chunk_ / 4) * g_.packed + chunk_ % 4 * 16;
    for (int step = 0; step < kStages - 1; ++step)
#pragma unroll
      for (int quarter = 0; quarter < 4; ++quarter) send(quarter);
  }

  /// Sends for a quarter of the next step.
  __device__ void send(int quarter) {
    Stage& s = stage(step_);
    copy_async16<false>(&s.of_b(line_ + kLines * quarter, chunk_), from_b_ + quarter * stride_b_,
                        line_ + kLines * quarter < left_ ? left_b_ : 0);
    const int left_a = max(0, min(16, left_ - chunk_ % 4 * 16));
#pragma unroll
    for (int i = quarter; i < kTileRows / kLines; i += 4)
      copy_async16<false>(&s.of_a(line_ + kLines * i, chunk_), from_a_ + i * stride_a_,
                          kLines * i < lines_ ? left_a : 0);
    if (quarter == 3) {
      close_copies();
      from_b_ += 4 * stride_b_, from_a_ += kStep, left_ -= kStep, ++step_;
    }
  }

  /// All threads, and the tensor cores, see the steps that were sent for, but the last `pending`.
  __device__ static void await(int pending) {
    await_copies(pending);
    show_tensor_core();
    __syncthreads();
  }

 private:
  const Int2Matmul& g_;
  Stage* stages_;
  const int chunk_ = threadIdx.x % kChunks, line_ = threadIdx.x / kChunks;
  const int64_t stride_a_, stride_b_;
  const uint8_t* from_b_ = nullptr;
  const int8_t* from_a_ = nullptr;
  int left_ = 0, left_b_ = 0, lines_ = 0, step_ = 0;  // rows of b; bytes of each; rows of a
};

/// The sums of a tile's rows of a, a part of a row in each thread.
template <int kEights>
struct RowSums {
  static constexpr int kParts = kManyThreads / (kRows * kEights), kOfPart = kChunks / kParts;  // chunks of a step
  const int row = threadIdx.x / kParts, part = threadIdx.x % kParts;
  int sum = 0;

  __device__ void add(Stage<kEights>& s, int chunk) {
    if (chunk >= kOfPart) return;
    const uint4 four = s.of_a(row, part * kOfPart + chunk);
    for (const unsigned word : {four.w, four.z, four.y, four.x}) sum = __dp4a(int(word), int(kOnes), sum);
  }

  /// All threads of the block get them; a barrier comes first.
  __device__ const int* all() {
    __shared__ int sums[kRows * kEights];
    sum = reduce_lanes<SumOf<int>>(sum, kParts);
    if (part == 0) sums[row] = sum;
    __syncthreads();
    return sums;
  }
};

/// A lane's bytes of b in half a step: rows 4 quad and 16 + 4 quad, columns 4 group.
template <int kEights>
__device__ void read_codes(unsigned (&bytes)[2][4], Stage<kEights>& s, int half_step, Lane at) {
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      bytes[half][i] = reinterpret_cast<const unsigned*>(
          &s.of_b(half_step * 32 + half * 16 + 4 * at.quad + i, at.warp * 2 + at.group / 4))[at.group % 4];
}

/// sums += the tile's products, and those of a's rows for `rows`. While a plane's products are in flight the next one's
/// weights are made, and a part of the other work is done.
template <int kEights, int kStages>
__device__ void multiply_tile(OperandStages<kEights, kStages>& operands, int steps, Lane at, int (&sums)[2][kEights][4],
                              RowSums<kEights>& rows) {
  unsigned next[2][4];
  operands.await(kStages - 2);
  read_codes(next, operands.stage(0), 0, at);
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    auto& s = operands.stage(step);
#pragma unroll
    for (int half_step = 0; half_step < 2; ++half_step) {
      unsigned bytes[2][4];
      memcpy(bytes, next, sizeof(bytes));
      transpose(bytes[0]), transpose(bytes[1]);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        unsigned weights[2][4];
#pragma unroll
        for (int i = 0; i < 8; ++i) weights[i / 4][i % 4] = bytes[i % 4 / 2][i / 4 * 2 + i % 2] >> 2 * j & 3 * kOnes;
        tensor_multiply_add(sums, weights, s.a[j / 2], j % 2 * 4 + 2 * half_step);
        await_products<true>();
        // For the next step; and nobody reads the one before any more.
        if (half_step == 0 && j == 0) operands.await(kStages - 3);
        if (half_step == 0) operands.send(j);
        if (j == 1) read_codes(next, half_step == 0 ? s : operands.stage(step + 1), 1 - half_step, at);
        rows.add(s, half_step * 4 + j);
      }
    }
  }
  await_products<false>();
#pragma unroll
  for (int i = 0; i < 2 * kEights * 4; ++i)
    forget(sums[i / (kEights * 4)][i / 4 % kEights][i % 4]);  // not read before they are there
}

/// out = sums − of_rows, for the tile's rows from first_row on and a lane's four columns.
template <int kEights>
__device__ void write_tile(const Int2Matmul& g, int64_t first_row, int64_t column, int quad,
                           const int (&sums)[2][kEights][4], const int* of_rows) {
#pragma unroll
  for (int e = 0; e < kEights; ++e)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int in_tile = 8 * e + 2 * quad + r;
      const int64_t m = first_row + in_tile;
      if (m >= g.m) continue;
      int* out = g.out + m * g.n + column;
      const int of_row = of_rows[in_tile];
      const int4 four{sums[0][e][r] - of_row, sums[0][e][2 + r] - of_row, sums[1][e][r] - of_row,
                      sums[1][e][2 + r] - of_row};
      if (g.n % 4 == 0) {
        if (column < g.n) __stcs(reinterpret_cast<int4*>(out), four);  // L2 is the operands'
      } else {
#pragma unroll
        for (int c = 0; c < 4; ++c)
          if (column + c < g.n) out[c] = (&four.x)[c];
      }
    }
}

/// out for many rows of a. A block walks along tiles of kRows · kEights rows and kTileColumns columns, a warp has 32 of
/// the columns and all of the rows; sums are in registers, both operands in stages of shared memory. The limit is the
/// rate of the tensor cores, which the lanes feed with weights.
template <int kEights, int kStages>
__global__ void __launch_bounds__(kManyThreads, 1) many_kernel(Int2Matmul g, int strips, int tiles) {
  await_previous();
  const Lane at;
  OperandStages<kEights, kStages> operands(g);
  const auto start = [&](int tile) {
    operands.start(int64_t(tile / strips) * kRows * kEights, int64_t(tile % strips) * kTileColumns);
  };
  start(blockIdx.x);
#pragma unroll 1
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    int sums[2][kEights][4] = {};
    RowSums<kEights> rows;
    multiply_tile(operands, int(ceil_div(g.packed, kStep)), at, sums, rows);
    copies_done();
    const int* of_rows = rows.all();
    if (tile + int(gridDim.x) < tiles) start(tile + int(gridDim.x));
    write_tile(g, int64_t(tile / strips) * kRows * kEights,
               int64_t(tile % strips) * kTileColumns + at.warp * 32 + 4 * at.group, at.quad, sums, of_rows);
  }
}

template <int kEights>
void launch_few(const Int2Matmul& g, Stream s) {
  const int64_t strips = ceil_div(g.n, kFewColumns);
  launch(few_kernel<kEights>, {.blocks = strips * ceil_div(g.m, kRows * kEights), .threads = 32 * kWarps}, s, g,
         aligned_a(g), aligned_b(g, 4), int(strips));
}

/// Of shared memory that many_kernel takes.
template <int kEights, int kStages>
constexpr int kManyBytes = kStages * int(sizeof(Stage<kEights>)) + int(alignof(Stage<kEights>));

template <int kEights, int kStages>
void launch_many(const Int2Matmul& g, Stream s) {
  const int64_t strips = ceil_div(g.n, kTileColumns), tiles = strips * ceil_div(g.m, kRows * kEights);
  launch(many_kernel<kEights, kStages>,
         {.blocks = std::min<int64_t>(tiles, multiprocessors(current_device())),
          .threads = kManyThreads,
          .shared_bytes = kManyBytes<kEights, kStages>},
         s, g, int(strips), int(tiles));
}

}  // namespace

LIGER_REGISTER(int2_matmul_kernel, [](const Int2Matmul& g, Stream s) {
  if (g.m <= 8) return launch_few<1>(g, s);
  if (g.m <= 16) return launch_few<2>(g, s);
  const auto waves = [&](int64_t columns, int64_t rows) {
    const int64_t at_once = multiprocessors(current_device());
    return ceil_div(ceil_div(g.n, columns) * ceil_div(g.m, rows), at_once);
  };
  // Measured at k = 4096: a wave of few's blocks takes 8 us, of many's with 64 rows 21, with 128 31.
  const int64_t few = 8 * waves(kFewColumns, 32), narrow = 21 * waves(kTileColumns, 64),
                wide = 31 * waves(kTileColumns, 128);
  const bool many = aligned_a(g) && aligned_b(g, 16) && kManyBytes<8, 3> <= shared_bytes();
  if (!many || few < std::min(narrow, wide)) launch_few<4>(g, s);
  else if (wide < narrow && kManyBytes<16, 4> <= shared_bytes_of_block()) launch_many<16, 4>(g, s);
  else launch_many<8, 3>(g, s);
});

}  // namespace liger::cuda::int2_matmul
