#include "liger/ops/research/norm/dyt.h"
#include "liger/ops/norm/norm.cuh"

namespace liger::cuda::dyt {
namespace {

using norm::load_like;

constexpr int kDyTThreads = 512, kAhead = 4;  // rows of a thread in flight at once

/// f(pack) for this thread's packs of the columns: all threads of a block call it as often, behind the last one too.
template <class T, class F>
__device__ void for_each_columns(const Row<T>& like, F f) {
  for (int k = int(threadIdx.x); k - int(threadIdx.x) < like.packs(); k += int(blockDim.x)) f(k);
}

/// f(row, packs) for this thread's rows first, first + step, …, with pack k of each matrix. All of these rows begin
/// alike between 16-byte boundaries.
template <class T, int kMatrices, class F>
__device__ void for_each_row(const void* const (&matrices)[kMatrices], int64_t first, int64_t step, int64_t rows,
                             const Row<T>& like, int k, F f) {
  for (int64_t row = first; row < rows && k < like.packs(); row += kAhead * step) {
    typename Row<T>::Pack packs[kAhead][kMatrices];
    unrolled<kAhead * kMatrices>([&](int i) {
      if (const int64_t r = row + i / kMatrices * step; r < rows)
        packs[i / kMatrices][i % kMatrices] = Row<T>(matrices[i % kMatrices], r, like.n, like.n).load(k, T(0), like);
    });
    unrolled<kAhead>([&](int i) {
      if (row + i * step < rows) f(row + i * step, packs[i]);
    });
  }
}

/// y = tanh(alpha · x) · w + b. A thread has w and b of its columns for kAhead rows; the limit is memory.
template <class T>
__global__ void __launch_bounds__(kDyTThreads, 2) dyt_forward_kernel(DyTForward a) {
  await_previous();
  using Vec = cuda::Vec<Row<T>::kWidth>;
  const float alpha = number(a.alpha);
  const int64_t step = int64_t(gridDim.x) * blockDim.y, first = blockIdx.x + int64_t(threadIdx.y) * gridDim.x;
  const Row<T> like(a.x, blockIdx.x, a.cols, a.cols);
  for_each_columns(like, [&](int k) {
    if (k >= like.packs()) return;
    const Vec w = a.w ? load_like(a.w, a.w_dtype, 0, a.cols, k, like) : Vec{} + 1,
              b = a.b ? load_like(a.b, a.w_dtype, 0, a.cols, k, like) : Vec{};
    for_each_row<T>({a.x}, first, step, a.rows, like, k, [&](int64_t row, const auto& packs) {
      const auto y = [=](float x, float w, float b) { return fmaf(Math<T>::tanh(alpha * x), w, b); };
      Row<T>(a.y, row, a.cols, a.cols).store(k, packed<T>(Vec::map(y, to_vec(packs[0]), w, b)), like);
    });
  });
}

/// A partial sum of dalpha from what the threads of a block have.
__device__ inline void put_dalpha(const DyTBackward& a, float sum) {
  if (!a.dalpha) return;
  __shared__ float of_rows[kDyTThreads];
  RowReduce<Sum> reduce;
  sum = reduce(sum);
  if (threadIdx.x == 0) of_rows[threadIdx.y] = sum;
  __syncthreads();
  if (threadIdx.x > 0 || threadIdx.y > 0) return;
  for (int y = 1; y < int(blockDim.y); ++y) sum += of_rows[y];
  a.dalpha[blockIdx.x] = sum;
}

/// dx, and the sums over rows dw, db and dalpha. A block makes one partial sum: a thread keeps the sums of its columns,
/// and walks along the block's rows; the limit is memory.
template <class T>
__global__ void __launch_bounds__(kDyTThreads, 1) dyt_backward_kernel(DyTBackward a) {
  await_previous();
  using Vec = cuda::Vec<Row<T>::kWidth>;
  const float alpha = number(a.alpha);
  const int64_t step = a.partials * blockDim.y, first = blockIdx.x + int64_t(threadIdx.y) * a.partials;
  const Row<T> like(a.x, blockIdx.x, a.cols, a.cols);
  float dalpha = 0;
  for_each_columns(like, [&](int k) {
    const bool there = k < like.packs();
    const Vec w = a.w && there ? load_like(a.w, a.w_dtype, 0, a.cols, k, like) : Vec{} + 1;
    Vec dw[1], db[1];
    for_each_row<T>({a.x, a.dy}, first, step, a.rows, like, k, [&](int64_t row, const auto& packs) {
      const Vec x = to_vec(packs[0]), dy = to_vec(packs[1]);
      const Vec t = Vec::map([=](float x) { return Math<T>::tanh(alpha * x); }, x);
      const Vec slope = Vec::map([](float t, float dy, float w) { return (1 - t * t) * (dy * w); }, t, dy, w);
      dw[0] = dw[0] + dy * t, db[0] = db[0] + dy, dalpha += sum(x * slope);
      if (a.dx) Row<T>(a.dx, row, a.cols, a.cols).store(k, packed<T>(slope * alpha), like);
    });
    const auto put = [&](Vec(&sums)[1], float* partials) {
      if (!partials) return;
      sum_over_rows(sums);
      if (threadIdx.y == 0 && there) Row<float>(partials, blockIdx.x, a.cols, a.cols).store(k, sums[0].v, like);
    };
    put(dw, a.dw), put(db, a.db);
  });
  put_dalpha(a, dalpha);
}

/// Threads for rows of which each has a pack, as far as a block goes.
template <class T>
dim3 threads_of(int64_t cols) {
  const int64_t packs = std::min<int64_t>(kDyTThreads, Row<T>::packs(cols, whole_packs<T>(cols, {})));
  return RowThreads::of(packs, {.few = kDyTThreads, .most = kDyTThreads}).threads;
}

}  // namespace

LIGER_REGISTER(dyt_forward, [](const DyTForward& a, Stream s) {
  dispatch(a.dtype, [&]<class T>() {
    const dim3 threads = threads_of<T>(a.cols);
    const int64_t alike = Row<T>::kWidth;  // rows so many apart begin alike
    const int64_t blocks = round_up(ceil_div(a.rows, int64_t(threads.y) * kAhead), alike);
    launch(dyt_forward_kernel<T>, {.blocks = blocks, .threads = threads}, s, a);
  });
});

LIGER_REGISTER(dyt_backward, [](const DyTBackward& a, Stream s) {
  dispatch(a.dtype, [&]<class T>() {
    const dim3 threads = threads_of<T>(a.cols);
    const int shared = int(threads.x * threads.y / 2) * Row<T>::kWidth * int(sizeof(float));
    launch(dyt_backward_kernel<T>, {.blocks = a.partials, .threads = threads, .shared_bytes = shared}, s, a);
  });
});

}  // namespace liger::cuda::dyt
