#pragma once
// How the kernels of the gated delta rule are run: what lies where in the workspace, and how many blocks there are.
#include <algorithm>
#include "liger/ops/mixers/gated_delta_rule_chain.cuh"

namespace liger::cuda::gated_delta_rule {
namespace {

/// A bump pointer over the workspace.
struct Room {
  char* base;
  int64_t used = 0;

  template <class T>
  T* take(int64_t n) {
    T* at = base ? reinterpret_cast<T*>(base + used) : nullptr;
    used += round_up(n * int64_t(sizeof(T)), int64_t(256));
    return at;
  }
};

// A segment has this many chunks at least.
constexpr int64_t kLeastSegment = 4;

/// Cuts the chains into segments: as many as give each multiprocessor four blocks, one after the other, where a row or
/// a document is so long that its chains take 1.5 times as long as the GPU would take for all of them at its best.
inline void cut_chains(Plan& plan) {
  const GatedDeltaRule& a = plan.a;
  const int64_t blocks = blocks_of_slot(plan), at_once = multiprocessors(current_device());
  plan.long_document = plan.tokens * blocks * 3 / (2 * at_once);
  if (a.batch_invariant || a.tokens < plan.long_document) return;
  const int64_t most = std::min(4 * at_once / blocks, a.rows * plan.row_slots / kLeastSegment);
  if (most > a.rows) plan.segments = int(most);
}

/// The plan, and how many bytes of workspace it needs: without room for U, D and R where `lean`.
template <class Kd>
Plan make_plan(const GatedDeltaRule& a, bool backward, int64_t& bytes, bool lean = false) {
  Plan plan{};
  plan.a = a, plan.group = int(a.heads / a.key_heads), plan.chunk = Kd::C, plan.tokens = a.rows * a.tokens;
  plan.length = int(a.tokens), plan.row_slots = int(ceil_div(a.tokens, int64_t(Kd::C)));
  plan.chunks = int(a.starts ? plan.tokens : a.rows * plan.row_slots);
  plan.V = int(round_up(a.V, int64_t(kChainCols)));
  Room room{static_cast<char*>(a.workspace)};
  if (a.starts) plan.table = room.take<int64_t>(plan.chunks + 1), plan.count = room.take<int>(2);
  const int64_t rows = plan.tokens * a.key_heads, slots = a.rows * plan.row_slots + a.documents;
  if constexpr (Kd::kChannels) {
    const int64_t token = a.heads * Kd::K, all = plan.tokens * token;
    plan.planes = room.take<bfloat16>(3 * Kd::kKeys * all);
    plan.q = plan.k = plan.end = {plan.planes, a.tokens * token, token, Kd::K, all};
    plan.k.numbers += Kd::kKeys * all, plan.end.numbers += 2 * Kd::kKeys * all;
  } else if (std::is_same_v<typename Kd::Number, bfloat16> && a.K == Kd::K) {
    plan.q = {static_cast<const bfloat16*>(a.q), a.q_row, a.q_token, a.K, 0};
    plan.k = {static_cast<const bfloat16*>(a.k), a.k_row, a.k_token, a.K, 0};
  } else {
    plan.planes = room.take<bfloat16>(2 * Kd::kRaw * rows * Kd::K);
    const int64_t token = a.key_heads * Kd::K;
    plan.q = plan.k = {plan.planes, a.tokens * token, token, Kd::K, rows * Kd::K};
    plan.k.numbers += Kd::kRaw * rows * Kd::K;
  }
  if (!Kd::kChannels) plan.end = plan.k;
  plan.factors = room.take<float>(Kd::kFactors * a.heads * plan.tokens);
  plan.kept = room.take<float>(a.heads * (Kd::kChannels ? slots * Kd::K : plan.tokens));
  const int64_t matrix = a.heads * Kd::kMade * plan.tokens;
  plan.p = room.take<bfloat16>(matrix * Kd::C);
  if (!lean) plan.u = room.take<bfloat16>(matrix * Kd::C);
  if (backward) {
    if (!lean) plan.d = room.take<bfloat16>(matrix * plan.V), plan.r = room.take<bfloat16>(matrix * plan.V);
    const int64_t state = slots * a.heads * Kd::kMade * plan.V * Kd::K;
    plan.s = room.take<bfloat16>(state), plan.ds = room.take<bfloat16>(state);
  }
  if (lean) cut_chains(plan);
  if (plan.segments) {
    plan.segment_states = room.take<float>(plan.segments * a.heads * plan.V * Kd::K);
    plan.segment_kept = room.take<float>(plan.segments * blocks_of_slot(plan));
  }
  bytes = room.used;
  return plan;
}

/// The grid of a kernel that has a block for each chunk of a head, or of a key head, and goes on where there are more
/// chunks than are likely.
inline int64_t chunk_blocks(const Plan& plan, int64_t heads) {
  return heads * std::min<int64_t>(plan.chunks, plan.a.rows * plan.row_slots + 64);
}

/// The slots of a chain: one for each row; with documents, of which nobody knows how many there are, as many as give a
/// GPU the blocks that run at once.
inline int chain_slots(const Plan& plan) {
  if (plan.segments) return plan.segments;
  const int64_t blocks = blocks_of_slot(plan);
  return int(plan.table ? std::clamp<int64_t>(ceil_div(int64_t(1024), blocks), 1, plan.chunks) : plan.a.rows);
}

template <class Staged>
void chain(void (*kernel)(ChainArgs), ChainArgs args, Stream s) {
  const Plan& plan = args.plan;
  const int64_t blocks = blocks_of_slot(plan);
  args.slots = chain_slots(plan);
  // The next chunk comes while this one is worked on, unless a multiprocessor has other blocks to turn to.
  const bool alone = args.slots * blocks <= 2 * multiprocessors(current_device());
  args.stages = alone && 2 * Staged::kBytes <= shared_bytes_of_block() ? 2 : 1;
  launch(kernel, {args.slots * blocks, dim3(kChainThreads), args.stages * Staged::kBytes}, s, args);
}

}  // namespace
}  // namespace liger::cuda::gated_delta_rule
