#pragma once
// The kernels of the gated delta rule that go along the chunks of a document, for Hopper's tensor cores: those of
// gated_delta_rule_chain.cuh, whose formulas and workspace they have. A warpgroup has 64 columns of v, a warp 16 of
// them: the left operands are made from the warp's own sums, in registers, and wgmma reads the right ones, which
// another warp copies ahead of it. Results leave through shared memory, as boxes. The limit is the latency of a chunk.
#include "liger/ops/mixers/gated_delta_rule_hopper.cuh"

namespace liger::cuda::gated_delta_rule {
namespace {

/// Where a block keeps what its segment adds to a state, `at` among all blocks: this thread's part of eight e.
template <class Kd>
__device__ float4& segment_state(const Plan& plan, int64_t at, int e) {
  return reinterpret_cast<float4*>(plan.segment_states)[(at * (Kd::K / 8) + e) * kGroup + threadIdx.x];
}

/// Without delta: what each segment adds to the state after it, or with kReverse to the gradient before it. A document
/// that begins in it, or with kReverse ends in it, hides the segments before; its factor is then -1.
template <class Kd, bool kReverse>
__global__ void __launch_bounds__(kGroupChainThreads, 2)
    segment_kernel(const __grid_constant__ ChainArgs args, const __grid_constant__ ChainMaps maps) {
  await_previous();
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)  // elsewhere it is not started
  constexpr int C = Kd::C, K = Kd::K;
  const Plan& plan = args.plan;
  const ChainPlace place(plan);
  if (!has_segments(plan)) return;
  const int head = place.head, slot = place.slot + kReverse;  // nobody reads the last one, or in reverse the first
  Panel<K> state;
  state.clear();
  float factor = 1;
  // In reverse k is q, and the rows are dO.
  each_chunk<GroupStage<Kd, false, false>, kReverse>(
      args, maps, slot, head, place.col, shared_memory<char>(), [&](const auto& stage, const Chunk& chunk) {
        if (kReverse ? chunk.ends : chunk.begins) {
          read_state(state, plan, kReverse ? args.after : plan.a.state, chunk.document, head, place.v);
          factor = -1;
        }
        Panel<C> rows;
        read_transposed<typename Kd::Number>(rows, stage.rows, place.v - place.col);
        if constexpr (kReverse) stage.scale(rows, kToOut);
        else stage.scale(rows, kBeta), stage.scale(rows, kToEnd);
        Left<Kd::kMade> left[C / 16];
        make_left(left, rows);
        const Kept<Kd> kept(*stage.kept);
#pragma unroll
        for (int n = 0; n < K; n += 64) {
          float sums[8][4] = {};
          hold(sums);
          begin_products(left);
#pragma unroll
          for (int k = 0; k < C / 16; ++k) group_multiply<false, 64>(sums, left[k], stage.k, 16 * k, n);
          products_issued();
          await_products<false>();
          hold(sums);
          keep_and_add(state, n / 8, kept, sums);
        }
        if (factor >= 0) factor *= kept.of_head;
      });
  if (threadIdx.x >= kGroup) return;
  const int64_t at = blockIdx.x + int64_t(kReverse) * blocks_of_slot(plan);
  if (threadIdx.x == 0) plan.segment_kept[at] = factor;
#pragma unroll
  for (int e = 0; e < K / 8; ++e) {
    const auto& of = state.of[e];
    segment_state<Kd>(plan, at, e) = {of[0], of[1], of[2], of[3]};
  }
#endif
}

/// The state before this block's segment, or with kReverse its gradient after it: the sum over the segments of its
/// document that are before it.
template <class Kd, bool kReverse>
__device__ void join_segments(Panel<Kd::K>& state, const Plan& plan) {
  state.clear();
  if (!has_segments(plan) || threadIdx.x >= kGroup) return;
  const int64_t blocks = blocks_of_slot(plan), step = kReverse ? blocks : -blocks;
  float factor = 1;
  for (int64_t at = blockIdx.x + step; at >= 0 && at < plan.segments * blocks; at += step) {
#pragma unroll
    for (int e = 0; e < Kd::K / 8; ++e) {
      const float4 of = segment_state<Kd>(plan, at, e);
      state.of[e][0] += factor * of.x, state.of[e][1] += factor * of.y;
      state.of[e][2] += factor * of.z, state.of[e][3] += factor * of.w;
    }
    const float kept = plan.segment_kept[at];
    if (kept < 0) return;
    factor *= kept;
  }
}

/// As chain_kernel.
template <class Kd, bool kDelta, bool kBackward>
__global__ void __launch_bounds__(kGroupChainThreads, 1)
    group_chain_kernel(const __grid_constant__ ChainArgs args, const __grid_constant__ ChainMaps maps) {
  await_previous();
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)  // elsewhere it is not started
  using T = typename Kd::Number;
  constexpr int C = Kd::C, K = Kd::K, kMade = Kd::kMade;
  const Plan& plan = args.plan;
  const ChainPlace place(plan);
  const int block_col = place.col, v = place.v, head = place.head;
  constexpr bool kWritesD = kBackward && kDelta;  // without delta it is v
  using Out = Outgoing<Kd, kBackward, kWritesD, !kBackward>;
  const Out out(shared_memory<char>());
  [[maybe_unused]] const float skip = skip_of(plan, head);
  Panel<K> state;
  if constexpr (!kDelta) join_segments<Kd, false>(state, plan);
  each_chunk<GroupStage<Kd, kDelta, !kBackward>, false>(
      args, maps, place.slot, head, block_col, shared_memory<char>() + Out::kBytes,
      [&](const auto& stage, const Chunk& chunk) {
        if (chunk.begins) read_state(state, plan, plan.a.state, chunk.document, head, v);
        // Kᵀ and Qᵀ times the state.
        Panel<C> x, o, d;
        x.clear(), o.clear();
        {
          Left<kMade> of_state[K / 16];
          make_left(of_state, state);
          hold(x.of), hold(o.of);
          begin_products(of_state);
          if constexpr (kDelta)
#pragma unroll
            for (int k = 0; k < K / 16; ++k) group_multiply<true, C>(x.of, of_state[k], stage.k, 16 * k, 0);
          if constexpr (!kBackward)
#pragma unroll
            for (int k = 0; k < K / 16; ++k) group_multiply<true, C>(o.of, of_state[k], stage.q, 16 * k, 0);
          products_issued();
          if constexpr (kBackward) {
            out.begin();
            put_rows(of_state, out.state, v - block_col);
            out.send_states(plan, maps, chunk.has_before(plan) ? chunk.slot(plan) : -1, head, block_col);
          }
          await_products<false>();
          hold(x.of), hold(o.of);
        }
        read_transposed<T>(d, stage.rows, v - block_col);
        [[maybe_unused]] Left<kMade> left[C / 16];
        if constexpr (kDelta) {
          stage.scale(x, kToX);
          subtract(d, x);  // X
          // D = X − U (β X)
          x = d;
          stage.scale(x, kBeta);
          make_left(left, x);
          x.clear();
          hold(x.of);
          begin_products(left);
          group_multiply_triangle<true>(x, left, stage.u);
          products_issued();
          await_products<false>();
          hold(x.of);
          subtract(d, x);
        }
        if constexpr (kWritesD) {
          out.begin();
          put_transposed(d, out.made, v - block_col);
          out.send_rows(plan, maps, chunk, head, block_col, plan.d, nullptr);
        }
        // The state after the chunk. Its sum over tokens is made apart, for the tensor core does not round to the
        // nearest.
        if constexpr (!kBackward) {
          stage.scale(o, kToOut);
          if constexpr (!kDelta) add_scaled(o, skip, d);
        }
        stage.scale(d, kBeta);
        if constexpr (!kBackward) make_left(left, d);
        stage.scale(d, kToEnd);
        Left<kMade> of_end[C / 16];
        make_left(of_end, d);
        const Kept<Kd> kept(*stage.kept);
        const auto send_out = [&] {
          hold(o.of);
          out.begin();
          put_transposed(o, out.rows, v - block_col);
          out.send_rows(plan, maps, chunk, head, block_col, nullptr, args.out);
        };
#pragma unroll
        for (int n = 0; n < K; n += 64) {
          float sums[8][4] = {};
          hold(sums);
          begin_products(of_end);
#pragma unroll
          for (int k = 0; k < C / 16; ++k) group_multiply<false, 64>(sums, of_end[k], stage.k, 16 * k, n);
          products_issued();
          if constexpr (!kBackward) {
            // O = s eᴳ Q S + P (β D) + skip D, beside the state.
            if (n == 0) {
              hold(o.of);
              begin_products(left);
              group_multiply_triangle<true>(o, left, stage.p);
              products_issued();
              await_products<true>();
            } else {
              await_products<true>();
              send_out();
              await_products<false>();
            }
          } else {
            await_products<false>();
          }
          hold(sums);
          keep_and_add(state, n / 8, kept, sums);
        }
        if constexpr (!kBackward) {
          if constexpr (K == 64) {
            await_products<false>();
            send_out();
          }
          if (chunk.ends) write_final(state, plan, args.last, chunk.document, head, v);
        }
      });
#endif
}

/// As reverse_chain_kernel.
template <class Kd, bool kDelta>
__global__ void __launch_bounds__(kGroupChainThreads, 1)
    group_reverse_chain_kernel(const __grid_constant__ ChainArgs args, const __grid_constant__ ChainMaps maps) {
  await_previous();
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)  // elsewhere it is not started
  using T = typename Kd::Number;
  constexpr int C = Kd::C, K = Kd::K, kMade = Kd::kMade;
  const Plan& plan = args.plan;
  const ChainPlace place(plan);
  const int block_col = place.col, v = place.v, head = place.head;
  using Out = Outgoing<Kd, true, kDelta, true>;  // without delta nobody reads R
  const Out out(shared_memory<char>());
  [[maybe_unused]] const float skip = skip_of(plan, head);
  Panel<K> dstate;
  if constexpr (!kDelta) join_segments<Kd, true>(dstate, plan);
  each_chunk<GroupStage<Kd, kDelta, true>, true>(
      args, maps, place.slot, head, block_col, shared_memory<char>() + Out::kBytes,
      [&](const auto& stage, const Chunk& chunk) {
        if (chunk.ends) read_state(dstate, plan, args.after, chunk.document, head, v);
        // dN = Pᵀ dO + rk e^(G_C − G) K dS'; P has s.
        Panel<C> dout, r;
        [[maybe_unused]] Panel<C> x;
        r.clear();
        {
          Left<kMade> of_state[K / 16];
          make_left(of_state, dstate);
          hold(r.of);
          begin_products(of_state);
#pragma unroll
          for (int k = 0; k < K / 16; ++k) group_multiply<true, C>(r.of, of_state[k], stage.k, 16 * k, 0);
          products_issued();
          out.begin();
          put_rows(of_state, out.state, v - block_col);
          out.send_states(plan, maps, chunk.has_after(plan, args.after) ? chunk.next_slot(plan) : -1, head, block_col);
          read_transposed<T>(dout, stage.rows, v - block_col);
          await_products<false>();
          hold(r.of);
        }
        stage.scale(r, kToEnd);
        [[maybe_unused]] Left<kMade> left[C / 16];
        {
          Left<Kd::kRaw> of_dout[C / 16];
          make_left(of_dout, dout);
          hold(r.of);
          begin_products(of_dout);
          group_multiply_triangle<false>(r, of_dout, stage.p);
          products_issued();
          await_products<false>();
          hold(r.of);
        }
        // R = dN − Uᵀ (β dN)
        if constexpr (kDelta) {
          x = r;
          stage.scale(x, kBeta);
          make_left(left, x);
          x.clear();
          hold(x.of);
          begin_products(left);
          group_multiply_triangle<false>(x, left, stage.u);
          products_issued();
          await_products<false>();
          hold(x.of);
          subtract(r, x);
        }
        // dS = e^(G_C) dS' + (s rq eᴳ Q)ᵀ dO − (rk eᴳ K)ᵀ (β R)
        Left<kMade> of_dout[C / 16];
        stage.scale(dout, kToOut);
        make_left(of_dout, dout);
        if constexpr (kDelta) {
          x = r;
          stage.scale(x, kBeta), stage.scale(x, kToX);
          for (auto& eight : x.of)
            for (float& of : eight) of = -of;
          make_left(left, x);
        }
        const Kept<Kd> kept(*stage.kept);
#pragma unroll
        for (int n = 0; n < K; n += 64) {
          float sums[8][4] = {};
          hold(sums);
          if constexpr (kDelta) begin_products(left);
          begin_products(of_dout);
#pragma unroll
          for (int k = 0; k < C / 16; ++k) {
            group_multiply<false, 64>(sums, of_dout[k], stage.q, 16 * k, n);
            if constexpr (kDelta) group_multiply<false, 64>(sums, left[k], stage.k, 16 * k, n);
          }
          products_issued();
          if (n == 0) {
            out.begin();
            if constexpr (kDelta) put_transposed(r, out.made, v - block_col);
            stage.scale(r, kBeta);
            if constexpr (!kDelta) {
              read_transposed<T>(x, stage.rows, v - block_col);  // dO as it came
              add_scaled(r, skip, x);
            }
            put_transposed(r, out.rows, v - block_col);
            out.send_rows(plan, maps, chunk, head, block_col, plan.r, args.out);
          }
          await_products<false>();
          hold(sums);
          keep_and_add(dstate, n / 8, kept, sums);
        }
        if (chunk.begins) write_final(dstate, plan, args.last, chunk.document, head, v);
      });
#endif
}

}  // namespace
}  // namespace liger::cuda::gated_delta_rule
