#pragma once
// Products of 16-bit rows sorted by group with the matrix of their group, on Hopper's tensor cores.
#include "liger/core/cuda/dispatch.h"
#include "liger/core/cuda/pack.cuh"
#include "liger/core/cuda/tiles.cuh"
#include "liger/core/grouped_gemm.h"

namespace liger::cuda::grouped_gemm {

// A block has a tile of 128 x 256 sums at a time, two warpgroups 64 x 256 each, and a third one copies operands to a
// ring of stages ahead of them, those of the block's next tile too. One block per multiprocessor.
constexpr int kRows = 128, kColumns = 256, kDepth = 64, kStages = 4, kThreads = 384, kProducer = 2;

/// The sums of a tile: the first operand has its rows, the second one its columns.
struct Task {
  int group, row, column;  // where the tile begins: rows and columns of the result of its group
  int columns;             // of the second operand that are multiplied, a multiple of 16
  int first, last;         // rows of the sorted operand: of its columns, or of its depth
};

/// Two groups of 8 columns of a warp's sums, as T, the columns as rows.
template <class T>
__device__ void store_columns(const float (&sums)[32][4], int c, uint4* to) {
  store_matrices<true>(to, {to_word<T>(sums[c][0], sums[c][1]), to_word<T>(sums[c][2], sums[c][3]),
                            to_word<T>(sums[c + 1][0], sums[c + 1][1]), to_word<T>(sums[c + 1][2], sums[c + 1][3])});
}

/// What is made of a result as it is stored.
enum class Makes {
  Nothing,
  OfNumbers,  // make(numbers, r, c) is given out[r] from c on, 8 numbers
  OfHalves    // make(first, second, r, c) is given out[r] from c on, 8 numbers of each half of the columns
};

struct MakesNothing {
  static constexpr Makes kMakes = Makes::Nothing;
};

/// GroupedRows: the matrices are the first operand and their columns the rows of sums, so that the rows of a group, few
/// and of any number, are columns of sums: multiples of 16, as wgmma takes them. The second product is more depth.
/// Where something is made of halves, a tile has 64 columns of the first half of the matrices and the same of the
/// second, a warpgroup each.
template <class T, bool kAlongDepth, class Make = MakesNothing>
struct RowsOfGroups {
  using Element = T;
  static constexpr Layout kFirst = kAlongDepth ? Layout::AlongK : Layout::AcrossK, kSecond = Layout::AlongK;
  static constexpr bool kSumOverRows = false, kHalves = Make::kMakes == Makes::OfHalves;
  static constexpr int kBoxRows = 32;  // of x: few, for tiles with few columns

  TensorMap matrix, x, low_matrix, low;
  T* out;         // null: only `make` is given the result
  const T* bias;  // may be null
  const int* ends;
  int groups, depth, rank, cols;
  Make make;

  /// From the first operand's rows of one warpgroup to those of the other.
  __device__ int to_next() const { return kHalves ? cols / 2 : 64; }
  __device__ int row_tiles() const { return kHalves ? ceil_div(cols / 2, 64) : ceil_div(cols, kRows); }
  __device__ int begin(int group) const { return group > 0 ? ends[group - 1] : 0; }
  __device__ int column_tiles(int group) const { return ceil_div(ends[group] - begin(group), kColumns); }
  __device__ Task task(int group, int row_tile, int column_tile) const {
    // The rows of a group are shared evenly among its tiles.
    const int rows = ends[group] - begin(group), columns = round_up(ceil_div(rows, ceil_div(rows, kColumns)), 16);
    const int first = begin(group) + column_tile * columns;
    return {group, row_tile * (kHalves ? 64 : kRows), 0, columns, first, min(first + columns, ends[group])};
  }
  __device__ int steps(const Task&) const { return ceil_div(depth, kDepth) + ceil_div(rank, kDepth); }
  __device__ int bytes(const Task& t) const { return (kRows + round_up(t.columns, kBoxRows)) * kDepth * 2; }

  __device__ void copy(const Task& t, int step, T* a, T* b, CopyBarrier& barrier) const {
    const int of_x = ceil_div(depth, kDepth), k = (step < of_x ? step : step - of_x) * kDepth;
    const TensorMap &first = step < of_x ? matrix : low_matrix, &second = step < of_x ? x : low;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = t.row + i * to_next();
      copy_box(a + i * 64 * kDepth, first, kAlongDepth ? k : row, kAlongDepth ? row : k, t.group, barrier);
    }
    for (int i = 0; i < t.columns; i += kBoxRows) copy_box(b + i * kDepth, second, k, t.first + i, 0, barrier);
  }

  /// Rounds the sums and adds the bias: a thread has two rows of sums, which are columns of the result.
  __device__ void add_bias(const Task& t, float (&sums)[32][4], int row, int end, int thread) const {
    row += thread / 32 * 16 + thread % 32 / 4;
    float of_row[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) of_row[i] = row + 8 * i < end ? float(bias[int64_t(t.group) * cols + row + 8 * i]) : 0;
#pragma unroll
    for (int c = 0; c < 32; ++c)
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[c][i] = round_to<T>(sums[c][i]) + of_row[i / 2];
  }

  /// A warpgroup's sums by way of its 16 KiB of shared memory, in which a column of 64 sums is a row of 128 bytes.
  __device__ void store(const Task& t, float (&sums)[32][4], uint4 (&staging)[2][1024], int group, int thread) const {
    const int lane = thread % 32, warp = thread / 32, row = t.row + group * to_next();
    const int end_row = kHalves ? cols / 2 * (1 + group) : cols;
    if (bias) add_bias(t, sums, row, end_row, thread);
    const auto await_others = [&] { kHalves ? await_threads(3, 256) : await_threads(1 + group, 128); };
#pragma unroll
    for (int from = 0; from < kColumns; from += 128) {
      if (from >= t.columns) break;
      await_others();
#pragma unroll
      for (int c = 0; c < 16; c += 2) {
        const int column = 8 * (c + lane / 16) + lane % 8, chunk = 2 * warp + lane / 8 % 2;
        store_columns<T>(sums, from / 8 + c, &staging[group][column * 8 + (chunk ^ column % 8)]);
      }
      await_others();
      const int chunk = thread % 8, end = t.last - t.first - from, to = row + 8 * chunk;
      if ((out || Make::kMakes == Makes::OfNumbers) && to < end_row) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const int column = 16 * i + thread / 8;
          if (column >= end) continue;
          const uint4& numbers = staging[group][column * 8 + (chunk ^ column % 8)];
          if (out) store16(out + int64_t(t.first + from + column) * cols + to, numbers);
          if constexpr (Make::kMakes == Makes::OfNumbers) make(numbers, t.first + from + column, to);
        }
      }
      if constexpr (kHalves) {
        if (t.row + 8 * chunk < cols / 2) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int column = 32 * i + 16 * group + thread / 8, at = column * 8 + (chunk ^ column % 8);
            if (column < end) make(staging[0][at], staging[1][at], t.first + from + column, t.row + 8 * chunk);
          }
        }
      }
    }
  }
};

/// out[g] = Σ a[r]ᵀ b[r]: the depth is the rows of a group.
template <class T>
struct OuterOfGroups {
  using Element = T;
  static constexpr Layout kFirst = Layout::AcrossK, kSecond = Layout::AcrossK;
  static constexpr bool kSumOverRows = true;

  TensorMap a, b;
  T* out;
  const int* ends;
  int groups, cols_a, cols_b;

  __device__ int row_tiles() const { return ceil_div(cols_a, kRows); }
  __device__ int column_tiles(int) const { return ceil_div(cols_b, kColumns); }
  __device__ Task task(int group, int row_tile, int column_tile) const {
    return {group, row_tile * kRows, column_tile * kColumns, kColumns, group > 0 ? ends[group - 1] : 0, ends[group]};
  }
  __device__ int steps(const Task& t) const { return ceil_div(t.last - t.first, kDepth); }
  __device__ int bytes(const Task&) const { return (kRows + kColumns) * kDepth * 2; }

  __device__ void copy(const Task& t, int step, T* to_a, T* to_b, CopyBarrier& barrier) const {
    const int k = t.first + step * kDepth;
    for (int i = 0; i < kRows; i += 64) copy_box(to_a + i * kDepth, a, t.row + i, k, 0, barrier);
    for (int i = 0; i < kColumns; i += 64) copy_box(to_b + i * kDepth, b, t.column + i, k, 0, barrier);
  }

  __device__ void store(const Task& t, const float (&sums)[32][4], uint4 (&staging)[2][1024], int group,
                        int thread) const {
    const auto word = [&](int c, int i) { return to_word<T>(sums[c][i], sums[c][i + 1]); };
    const auto row_at = [&](int row) {
      const int to = t.row + 64 * group + row;
      return to < cols_a ? out + (int64_t(t.group) * cols_a + to) * cols_b + t.column : nullptr;
    };
    store_tile(staging[group], group, thread, cols_b - t.column, word, row_at);
  }
};

template <class T>
struct alignas(1024) Shared {
  T a[kStages][kRows * kDepth], b[kStages][kColumns * kDepth];
  uint4 staging[2][1024];
  CopyBarrier full[kStages], empty[kStages];
  int tiles[kGroupedMost + 1];  // column tiles of the groups before each
};

using Stage = RingStage<kStages>;

/// The tiles of a block, one after another.
template <class Work>
struct Tiles {
  const Work& work;
  const int* before;  // Shared::tiles

  __device__ int count() const { return before[work.groups] * work.row_tiles(); }

  __device__ Task operator()(int tile) const {
    const int row_tiles = work.row_tiles();
    int group = 0, end = work.groups;  // the last group whose tiles begin at `tile` or before it
    while (end - group > 1) {
      const int middle = (group + end) / 2;
      if (before[middle] * row_tiles <= tile) group = middle;
      else end = middle;
    }
    tile -= before[group] * row_tiles;
    const TileAt at = tile_at(tile, row_tiles, before[group + 1] - before[group]);
    return work.task(group, at.row, at.column);
  }
};

template <class Work>
__device__ void count_tiles(const Work& work, int* before) {
  if (threadIdx.x >= 32) return;
  const int lane = threadIdx.x;
  int sum = 0;
  for (int first = 0; first < work.groups; first += 32) {
    const int mine = first + lane < work.groups ? work.column_tiles(first + lane) : 0;
    int inclusive = mine;
    for (int distance = 1; distance < 32; distance *= 2) {
      const int other = __shfl_sync(~0u, inclusive, max(0, lane - distance));
      if (lane >= distance) inclusive += other;
    }
    if (first + lane < work.groups) before[first + lane] = sum + inclusive - mine;
    sum += __shfl_sync(~0u, inclusive, 31);
  }
  if (lane == 0) before[work.groups] = sum;
}

/// The last step of a sum over the rows of a group has rows of the next one: zeros, up to a multiple of 16, in what
/// this warpgroup multiplies and in its half of what both do.
template <class T>
__device__ void clear_rows(T* a, T* b, int rows, int group, int thread) {
  const int chunks = (round_up(rows, 16) - rows) * 8;  // of 16 bytes
  for (int i = thread; i < 3 * chunks; i += 128) {
    T* box = i < chunks ? a : b + (2 * group + i / chunks - 1) * 64 * kDepth;
    reinterpret_cast<uint4*>(box)[rows * 8 + i % chunks] = {};
  }
  show_tensor_core();
  await_threads(3, 256);
}

template <class Work, int kColumnsHere, class T>
__device__ void multiply(const Work& work, const Task& t, Shared<T>& shared, float (&sums)[32][4], Stage& stage,
                         int group, int thread) {
  const int steps = work.steps(t);
  int previous = -1;
  for (int step = 0; step < steps; ++step) {
    T *a = shared.a[stage.at] + group * 64 * kDepth, *b = shared.b[stage.at];
    shared.full[stage.at].await(stage.parity);
    const int rest = Work::kSumOverRows ? t.last - t.first - step * kDepth : kDepth;
    if (rest >= kDepth) {
      products_begin();
#pragma unroll
      for (int k = 0; k < kDepth / 16; ++k) multiply_add<T, Work::kFirst, Work::kSecond, kColumnsHere>(sums, a, b, k);
    } else {
      if (rest % 16 != 0) clear_rows(a, b, rest, group, thread);
      products_begin();
      for (int k = 0; k < ceil_div(rest, 16); ++k)
        multiply_add<T, Work::kFirst, Work::kSecond, kColumnsHere>(sums, a, b, k);
    }
    products_issued();
    await_products<true>();
    if (previous >= 0 && thread % 32 == 0) shared.empty[previous].arrive();
    previous = stage.at;
    stage.next();
  }
  await_products<false>();
  if (previous >= 0 && thread % 32 == 0) shared.empty[previous].arrive();
}

template <class Work>
__global__ void __launch_bounds__(kThreads, 1) grouped_kernel(const __grid_constant__ Work work) {
  await_previous();
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)  // elsewhere it is not started
  using T = typename Work::Element;
  Shared<T>& shared = *shared_memory<Shared<T>>();
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) shared.full[i].init(1), shared.empty[i].init(8);
    barriers_initialised();
  }
  count_tiles(work, shared.tiles);
  __syncthreads();
  const Tiles<Work> tiles{work, shared.tiles};
  const int count = tiles.count(), group = int(threadIdx.x) / 128, thread = int(threadIdx.x) % 128;
  Stage stage;
  if (group == kProducer) {
    resize_registers<40, false>();
    if (thread > 0) return;
    for (int tile = blockIdx.x; tile < count; tile += gridDim.x) {
      const Task t = tiles(tile);
      const int steps = work.steps(t), bytes = work.bytes(t);
      for (int step = 0; step < steps; ++step, stage.next()) {
        shared.empty[stage.at].await(stage.parity ^ 1);
        shared.full[stage.at].arrive_expecting(bytes);
        work.copy(t, step, shared.a[stage.at], shared.b[stage.at], shared.full[stage.at]);
      }
    }
    return;
  }
  resize_registers<232, true>();
  for (int tile = blockIdx.x; tile < count; tile += gridDim.x) {
    const Task t = tiles(tile);
    float sums[32][4] = {};
    if constexpr (Work::kSumOverRows) {
      multiply<Work, kColumns>(work, t, shared, sums, stage, group, thread);
    } else {
      switch (t.columns / 16) {
#define LIGER_COLUMNS(i) \
  case i: multiply<Work, 16 * i>(work, t, shared, sums, stage, group, thread); break
        LIGER_COLUMNS(1);
        LIGER_COLUMNS(2);
        LIGER_COLUMNS(3);
        LIGER_COLUMNS(4);
        LIGER_COLUMNS(5);
        LIGER_COLUMNS(6);
        LIGER_COLUMNS(7);
        LIGER_COLUMNS(8);
        LIGER_COLUMNS(9);
        LIGER_COLUMNS(10);
        LIGER_COLUMNS(11);
        LIGER_COLUMNS(12);
        LIGER_COLUMNS(13);
        LIGER_COLUMNS(14);
        LIGER_COLUMNS(15);
        LIGER_COLUMNS(16);
#undef LIGER_COLUMNS
      }
    }
    work.store(t, sums, shared.staging, group, thread);
  }
#endif
}

template <class Work>
void start(const Work& work, Stream s) {
  using Memory = Shared<typename Work::Element>;
  static_assert(sizeof(Memory) <= 227 * 1024);
  launch(grouped_kernel<Work>,
         {.blocks = multiprocessors(current_device()), .threads = kThreads, .shared_bytes = int(sizeof(Memory))}, s,
         work);
}

/// Starts RowsOfGroups; make.operator()<T>() is what it is given.
template <class F>
void start_rows(const GroupedRows& a, Stream s, F make) {
  if (a.rows == 0 || a.cols == 0) return;
  dispatch16(a.dtype, [&]<class T>() {
    const auto run = [&]<bool kAlongDepth>() {
      using Work = RowsOfGroups<T, kAlongDepth, decltype(make.template operator()<T>())>;
      const auto of_matrix = [&](const void* matrix, int64_t depth, int64_t stride, int64_t group_stride) {
        const int64_t inner = kAlongDepth ? depth : a.cols, outer = kAlongDepth ? a.cols : depth;
        return tensor_map(a.dtype, matrix, {inner, outer, a.groups}, {stride, group_stride}, 64);
      };
      const auto of_rows = [&](const void* rows, int64_t depth, int64_t stride) {
        return tensor_map(a.dtype, rows, {depth, a.rows, 1}, {stride, stride}, Work::kBoxRows);
      };
      Work work{.matrix = of_matrix(a.matrix, a.depth, a.matrix_stride, a.group_stride),
                .x = of_rows(a.x, a.depth, a.x_stride),
                .low_matrix = {},
                .low = {},
                .out = static_cast<T*>(a.out),
                .bias = static_cast<const T*>(a.bias),
                .ends = a.ends,
                .groups = int(a.groups),
                .depth = int(a.depth),
                .rank = int(a.rank),
                .cols = int(a.cols),
                .make = make.template operator()<T>()};
      if (a.rank > 0) {
        work.low_matrix = of_matrix(a.low_matrix, a.rank, kAlongDepth ? a.rank : a.cols, a.rank * a.cols);
        work.low = of_rows(a.low, a.rank, a.rank);
      }
      start(work, s);
    };
    if (a.along_depth) run.template operator()<true>();
    else run.template operator()<false>();
  });
}

}  // namespace liger::cuda::grouped_gemm
