#include "liger/core/cuda/row_layout.cuh"
#include "liger/ops/connections/mhc_mix.h"

namespace liger::cuda::mhc_mix {
namespace {

constexpr int kThreads = 128, kBackwardThreads = 256;

/// y. A thread has a pack of columns of all of a row's x, in registers. The limit is memory.
template <class T, class F, int kMost>
__global__ void __launch_bounds__(kThreads) forward_kernel(MHCMixForward a, int64_t blocks_a_row) {
  await_previous();
  using Vec = cuda::Vec<Row<T>::kWidth>;
  const int64_t row = blockIdx.x / blocks_a_row;
  const int k = int(blockIdx.x % blocks_a_row) * kThreads + int(threadIdx.x);
  const Row<T> like(a.y, row * a.out, a.cols, a.cols);
  if (k >= like.packs()) return;
  typename Row<T>::Pack x[kMost];
  Vec f;
  unrolled<kMost>([&](int i) {
    if (i < a.in) x[i] = Row<T>(a.x, row * a.in + i, a.cols, a.cols).load(k, T(0), like);
  });
  if (a.f) f = to_vec(Row<F>(a.f, row, a.cols, a.cols).load(k, F(0), like));
  for (int o = 0; o < a.out; ++o) {
    const float* weight = a.weight + (row * a.out + o) * a.in;
    Vec sum;
    if (a.f) sum = f * a.of_f[row * a.out + o];
    unrolled<kMost>([&](int i) {
      if (i < a.in) sum = sum + to_vec(x[i]) * weight[i];
    });
    Row<T>(a.y, row * a.out + o, a.cols, a.cols).store(k, packed<T>(sum), like);
  }
}

/// dx and the gradients of the weights of an input x of a row, `step` apart.
template <class T, class X, int kMost, class Reduce>
__device__ void input_backward(const MHCMixBackward& a, int64_t row, const Row<X>& x, void* dx, int64_t dx_row,
                               const float* weight, float* dweight, int step, Reduce& reduce) {
  using Vec = cuda::Vec<Row<T>::kWidth>;
  const Row<T> like(a.dy, row * a.out, a.cols, a.cols);
  float own[kMost];
  unrolled<kMost>([&](int o) { own[o] = o < a.out ? weight[o * step] : 0; });
  typename Sums<kMost>::Value sums{};
  for_each_pack_of(like, [&](int k) {
    const Vec of_x = to_vec(x.load(k, X(0), like));
    Vec sum;
    unrolled<kMost>([&](int o) {
      if (o >= a.out) return;
      const Vec dy = to_vec(Row<T>(a.dy, row * a.out + o, a.cols, a.cols).load(k, T(0), like));
      sum = sum + dy * own[o], sums.v[o] += cuda::sum(dy * of_x);
    });
    if (dx) Row<X>(dx, dx_row, a.cols, a.cols).store(k, packed<X>(sum), like);
  });
  sums = reduce(sums);
  unrolled<kMost>([&](int o) {
    if (o < a.out && threadIdx.x == 0) dweight[o * step] = sums.v[o];
  });
}

/// dx, df and the gradients of the weights. A block has a row. It reads dy for each input, but for the first from a
/// cache. The limit is memory.
template <class T, class F, int kMost>
__global__ void __launch_bounds__(kBackwardThreads) backward_kernel(MHCMixBackward a) {
  await_previous();
  const int64_t row = blockIdx.x;
  RowReduce<Sums<kMost>> reduce;
  for (int i = 0; i < a.in; ++i)
    input_backward<T, T, kMost>(a, row, Row<T>(a.x, row * a.in + i, a.cols, a.cols), a.dx, row * a.in + i,
                                a.weight + row * a.out * a.in + i, a.dweight + row * a.out * a.in + i, a.in, reduce);
  if (a.f)
    input_backward<T, F, kMost>(a, row, Row<F>(a.f, row, a.cols, a.cols), a.df, row, a.of_f + row * a.out,
                                a.dof_f + row * a.out, 1, reduce);
}

/// f.operator()<T, F, kMost>().
template <class Args, class F>
void dispatch_streams(const Args& a, int most, F f) {
  dispatch_weighted(a.dtype, a.f_dtype, [&]<class T, class Of>() {
    if (most <= 4) f.template operator()<T, Of, 4>();  // as models have
    else f.template operator()<T, Of, MHCMixForward::kMostStreams>();
  });
}

}  // namespace

LIGER_REGISTER(mhc_mix_forward, [](const MHCMixForward& a, Stream s) {
  dispatch_streams(a, a.in, [&]<class T, class F, int kMost>() {
    const int64_t blocks = ceil_div(Row<T>::packs(a.cols, whole_packs<T>(a.cols, {a.y})), kThreads);
    launch(forward_kernel<T, F, kMost>, {.blocks = a.rows * blocks, .threads = kThreads}, s, a, blocks);
  });
});
LIGER_REGISTER(mhc_mix_backward, [](const MHCMixBackward& a, Stream s) {
  dispatch_streams(a, a.out, [&]<class T, class F, int kMost>() {
    launch(backward_kernel<T, F, kMost>, {.blocks = a.rows, .threads = kBackwardThreads}, s, a);
  });
});

}  // namespace liger::cuda::mhc_mix
