#include "liger/core/cuda/async_copy.cuh"
#include "liger/core/cuda/pack.cuh"
#include "liger/ops/linear/scaled_matmul_hopper.cuh"

namespace liger::cuda::scaled_matmul_ {
namespace {

// A block has a tile of 128 x 128 results, each of its eight warps 64 x 32 of them. Stages of shared memory have 64
// bytes of each row of x and w, or of low and b, and are filled ahead of the products. Two blocks per multiprocessor:
// one multiplies while the other stores.
constexpr int kSide = 128, kBytes = 64, kChunks = kBytes / 16, kStages = 3, kThreads = 256;
constexpr int kWarpRows = 64, kWarpColumns = 32;

/// Chunk c of 16 bytes of a row lies at c ^ row / 2 % 4, so that eight rows are read without conflicts.
struct Rows {
  uint4 chunks[kSide][kChunks];
  __device__ uint4& at(int row, int chunk) { return chunks[row][chunk ^ row / 2 % kChunks]; }
};
struct Stage {
  Rows x, w;
};

/// Begins to copy 64 bytes of 128 rows, from `first` and from byte `byte` on; zeros where there are none.
__device__ void copy_rows(Rows& to, const void* from, int64_t rows, int64_t row_bytes, int64_t stride, int64_t first,
                          int64_t byte) {
#pragma unroll
  for (int i = threadIdx.x; i < kSide * kChunks; i += kThreads) {
    const int64_t row = first + i / kChunks, at = byte + i % kChunks * 16;
    const bool there = row < rows && at < row_bytes;
    copy_async16<false>(&to.at(i / kChunks, i % kChunks),
                        static_cast<const char*>(from) + (there ? row * stride + at : 0), there ? 16 : 0);
  }
}

/// multiply(sum, a, b0, b1) for all products of a warp with a stage: 32 bytes of 16 rows and of 8 columns.
template <class Sum, class F>
__device__ void for_products(Stage& stage, Sum (&sums)[4][4][4], int row, int column, F multiply) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int k = 0; k < kChunks; k += 2) {
    unsigned a[4][4], b[2][4];
#pragma unroll
    for (int t = 0; t < 4; ++t) load_matrices(a[t], &stage.x.at(row + 16 * t + lane % 16, k + lane / 16));
#pragma unroll
    for (int u = 0; u < 2; ++u)
      load_matrices(b[u], &stage.w.at(column + 16 * u + lane / 16 * 8 + lane % 8, k + lane / 8 % 2));
#pragma unroll
    for (int t = 0; t < 4; ++t)
#pragma unroll
      for (int u = 0; u < 4; ++u) multiply(sums[t][u], a[t], b[u / 2][u % 2 * 2], b[u / 2][u % 2 * 2 + 1]);
  }
}

template <class T, EightBit kFormat>
__global__ void __launch_bounds__(kThreads, 2) scaled_matmul_kernel(ScaledMatmul m) {
  await_previous();
  using Sum = std::conditional_t<kFormat == EightBit::Int8, int, float>;
  Stage* stages = shared_memory<Stage>();
  const TileAt at =
      tile_at(int(blockIdx.x), int(ceil_div(m.rows, int64_t(kSide))), int(ceil_div(m.cols, int64_t(kSide))));
  const int64_t first_row = at.row * int64_t(kSide), first_column = at.column * int64_t(kSide);
  const int steps = int(ceil_div(m.depth, int64_t(kBytes))), all = steps + int(ceil_div(m.rank * 2, int64_t(kBytes)));
  const auto copy = [&](int step) {
    if (step < all) {
      Stage& to = stages[step % kStages];
      const bool adapter = step >= steps;
      const int64_t byte = int64_t(step - (adapter ? steps : 0)) * kBytes, bytes = adapter ? 2 * m.rank : m.depth;
      copy_rows(to.x, adapter ? m.low : m.x, m.rows, bytes, adapter ? 2 * m.low_stride : m.depth, first_row, byte);
      copy_rows(to.w, adapter ? m.b : m.w, m.cols, bytes, adapter ? 2 * m.b_stride : m.depth, first_column, byte);
    }
    close_copies();
  };
  // The stage of a step, and its copies for a later one begun.
  const auto next = [&](int step) -> Stage& {
    await_copies(kStages - 2);
    __syncthreads();
    copy(step + kStages - 1);
    return stages[step % kStages];
  };
#pragma unroll
  for (int step = 0; step < kStages - 1; ++step) copy(step);

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = lane / 4, quad = lane % 4;
  const int row = warp / 4 * kWarpRows, column = warp % 4 * kWarpColumns;
  Sum sums[4][4][4] = {};
  for (int step = 0; step < steps; ++step)
    for_products(next(step), sums, row, column, [](Sum(&sum)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
      multiply_bytes(sum, a, b0, b1);
    });

  // factor · (Σ / factor + low bᵀ): the adapter's products are added to the sums by the tensor cores.
  const float factor = m.rank > 0 ? m.factor : 1, inverse = 1 / factor;
  float results[4][4][4], scales[4][2];
#pragma unroll
  for (int t = 0; t < 4; ++t)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int64_t r = first_row + row + 16 * t + 8 * i + group;
      scales[t][i] = r < m.rows ? m.x_scale[r] * inverse : 0;
    }
#pragma unroll
  for (int u = 0; u < 4; ++u) {
    const float4 of = columns_of<T>(m.w_scale, m.bias, m.cols, first_column + column + 8 * u + 2 * quad);
#pragma unroll
    for (int t = 0; t < 4; ++t)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        results[t][u][i] =
            float(sums[t][u][i]) * (scales[t][i / 2] * (i % 2 ? of.y : of.x)) + (i % 2 ? of.w : of.z) * inverse;
  }
  for (int step = steps; step < all; ++step)
    for_products(
        next(step), results, row, column,
        [](float (&sum)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) { multiply_numbers<T>(sum, a, b0, b1); });

  // By way of shared memory, where a warp has 64 rows of 64 bytes.
  copies_done();
  __syncthreads();
  auto* words = reinterpret_cast<unsigned (*)[kChunks][4]>(stages) + warp * kWarpRows;
#pragma unroll
  for (int t = 0; t < 4; ++t)
#pragma unroll
    for (int u = 0; u < 4; ++u)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int r = 16 * t + 8 * i + group;
        words[r][u ^ r / 2 % kChunks][quad] =
            to_word<T>(results[t][u][2 * i] * factor, results[t][u][2 * i + 1] * factor);
      }
  __syncwarp();
#pragma unroll
  for (int i = lane; i < kWarpRows * kChunks; i += 32) {
    const int r = i / kChunks, chunk = i % kChunks;
    const int64_t to_row = first_row + row + r, to_column = first_column + column + 8 * chunk;
    if (to_row < m.rows && to_column < m.cols)
      store16(static_cast<T*>(m.out) + to_row * m.cols + to_column,
              *reinterpret_cast<const uint4*>(words[r][chunk ^ r / 2 % kChunks]));
  }
}

void run(const ScaledMatmul& m, Stream s) {
  static_assert(kWarpRows * kWarpColumns * 2 * kThreads / 32 <= int(sizeof(Stage)) * kStages);
  const int64_t tiles = ceil_div(m.rows, int64_t(kSide)) * ceil_div(m.cols, int64_t(kSide));
  dispatch(m, [&]<class T, EightBit kFormat>() {
    launch(scaled_matmul_kernel<T, kFormat>,
           {.blocks = tiles, .threads = kThreads, .shared_bytes = kStages * int(sizeof(Stage))}, s, m);
  });
}

}  // namespace

LIGER_REGISTER(has_scaled_matmul, [](const HasScaledMatmul& a, Stream) {
  *a.yes = has_wgmma() || has_byte_mma(a.format == EightBit::E4M3);
});
LIGER_REGISTER(scaled_matmul, [](const ScaledMatmul& given, Stream s) {
  if (given.rows == 0 || given.cols == 0) return;
  ScaledMatmul a = given;
  if (a.factor == 0) a.rank = 0;
  if (has_wgmma()) scaled_matmul_hopper::run(a, s);
  else run(a, s);
});

}  // namespace liger::cuda::scaled_matmul_
