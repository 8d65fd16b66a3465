#include "liger/core/cuda/math.cuh"
#include "liger/core/cuda/stream.cuh"
#include "liger/ops/loss/class_log_prob.h"

namespace liger::cuda::class_log_prob {
namespace {

constexpr unsigned kThreads = 256;

/// A thread has a class of a row.
template <class T>
__global__ void __launch_bounds__(kThreads) log_probs_kernel(ClassLogProbs a) {
  await_previous();
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x, row = i / a.count;
  if (i >= a.rows * a.count) return;
  const int64_t at = a.classes[i];
  const bool ignored = a.ids[row] == a.ignore_index;
  if (!ignored && (at < -1 || at >= a.cols)) fail_label(at, a.cols);
  const bool there = !ignored && at >= 0;
  const float x = there ? float(static_cast<const T*>(a.x)[row * a.x_stride + at]) : 0;
  const float* stats = a.stats + 3 * row;
  a.logp[i] = there ? (map_logit<Math<T>>(a.map, x) - stats[0]) * a.inverse_temperature - logf(stats[1]) : 0;
  if (a.logits) a.logits[i] = x;
}

template <class T>
__global__ void __launch_bounds__(kThreads) write_kernel(ClassLogitsWrite a) {
  await_previous();
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x, row = i / a.count;
  if (i >= a.rows * a.count || a.ids[row] == a.ignore_index || a.classes[i] < 0) return;
  static_cast<T*>(a.x)[row * a.x_stride + a.classes[i]] = T(a.logits ? a.logits[i] : -INFINITY);
}

template <class T>
__global__ void __launch_bounds__(kThreads) gradients_kernel(ClassGradients a) {
  await_previous();
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x, row = i / a.count;
  if (i >= a.rows * a.count) return;
  float dx;
  const auto exp = [](float x) { return expf(x); };
  const auto log = [](float x) { return logf(x); };
  if (class_gradient(a, row, i % a.count, exp, log, &dx))
    static_cast<T*>(a.dx)[row * a.cols + a.classes[i] - a.first] = T(dx);
}

template <class A>
Grid grid(const A& a) {
  return {.blocks = ceil_div(a.rows * a.count, kThreads), .threads = kThreads};
}

}  // namespace

LIGER_REGISTER(class_log_probs, [](const ClassLogProbs& a, Stream s) {
  dispatch(a.dtype, [&]<class T>() { launch(log_probs_kernel<T>, grid(a), s, a); });
});
LIGER_REGISTER(class_logits_write, [](const ClassLogitsWrite& a, Stream s) {
  dispatch(a.dtype, [&]<class T>() { launch(write_kernel<T>, grid(a), s, a); });
});
LIGER_REGISTER(class_gradients, [](const ClassGradients& a, Stream s) {
  dispatch(a.dtype, [&]<class T>() { launch(gradients_kernel<T>, grid(a), s, a); });
});

}  // namespace liger::cuda::class_log_prob
