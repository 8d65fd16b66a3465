#include <algorithm>
#include "liger/core/cuda/stream.cuh"
#include "liger/core/shares.h"

namespace liger::cuda::shares {
namespace {

__host__ __device__ int64_t blocks_of(const ShareSum& a) { return a.groups * ((a.cols + 31) / 32); }

__device__ float read(const void* p, DType t, int64_t i) {
  if (t == DType::F32) return static_cast<const float*>(p)[i];
  return t == DType::F16 ? float(static_cast<const half*>(p)[i]) : float(static_cast<const bfloat16*>(p)[i]);
}

__device__ void write(void* p, DType t, int64_t i, float v) {
  if (t == DType::F32) static_cast<float*>(p)[i] = v;
  else if (t == DType::F16) static_cast<half*>(p)[i] = half(v);
  else static_cast<bfloat16*>(p)[i] = bfloat16(v);
}

/// 32 columns a block; threadIdx.y walks the shares, then the 32 partial sums meet in shared memory.
__global__ void __launch_bounds__(1024) sum_shares_kernel(SumShares all) {
  __shared__ float partial[32][33];
  ShareSum a = all.sums[0];
  int64_t block = blockIdx.x;
#pragma unroll
  for (int i = 1; i < SumShares::kMost; ++i)
    if (i < all.count && block >= blocks_of(a)) block -= blocks_of(a), a = all.sums[i];
  const int64_t blocks = (a.cols + 31) / 32, group = block / blocks, first = block % blocks * 32, c = first + threadIdx.x;
  const float* part = a.part + group * a.shares * a.cols;
  float sum = 0;
  if (c < a.cols) {
    if (a.factor) {
      for (int64_t s = threadIdx.y; s < a.shares; s += 32) sum += part[s * a.cols + c] * (read(a.factor, a.factor_dtype, (group * a.shares + s) / a.per_factor * a.cols + c) + a.plus);
    } else {
#pragma unroll 4
      for (int s = threadIdx.y; s < int(a.shares); s += 32) sum += part[s * a.cols + c];
    }
  }
  partial[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  float total = partial[threadIdx.x][threadIdx.y];
  for (int lane = 16; lane > 0; lane /= 2) total += __shfl_xor_sync(~0u, total, lane);
  const int64_t out = first + threadIdx.y;
  if (threadIdx.x == 0 && out < a.cols) write(a.out, a.dtype, group * a.cols + out, total);
}

template <class T>
__global__ void __launch_bounds__(256) scale_rows_kernel(ScaleRows a, Pieces<T, 8> pieces) {
  if (!a.per_row && a.g[0] == 1) return;
  for (int64_t i = blockIdx.x; i < pieces.count(); i += gridDim.x) {
    const float g = a.g[a.per_row ? pieces.row(i) : 0];
    if (g == 1) continue;
    const Row<T> x = pieces.of(a.x, a.cols, i);
    for_each_pack<4>(x, 0, x.packs(), T(0), [&](int k, const auto& pack) {
      float f[Row<T>::kWidth];
      pack.to_float(f);
      for (float& v : f) v *= g;
      x.store(k, f, x);
    });
  }
}

}  // namespace

// As many blocks as an SM holds of 512 threads, whose loads hide each other's latency; fewer shares where a cluster works on a row. Rows
// of odd lengths go to a multiple of 8 shares, or to one each, so that all rows of a share begin alike between 16-byte boundaries.
LIGER_REGISTER(row_shares, [](const RowShares& a, Stream) {
  int64_t blocks = a.cols > 4096 ? 1 : 2, cluster = 1;
  while (cluster < 8 && cluster * 16384 < a.cols) cluster *= 2;
  // Not every part of the chip that a cluster must fit into has a multiple of 4 multiprocessors: a sixteenth stays idle.
  int64_t shares = blocks * multiprocessors(a.device) * (cluster > 2 ? 15 : 16) / (16 * cluster) / a.groups;
  if (a.cols % 8 != 0) shares = std::max<int64_t>(1, shares / 8) * 8;
  *a.count = std::clamp<int64_t>(a.rows, 1, std::max<int64_t>(1, shares));
});
LIGER_REGISTER(stream_capturing, [](const StreamCapturing& a, Stream s) { *a.yes = capturing(s); });
LIGER_REGISTER(sum_shares, [](const SumShares& a, Stream s) {
  int64_t blocks = 0;
  for (int i = 0; i < a.count; ++i) blocks += blocks_of(a.sums[i]);
  launch(sum_shares_kernel, {.blocks = blocks, .threads = {32, 32}}, s, a);
});
LIGER_REGISTER(scale_rows, [](const ScaleRows& whole, Stream s) {
  ScaleRows a = whole;
  if (!a.per_row) a.cols *= a.rows, a.rows = a.cols > 0;
  dispatch(a.dtype, [&]<class T>() {
    const Pieces<T, 8> pieces(a.rows, a.cols);
    Grid grid = pieces.grid();  // of no more blocks than fit on the device: where all factors are 1, to start them is what takes time
    grid.blocks = std::min<int64_t>(grid.blocks, 8 * multiprocessors(current_device()));
    launch(scale_rows_kernel<T>, grid, s, a, pieces);
  });
});

}  // namespace liger::cuda::shares
