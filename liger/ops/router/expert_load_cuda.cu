#include "liger/ops/router/expert_load.h"
#include "liger/ops/router/logits.cuh"

namespace liger::cuda::expert_load {
namespace {

using namespace router;

/// A block makes one partial sum, of tokens that its teams of lanes take in turn; a lane sums the probabilities of its
/// experts in registers, and the teams meet in shared memory, in their order. Of many experts a block has one team,
/// which sums in the result. The limit is the latency of the reductions: a token's logits are read once.
template <class T, int kHeld>
__global__ void __launch_bounds__(256) load_kernel(ExpertLoadForward a) {
  await_previous();
  int* const shared = shared_memory<int>();
  Counts counts(a.counts, shared, a.experts);
  __syncthreads();
  float* const load = a.load + int64_t(blockIdx.x) * a.experts;
  float sums[kHeld > 0 ? kHeld : 1] = {};
  if constexpr (kHeld == 0)
    for (int e = threadIdx.x; e < a.experts; e += blockDim.x) load[e] = 0;
  const int64_t step = int64_t(gridDim.x) * blockDim.y;
  // Every team makes as many rounds: those of a warp reduce together.
  for (int64_t first = int64_t(blockIdx.x) * blockDim.y; first < a.tokens; first += step) {
    const int64_t at = first + threadIdx.y, token = at < a.tokens ? at : a.tokens - 1;
    const bool counted = at < a.tokens && (!a.mask || a.mask[token]);
    const Logits<T, kHeld> z(a.z, token, a.stride, a.experts);
    const Scores p(RouterScore::Softmax, z);
    if (counted) {
      z.each([&](int e, float v, int j) {
        if constexpr (kHeld > 0) sums[j] += p(v);
        else load[e] += p(v);
      });
    }
    const auto key = [](int, float v) { return order_of(v); };
    const auto keys = keys_of<kHeld>(z, key);
    int64_t last = 0;
    for (int64_t i = 0; i < a.k; ++i) {
      last = i == 0 ? keys.next() : keys.next(last);
      if (z.lane == 0 && counted) counts.add(expert_of(last));
    }
  }
  __syncthreads();
  counts.finish();
  if constexpr (kHeld > 0) {
    float* const of_teams = reinterpret_cast<float*>(shared + Counts::shared_ints(a.experts));
#pragma unroll
    for (int j = 0; j < kHeld; ++j)
      if (const int e = j * int(blockDim.x) + int(threadIdx.x); e < a.experts)
        of_teams[threadIdx.y * a.experts + e] = sums[j];
    __syncthreads();
    for (int e = int(threadIdx.y * blockDim.x + threadIdx.x); e < a.experts; e += int(blockDim.x * blockDim.y)) {
      float sum = 0;
      for (int team = 0; team < int(blockDim.y); ++team) sum += of_teams[team * a.experts + e];
      load[e] = sum;
    }
  }
}

/// dz. A team of lanes has a token. The limit is memory: logits are read and their gradients written once.
template <class T, int kHeld>
__global__ void __launch_bounds__(256) backward_kernel(ExpertLoadBackward a) {
  await_previous();
  const int64_t at = int64_t(blockIdx.x) * blockDim.y + threadIdx.y, token = at < a.tokens ? at : a.tokens - 1;
  const Logits<T, kHeld> z(a.z, token, a.stride, a.experts);
  const Scores p(RouterScore::Softmax, z);
  float mean = 0;
  z.each([&](int e, float v, int) { mean += p(v) * a.dload[e]; });
  mean = reduce_lanes<Sum>(mean, z.lanes);
  if (at >= a.tokens) return;
  T* const dz = static_cast<T*>(a.dz) + token * a.experts;
  const bool counted = !a.mask || a.mask[token];
  z.each([&](int e, float v, int) { dz[e] = T(counted ? p(v) * (a.dload[e] - mean) : 0.f); });
}

}  // namespace

LIGER_REGISTER(expert_load_forward, [](const ExpertLoadForward& a, Stream s) {
  clear(a.counts, a.experts * 4, s);
  dispatch(a.dtype, [&]<class T>() {
    dispatch_team(a.experts, [&]<int kHeld>(dim3 threads) {
      if (kHeld == 0) threads = dim3(32);
      const int64_t of_teams = kHeld > 0 ? threads.y * a.experts : 0;
      launch(load_kernel<T, kHeld>,
             {.blocks = a.partials,
              .threads = threads,
              .shared_bytes = 4 * (Counts::shared_ints(a.experts) + int(of_teams))},
             s, a);
    });
  });
});
LIGER_REGISTER(expert_load_backward, [](const ExpertLoadBackward& a, Stream s) {
  dispatch(a.dtype, [&]<class T>() {
    dispatch_team(a.experts, [&]<int kHeld>(dim3 threads) {
      launch(backward_kernel<T, kHeld>, {.blocks = ceil_div(a.tokens, threads.y), .threads = threads}, s, a);
    });
  });
});

}  // namespace liger::cuda::expert_load
