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

/// Few registers, so that enough blocks share an SM: one loads while another reduces and a third stores.
template <class T, class W, class Tile>
__global__ void __maxnreg__(40) forward_kernel(RmsNormForward a) {
  const int64_t row = int64_t(blockIdx.x) * blockDim.y + threadIdx.y;
  RowReduce<Sum> reduce;
  const auto raw_x = fetch<T, Tile>(a.x, row, a.rows, a.cols);
  const auto raw_w = fetch<W, Tile>(a.w, 0, a.w ? 1 : 0, a.cols);
  const Tile x = unpack(raw_x);
  const float rstd = inverse_rms<T>(row_sum(x * x, reduce), a.cols, a.eps, a.casting);
  Tile xhat = x * rstd, w = unpack(raw_w) + (a.w ? a.offset : 1);
  if (a.casting != Casting::Gemma) xhat = round_to<T>(xhat);
  if (a.casting == Casting::None) w = round_to<T>(w);
  store<T>(xhat * w, a.y, row, a.rows, a.cols);
  if (threadIdx.x == 0 && row < a.rows) a.rstd[row] = rstd;
}

/// Each block walks every gridDim-th group of rows, fetches the next one while it works, and keeps its part of dw in registers.
template <class T, class W, class Tile>
__global__ void __launch_bounds__(kTileThreads) backward_kernel(RmsNormBackward a) {
  const auto raw_w = fetch<W, Tile>(a.w, 0, a.w ? 1 : 0, a.cols);
  const float plus = a.w ? a.offset : 1;
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
    const Tile g = dy * (unpack(raw_w) + plus), xhat = x * rstd;
    dw = dw + dy * (casting == Casting::Gemma ? xhat : round_to<T>(xhat));
    const float mean = row_sum(g * xhat, reduce) / a.cols;
    if (a.dx) store<T>(Tile::map([=](float g, float xhat) { return rstd * (g - xhat * mean); }, g, xhat), a.dx, row, a.rows, a.cols);
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
    float f[Row<T>::kWidth];
    pack.to_float(f);
    for (const float v : f) sum += v * v;
  });
  const float rstd = inverse_rms<T>(reduce(sum), a.cols, a.eps, a.casting);
  for_each_pack<4>(x, 0, x.packs(), T(0), [&](int k, const auto& pack) {
    float f[Row<T>::kWidth];
    pack.to_float(f);
#pragma unroll
    for (int j = 0; j < Row<T>::kWidth; ++j) {
      const int c = x.column(k) + j;
      const float w = a.w && c >= 0 && c < x.n ? weight<T>(float(static_cast<const W*>(a.w)[c]), a) : 1;
      f[j] = normalise<T>(f[j], rstd, a.casting) * w;
    }
    y.store(k, f, x);
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
    const auto in_registers = [&]<class Tile>(dim3 threads) {
      launch(backward_kernel<T, W, Tile>,
             {.blocks = a.shares, .threads = threads, .shared_bytes = threads.y > 1 ? int(a.cols * sizeof(float)) : 0}, s, a);
    };
    // One pack a thread leaves room to fetch the next row ahead.
    if (!dispatch_tile<T, 16 / sizeof(T)>(a.cols, 512, {a.dy, a.x, a.w, a.dx, a.dw}, in_registers) &&
        !dispatch_tile<T, 8>(a.cols, 512, {a.dy, a.x, a.w, a.dx, a.dw}, in_registers))
      launch(backward_long_kernel<T, W>, {.blocks = a.shares, .threads = 1024}, s, a);
  });
});

}  // namespace liger::cuda::rms_norm
