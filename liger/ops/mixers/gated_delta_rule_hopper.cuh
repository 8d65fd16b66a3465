#pragma once
// The kernels of the gated delta rule that go along the chunks of a document, for Hopper's tensor cores: those of
// gated_delta_rule_chain.cuh, whose formulas and workspace they have. A warpgroup has 64 columns of v, a warp 16 of
// them: the left operands are made from the warp's own sums, in registers, and wgmma reads the right ones, which
// another warp copies ahead of it. Results leave through shared memory, as boxes. The limit is the latency of a chunk.
#include "liger/core/cuda/split_wgmma.cuh"
#include "liger/core/cuda/tiles.cuh"
#include "liger/ops/mixers/gated_delta_rule_chain.cuh"

namespace liger::cuda::gated_delta_rule {
namespace {

constexpr int kGroup = 128;                      // threads of a warpgroup
constexpr int kGroupChainThreads = kGroup + 32;  // and of the warp that loads
constexpr int kChainStages = 2;                  // chunks that are loaded at most

/// Shared memory of a block.
template <class Staged, class Out>
constexpr int kGroupChainBytes = Out::kBytes + kChainStages * (Staged::kBytes + 2 * int(sizeof(CopyBarrier)));

/// Where boxes are copied from and to: q and k as [row, token, head and column], v or dO and o or dv likewise, U and P,
/// D or R as [head and term, token, column], the states, or their gradients, as rows of K numbers.
struct ChainMaps {
  TensorMap q, k, rows, u, p, out, made, states;
};

/// Zeros in rows n to kRows - 1 of all panels of 64 columns: boxes have the rows of the next chunk there. By kThreads
/// threads, the first of a block, before products read them.
template <int kRows, int kThreads>
__device__ void clear_rows(void* panels, int bytes, int n) {
  const int chunks = (kRows - n) * 8;  // of 16 bytes, in a panel
  for (int i = threadIdx.x; i < bytes / (kRows * 128) * chunks; i += kThreads)
    static_cast<uint4*>(panels)[(i / chunks * kRows + n) * 8 + i % chunks] = {};
  show_tensor_core();
  await_threads(1, kThreads);
}

/// What a block holds in shared memory for one chunk; with kAll also q and P.
template <class Kd, bool kDelta, bool kAll>
struct GroupStage {
  static constexpr int C = Kd::C;
  using Keys = SwizzledTile<1, C, Kd::K>;
  using Matrix = SwizzledTile<Kd::kMade, C, C>;
  using Rows = SwizzledTile<1, C, kChainCols>;
  static constexpr int kBoxes = (kAll ? 2 : 1) * Keys::kBytes + (kAll + kDelta) * Matrix::kBytes + Rows::kBytes;
  static constexpr int kBytes = round_up(kBoxes + Kd::kFactors * C * 4 + 4 + int(sizeof(Chunk)), 1024);
  char* first;
  Keys k, q;
  Matrix u, p;
  Rows rows;
  float *factors, *kept;  // kept: e^(G_C)
  Chunk* chunk;

  __device__ explicit GroupStage(char* shared)
      : first(shared),
        k(Keys::at_front(shared)),
        q(kAll ? Keys::at_front(shared) : k),
        u{reinterpret_cast<bfloat16*>(shared)},
        p(u),
        rows{} {
    if (kDelta) u = Matrix::at_front(shared);
    if (kAll) p = Matrix::at_front(shared);
    rows = Rows::at_front(shared), factors = reinterpret_cast<float*>(shared), kept = factors + Kd::kFactors * C;
    chunk = reinterpret_cast<Chunk*>(kept + 1);
  }

  /// By one warp; each lane then arrives.
  __device__ void load(const Plan& plan, const ChainMaps& maps, const Chunk& of, int head, int col,
                       CopyBarrier& barrier) const {
    const int lane = threadIdx.x % 32, at = int(of.at(plan));
    if (lane == 0) {
      *chunk = of, *kept = plan.kept[head * plan.tokens + at];
      barrier.arrive_expecting(kBoxes);
#pragma unroll
      for (int c = 0; c < Kd::K; c += 64) {
        const int x = head / plan.group * Kd::K + c;
        copy_box(k.at(0, c), maps.k, x, of.token, of.row, barrier);
        if (kAll) copy_box(q.at(0, c), maps.q, x, of.token, of.row, barrier);
      }
#pragma unroll
      for (int t = 0; t < Kd::kMade; ++t) {
        if (kDelta) copy_box(u.at(0, 0, t), maps.u, 0, at, head * Kd::kMade + t, barrier);
        if (kAll) copy_box(p.at(0, 0, t), maps.p, 0, at, head * Kd::kMade + t, barrier);
      }
      copy_box(rows.at(0, 0), maps.rows, head * int(plan.a.V) + col, of.token, of.row, barrier);
    }
    const float* from = plan.factors + Kd::kFactors * head * plan.tokens + at;
#pragma unroll
    for (int i = lane; i < Kd::kFactors * C; i += 32)
      factors[i] = i % C < of.n ? from[i / C * plan.tokens + i % C] : 0.f;
    barrier.arrive();
  }

  /// By the warpgroup.
  __device__ void clear_after(int n) const {
    if (n < C) clear_rows<C, kGroup>(first, kBoxes, n);
  }

  /// Multiplies each column of a panel, which is a token, by factor i.
  __device__ void scale(Panel<C>& panel, int i) const { scale_tokens(panel, factors + i * C); }
};

/// The results of a chunk in shared memory, from which boxes of them are written: with kStates the states, with kOfMade
/// D or R, with kRows o or dv.
template <class Kd, bool kStates, bool kOfMade, bool kRows>
struct Outgoing {
  static constexpr int C = Kd::C;
  using State = SwizzledTile<Kd::kMade, kChainCols, Kd::K>;
  using Made = SwizzledTile<Kd::kMade, C, kChainCols>;
  using Rows = SwizzledTile<1, C, kChainCols>;
  static constexpr int kBytes = kStates * State::kBytes + kOfMade * Made::kBytes + kRows * Rows::kBytes;
  State state;
  Made made;
  Rows rows;

  __device__ explicit Outgoing(char* shared) : state{}, made{}, rows{} {
    if (kStates) state = State::at_front(shared);
    if (kOfMade) made = Made::at_front(shared);
    if (kRows) rows = Rows::at_front(shared);
  }

  /// Before the warpgroup writes to the states, or to the rows: what was sent of them before must have left.
  __device__ void begin() const {
    if (threadIdx.x == 0) await_stores<kStates && (kOfMade || kRows)>();
    await_threads(1, kGroup);
  }

  /// Sends the states, to where `slot` keeps them; nowhere if it is negative.
  __device__ void send_states(const Plan& plan, const ChainMaps& maps, int64_t slot, int head, int col) const {
    show_tensor_core();
    await_threads(1, kGroup);
    if (threadIdx.x > 0) return;
    if (slot >= 0)
#pragma unroll
      for (int t = 0; t < Kd::kMade; ++t)
#pragma unroll
        for (int c = 0; c < Kd::K; c += 64)
          store_box(maps.states, state.at(0, c, t), c,
                    int(((slot * plan.a.heads + head) * Kd::kMade + t) * plan.V + col), 0);
    stores_issued();
  }

  /// Sends D or R, which goes to `of_made`, and o or dv, to `of_rows`.
  __device__ void send_rows(const Plan& plan, const ChainMaps& maps, const Chunk& chunk, int head, int col,
                            bfloat16* of_made, void* of_rows) const {
    const int64_t at = chunk.at(plan), width = plan.a.heads * plan.a.V;
    show_tensor_core();
    await_threads(1, kGroup);
    if (chunk.n < C) {  // boxes have too many rows
      if constexpr (kOfMade)
#pragma unroll
        for (int t = 0; t < Kd::kMade; ++t)
          write_some(made, t, of_made + ((int64_t(head) * Kd::kMade + t) * plan.tokens + at) * plan.V + col, plan.V,
                     chunk.n);
      if constexpr (kRows)
        write_some(rows, 0, static_cast<bfloat16*>(of_rows) + at * width + head * plan.a.V + col, width, chunk.n);
    }
    if (threadIdx.x > 0) return;
    if (chunk.n == C) {
      if constexpr (kOfMade)
#pragma unroll
        for (int t = 0; t < Kd::kMade; ++t) store_box(maps.made, made.at(0, 0, t), col, int(at), head * Kd::kMade + t);
      if constexpr (kRows) store_box(maps.out, rows.at(0, 0), head * int(plan.a.V) + col, chunk.token, chunk.row);
    }
    stores_issued();
  }

  /// The first n rows of a tile, `step` numbers apart.
  template <class Tile>
  static __device__ void write_some(const Tile& tile, int term, bfloat16* to, int64_t step, int n) {
    for (int i = threadIdx.x; i < 8 * n; i += kGroup)
      store16(to + i / 8 * step + i % 8 * 8, *reinterpret_cast<const uint4*>(tile.at(i / 8, i % 8 * 8, term)));
  }
};

/// sums[v, n] += Σ_k left[v, k] · tile, for k and n of a chunk: of a tile that is 0 above its diagonal. Its rows are
/// later tokens: with kAlongK the columns n, else the k, of which 16 add to the first 16 k + 16 columns alone.
template <bool kAlongK, int k = 0, int kA, int C, class Tile>
__device__ void group_multiply_triangle(Panel<C>& sums, const Left<kA> (&left)[C / 16], const Tile& tile) {
  group_multiply<kAlongK, kAlongK ? C : 16 * k + 16>(sums.of, left[k], tile, 16 * k, 0);
  if constexpr (k + 1 < C / 16) group_multiply_triangle<kAlongK, k + 1>(sums, left, tile);
}

/// The chunks of a block, in order or in reverse: a warp loads them, and the warpgroup calls f(stage, chunk) for each.
/// Products in flight stand in no branch that the compiler does not know to be all threads': else it has each of them
/// awaited.
template <class Staged, bool kReverse, class F>
__device__ void each_chunk(const ChainArgs& args, const ChainMaps& maps, int slot, int head, int col, char* shared,
                           F f) {
  constexpr int kStages = kChainStages;
  const Plan& plan = args.plan;
  auto* const full = reinterpret_cast<CopyBarrier*>(shared + kStages * Staged::kBytes);
  CopyBarrier* const empty = full + kStages;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) full[i].init(33), empty[i].init(kGroup / 32);
    barriers_initialised();
  }
  __syncthreads();
  const int count = count_of(plan), begin = first_chunk(plan, slot, args.slots, count),
            end = first_chunk(plan, slot + 1, args.slots, count);
  int i = begin;
  const auto each = [&](auto g) {
    RingStage<kStages> ring;
    for (; i < end; ++i, ring.next()) g(ring, Staged(shared + ring.at * Staged::kBytes));
  };
  if (threadIdx.x >= kGroup) {
    each([&](const auto& ring, const Staged& stage) {
      const Chunk chunk = chunk_at(plan, kReverse ? end - 1 - (i - begin) : i);
      empty[ring.at].await(ring.parity ^ 1);
      stage.load(plan, maps, chunk, head, col, full[ring.at]);
    });
  } else {
    each([&](const auto& ring, const Staged& stage) {
      full[ring.at].await(ring.parity);
      const Chunk chunk = *stage.chunk;
      stage.clear_after(chunk.n);
      f(stage, chunk);
      __syncwarp();
      if (threadIdx.x % 32 == 0) empty[ring.at].arrive();
    });
    await_stores<0>();
  }
}

/// Where a block keeps what its segment adds to a state, `at` among all blocks: this thread's part of eight e.
template <class Kd>
__device__ float4& segment_state(const Plan& plan, int64_t at, int e) {
  return reinterpret_cast<float4*>(plan.segment_states)[(at * (Kd::K / 8) + e) * kGroup + threadIdx.x];
}

/// Without delta: what each segment adds to the state after it, or with kReverse to the gradient before it. A document
/// that begins in it, or there ends, hides the segments before; its factor is then -1.
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
  const int64_t at = blockIdx.x + int64_t(kReverse) * plan.a.heads * (plan.V / kChainCols);
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
  const int64_t blocks = plan.a.heads * (plan.V / kChainCols), step = kReverse ? blocks : -blocks;
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
