#include "liger/core/cuda/math.cuh"
#include "liger/core/cuda/stream.cuh"
#include "liger/ops/activation/experts.h"

namespace liger::cuda::experts {
namespace {

/// y = Σ_k weight_k · row_k of each token. A block has a token, a thread its packs of the k rows, which lie anywhere.
/// The limit is memory: a row is read once.
template <class T>
__global__ void __launch_bounds__(256) combine_kernel(CombineExperts a) {
  await_previous();
  constexpr int kWidth = Row<T>::kWidth;
  const int64_t token = blockIdx.x;
  const Row<T> y(a.y, token, a.cols, a.cols);
  for (int p = threadIdx.x; p < y.packs(); p += blockDim.x) {
    float sum[kWidth] = {};
    for (int64_t k = token * a.k; k < (token + 1) * a.k; ++k) {
      if (a.place[k] < 0) continue;
      const float weight = a.weights ? a.weights[k] : 1;
      float x[kWidth];
      Row<T>(a.rows, a.place[k], a.cols, a.cols).load(p, T(0), y).to_float(x);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) sum[j] = fmaf(weight, x[j], sum[j]);
    }
    y.store(p, sum, y);
  }
}

/// Of each pair of token and expert, in place: gate and up become their gradients, and dh becomes weight · h, which the
/// gradient of the down projection is made of; Σ h · dh is the routing weight's gradient.
/// A block has a pair, a thread a pack at a time. The limit is memory: each number is read and written once.
template <class T, class Act>
__global__ void __launch_bounds__(256) backward_kernel(ExpertsBackward a) {
  await_previous();
  using M = Math<T>;
  constexpr int kWidth = Row<T>::kWidth;
  const int64_t pair = blockIdx.x;
  const Row<T> gate(a.a, pair, 2 * a.cols, a.cols), up(static_cast<T*>(a.a) + a.cols, pair, 2 * a.cols, a.cols),
      dh(a.dh, pair, a.cols, a.cols);
  const float weight = a.weights[pair];
  float sum = 0;
  for (int p = threadIdx.x; p < gate.packs(); p += blockDim.x) {
    float x[kWidth], u[kWidth], d[kWidth];
    gate.load(p, T(0)).to_float(x), up.load(p, T(0), gate).to_float(u), dh.load(p, T(0), gate).to_float(d);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      const float act = round_to<T>(Act::template value<M>(x[j])), h = round_to<T>(act * u[j]), dc = weight * d[j];
      sum += h * d[j];
      x[j] = dc * u[j] * Act::template derivative<M>(x[j]);
      u[j] = dc * act;
      d[j] = weight * h;
    }
    gate.store(p, x, gate), up.store(p, u, gate), dh.store(p, d, gate);
  }
  sum = RowReduce<Sum>()(sum);
  if (threadIdx.x == 0) a.dweights[pair] = sum;
}

}  // namespace

LIGER_REGISTER(combine_experts, [](const CombineExperts& a, Stream s) {
  dispatch(a.dtype, [&]<class T>() { launch(combine_kernel<T>, {.blocks = a.tokens, .threads = 256}, s, a); });
});
LIGER_REGISTER(experts_backward, [](const ExpertsBackward& a, Stream s) {
  dispatch(a.dtype, [&]<class T>() {
    dispatch_activation(
        a.activation, [&]<class Act>() { launch(backward_kernel<T, Act>, {.blocks = a.pairs, .threads = 256}, s, a); });
  });
});

}  // namespace liger::cuda::experts
