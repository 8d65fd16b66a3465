#pragma once
// Products of 8-bit rows on Hopper's warpgroups.
#include "liger/core/cuda/tiles.cuh"
#include "liger/ops/linear/scaled_matmul.cuh"

namespace liger::cuda::scaled_matmul_hopper {

// A block has a tile of 128 rows x 256 columns of the result at a time, two warpgroups 64 x 256 each. A third warpgroup
// copies operands to a ring of stages ahead of them, those of the block's next tile too. A stage has 128 bytes of each
// row of x and w, or of low and b. Results leave by boxes of 64 x 64, while the next tile begins. One block per
// multiprocessor.
constexpr int kRows = 128, kColumns = 256, kBytes = 128, kStages = 4, kThreads = 384, kProducer = 2, kBox = 64;

/// Where a tile begins.
struct Tile {
  int row, column;
};

struct Matmul {
  TensorMap x, w, low, b, out;
  const float *x_scale, *w_scale;
  const void* bias;
  int rows, cols, depth, rank;
  float factor;

  __device__ int row_tiles() const { return ceil_div(rows, kRows); }
  __device__ int tiles() const { return row_tiles() * ceil_div(cols, kColumns); }
  __device__ int steps() const { return ceil_div(depth, kBytes); }
  __device__ int low_steps() const { return ceil_div(rank, kBytes / 2); }

  __device__ Tile tile(int tile) const {
    const TileAt at = tile_at(tile, row_tiles(), ceil_div(cols, kColumns));
    return {at.row * kRows, at.column * kColumns};
  }
};

struct alignas(1024) Shared {
  uint8_t x[kStages][kRows * kBytes], w[kStages][kColumns * kBytes];
  uint4 staging[2][2][kBox * kBox / 8];  // two boxes of each warpgroup
  CopyBarrier full[kStages], empty[kStages];
};

using Stage = RingStage<kStages>;

__device__ inline void copy_tiles(const Matmul& m, Shared& shared) {
  Stage stage;
  for (int tile = blockIdx.x; tile < m.tiles(); tile += gridDim.x) {
    const Tile begin = m.tile(tile);
    const int steps = m.steps(), all = steps + m.low_steps();
    for (int step = 0; step < all; ++step, stage.next()) {
      shared.empty[stage.at].await(stage.parity ^ 1);
      CopyBarrier& full = shared.full[stage.at];
      full.arrive_expecting((kRows + kColumns) * kBytes);
      const bool adapter = step >= steps;
      const int k = (step - (adapter ? steps : 0)) * kBytes / 2;
      copy_box(shared.x[stage.at], adapter ? m.low : m.x, k, begin.row, 0, full);
      copy_box(shared.w[stage.at], adapter ? m.b : m.w, k, begin.column, 0, full);
    }
  }
}

/// Multiplies what `steps` stages have: multiply(x, w) starts the products of one.
template <class F>
__device__ void for_stages(Shared& shared, Stage& stage, int steps, int group, F multiply) {
  const bool arrives = threadIdx.x % 32 == 0;
  int previous = -1;
  for (int step = 0; step < steps; ++step) {
    shared.full[stage.at].await(stage.parity);
    products_begin();
    multiply(shared.x[stage.at] + group * 64 * kBytes, shared.w[stage.at]);
    products_issued();
    await_products<true>();
    if (previous >= 0 && arrives) shared.empty[previous].arrive();
    previous = stage.at;
    stage.next();
  }
  await_products<false>();
  if (previous >= 0 && arrives) shared.empty[previous].arrive();
}

/// Rows 16 warp + group and that + 8, whose scales are `first` and `second`, columns 8 c + 2 quad and the next, as
/// multiply_add has them.
template <class Sum>
__device__ void scaled(const float4* columns, const Sum (&sums)[32][4], float (&to)[32][4], float first, float second,
                       float inverse, int quad) {
#pragma unroll
  for (int c = 0; c < 32; ++c) {
    const float4 of = columns[4 * c + quad];
    to[c][0] = float(sums[c][0]) * (first * of.x) + of.z * inverse;
    to[c][1] = float(sums[c][1]) * (first * of.y) + of.w * inverse;
    to[c][2] = float(sums[c][2]) * (second * of.x) + of.z * inverse;
    to[c][3] = float(sums[c][3]) * (second * of.y) + of.w * inverse;
  }
}

/// Writes a warpgroup's 64 x 256 results, times factor, by way of its two boxes in shared memory.
template <class T>
__device__ void store(const Matmul& m, Tile begin, uint4 (&boxes)[2][kBox * kBox / 8], const float (&results)[32][4],
                      float factor, int group, int thread) {
  const int row = thread / 32 * 16 + thread % 16;
  const auto word = [&](int c, int i) { return to_word<T>(results[c][i] * factor, results[c][i + 1] * factor); };
#pragma unroll
  for (int part = 0; part < kColumns / kBox; ++part) {
    uint4* box = boxes[part % 2];
    if (thread == 0) await_stores<1>();  // of the box before the last: it was this one
    await_threads(1 + group, 128);
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
      const int chunk = i + thread % 32 / 16, c = 8 * part + i;
      store_matrices<false>(&box[row * 8 + (chunk ^ row % 8)],
                            {word(c, 0), word(c, 2), word(c + 1, 0), word(c + 1, 2)});
    }
    show_tensor_core();
    await_threads(1 + group, 128);
    if (thread == 0) {
      store_box(m.out, box, begin.column + part * kBox, begin.row + group * 64, 0);
      stores_issued();
    }
  }
}

template <class T, EightBit kFormat>
__global__ void __launch_bounds__(kThreads, 1) scaled_matmul_kernel(const __grid_constant__ Matmul m) {
  await_previous();
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)  // elsewhere it is not started
  using Sum = std::conditional_t<kFormat == EightBit::Int8, int, float>;
  Shared& shared = *shared_memory<Shared>();
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) shared.full[i].init(1), shared.empty[i].init(8);
    barriers_initialised();
  }
  __syncthreads();
  const int group = int(threadIdx.x) / 128, thread = int(threadIdx.x) % 128;
  if (group == kProducer) {
    resize_registers<40, false>();
    if (thread == 0) copy_tiles(m, shared);
    return;
  }
  resize_registers<232, true>();
  const int row = 64 * group + 16 * (thread / 32) + thread % 32 / 4;
  float4* columns = reinterpret_cast<float4*>(shared.staging[group][0]);
  Stage stage;
  for (int tile = blockIdx.x; tile < m.tiles(); tile += gridDim.x) {
    const Tile begin = m.tile(tile);
    // Loaded ahead of the products, which take the time that memory needs.
    const float4 mine = scaled_matmul_::columns_of<T>(m.w_scale, m.bias, m.cols, begin.column + 2 * thread);
    const float first = begin.row + row < m.rows ? m.x_scale[begin.row + row] : 0,
                second = begin.row + row + 8 < m.rows ? m.x_scale[begin.row + row + 8] : 0;
    Sum sums[32][4] = {};
    for_stages(shared, stage, m.steps(), group, [&](const uint8_t* x, const uint8_t* w) {
#pragma unroll
      for (int k = 0; k < kBytes / 32; ++k) multiply_add_bytes(sums, x, w, k);
    });
    if (thread == 0) await_stores<0>();
    await_threads(1 + group, 128);
    columns[thread] = mine;
    await_threads(1 + group, 128);
    float results[32][4];
    // factor · (Σ / factor + low bᵀ): the adapter's products are added to the sums by the tensor cores.
    const float factor = m.rank > 0 ? m.factor : 1, inverse = 1 / factor;
    scaled(columns, sums, results, first * inverse, second * inverse, inverse, thread % 4);
    if (m.rank > 0)
      for_stages(shared, stage, m.low_steps(), group, [&](const uint8_t* low, const uint8_t* b) {
#pragma unroll
        for (int k = 0; k < kBytes / 32; ++k)
          multiply_add<T, Layout::AlongK, Layout::AlongK, kColumns>(results, reinterpret_cast<const T*>(low),
                                                                    reinterpret_cast<const T*>(b), k);
      });
    store<T>(m, begin, shared.staging[group], results, factor, group, thread);
  }
  if (thread == 0) await_stores<0>();
#endif
}

inline void run(const ScaledMatmul& a, Stream s) {
  // The copies do not look at the numbers: two of 8 bits go as one of 16.
  const auto bytes = [&](const uint8_t* of, int64_t rows, int box_rows) {
    return tensor_map(a.dtype, of, {a.depth / 2, rows, 1}, {a.depth / 2, a.depth / 2}, box_rows);
  };
  const auto adapted = [&](const void* of, int64_t rows, int64_t stride, int box_rows) {
    return a.rank > 0 ? tensor_map(a.dtype, of, {a.rank, rows, 1}, {stride, stride}, box_rows) : TensorMap();
  };
  const Matmul m{.x = bytes(a.x, a.rows, kRows),
                 .w = bytes(a.w, a.cols, kColumns),
                 .low = adapted(a.low, a.rows, a.low_stride, kRows),
                 .b = adapted(a.b, a.cols, a.b_stride, kColumns),
                 .out = tensor_map(a.dtype, a.out, {a.cols, a.rows, 1}, {a.cols, a.cols}, kBox),
                 .x_scale = a.x_scale,
                 .w_scale = a.w_scale,
                 .bias = a.bias,
                 .rows = int(a.rows),
                 .cols = int(a.cols),
                 .depth = int(a.depth),
                 .rank = int(a.rank),
                 .factor = a.factor};
  scaled_matmul_::dispatch(a, [&]<class T, EightBit kFormat>() {
    static_assert(sizeof(Shared) <= 227 * 1024);
    launch(scaled_matmul_kernel<T, kFormat>,
           {.blocks = multiprocessors(current_device()), .threads = kThreads, .shared_bytes = int(sizeof(Shared))}, s,
           m);
  });
}

}  // namespace liger::cuda::scaled_matmul_hopper
