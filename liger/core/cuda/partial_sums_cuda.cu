#include <algorithm>
#include <numeric>
#include "liger/core/cuda/stream.cuh"
#include "liger/core/partial_sums.h"

namespace liger::cuda::partial_sums {
namespace {

constexpr int kThreads = 256, kMostColumns = 128;  // of a block
/// Few columns a block, so that there are many blocks, until there are.
__host__ __device__ int columns_of(const PartialSum& a) {
  return a.cols % 4 == 0 && a.cols >= 256 * kMostColumns ? kMostColumns : 32;
}
__host__ __device__ int64_t blocks_of(const PartialSum& a) { return a.groups * ceil_div(a.cols, columns_of(a)); }

/// sum += packs first, first + step, … below n, kBatch in flight, then what is left over by halves of that.
template <int kBatch, class Pack>
__device__ void add_packs(float (&sum)[Pack::kWidth], const float* part, int first, int n, int step, int64_t cols) {
  for (; first + (kBatch - 1) * step < n; first += kBatch * step) {
    Pack packs[kBatch];
#pragma unroll
    for (int u = 0; u < kBatch; ++u) packs[u] = Pack::read(part + (first + u * step) * cols);
#pragma unroll
    for (const Pack& pack : packs)
#pragma unroll
      for (int j = 0; j < Pack::kWidth; ++j) sum[j] += pack.words[j];
  }
  if constexpr (kBatch > 1) add_packs<kBatch / 2, Pack>(sum, part, first, n, step, cols);
}

/// The sums of a block's columns, kWidth neighbours a thread: threads that have the same ones walk along the partial
/// sums, and meet in a warp and then in `partial`.
template <int kWidth, int kColumns>
__device__ void sum_columns(const PartialSum& a, unsigned block, float (&partial)[kThreads / 32][kMostColumns]) {
  using Pack = cuda::Pack<float, kWidth>;
  constexpr int kLanes = kColumns / kWidth, kWalkers = kThreads / kLanes;
  const unsigned blocks = unsigned(ceil_div(a.cols, kColumns)), group = block / blocks, partials = unsigned(a.partials),
                 per_factor = unsigned(a.per_factor);
  const int64_t first = int64_t(block % blocks) * kColumns;
  const int column = int(threadIdx.x) % kLanes * kWidth, walker = int(threadIdx.x) / kLanes,
            warp = int(threadIdx.x) / 32;
  const bool mine = first + column < a.cols;
  float sum[kWidth] = {};
  for (unsigned index = group * partials; index < (group + 1) * partials;) {  // as many as have one row of factor
    const unsigned row = a.factor.of ? index / per_factor : 0,
                   stop = a.factor.of ? min((group + 1) * partials, (row + 1) * per_factor) : (group + 1) * partials;
    float of_row[kWidth] = {};
    add_packs<32 / kWidth, Pack>(of_row, a.part + index * a.cols + first + column, walker, mine ? int(stop - index) : 0,
                                 kWalkers, a.cols);
#pragma unroll
    for (int j = 0; j < kWidth; ++j)
      sum[j] += of_row[j] * (a.factor.of && mine ? number(a.factor, row * a.cols + first + column + j) + a.plus : 1);
    index = stop;
  }
#pragma unroll
  for (int lane = kLanes; lane < 32; lane *= 2)
#pragma unroll
    for (int j = 0; j < kWidth; ++j) sum[j] += __shfl_xor_sync(~0u, sum[j], lane);
  if (threadIdx.x % 32 < kLanes) *reinterpret_cast<Pack*>(&partial[warp][column]) = Pack::from_float(sum);
  __syncthreads();
  if (threadIdx.x >= kColumns || first + threadIdx.x >= a.cols) return;
  float total = 0;
#pragma unroll
  for (const auto& of_warp : partial) total += of_warp[threadIdx.x];
  write_number(a.out, a.dtype, group * a.cols + first + threadIdx.x, total);
}

/// The totals of several sums at once.
/// A block has columns_of(a) columns of one of them. Its threads walk along the partial sums, with kBatch loads of a
/// thread in flight, and add up in a fixed order: in registers, in a warp, in shared memory. The partial sums have just
/// been written, and come from L2, whose latency is the limit.
__global__ void __launch_bounds__(kThreads) sum_partials_kernel(AddPartials all) {
  await_previous();
  alignas(16) __shared__ float partial[kThreads / 32][kMostColumns];
  PartialSum a = all.sums[0];
  unsigned block = blockIdx.x;
#pragma unroll
  for (int i = 1; i < AddPartials::kMost; ++i)
    if (i < all.count && block >= blocks_of(a)) block -= unsigned(blocks_of(a)), a = all.sums[i];
  if (columns_of(a) == kMostColumns) sum_columns<4, kMostColumns>(a, block, partial);
  else if (a.cols % 4 == 0) sum_columns<4, 32>(a, block, partial);
  else sum_columns<1, 32>(a, block, partial);
}

/// x ← x · g, in place. A block walks along row chunks, of which a thread has up to 8 packs, four of them in flight.
/// Where a factor is 1 nothing but that is read; elsewhere the limit is memory.
template <class T>
__global__ void __launch_bounds__(256) scale_rows_kernel(ScaleRows a, RowChunks<T, 8> chunks) {
  await_previous();
  if (!a.per_row && number(a.g) == 1) return;
  for (int64_t i = blockIdx.x; i < chunks.count(); i += gridDim.x) {
    const float g = number(a.g, a.per_row ? chunks.row(i) : 0);
    if (g == 1) continue;
    const Row<T> x = chunks.of(a.x, a.cols, i);
    for_each_pack<4>(x, 0, x.packs(), T(0), [&](int k, const auto& pack) {
      float f[Row<T>::kWidth];
      pack.to_float(f);
      for (float& v : f) v *= g;
      x.store(k, f, x);
    });
  }
}

}  // namespace

// As many blocks as a multiprocessor holds of 512 threads, whose loads hide each other's latency; fewer partial sums
// where a cluster works on a row (past 16384 columns), and where blocks of several short rows would have none. Where
// rows begin between 16-byte boundaries, a multiple of so many partial sums, or one a row, that all rows of one begin
// alike.
LIGER_REGISTER(row_partials, [](const RowPartials& a, Stream) {
  const int64_t alike = 8 / std::gcd(a.cols, 8);
  const int64_t blocks = a.cols > 4096 ? 1 : 2, packs = a.cols / 8;
  int64_t cluster = 1;
  while (cluster < 8 && cluster * 2048 < packs) cluster *= 2;
  const int64_t fit = std::max<int64_t>(1, blocks * clusters_at_once(int(cluster), a.device) / a.groups);
  const int64_t a_block = std::max<int64_t>(1, 4096 / std::max<int64_t>(1, a.cols)), wanted = ceil_div(a.rows, a_block);
  *a.count =
      std::max<int64_t>(1, std::min({a.rows, round_up(wanted, alike), std::max<int64_t>(1, fit / alike) * alike}));
});
LIGER_REGISTER(runs_here, [](const RunsHere& a, Stream) { *a.yes = has_code(); });
LIGER_REGISTER(stream_capturing, [](const StreamCapturing& a, Stream s) { *a.yes = capturing(s); });
LIGER_REGISTER(add_partials, [](const AddPartials& a, Stream s) {
  int64_t blocks = 0;
  for (int i = 0; i < a.count; ++i) blocks += blocks_of(a.sums[i]);
  launch(sum_partials_kernel, {.blocks = blocks, .threads = kThreads}, s, a);
});
LIGER_REGISTER(scale_rows, [](const ScaleRows& whole, Stream s) {
  ScaleRows a = whole;
  if (!a.per_row) a.cols *= a.rows, a.rows = a.cols > 0;
  dispatch(a.dtype, [&]<class T>() {
    const RowChunks<T, 8> chunks(a.rows, a.cols);
    // No more blocks than fit on the device: where all factors are 1, to start them is what takes time.
    Grid grid = chunks.grid();
    grid.blocks = std::min<int64_t>(grid.blocks, 8 * multiprocessors(current_device()));
    launch(scale_rows_kernel<T>, grid, s, a, chunks);
  });
});

}  // namespace liger::cuda::partial_sums
