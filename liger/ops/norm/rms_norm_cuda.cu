#include "liger/core/cuda/stream.cuh"
#include "liger/ops/norm/rms_norm.h"

namespace liger::cuda::rms_norm {
namespace {

template <class T>
__device__ float weight(float w, const RmsNormForward& a) { return a.casting == Casting::None ? round_to<T>(w + a.offset) : w + a.offset; }

/// x̂ as the reference has it when it meets the weight.
template <class T>
__device__ float normalise(float x, float rstd, Casting casting) { return casting == Casting::Gemma ? x * rstd : round_to<T>(x * rstd); }

template <class T>
__device__ float inverse_rms(float sum, int64_t cols, float eps, Casting casting) {
  const float rstd = rsqrtf(sum / cols + eps);
  return casting == Casting::None ? round_to<T>(rstd) : rstd;
}

/// The weight of every row of a block; 1 where there is none.
template <class W, class Tile>
__device__ Tile load_weight(const void* w, float offset, int64_t cols) {
  return w ? load<W, Tile>(w, 0, 1, cols) + offset : Tile() + 1.f;
}

template <class T, class W, class Tile>
__global__ void __launch_bounds__(kTileThreads) forward_kernel(RmsNormForward a) {
  const int64_t row = int64_t(blockIdx.x) * blockDim.y + threadIdx.y;
  RowReduce<Sum> reduce;
  const Tile x = load<T, Tile>(a.x, row, a.rows, a.cols);
  Tile w = load_weight<W, Tile>(a.w, a.offset, a.cols);
  if (a.casting == Casting::None) w = round_to<T>(w);
  const float rstd = inverse_rms<T>(row_sum(x * x, reduce), a.cols, a.eps, a.casting);
  const Casting casting = a.casting;
  store<T>(Tile::map([=](float x, float w) { return normalise<T>(x, rstd, casting) * w; }, x, w), a.y, row, a.rows, a.cols);
  if (threadIdx.x == 0 && row < a.rows) a.rstd[row] = rstd;
}

/// Each block walks every gridDim-th group of rows, fetches the next one while it works, and keeps its part of dw in registers.
template <class T, class W, class Tile>
__global__ void __launch_bounds__(kTileThreads) backward_kernel(RmsNormBackward a) {
  const Tile w = load_weight<W, Tile>(a.w, a.offset, a.cols);
  const int64_t step = int64_t(gridDim.x) * blockDim.y;
  const Casting casting = a.casting;
  RowReduce<Sum> reduce;
  Tile dw;
  int64_t first = int64_t(blockIdx.x) * blockDim.y;
  auto next_x = fetch<T, Tile>(a.x, first + threadIdx.y, a.rows, a.cols);
  auto next_dy = fetch<T, Tile>(a.dy, first + threadIdx.y, a.rows, a.cols);
  for (; first < a.rows; first += step) {
    const int64_t row = first + threadIdx.y;
    const Tile x = unpack(next_x), dy = unpack(next_dy);
    next_x = fetch<T, Tile>(a.x, row + step, a.rows, a.cols);
    next_dy = fetch<T, Tile>(a.dy, row + step, a.rows, a.cols);
    const float rstd = row < a.rows ? a.rstd[row] : 0;
    const float mean = row_sum(Tile::map([=](float dy, float w, float x) { return dy * w * (x * rstd); }, dy, w, x), reduce) / a.cols;
    if (a.dx) store<T>(Tile::map([=](float dy, float w, float x) { return rstd * (dy * w - x * rstd * mean); }, dy, w, x), a.dx, row, a.rows, a.cols);
    dw = Tile::map([=](float dw, float dy, float x) { return dw + dy * normalise<T>(x, rstd, casting); }, dw, dy, x);
  }
  if (!a.dw) return;
  // The rows of a block are added in turn, so that a block is one share.
  float* sum = shared_memory<float>();
  for (int y = 1; y < int(blockDim.y); ++y) {
    if (int(threadIdx.y) == y) store<float>(dw, sum, 0, 1, a.cols);
    __syncthreads();
    if (threadIdx.y == 0) dw = dw + load<float, Tile>(sum, 0, 1, a.cols);
    __syncthreads();
  }
  if (threadIdx.y == 0) store<float>(dw, a.dw, blockIdx.x, gridDim.x, a.cols);
}

/// Rows too long for a tile: read twice, the second time from the L2 cache.
template <class T, class W>
__global__ void __launch_bounds__(1024) forward_long_kernel(RmsNormForward a) {
  const Row<T> x(a.x, blockIdx.x, a.cols, a.cols), y(a.y, blockIdx.x, a.cols, a.cols);
  RowReduce<Sum> reduce;
  float sum = 0;
  for_each_pack<4>(x, 0, x.packs(), T(0), [&](int, const auto& pack) {
    for (const T v : pack.v) sum += float(v) * float(v);
  });
  const float rstd = inverse_rms<T>(reduce(sum), a.cols, a.eps, a.casting);
  for_each_pack<4>(x, 0, x.packs(), T(0), [&](int k, auto pack) {
#pragma unroll
    for (int j = 0; j < Row<T>::kWidth; ++j) {
      const int c = x.column(k) + j;
      const float w = a.w && c >= 0 && c < x.n ? weight<T>(float(static_cast<const W*>(a.w)[c]), a) : 1;
      pack.v[j] = T(normalise<T>(float(pack.v[j]), rstd, a.casting) * w);
    }
    y.store(k, pack, x);
  });
  if (threadIdx.x == 0) a.rstd[blockIdx.x] = rstd;
}

template <class T, class W>
__global__ void __launch_bounds__(1024) backward_long_kernel(RmsNormBackward a) {
  RowReduce<Sum> reduce;
  float* dw = a.dw ? a.dw + int64_t(blockIdx.x) * a.cols : nullptr;
  const W* w = static_cast<const W*>(a.w);
  for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
    const float rstd = a.rstd[row];
    const T *x = static_cast<const T*>(a.x) + row * a.cols, *dy = static_cast<const T*>(a.dy) + row * a.cols;
    T* dx = static_cast<T*>(a.dx) + row * a.cols;
    float sum = 0;
    for (int64_t c = threadIdx.x; c < a.cols; c += blockDim.x) sum += float(dy[c]) * (w ? float(w[c]) + a.offset : 1) * (float(x[c]) * rstd);
    const float mean = reduce(sum) / a.cols;
    for (int64_t c = threadIdx.x; c < a.cols; c += blockDim.x) {
      const float g = float(dy[c]) * (w ? float(w[c]) + a.offset : 1);
      if (a.dx) dx[c] = T(rstd * (g - float(x[c]) * rstd * mean));
      if (dw) dw[c] = (row == blockIdx.x ? 0 : dw[c]) + float(dy[c]) * normalise<T>(float(x[c]), rstd, a.casting);
    }
  }
}

}  // namespace

LIGER_REGISTER(rms_norm_forward, [](const RmsNormForward& a, Stream s) {
  dispatch_weighted(a.dtype, a.w_dtype, [&]<class T, class W>() {
    if (!dispatch_tile<T, 16>(a.cols, 128, {a.x, a.w, a.y}, [&]<class Tile>(dim3 threads) {
          launch(forward_kernel<T, W, Tile>, {.blocks = (a.rows + threads.y - 1) / threads.y, .threads = threads}, s, a);
        }))
      launch(forward_long_kernel<T, W>, {.blocks = a.rows, .threads = 1024}, s, a);
  });
});
LIGER_REGISTER(rms_norm_backward, [](const RmsNormBackward& a, Stream s) {
  if (a.rows == 0) return;
  dispatch_weighted(a.dtype, a.w_dtype, [&]<class T, class W>() {
    if (!dispatch_tile<T, 8>(a.cols, 512, {a.dy, a.x, a.w, a.dx, a.dw}, [&]<class Tile>(dim3 threads) {
          launch(backward_kernel<T, W, Tile>,
                 {.blocks = a.shares, .threads = threads, .shared_bytes = threads.y > 1 ? int(a.cols * sizeof(float)) : 0}, s, a);
        }))
      launch(backward_long_kernel<T, W>, {.blocks = a.shares, .threads = 1024}, s, a);
  });
});

}  // namespace liger::cuda::rms_norm
