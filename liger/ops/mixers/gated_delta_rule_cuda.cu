#include <algorithm>
#include "liger/ops/mixers/gated_delta_rule_chain.cuh"
#include "liger/ops/mixers/gated_delta_rule_gradient.cuh"

// Forward is two kernels, backward four:
//   prepare          for each chunk, all at once: U, P and the decays
//   chain            along the chunks of a document, one warp for each 16 columns of v: O; in backward D and the states
//   reverse chain    back along them: R, dV and the gradients of the states
//   gradients        for each chunk, all at once: dQ, dK, dg, dβ
// A warp of a chain holds the state's transpose, 16 rows of K numbers, in registers: with rows of v every left operand
// is made from sums that the warp has, and only k, q, U and P come through shared memory. Raw numbers of q, k, v and dO
// enter products with as many terms as hold them exactly, all others with two, or three for float inputs: bfloat16
// alone would be off by a multiple of what the float computation is, where keys are alike.

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

template <class F>
void with_kind(const GatedDeltaRule& a, F&& f) {
  dispatch(a.dtype, [&]<class T>() {
    constexpr bool kUsual = std::is_same_v<T, bfloat16>;  // what nobody trains with takes the next size
    if (a.K <= 64) return f.template operator()<Kind<T, 64>>();
    if (a.K <= 96) return f.template operator()<Kind<T, kUsual ? 96 : 128>>();
    if (a.K <= 128) return f.template operator()<Kind<T, 128>>();
    if (a.K <= 192) return f.template operator()<Kind<T, kUsual ? 192 : 256>>();
    if (a.K <= 256) return f.template operator()<Kind<T, 256>>();
    throw std::runtime_error("gated_delta_rule: q and k may have up to 256 columns on a GPU");
  });
}

/// The plan, and how many bytes of workspace it needs.
template <class Kd>
Plan make_plan(const GatedDeltaRule& a, bool backward, int64_t& bytes) {
  Plan plan{};
  plan.a = a, plan.group = int(a.heads / a.key_heads), plan.chunk = Kd::C, plan.tokens = a.rows * a.tokens;
  plan.length = int(a.tokens), plan.row_slots = int(ceil_div(a.tokens, int64_t(Kd::C)));
  plan.chunks = int(a.starts ? plan.tokens : a.rows * plan.row_slots);
  plan.V = int(round_up(a.V, int64_t(kChainCols)));
  Room room{static_cast<char*>(a.workspace)};
  if (a.starts) plan.table = room.take<int64_t>(plan.chunks + 1), plan.count = room.take<int>(1);
  const int64_t rows = plan.tokens * a.key_heads;
  if (std::is_same_v<typename Kd::Number, bfloat16> && a.K == Kd::K) {
    plan.q = {static_cast<const bfloat16*>(a.q), a.q_row, a.q_token, a.K, 0};
    plan.k = {static_cast<const bfloat16*>(a.k), a.k_row, a.k_token, a.K, 0};
  } else {
    plan.planes = room.take<bfloat16>(2 * Kd::kRaw * rows * Kd::K);
    const int64_t token = a.key_heads * Kd::K;
    plan.q = plan.k = {plan.planes, a.tokens * token, token, Kd::K, rows * Kd::K};
    plan.k.numbers += Kd::kRaw * rows * Kd::K;
  }
  plan.factors = room.take<float>(4 * a.heads * plan.tokens);
  plan.kept = room.take<float>(a.heads * plan.tokens);
  const int64_t matrix = a.heads * Kd::kMade * plan.tokens;
  plan.u = room.take<bfloat16>(matrix * Kd::C), plan.p = room.take<bfloat16>(matrix * Kd::C);
  if (backward) {
    plan.d = room.take<bfloat16>(matrix * plan.V), plan.r = room.take<bfloat16>(matrix * plan.V);
    const int64_t slots = a.rows * plan.row_slots + a.documents, state = slots * a.heads * Kd::kMade * plan.V * Kd::K;
    plan.s = room.take<bfloat16>(state), plan.ds = room.take<bfloat16>(state);
  }
  bytes = room.used;
  return plan;
}

/// The grid of a kernel that has a block for each chunk of a key head, and goes on where there are more chunks than are
/// likely.
template <class Kd>
int64_t chunk_blocks(const Plan& plan) {
  return plan.a.key_heads * std::min<int64_t>(plan.chunks, plan.a.rows * plan.row_slots + 64);
}

template <class Kd>
void prepare(const Plan& plan, Stream s) {
  if (plan.table) launch(table_kernel, {1, dim3(kTableThreads)}, s, plan);
  if (plan.planes)
    launch(planes_kernel<Kd>,
           {std::min<int64_t>(ceil_div(plan.tokens * plan.a.key_heads * Kd::K, int64_t(256)), 65536), dim3(256)}, s,
           plan);
  launch(prepare_kernel<Kd>, {chunk_blocks<Kd>(plan), dim3(Prepare<Kd>::kThreads), Prepare<Kd>::kBytes}, s, plan);
}

template <class Staged>
void chain(void (*kernel)(ChainArgs), ChainArgs args, Stream s) {
  const Plan& plan = args.plan;
  const int64_t blocks = plan.a.heads * (plan.V / kChainCols);
  // A block for each row; with documents, of which nobody knows how many there are, as many as a GPU runs at once.
  args.slots = int(plan.table ? std::clamp<int64_t>(ceil_div(int64_t(1024), blocks), 1, plan.chunks) : plan.a.rows);
  // The next chunk comes while this one is worked on, unless a multiprocessor has other blocks to turn to.
  const bool alone = args.slots * blocks <= 2 * multiprocessors(current_device());
  args.stages = alone && 2 * Staged::kBytes <= shared_bytes_of_block() ? 2 : 1;
  launch(kernel, {args.slots * blocks, dim3(kChainThreads), args.stages * Staged::kBytes}, s, args);
}

}  // namespace

LIGER_REGISTER(gated_delta_rule_workspace, [](const GatedDeltaRuleWorkspace& w, Stream) {
  with_kind(w.like, [&]<class Kd>() { make_plan<Kd>(w.like, w.backward, *w.bytes); });
});

LIGER_REGISTER(gated_delta_rule_forward, [](const GatedDeltaRuleForward& a, Stream s) {
  with_kind(a, [&]<class Kd>() {
    int64_t bytes;
    const Plan plan = make_plan<Kd>(a, false, bytes);
    prepare<Kd>(plan, s);
    chain<Stage<Kd, true>>(chain_kernel<Kd, false>, {.plan = plan, .out = a.o, .last = a.final_state}, s);
  });
});

LIGER_REGISTER(gated_delta_rule_backward, [](const GatedDeltaRuleBackward& a, Stream s) {
  with_kind(a, [&]<class Kd>() {
    int64_t bytes;
    const Plan plan = make_plan<Kd>(a, true, bytes);
    prepare<Kd>(plan, s);
    chain<Stage<Kd, false>>(chain_kernel<Kd, true>, {.plan = plan}, s);
    chain<Stage<Kd, true>>(reverse_chain_kernel<Kd>,
                           {.plan = plan, .out = a.dv, .dout = a.dout, .last = a.dstate, .after = a.dfinal}, s);
    const int stages = Gradient<Kd>::bytes(2) <= shared_bytes_of_block() ? 2 : 1;
    launch(gradient_kernel<Kd>, {chunk_blocks<Kd>(plan), dim3(Gradient<Kd>::kThreads), Gradient<Kd>::bytes(stages)}, s,
           GradientArgs{plan, a.dout, a.dq, a.dk, a.dg, a.dbeta, a.dfinal != nullptr, stages});
  });
});

}  // namespace liger::cuda::gated_delta_rule
