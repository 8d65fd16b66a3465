#pragma once
// The kernel of the gated delta rule that prepares chunks, for a gate of each head, and U for gates of either kind.
#include "liger/ops/mixers/gated_delta_rule.cuh"

namespace liger::cuda::gated_delta_rule {
namespace {

template <class Kd>
struct Prepare {
  static constexpr int C = Kd::C, kThreads = 2 * C, kWarps = kThreads / 32;
  static constexpr int kRow = C + 4;  // floats of a row of A, which is read in runs of four
  static constexpr int kMatrices = 2 * C * kRow * 4;
  static constexpr int kBytes = 2 * C * 4 + (kMatrices > Keys<Kd>::kBytes ? kMatrices : Keys<Kd>::kBytes);
};

/// U of a head's chunk, from A and A β in shared memory, by substitution in float, one column a thread:
///   U_ij = A_ij − Σ_(j < m < i) A_im β_m U_mj
template <class Kd, int kRow>
__device__ void write_u(const Plan& plan, const Chunk& chunk, int head, const float (*a)[kRow],
                        const float (*scaled)[kRow]) {
  constexpr int C = Kd::C;
  const int j = threadIdx.x;
  if (j >= C) return;
  const int64_t plane = plan.tokens * C, at = (int64_t(head) * Kd::kMade * plan.tokens + chunk.at(plan)) * C;
  float u[C];
#pragma unroll
  for (int i = 0; i < C; ++i) {
    float sums[4] = {a[i][j], 0, 0, 0};
#pragma unroll
    for (int m = 0; m < i; m += 4) {
      const float4 of = *reinterpret_cast<const float4*>(&scaled[i][m]);  // 0 from column i on
      sums[0] -= of.x * u[m];
      if (m + 1 < i) sums[1] -= of.y * u[m + 1];
      if (m + 2 < i) sums[2] -= of.z * u[m + 2];
      if (m + 3 < i) sums[3] -= of.w * u[m + 3];
    }
    u[i] = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  }
#pragma unroll
  for (int i = 0; i < C; ++i) {
    if (i >= chunk.n) continue;
    float rest = u[i];
#pragma unroll
    for (int t = 0; t < Kd::kMade; ++t) {
      const bfloat16 term(rest);
      plan.u[at + t * plane + i * C + j] = term;
      rest -= float(term);
    }
  }
}

/// U, P and the factors of the chunks of a key head: one block for each chunk and `heads` of the group's heads, a warp
/// for 16 of its tokens. The limit is the latency of U.
template <class Kd>
__global__ void __launch_bounds__(Prepare<Kd>::kThreads) prepare_kernel(Plan plan, int heads) {
  await_previous();
  using P = Prepare<Kd>;
  constexpr int C = Kd::C;
  __shared__ Decays<C> decays_of[P::kWarps];  // each of a head
  char* shared = shared_memory<char>();
  float *norm_q = reinterpret_cast<float*>(shared), *norm_k = norm_q + C;
  shared += 2 * C * 4;
  auto* a = reinterpret_cast<float (*)[P::kRow]>(shared);  // A, and then A β, where q and k were
  auto* scaled = a + C;
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16;
  const int parts = ceil_div(plan.group, heads), of_chunk = int(plan.a.key_heads) * parts,
            key_head = blockIdx.x % of_chunk / parts, first_head = blockIdx.x % parts * heads,
            end = min(first_head + heads, plan.group), count = count_of(plan), step = gridDim.x / of_chunk;
  for (int c = blockIdx.x / of_chunk; c < count; c += step) {
    const Chunk chunk = chunk_at(plan, c);
    Panel<C> kk, qk;
    {
      char* at = shared;
      const Keys<Kd> keys(at);
      keys.template load<P::kThreads>(plan, chunk, key_head);
      keys.products(row, 0, kk, qk);
      if (threadIdx.x < 2 * C) norm_q[threadIdx.x] = keys.norm_q[threadIdx.x];
    }
    const int64_t first = chunk.at(plan);
    for (int h = first_head; h < end; ++h) {
      const int head = key_head * plan.group + h, turn = h % P::kWarps;
      if (turn == 0) {
        __syncthreads();
        if (const int warp = threadIdx.x / 32; h + warp < end) decays_of[warp].load(plan, chunk, head + warp);
        __syncthreads();
      }
      const Decays<C>& decays = decays_of[turn];
      if (const int i = threadIdx.x; i < chunk.n) {
        float* to = plan.factors + 4 * head * plan.tokens + first + i;
        to[0] = decays.beta[i], to[plan.tokens] = norm_k[i] * decays.from_start[i];
        to[2 * plan.tokens] = norm_k[i] * decays.to_end[i];
        to[3 * plan.tokens] = plan.a.scale * norm_q[i] * decays.from_start[i];
        if (i == 0) plan.kept[head * plan.tokens + first] = decays.from_start[C - 1];
      }
      const int64_t plane = plan.tokens * C, at = (int64_t(head) * Kd::kMade * plan.tokens + first) * C;
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int e = 0; e < C / 8; e += 2) {
          const int i = row + lane / 4 + 8 * half;
          unsigned words[2][Kd::kMade];
#pragma unroll
          for (int n = 0; n < 2; ++n) {
            const int j = 8 * (e + n) + lane % 4 * 2;
            float of_p[2] = {}, of_a[2] = {};
            if (8 * (e + n) <= row + 15)
#pragma unroll
              for (int right = 0; right < 2; ++right) {
                const float decay = decays.between(i, j + right) * norm_k[j + right];
                of_p[right] = plan.a.scale * norm_q[i] * qk.of[e + n][2 * half + right] * decay;
                if (plan.a.delta)
                  of_a[right] = j + right < i ? norm_k[i] * kk.of[e + n][2 * half + right] * decay : 0.f;
              }
            if (plan.a.delta) {
              *reinterpret_cast<float2*>(&a[i][j]) = {of_a[0], of_a[1]};
              *reinterpret_cast<float2*>(&scaled[i][j]) = {of_a[0] * decays.beta[j], of_a[1] * decays.beta[j + 1]};
            }
            split_pair(of_p[0], of_p[1], words[n]);
          }
#pragma unroll
          for (int t = 0; t < Kd::kMade; ++t)
            write_halves(words[0][t], words[1][t], plan.p + at + t * plane + i * C + 8 * e, i < chunk.n);
        }
      if (plan.a.delta) {
        __syncthreads();
        write_u<Kd>(plan, chunk, head, a, scaled);
        __syncthreads();
      }
    }
    __syncthreads();
  }
}

}  // namespace
}  // namespace liger::cuda::gated_delta_rule
