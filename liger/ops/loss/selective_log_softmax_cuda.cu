#include "liger/core/cuda/softmax.cuh"
#include "liger/core/cuda/stream.cuh"
#include "liger/ops/loss/selective_log_softmax.h"

namespace liger::cuda::selective_log_softmax {
namespace {

/// OnlineSoftmax of z = x / T, which also sums exp(z − max) (z − max); max is x's. Of 16-bit numbers it sees the
/// logarithms to base 2.
template <class T>
struct OnlineEntropy {
  using Softmax = OnlineSoftmax<T>;
  static constexpr bool kFast = Softmax::kFast;
  static constexpr float kUnit = kFast ? 1 / kLog2e : 1;  // of exponents and what is summed of them
  float scale;
  struct Value {
    float max, sum, weighted;
  };
  __device__ explicit OnlineEntropy(float inverse_temperature) : scale(inverse_temperature / kUnit) {}
  __device__ static Value identity() { return {Softmax::identity().max, 0, 0}; }

  __device__ float exponent(float x, float max) const { return (x - max) * scale; }
  __device__ static float exp(float d) {
    if constexpr (kFast) return exp2_approx(d);
    else return expf(d);
  }

  /// v with another max, of which it is `d` below.
  __device__ static Value raised(Value v, float d, float top) {
    const float e = exp(d);
    return {top, e * v.sum, e * (v.weighted + fmaxf(d, kSelectiveLowest) * v.sum)};
  }

  template <class Pack, int n>
  __device__ void push(Value& v, const Pack (&packs)[n]) const {
    const float top = largest<T>(packs, v.max);
    v = raised(v, exponent(v.max, top), top);
#pragma unroll
    for (const Pack& pack : packs) {
      float x[Pack::kWidth];
      pack.to_float(x);
#pragma unroll
      for (const float x_j : x) {
        const float d = exponent(x_j, top), e = exp(d);
        v.sum += e;
        v.weighted += e * fmaxf(d, kSelectiveLowest);
      }
    }
  }

  __device__ Value operator()(Value a, Value b) const {
    const float top = fmaxf(a.max, b.max);
    a = raised(a, exponent(a.max, top), top), b = raised(b, exponent(b.max, top), top);
    return {top, a.sum + b.sum, a.weighted + b.weighted};
  }

  __device__ static Value shuffle(Value v, int lane) {
    return {__shfl_xor_sync(~0u, v.max, lane), __shfl_xor_sync(~0u, v.sum, lane),
            __shfl_xor_sync(~0u, v.weighted, lane)};
  }
};

/// f(j, z) for each element j of pack k that is the row's.
template <class T, class Pack, class F>
__device__ void for_each_logit(const Row<T>& x, int k, const Pack& pack, const LogitMap& map, F f) {
  float v[Pack::kWidth];
  pack.to_float(v);
#pragma unroll
  for (int j = 0; j < Pack::kWidth; ++j)
    if (const int c = x.column(k) + j; c >= 0 && c < x.n) f(j, map_logit<Math<T>>(map, v[j]));
}

/// The statistics of a row chunk (SelectiveParts). A block has the chunk, a thread four packs of it in flight. The
/// limit is memory: a logit is read once. kPlain: the logits are x, and their sum is not wanted.
template <class T, bool kPlain>
__global__ void __launch_bounds__(256) parts_kernel(SelectiveParts a, RowChunks<T> chunks) {
  await_previous();
  if (a.ids[chunks.row()] == a.ignore_index) return;
  const Row<T> x = chunks.of(a.x, a.x_stride);
  const OnlineEntropy<T> online(a.inverse_temperature);
  auto v = online.identity();
  float logits = 0;
  const auto blank = Row<T>::Pack::filled(T(-INFINITY));
  const auto load = [&](int k) { return x.load(k, T(-INFINITY)); };
  if constexpr (kPlain) {
    for_each_batch<4, true>(0, x.packs(), blockDim.x, load, blank,
                            [&](int, const auto& packs) { online.push(v, packs); });
  } else {
    for_each_batch<1, false>(0, x.packs(), blockDim.x, load, blank, [&](int k, const auto& packs) {
      float z[Row<T>::kWidth];
#pragma unroll
      for (float& z_j : z) z_j = -INFINITY;
      for_each_logit(x, k, packs[0], a.map, [&](int j, float z_j) { z[j] = z_j, logits += z_j; });
      const Pack<float, Row<T>::kWidth> mapped[] = {Pack<float, Row<T>::kWidth>::from_float(z)};
      online.push(v, mapped);
    });
    logits = RowReduce<Sum>()(logits);
  }
  v = RowReduce<OnlineEntropy<T>>()(v, online);
  float* part = a.parts + int64_t(blockIdx.x) * kSelectiveParts;
  if (threadIdx.x == 0) part[0] = v.max, part[1] = v.sum, part[2] = v.weighted * online.kUnit, part[3] = logits;
}

/// A row's log-probability, log-sum-exp and entropy, of the statistics of its chunks. A warp has a row; of the logits
/// it reads the label's.
template <class T>
__global__ void __launch_bounds__(256) rows_kernel(SelectiveLogSoftmax a) {
  await_previous();
  const int64_t row = int64_t(blockIdx.x) * blockDim.y + threadIdx.y;
  if (row >= a.rows) return;
  const int64_t id = a.ids[row];
  const bool ignored = id == a.ignore_index;
  if (!ignored && (id < 0 || id >= a.cols)) fail_label(id, a.cols);
  const OnlineEntropy<float> online(a.inverse_temperature);
  auto v = online.identity();
  float logits = 0;
  for (int i = threadIdx.x; i < a.per_row && !ignored; i += blockDim.x) {
    const float* part = a.parts + (row * a.per_row + i) * kSelectiveParts;
    v = online(v, {part[0], part[1], part[2]}), logits += part[3];
  }
  v = RowReduce<OnlineEntropy<float>>()(v, online);
  if (a.mean_logit) logits = reduce_lanes<Sum>(logits, 32);
  if (threadIdx.x > 0) return;
  const float log_sum = logf(v.sum);
  const float mean = v.weighted / v.sum;
  const float x = ignored ? 0 : float(static_cast<const T*>(a.x)[row * a.x_stride + id]),
              z = map_logit<Math<T>>(a.map, x);
  a.logp[row] = ignored ? 0 : online.exponent(z, v.max) - log_sum;
  if (a.lse) a.lse[row] = ignored ? 0 : v.max * a.inverse_temperature + log_sum;
  if (a.mean_logit) a.mean_logit[row] = ignored ? 0 : logits * a.inverse_temperature / float(a.cols);
  a.entropy[row] = ignored ? 0 : log_sum - mean;
  float* stats = a.stats + 3 * row;
  stats[0] = v.max, stats[1] = v.sum, stats[2] = mean;
}

/// dx of a row chunk; the softmax is recomputed from the row's maximum and sum, which forward has kept.
/// A block has the chunk, a thread four packs of it in flight. The limit is memory: x is read and dx written once.
/// kPlain: the logits are x, and the mean of logits has no gradient.
template <class T, bool kPlain>
__global__ void __launch_bounds__(256) backward_kernel(SelectiveBackward a, RowChunks<T> chunks) {
  await_previous();
  constexpr int kWidth = Row<T>::kWidth;
  const int64_t row = chunks.row(), id = a.ids[row];
  const Row<T> x = chunks.of(a.x, a.x_stride), dx = chunks.of(a.dx, a.cols);
  if (id == a.ignore_index) {
    constexpr float zeros[kWidth] = {};
    for (int k = threadIdx.x; k < x.packs(); k += blockDim.x) dx.store(k, zeros, x);
    return;
  }
  const OnlineEntropy<T> online(a.inverse_temperature);
  const float *stats = a.stats + 3 * row, max = stats[0], by = 1 / stats[1], g = a.dlogp[row] * a.inverse_temperature,
              h = a.dentropy[row] * a.inverse_temperature;
  const float slope = h * by * online.kUnit,
              level = (g - h * stats[2] - (a.dlse ? a.dlse[row] * a.inverse_temperature : 0)) * by;
  const float each = !kPlain && a.dmean_logit ? a.dmean_logit[row] * a.inverse_temperature / float(a.classes) : 0;
  const int at = int(id - a.first - chunks.begin());  // the id's column in this chunk, or outside of it
  for_each_pack<4>(x, 0, x.packs(), T(0), [&](int k, const auto& pack) {
    float f[kWidth];
    pack.to_float(f);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      const float z = kPlain ? f[j] : map_logit<Math<T>>(a.map, f[j]), d = online.exponent(z, max);
      float dz = -online.exp(d) * (level + slope * fmaxf(d, kSelectiveLowest));
      if (x.column(k) + j == at) dz += g;
      f[j] = kPlain ? dz : (dz + each) * map_slope(a.map, z);
    }
    dx.store(k, f, x);
  });
}

}  // namespace

LIGER_REGISTER(selective_parts, [](const SelectiveParts& a, Stream s) {
  dispatch(a.dtype, [&]<class T>() {
    const RowChunks<T> chunks(a.rows, a.cols, a.chunk);
    launch(is_plain(a.map) && !a.mean_logit ? parts_kernel<T, true> : parts_kernel<T, false>, chunks.grid(), s, a,
           chunks);
  });
});
LIGER_REGISTER(selective_log_softmax_rows, [](const SelectiveLogSoftmax& a, Stream s) {
  dispatch(a.dtype,
           [&]<class T>() { launch(rows_kernel<T>, {.blocks = ceil_div(a.rows, 8), .threads = {32, 8}}, s, a); });
});
LIGER_REGISTER(selective_backward, [](const SelectiveBackward& a, Stream s) {
  dispatch(a.dtype, [&]<class T>() {
    const RowChunks<T> chunks(a.rows, a.cols, 16384);
    launch(is_plain(a.map) && !a.dmean_logit ? backward_kernel<T, true> : backward_kernel<T, false>, chunks.grid(), s,
           a, chunks);
  });
});

}  // namespace liger::cuda::selective_log_softmax
