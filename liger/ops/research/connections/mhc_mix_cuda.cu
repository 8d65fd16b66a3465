#include "liger/core/cuda/row_layout.cuh"
#include "liger/ops/research/connections/mhc_mix.h"

namespace liger::cuda::mhc_mix {
namespace {

constexpr int kThreads = 128;
/// Of a block of backward. Of a single y, four x and its gradient need few registers.
template <int kOut>
constexpr int kBackwardThreads = kOut == 1 ? 512 : 256;

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

/// dx, df and the gradients of the weights. A block has a row and takes kIn of its x at a time, the last ones together
/// with f; a thread has a pack of columns of these and of all dy. dy is read once where kIn are all. The limit is
/// memory.
template <class T, class F, int kIn, int kOut>
__global__ void __launch_bounds__(kBackwardThreads<kOut>, kOut <= 4 ? 2 : 1) backward_kernel(MHCMixBackward a) {
  await_previous();
  using Vec = cuda::Vec<Row<T>::kWidth>;
  const int64_t row = blockIdx.x;
  const Row<T> like(a.dy, row * a.out, a.cols, a.cols);
  RowReduce<Sums<(kIn + 1) * kOut>> reduce;
  for (int first = 0; first < a.in; first += kIn) {
    const int n = min(kIn, a.in - first);
    const bool with_f = a.f && first + n == a.in;
    const auto x = [&](const void* of, int i) { return Row<T>(of, row * a.in + first + i, a.cols, a.cols); };
    const auto weight = [&](int o, int i) { return (row * a.out + o) * a.in + first + i; };
    typename Sums<(kIn + 1) * kOut>::Value sums{};
    for_each_pack_of(like, [&](int k) {
      typename Row<T>::Pack dys[kOut], xs[kIn];
      Vec f;
      unrolled<kOut>([&](int o) {
        if (o < a.out) dys[o] = Row<T>(a.dy, row * a.out + o, a.cols, a.cols).load(k, T(0), like);
      });
      unrolled<kIn>([&](int i) {
        if (i < n) xs[i] = x(a.x, i).load(k, T(0), like);
      });
      if (with_f) f = to_vec(Row<F>(a.f, row, a.cols, a.cols).load(k, F(0), like));
      const auto gradient = [&](int i, const Vec& in, auto weight_of) {
        Vec d;
        unrolled<kOut>([&](int o) {
          if (o >= a.out) return;
          const Vec dy = to_vec(dys[o]);
          d = d + dy * weight_of(o), sums.v[i * kOut + o] += cuda::sum(dy * in);
        });
        return d;
      };
      unrolled<kIn>([&](int i) {
        if (i >= n) return;
        const Vec dx = gradient(i, to_vec(xs[i]), [&](int o) { return a.weight[weight(o, i)]; });
        if (a.dx) x(a.dx, i).store(k, packed<T>(dx), like);
      });
      if (!with_f) return;
      const Vec df = gradient(kIn, f, [&](int o) { return a.of_f[row * a.out + o]; });
      if (a.df) Row<F>(a.df, row, a.cols, a.cols).store(k, packed<F>(df), like);
    });
    sums = reduce(sums);
    if (threadIdx.x > 0) continue;
    unrolled<kOut>([&](int o) {
      if (o >= a.out) return;
      unrolled<kIn>([&](int i) {
        if (i < n) a.dweight[weight(o, i)] = sums.v[i * kOut + o];
      });
      if (with_f) a.dof_f[row * a.out + o] = sums.v[kIn * kOut + o];
    });
  }
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
  dispatch_weighted(a.dtype, a.f_dtype, [&]<class T, class F>() {
    const auto start = [&]<int kIn, int kOut>() {
      launch(backward_kernel<T, F, kIn, kOut>, {.blocks = a.rows, .threads = kBackwardThreads<kOut>}, s, a);
    };
    if (a.in <= 4 && a.out == 1) start.template operator()<4, 1>();       // a layer's input, of four streams
    else if (a.in <= 4 && a.out <= 4) start.template operator()<4, 4>();  // and its output
    else start.template operator()<1, MHCMixForward::kMostStreams>();
  });
});

}  // namespace liger::cuda::mhc_mix
