#pragma once
// What the kernels of the gated delta rule for Hopper's tensor cores are made of: operands of a chunk that come to
// shared memory, results that leave it, and the walk along the chunks of a block.
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

}  // namespace
}  // namespace liger::cuda::gated_delta_rule
