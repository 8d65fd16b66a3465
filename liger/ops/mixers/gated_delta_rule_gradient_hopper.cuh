#pragma once
// The kernel of the gated delta rule that makes the gradients of all chunks at once, for Hopper's tensor cores: that of
// gated_delta_rule_gradient.cuh, with two warpgroups, each of which has half of the columns, and a third that copies
// operands ahead of them.
#include "liger/ops/mixers/gated_delta_rule_gradient.cuh"
#include "liger/ops/mixers/gated_delta_rule_hopper.cuh"

namespace liger::cuda::gated_delta_rule {
namespace {

constexpr int kGradientGroups = 2, kGradientGroupThreads = kGradientGroups * kGroup,
              kGradientThreads = kGradientGroupThreads + kGroup, kGradientWarps = kGradientGroupThreads / 32;

/// Waits for the threads of the warpgroups.
struct GroupThreads {
  __device__ void operator()() const { await_threads(1, kGradientGroupThreads); }
};

/// Where boxes are copied from: q, k and dO as [row, token, head and column], D and R as [head and term, token,
/// column], the states as rows of K numbers. Without delta D is v, which lies as dO does, and there is no R.
struct GradientMaps {
  TensorMap q, k, dout, d, r, s, ds;
};

/// What a block holds in shared memory, for V columns of v.
template <class Kd, int V, bool kDelta>
struct GroupGradient {
  static constexpr int C = Kd::C, K = Kd::K, kMade = Kd::kMade, kSlice = 32, kStages = kDelta ? 2 : V == 64 ? 4 : 3;
  using KeyRows = SwizzledTile<1, C, K>;
  using Raw = SwizzledTile<1, C, V>;
  using Made = SwizzledTile<kDelta ? kMade : 1, C, V>;
  using State = SwizzledTile<kMade, kSlice, K>;  // kSlice rows, each of a column of v
  using Matrix = SwizzledTile<kMade, C, C>;

  struct Barriers {
    CopyBarrier full_keys, empty_keys, full_rows, empty_rows, full_states[kStages], empty_states[kStages];
  };
  struct alignas(1024) Memory {
    char keys[2 * KeyRows::kBytes], rows[Raw::kBytes + (1 + kDelta) * Made::kBytes], states[kStages][2 * State::kBytes],
        matrix[Matrix::kBytes];
    float products[C][kProductRow<Kd>], norms[2 * C];
    GradientSums<Kd, kGradientGroups, kGradientWarps> sums;
    Barriers barriers;
  };
  static_assert(sizeof(Memory) <= 227 * 1024);

  struct Keys {
    KeyRows q, k;
    const float *norm_q, *norm_k;
  };
  struct Rows {
    Raw dout;
    Made d, r;
    __device__ explicit Rows(char* shared)
        : dout(Raw::at_front(shared)), d(Made::at_front(shared)), r(kDelta ? Made::at_front(shared) : d) {}
  };
  struct States {
    State s, ds;
    __device__ explicit States(char* shared) : s(State::at_front(shared)), ds(State::at_front(shared)) {}
  };

  /// By one thread, for all chunks and heads of the block.
  static __device__ void load(const GradientArgs& args, const GradientMaps& maps, Memory& memory, int tasks) {
    const Plan& plan = args.plan;
    Barriers& barriers = memory.barriers;
    RingStage<1> of_keys, of_rows;
    RingStage<kStages> of_states;
    const int key_heads = int(plan.a.key_heads), none = int(state_rows(plan, kMade));
    for (int task = blockIdx.x; task < tasks; task += gridDim.x, of_keys.next()) {
      const Chunk chunk = chunk_at(plan, task / key_heads);
      const int key_head = task % key_heads, at = int(chunk.at(plan));
      barriers.empty_keys.await(of_keys.parity ^ 1);
      barriers.full_keys.arrive_expecting(sizeof(memory.keys));
      char* to = memory.keys;
      const KeyRows q = KeyRows::at_front(to), k = KeyRows::at_front(to);
      for (int c = 0; c < K; c += 64) {
        copy_box(q.at(0, c), maps.q, key_head * K + c, chunk.token, chunk.row, barriers.full_keys);
        copy_box(k.at(0, c), maps.k, key_head * K + c, chunk.token, chunk.row, barriers.full_keys);
      }
      for (int head = key_head * plan.group; head < (key_head + 1) * plan.group; ++head, of_rows.next()) {
        barriers.empty_rows.await(of_rows.parity ^ 1);
        barriers.full_rows.arrive_expecting(sizeof(memory.rows));
        const Rows rows(memory.rows);
        for (int c = 0; c < V; c += 64) {
          copy_box(rows.dout.at(0, c), maps.dout, head * V + c, chunk.token, chunk.row, barriers.full_rows);
          if constexpr (kDelta)
            for (int t = 0; t < kMade; ++t) {
              copy_box(rows.d.at(0, c, t), maps.d, c, at, head * kMade + t, barriers.full_rows);
              copy_box(rows.r.at(0, c, t), maps.r, c, at, head * kMade + t, barriers.full_rows);
            }
          else copy_box(rows.d.at(0, c), maps.d, head * V + c, chunk.token, chunk.row, barriers.full_rows);
        }
        // Where there is no state, boxes outside of the map: zeros.
        const auto row_of = [&](bool there, int64_t slot, int t, int v) {
          return there ? int(((slot * plan.a.heads + head) * kMade + t) * V + v) : none;
        };
        const bool has_state = chunk.has_before(plan), has_after = chunk.has_after(plan, args.after);
        for (int v = 0; v < V; v += kSlice, of_states.next()) {
          barriers.empty_states[of_states.at].await(of_states.parity ^ 1);
          CopyBarrier& full = barriers.full_states[of_states.at];
          full.arrive_expecting(sizeof(memory.states[0]));
          const States states(memory.states[of_states.at]);
          for (int c = 0; c < K; c += 64)
            for (int t = 0; t < kMade; ++t) {
              copy_box(states.s.at(0, c, t), maps.s, c, row_of(has_state, chunk.slot(plan), t, v), 0, full);
              copy_box(states.ds.at(0, c, t), maps.ds, c, row_of(has_after, chunk.next_slot(plan), t, v), 0, full);
            }
        }
      }
    }
  }
};

/// As gradient_kernel.
template <class Kd, int V, bool kDelta>
__global__ void __launch_bounds__(kGradientThreads, 1)
    group_gradient_kernel(const __grid_constant__ GradientArgs args, const __grid_constant__ GradientMaps maps) {
  await_previous();
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)  // elsewhere it is not started
  using G = GroupGradient<Kd, V, kDelta>;
  constexpr int C = Kd::C, K = Kd::K;
  const Plan& plan = args.plan;
  auto& memory = *shared_memory<typename G::Memory>();
  auto& barriers = memory.barriers;
  if (threadIdx.x == 0) {
    barriers.full_keys.init(1), barriers.empty_keys.init(kGradientWarps);
    barriers.full_rows.init(1), barriers.empty_rows.init(kGradientWarps);
    for (int i = 0; i < G::kStages; ++i) barriers.full_states[i].init(1), barriers.empty_states[i].init(kGradientWarps);
    barriers_initialised();
  }
  __syncthreads();
  const int key_heads = int(plan.a.key_heads), tasks = count_of(plan) * key_heads;
  if (threadIdx.x >= kGradientGroupThreads) {
    resize_registers<40, false>();
    if (threadIdx.x == kGradientGroupThreads) G::load(args, maps, memory, tasks);
    return;
  }
  resize_registers<232, true>();
  const GroupThreads sync;
  const auto release = [](CopyBarrier& empty) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) empty.arrive();
  };
  const typename G::Rows rows(memory.rows);
  const typename G::Matrix matrix{reinterpret_cast<bfloat16*>(memory.matrix)};
  char* keys_at = memory.keys;
  const typename G::KeyRows q = G::KeyRows::at_front(keys_at), k_rows = G::KeyRows::at_front(keys_at);
  const typename G::Keys keys{q, k_rows, memory.norms, memory.norms + C};
  using Part = WarpGradient<Kd, kGradientGroups, typename G::Keys, GroupThreads, kDelta, kGradientWarps>;
  constexpr int kOfC = Part::kOfC, kOfK = Part::kOfK;
  RingStage<1> of_keys, of_rows;
  RingStage<G::kStages> of_states;
  for (int task = blockIdx.x; task < tasks; task += gridDim.x, of_keys.next()) {
    const Chunk chunk = chunk_at(plan, task / key_heads);
    const int key_head = task % key_heads;
    Part part{args, memory.sums, keys, memory.products, int(threadIdx.x) % kGroup / 32 * 16, int(threadIdx.x) / kGroup};
    barriers.full_keys.await(of_keys.parity);
    if (chunk.n < C) clear_rows<C, kGradientGroupThreads>(memory.keys, sizeof(memory.keys), chunk.n);
    {
      Panel<kOfC> kk, qk;
      kk.clear(), qk.clear();
      hold(kk.of), hold(qk.of);
      products_begin();
#pragma unroll
      for (int k = 0; k < K; k += 16) {
        if constexpr (kDelta) group_multiply<false, true, kOfC>(kk.of, keys.k, k, keys.k, k, part.col);
        group_multiply<false, true, kOfC>(qk.of, keys.q, k, keys.k, k, part.col);
      }
      products_issued();
      norm_rows<kGradientGroupThreads, C, K>(plan, keys.q, keys.k, memory.norms);
      sync();
      await_products<false>();
      hold(kk.of), hold(qk.of);
      part.put_products(kk, qk);
    }
    for (int head = key_head * plan.group; head < (key_head + 1) * plan.group; ++head, of_rows.next()) {
      const int of_group = head - key_head * plan.group, turn = of_group % kGradientWarps;
      sync();  // the sums of the head before have been read
      if (turn == 0) {
        const int warp = threadIdx.x / 32;
        if (of_group + warp < plan.group) memory.sums.decays[warp].load(plan, chunk, head + warp);
        sync();
      }
      part.decays_of_head = &memory.sums.decays[turn];
      barriers.full_rows.await(of_rows.parity);
      if (chunk.n < C) clear_rows<C, kGradientGroupThreads>(memory.rows, sizeof(memory.rows), chunk.n);
      {
        Panel<kOfC> w, y;
        w.clear(), y.clear();
        hold(w.of), hold(y.of);
        products_begin();
#pragma unroll
        for (int k = 0; k < V; k += 16) {
          group_multiply<false, true, kOfC>(w.of, rows.dout, k, rows.d, k, part.col);
          if constexpr (kDelta) group_multiply<false, true, kOfC>(y.of, rows.r, k, rows.d, k, part.col);
        }
        products_issued();
        await_products<false>();
        hold(w.of), hold(y.of);
        part.add_matrices(w, y);
      }
      Panel<kOfK> of_q, of_k, of_end;
      of_q.clear(), of_k.clear(), of_end.clear();
      float product = 0;  // of S and dS', this thread's part
      for (int v = 0; v < V; v += G::kSlice, of_states.next()) {
        const typename G::States states(memory.states[of_states.at]);
        barriers.full_states[of_states.at].await(of_states.parity);
        hold(of_q.of), hold(of_k.of), hold(of_end.of);
        products_begin();
#pragma unroll
        for (int k = 0; k < G::kSlice; k += 16) {
          group_multiply<false, false, kOfK>(of_q.of, rows.dout, v + k, states.s, k, part.k_col);
          if constexpr (kDelta) group_multiply<false, false, kOfK>(of_k.of, rows.r, v + k, states.s, k, part.k_col);
          group_multiply<false, false, kOfK>(of_end.of, rows.d, v + k, states.ds, k, part.k_col);
        }
        products_issued();
        product += inner_product<kGradientGroupThreads, G::kSlice, K>(states.s, states.ds);
        await_products<false>();
        hold(of_q.of), hold(of_k.of), hold(of_end.of);
        release(barriers.empty_states[of_states.at]);
      }
      release(barriers.empty_rows);
      part.add_states(of_q, of_k, of_end, product);
      part.write_gates(chunk, head);
    }
    part.add_products(matrix, [&](Panel<kOfK>& to, auto transposed, const auto& right) {
      show_tensor_core();
      sync();
      hold(to.of);
      products_begin();
#pragma unroll
      for (int k = 0; k < C; k += 16)
        group_multiply<decltype(transposed)::value, false, kOfK>(to.of, matrix, k, right, k, part.k_col);
      products_issued();
      await_products<false>();
      hold(to.of);
      sync();
    });
    part.write(chunk, key_head);
    release(barriers.empty_keys);
    sync();
  }
#endif
}

}  // namespace
}  // namespace liger::cuda::gated_delta_rule
