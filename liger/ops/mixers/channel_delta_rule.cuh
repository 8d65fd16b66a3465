#pragma once
// What the kernels of the gated delta rule share that have a gate for each channel. What lies inside of a chunk is
// summed in float, a warp for each row, whose lanes have some channels each: decays come as running products, from a
// token to those before it or after it.
#include "liger/ops/mixers/gated_delta_rule_prepare.cuh"

namespace liger::cuda::gated_delta_rule {
namespace {

constexpr int kLanes = 32;  // lanes of a warp

/// A lane's channels of a row: kRun neighbours at a time.
template <class Kd>
struct Lane {
  static constexpr int kRun = Kd::K >= 128 ? 4 : 2, kOwn = Kd::K / kLanes;
  float of[kOwn];

  static __device__ int channel(int i) { return i / kRun * kRun * kLanes + threadIdx.x % kLanes * kRun + i % kRun; }
  static __device__ Lane same(float v) {
    Lane lane;
#pragma unroll
    for (float& of : lane.of) of = v;
    return lane;
  }
  /// Of a row in shared memory.
  static __device__ Lane read(const float* row) {
    Lane lane;
#pragma unroll
    for (int i = 0; i < kOwn; i += kRun) {
      if constexpr (kRun == 4) {
        const float4 v = *reinterpret_cast<const float4*>(row + channel(i));
        lane.of[i] = v.x, lane.of[i + 1] = v.y, lane.of[i + 2] = v.z, lane.of[i + 3] = v.w;
      } else {
        const float2 v = *reinterpret_cast<const float2*>(row + channel(i));
        lane.of[i] = v.x, lane.of[i + 1] = v.y;
      }
    }
    return lane;
  }
  __device__ void write(float* row) const {
#pragma unroll
    for (int i = 0; i < kOwn; i += kRun) {
      if constexpr (kRun == 4) *reinterpret_cast<float4*>(row + channel(i)) = {of[i], of[i + 1], of[i + 2], of[i + 3]};
      else *reinterpret_cast<float2*>(row + channel(i)) = {of[i], of[i + 1]};
    }
  }
  /// Of a row of `width` numbers in global memory, which may be fewer than K: `rest` past them.
  template <class T>
  static __device__ Lane load(const T* row, int width, float rest) {
    Lane lane;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) lane.of[i] = channel(i) < width ? float(row[channel(i)]) : rest;
    return lane;
  }
  template <class T>
  __device__ void store(T* row, int width) const {
#pragma unroll
    for (int i = 0; i < kOwn; ++i)
      if (channel(i) < width) row[channel(i)] = T(of[i]);
  }
  /// As terms.
  template <int kTerms>
  __device__ void store_terms(bfloat16* row, int64_t plane) const {
#pragma unroll
    for (int i = 0; i < kOwn; i += 2) write_pair<kTerms>(of[i], of[i + 1], row + channel(i), plane);
  }
  /// f(i) for each.
  template <class F>
  static __device__ void each(F f) {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) f(i);
  }
  __device__ Lane times(const Lane& other, float by = 1) const {
    Lane lane;
    each([&](int i) { lane.of[i] = by * of[i] * other.of[i]; });
    return lane;
  }
  /// Σ over all channels, for all lanes.
  __device__ float dot(const Lane& other) const {
    float sum = 0;
    each([&](int i) { sum += of[i] * other.of[i]; });
    for (int step = 1; step < kLanes; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
    return sum;
  }
};

/// Sums over n neighbouring lanes of n numbers of each: lane l gets that of number l % n.
template <int n>
__device__ float sums_of_lanes(const float (&of)[n]) {
  if constexpr (n == 1) {
    return of[0];
  } else {
    float half[n / 2];
#pragma unroll
    for (int i = 0; i < n / 2; ++i) {
      const float low = of[i] + __shfl_xor_sync(~0u, of[i], n / 2),
                  high = of[i + n / 2] + __shfl_xor_sync(~0u, of[i + n / 2], n / 2);
      half[i] = threadIdx.x & (n / 2) ? high : low;
    }
    return sums_of_lanes(half);
  }
}

/// q̂, k̂, e^g and β of a head's chunk in shared memory; rows past its end are 0, and do not decay.
template <class Kd>
struct ChannelRows {
  static constexpr int C = Kd::C, K = Kd::K, kBytes = (3 * C * K + 3 * C) * 4;
  float *q, *k, *decay, *beta, *norm_q, *norm_k;

  __device__ explicit ChannelRows(char*& shared)
      : q(reinterpret_cast<float*>(shared)),
        k(q + C * K),
        decay(k + C * K),
        beta(decay + C * K),
        norm_q(beta + C),
        norm_k(norm_q + C) {
    shared += kBytes;
  }

  /// By all threads of the block.
  template <int kThreads>
  __device__ void load(const Plan& plan, const Chunk& chunk, int head) const {
    using T = typename Kd::Number;
    const GatedDeltaRule& a = plan.a;
    const int key_head = head / plan.group, width = int(a.K);
    __syncthreads();
    for (int row = threadIdx.x / kLanes; row < C; row += kThreads / kLanes) {
      const int64_t token = chunk.token + row, at = (chunk.at(plan) + row) * a.heads + head;
      const bool there = row < chunk.n;
      const auto normed = [&](const void* of, int64_t of_row, int64_t of_token, float* to, float* norm) {
        auto lane = Lane<Kd>::same(0);
        if (there)
          lane = Lane<Kd>::load(static_cast<const T*>(of) + chunk.row * of_row + token * of_token + key_head * width,
                                width, 0);
        const float by = a.eps < 0 ? 1.f : 1 / sqrtf(lane.dot(lane) + a.eps);
        Lane<Kd>::each([&](int i) { lane.of[i] *= by; });
        lane.write(to + row * K);
        if (threadIdx.x % kLanes == 0) norm[row] = by;
      };
      normed(a.q, a.q_row, a.q_token, q, norm_q), normed(a.k, a.k_row, a.k_token, k, norm_k);
      auto gates = Lane<Kd>::same(0);
      if (there) gates = Lane<Kd>::load(a.g + at * width, width, 0);
      Lane<Kd>::each([&](int i) { gates.of[i] = expf(gates.of[i]); });
      gates.write(decay + row * K);
      if (threadIdx.x % kLanes == 0) beta[row] = there ? a.beta[at] : 0.f;
    }
    __syncthreads();
  }
};

template <class Kd>
struct PrepareChannels {
  static constexpr int C = Kd::C, kThreads = 256;
  static constexpr int kRow = C + 4;  // floats of a row of A, which is read in runs of four
  static constexpr int kBytes = ChannelRows<Kd>::kBytes + 3 * C * kRow * 4;
};

/// U, P, β, and q̂ and k̂ with their decays, of the chunks of a head: one block for each chunk. The limit is the sum for
/// P and A, C² K / 2 times two multiplications and two additions.
template <class Kd>
__global__ void __launch_bounds__(PrepareChannels<Kd>::kThreads) prepare_channels_kernel(Plan plan) {
  await_previous();
  using P = PrepareChannels<Kd>;
  using Own = Lane<Kd>;
  constexpr int C = Kd::C, K = Kd::K, kWarps = P::kThreads / kLanes;
  char* shared = shared_memory<char>();
  const ChannelRows<Kd> rows(shared);
  auto* a = reinterpret_cast<float (*)[P::kRow]>(shared);
  auto *scaled = a + C, *p = scaled + C;
  const int lane = threadIdx.x % kLanes, warp = threadIdx.x / kLanes;
  const int count = count_of(plan), heads = int(plan.a.heads), head = blockIdx.x % heads, step = gridDim.x / heads;
  for (int c = blockIdx.x / heads; c < count; c += step) {
    const Chunk chunk = chunk_at(plan, c);
    const int64_t first = chunk.at(plan);
    rows.template load<P::kThreads>(plan, chunk, head);
    for (int i = warp; i < C; i += kWarps) {
      const auto q = Own::read(rows.q + i * K), k = Own::read(rows.k + i * K);
      auto decay = Own::same(1);
      float of_a[C], of_p[C];
#pragma unroll
      for (int j = C - 1; j >= 0; --j) {
        of_a[j] = of_p[j] = 0;
        if (j > i) continue;
        const auto key = Own::read(rows.k + j * K).times(decay);
        Own::each([&](int e) { of_a[j] += k.of[e] * key.of[e], of_p[j] += q.of[e] * key.of[e]; });
        decay = decay.times(Own::read(rows.decay + j * K));
      }
      float sum_a = sums_of_lanes(of_a), sum_p = sums_of_lanes(of_p);
      for (int step = C; step < kLanes; step *= 2)
        sum_a += __shfl_xor_sync(~0u, sum_a, step), sum_p += __shfl_xor_sync(~0u, sum_p, step);
      if (const int j = lane; j < C) {
        a[i][j] = j < i && plan.a.delta ? sum_a : 0.f;
        scaled[i][j] = a[i][j] * rows.beta[j];
        p[i][j] = plan.a.scale * sum_p;  // 0 above the diagonal
      }
      if (i < chunk.n) {
        auto to_end = Own::same(1);
        for (int j = C - 1; j > i; --j) to_end = to_end.times(Own::read(rows.decay + j * K));
        const int64_t plane = plan.q.plane, operand = Kd::kKeys * plane;
        bfloat16* const to = plan.planes + ((first + i) * heads + head) * K;
        q.times(decay, plan.a.scale).template store_terms<Kd::kKeys>(to, plane);
        k.times(decay).template store_terms<Kd::kKeys>(to + operand, plane);
        k.times(to_end).template store_terms<Kd::kKeys>(to + 2 * operand, plane);
        if (lane == 0) plan.factors[head * plan.tokens + first + i] = rows.beta[i];
      }
      if (i == C - 1 && chunk.has_before(plan))
        decay.store(plan.kept + (chunk.slot(plan) * plan.a.heads + head) * K, K);
    }
    __syncthreads();
    const int64_t at = (int64_t(head) * Kd::kMade * plan.tokens + first) * C;
    for (int pair = threadIdx.x; pair < chunk.n * (C / 2); pair += P::kThreads) {
      const int i = pair / (C / 2), j = pair % (C / 2) * 2;
      write_pair<Kd::kMade>(p[i][j], p[i][j + 1], plan.p + at + i * C + j, plan.tokens * C);
    }
    if (plan.a.delta) write_u<Kd>(plan, chunk, head, a, scaled);
    __syncthreads();
  }
}

}  // namespace
}  // namespace liger::cuda::gated_delta_rule
