#include "liger/core/cuda/math.cuh"
#include "liger/core/cuda/sort_by_key.cuh"
#include "liger/ops/experts/experts.h"
#include "liger/ops/activation/gate_up.cuh"

namespace liger::cuda::experts {
namespace {

/// The key by which pairs are sorted.
struct PairKey {
  SortByExpert a;
  __device__ int operator()(int i) const { return a.key(i); }
};

/// Where each pair went, and where each expert's pairs end: behind the last whose key is not above it. A thread has a
/// sorted pair, and the first one the experts before it, too.
__global__ void __launch_bounds__(256) places_kernel(SortByExpert a, const int* sorted_keys) {
  await_previous();
  const int64_t p = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (p >= a.pairs) return;
  const int key = sorted_keys[p], experts = int(a.experts), next = p + 1 < a.pairs ? sorted_keys[p + 1] : experts;
  a.place[a.order[p]] = key < experts ? int(p) : -1;
  for (int e = key; e < next; ++e) a.ends[e] = int(p) + 1;
  if (p == 0)
    for (int e = 0; e < key; ++e) a.ends[e] = 0;
}

/// A block has a token, a thread its packs, which go to the token's k places. The limit is memory: x is read once.
template <class T>
__global__ void __launch_bounds__(256) spread_kernel(SpreadTokens a) {
  await_previous();
  const int64_t token = blockIdx.x;
  const Row<T> x(a.x, token, a.cols, a.cols);
  for_each_pack<2>(x, 0, x.packs(), T(0), [&](int p, const auto& pack) {
    for (int64_t k = token * a.k; k < (token + 1) * a.k; ++k) {
      if (a.place[k] < 0) continue;
      const Row<T> row(a.rows, a.place[k], a.cols, a.cols);
      if (!a.weights.of) {
        row.store(p, pack, x);
        continue;
      }
      const float weight = number(a.weights, k);
      float product[Row<T>::kWidth];
      pack.to_float(product);
#pragma unroll
      for (float& y : product) y *= weight;
      row.store(p, product, x);
    }
  });
}

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
      const float weight = a.weights.of ? number(a.weights, k) : 1;
      float x[kWidth];
      Row<T>(a.rows, a.place[k], a.cols, a.cols).load(p, T(0), y).to_float(x);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) sum[j] = fmaf(weight, x[j], sum[j]);
    }
    y.store(p, sum, y);
  }
}

/// A block has a pair of token and expert, a thread a pack at a time. The limit is memory: each number is read and
/// written once.
template <class T, class Gate>
__global__ void __launch_bounds__(256) backward_kernel(ExpertsBackward a, Interleaved<T> in) {
  await_previous();
  const typename Gate::template Of<Math<T>, float> gate(a.form);
  const int64_t pair = blockIdx.x;
  const int to = a.order[pair];
  if (pair >= *a.valid) {
    if (threadIdx.x == 0) a.dweights[to] = 0;
    return;
  }
  const float weight = number(a.weights, to);
  float sum = 0;
  // Of gate, up and dh makes their gradients and weight · h.
  const auto step = [&]<int n>(float (&x)[n], float (&b)[n], float (&d)[n]) {
    unrolled<n>([&](int j) {
      const float act = round_to<T>(gate.act(x[j])), u = gate.up(b[j]), h = act * u, dc = weight * d[j];
      sum += round_to<T>(h) * d[j];
      x[j] = dc * u * gate.slope(x[j]);
      b[j] = gate.through_up(b[j], dc * act);
      d[j] = weight * h;
    });
  };
  if constexpr (Gate::kInterleaved) {
    constexpr int kPairs = Interleaved<T>::kPairs;
    const T* rows = static_cast<const T*>(a.a) + pair * 2 * a.cols;
    T *drows = static_cast<T*>(a.da) + pair * 2 * a.cols, *dh = static_cast<T*>(a.dh) + pair * a.cols;
    for (int64_t i = threadIdx.x; i < in.steps(); i += blockDim.x) {
      float x[kPairs], b[kPairs], d[kPairs];
      in.load(rows, i, x, b), in.load(dh, i, d);
      step(x, b, d);
      in.store(drows, i, x, b), in.store(dh, i, d);
    }
  } else if constexpr (!kHasGate<Gate>) {
    constexpr int kWidth = Row<T>::kWidth;
    const Row<T> in(a.a, pair, a.cols, a.cols), out(a.da, pair, a.cols, a.cols), dh(a.dh, pair, a.cols, a.cols);
    for (int p = threadIdx.x; p < in.packs(); p += blockDim.x) {
      float none[kWidth] = {}, b[kWidth], d[kWidth];
      in.load(p, T(0)).to_float(b), dh.load(p, T(0), in).to_float(d);
      step(none, b, d);
      out.store(p, b, in), dh.store(p, d, in);
    }
  } else {
    constexpr int kWidth = Row<T>::kWidth;
    const int64_t stride = 2 * a.cols;
    const Row<T> gates(a.a, pair, stride, a.cols), ups(static_cast<const T*>(a.a) + a.cols, pair, stride, a.cols),
        dgates(a.da, pair, stride, a.cols), dups(static_cast<T*>(a.da) + a.cols, pair, stride, a.cols),
        dh(a.dh, pair, a.cols, a.cols);
    for (int p = threadIdx.x; p < gates.packs(); p += blockDim.x) {
      float x[kWidth], b[kWidth], d[kWidth];
      gates.load(p, T(0)).to_float(x), ups.load(p, T(0), gates).to_float(b), dh.load(p, T(0), gates).to_float(d);
      step(x, b, d);
      dgates.store(p, x, gates), dups.store(p, b, gates), dh.store(p, d, gates);
    }
  }
  if (a.bias) {
    constexpr int kWidth = Row<T>::kWidth;
    const Row<T> dy(a.dy, pair, a.width, a.width), bias(a.bias, a.experts[pair], a.width, a.width);
    for (int p = threadIdx.x; p < dy.packs(); p += blockDim.x) {
      float d[kWidth], b[kWidth];
      dy.load(p, T(0)).to_float(d), bias.load(p, T(0), dy).to_float(b);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) sum = fmaf(d[j], b[j], sum);
    }
  }
  sum = RowReduce<Sum>()(sum);
  if (threadIdx.x == 0) a.dweights[to] = sum;
}

}  // namespace

LIGER_REGISTER(sort_by_expert, [](const SortByExpert& a, Stream s) {
  const KeySort<4> sort(int(a.pairs), a.experts, s);
  const int64_t keys = round_up(a.pairs * 4, 256);  // bytes
  if (!a.scratch) return void(*a.scratch_bytes = std::max<int64_t>(1, keys + sort.scratch_bytes()));
  if (a.pairs == 0) return clear(a.ends, a.experts * 4, s);
  auto* sorted_keys = static_cast<int*>(a.scratch);
  sort(PairKey{a}, sorted_keys, a.order, static_cast<char*>(a.scratch) + keys);
  launch(places_kernel, {.blocks = ceil_div(a.pairs, 256), .threads = 256}, s, a, static_cast<const int*>(sorted_keys));
});
LIGER_REGISTER(spread_tokens, [](const SpreadTokens& a, Stream s) {
  dispatch(a.dtype, [&]<class T>() { launch(spread_kernel<T>, {.blocks = a.tokens, .threads = 256}, s, a); });
});
LIGER_REGISTER(combine_experts, [](const CombineExperts& a, Stream s) {
  dispatch(a.dtype, [&]<class T>() { launch(combine_kernel<T>, {.blocks = a.tokens, .threads = 256}, s, a); });
});
LIGER_REGISTER(experts_backward, [](const ExpertsBackward& a, Stream s) {
  dispatch(a.dtype, [&]<class T>() {
    // Experts are narrow: no warp of a block has nothing to do.
    const auto threads = unsigned(std::min<int64_t>(256, round_up(Row<T>::packs(a.cols, true), 32)));
    const Interleaved<T> in(a.cols, {a.a, a.da, a.dh});
    dispatch_experts(a.gated, a.form,
                     [&]<class Gate>() { launch(backward_kernel<T, Gate>, {a.pairs, threads}, s, a, in); });
  });
});

}  // namespace liger::cuda::experts
