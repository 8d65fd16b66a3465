#include <algorithm>
#include "liger/core/cuda/dispatch.h"
#include "liger/core/cuda/pack.cuh"
#include "liger/ops/optimizer/adamw.h"

namespace liger::cuda::optimizer {
namespace {

inline constexpr int kThreads = 256, kWidth = 8;                   // a thread updates so many neighbours at once
inline constexpr int64_t kChunk = int64_t(kThreads) * kWidth * 8;  // elements of a block

/// As many tensors as the arguments of a launch have room for: 4 KiB.
inline constexpr int kTensors = 60;
struct Batch {
  AdamWTensor tensors[kTensors];
  int first_chunk[kTensors];  // how many chunks the tensors before this one have
  int count;

  /// The tensor to which a chunk belongs.
  __device__ int tensor_of(int chunk) const {
    int begin = 0;
    for (int end = count; end - begin > 1;) {
      const int middle = (begin + end) / 2;
      if (first_chunk[middle] <= chunk) begin = middle;
      else end = middle;
    }
    return begin;
  }
};

/// What all elements of a tensor share.
struct Settings {
  const float *lr, *factor, *found_inf;
  float lr_value, log_beta1, log_beta2, beta2, rest1, rest2, decay, eps, sign;  // rest: 1 − beta
};

struct Coefficients {
  float factor, keep, step_size, root;

  __device__ Coefficients(const Settings& n, float step) {
    const float lr = n.lr ? *n.lr : n.lr_value;
    factor = n.factor ? n.sign * *n.factor : n.sign;
    keep = 1 - lr * n.decay;
    step_size = lr / -expm1f(step * n.log_beta1);
    root = sqrtf(-expm1f(step * n.log_beta2));
  }
};

/// kWidth elements from i on.
template <int kWidth, class P, class G, class M, bool kMaster>
__device__ void update(const AdamWTensor& t, int64_t i, const Settings& n, const Coefficients& c) {
  using Source = std::conditional_t<kMaster, float, P>;
  Source* source = kMaster ? reinterpret_cast<Source*>(t.master) : static_cast<Source*>(t.parameter);
  M *mean = static_cast<M*>(t.mean) + i, *square = static_cast<M*>(t.square) + i;
  const auto g_ = Pack<G, kWidth>::read(static_cast<const G*>(t.gradient) + i);
  const auto p_ = Pack<Source, kWidth>::read(source + i);
  const auto m_ = Pack<M, kWidth>::read(mean), v_ = Pack<M, kWidth>::read(square);
  float g[kWidth], p[kWidth], m[kWidth], v[kWidth];
  g_.to_float(g), p_.to_float(p), m_.to_float(m), v_.to_float(v);
#pragma unroll
  for (int j = 0; j < kWidth; ++j) {
    g[j] *= c.factor;
    m[j] += (g[j] - m[j]) * n.rest1;
    v[j] = v[j] * n.beta2 + g[j] * g[j] * n.rest2;
    p[j] = p[j] * c.keep - c.step_size * m[j] / (sqrtf(v[j]) / c.root + n.eps);
  }
  Pack<M, kWidth>::from_float(m).write(mean);
  Pack<M, kWidth>::from_float(v).write(square);
  Pack<Source, kWidth>::from_float(p).write(source + i);
  if constexpr (kMaster) Pack<P, kWidth>::from_float(p).write(static_cast<P*>(t.parameter) + i);
}

/// A block updates a chunk of a tensor: all of it in packs where each of its arrays begins at a multiple of 16 bytes,
/// as torch allocates them. The limit is memory.
template <class P, class G, class M, bool kMaster>
__global__ void __launch_bounds__(kThreads) adamw_kernel(Batch batch, Settings n) {
  await_previous();
  if (n.found_inf && *n.found_inf != 0) return;
  const int which = batch.tensor_of(int(blockIdx.x));
  const AdamWTensor& t = batch.tensors[which];
  const int64_t begin = int64_t(int(blockIdx.x) - batch.first_chunk[which]) * kChunk;
  const int64_t end = t.count - begin < kChunk ? t.count : begin + kChunk;
  const Coefficients c(n, *t.step);
  const auto bits = [](const void* p) { return reinterpret_cast<uintptr_t>(p); };
  const bool aligned =
      (bits(t.parameter) | bits(t.gradient) | bits(t.mean) | bits(t.square) | bits(t.master)) % 16 == 0;
  const int64_t packed = aligned ? end - (end - begin) % kWidth : begin;
  for (int64_t i = begin + int64_t(threadIdx.x) * kWidth; i < packed; i += kThreads * kWidth)
    update<kWidth, P, G, M, kMaster>(t, i, n, c);
  for (int64_t i = packed + threadIdx.x; i < end; i += kThreads) update<1, P, G, M, kMaster>(t, i, n, c);
}

template <class P, class G, class M, bool kMaster>
void run(const AdamW& a, Stream s) {
  const Settings n{
      a.lr,           a.factor,           a.found_inf,        a.lr_value,     a.log_beta1(), a.log_beta2(),
      float(a.beta2), float(1 - a.beta1), float(1 - a.beta2), a.weight_decay, a.eps,         a.maximize ? -1.f : 1.f};
  for (int64_t first = 0; first < a.tensors_count; first += kTensors) {
    Batch batch{};
    batch.count = int(std::min<int64_t>(kTensors, a.tensors_count - first));
    int64_t chunks = 0;
    for (int i = 0; i < batch.count; ++i) {
      batch.tensors[i] = a.tensors[first + i], batch.first_chunk[i] = int(chunks);
      chunks += ceil_div(batch.tensors[i].count, kChunk);
    }
    launch(adamw_kernel<P, G, M, kMaster>, Grid{chunks, dim3(kThreads)}, s, batch, n);
  }
}

}  // namespace

LIGER_REGISTER(adamw, [](const AdamW& a, Stream s) {
  dispatch_weighted(a.parameter, a.gradient, [&]<class P, class G>() {
    if constexpr (!std::is_same_v<P, float>) {
      if (a.tensors[0].master) return run<P, G, float, true>(a, s);
      if (a.moments != DType::F32) return run<P, G, P, false>(a, s);
    }
    run<P, G, float, false>(a, s);
  });
});

}  // namespace liger::cuda::optimizer
