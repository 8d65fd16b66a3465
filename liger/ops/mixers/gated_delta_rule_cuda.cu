#include "liger/ops/mixers/gated_delta_rule_chain_hopper.cuh"
#include "liger/ops/mixers/gated_delta_rule_gradient_hopper.cuh"
#include "liger/ops/mixers/gated_delta_rule_plan.cuh"
#include "liger/ops/mixers/gated_delta_rule_prepare.cuh"

// Forward is two kernels, backward four:
//   prepare          for each chunk, all at once: U, P and the decays
//   chain            along the chunks of a document, one warp for each 16 columns of v: O; in backward D and the states
//   reverse chain    back along them: R, dV and the gradients of the states
//   gradients        for each chunk, all at once: dQ, dK, dg, dβ
// A warp of a chain holds the state's transpose, 16 rows of K numbers, in registers: with rows of v every left operand
// is made from sums that the warp has, and only k, q, U and P come through shared memory. Raw numbers of q, k, v and dO
// enter products with as many terms as hold them exactly, all others with two, or three for float inputs: bfloat16
// alone would be off by a multiple of what the float computation is, where keys are alike. On Hopper, bfloat16 keys of
// 64 and 128 columns have kernels that do the same for all but `prepare`. There, without delta, few long documents are
// cut into segments (cut_chains): one more kernel before each chain makes what each segment adds to the state, and the
// chain's blocks begin with the sum over the segments before theirs.

namespace liger::cuda::gated_delta_rule {
namespace {

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

template <class Kd>
void prepare(const Plan& plan, Stream s) {
  if (plan.table) launch(table_kernel, {1, dim3(kTableThreads)}, s, plan);
  if (plan.planes)
    launch(planes_kernel<Kd>,
           {std::min<int64_t>(ceil_div(plan.tokens * plan.a.key_heads * Kd::K, int64_t(256)), 65536), dim3(256)}, s,
           plan);
  using P = Prepare<Kd>;
  // Few key heads of many heads leave multiprocessors idle, unless several blocks share the heads: then each makes the
  // products of keys anew.
  const int64_t blocks = chunk_blocks(plan, plan.a.key_heads), wanted = 8 * multiprocessors(current_device()) / blocks;
  const int parts = int(std::clamp<int64_t>(wanted, 1, ceil_div(plan.group, P::kWarps))),
            heads = parts == 1 ? plan.group : round_up(ceil_div(plan.group, parts), P::kWarps);
  launch(prepare_kernel<Kd>, {blocks * ceil_div(plan.group, heads), dim3(P::kThreads), P::kBytes}, s, plan, heads);
}

/// Whether there are kernels for Hopper.
template <class Kd>
constexpr bool kForHopper = std::is_same_v<typename Kd::Number, bfloat16> && (Kd::K == 64 || Kd::K == 128);

/// Whether they take it: boxes of 64 numbers, rows that begin at multiples of 16 bytes. Without delta they are the
/// kernels that need no U, D and R, for the sizes of group_gradient.
template <class Kd>
bool for_hopper(const GatedDeltaRule& a) {
  if constexpr (!kForHopper<Kd>) {
    return false;
  } else {
    const auto even = [](const void* data, int64_t row, int64_t token) {
      return reinterpret_cast<uintptr_t>(data) % 16 == 0 && row % 8 == 0 && token % 8 == 0 && row >= 0 && token > 0;
    };
    const bool sizes = a.delta || (a.K == 128 && (a.V == 64 || a.V == 128));
    return has_wgmma() && sizes && a.K == Kd::K && a.V % kChainCols == 0 && even(a.q, a.q_row, a.q_token) &&
           even(a.k, a.k_row, a.k_token) && even(a.v, a.v_row, a.v_token);
  }
}

/// Whether U, D and R are not needed.
template <class Kd>
bool is_lean(const GatedDeltaRule& a) {
  return !a.delta && for_hopper<Kd>(a);
}

/// f<delta>(): products in flight stand in no branch.
template <class Kd, class F>
void with_delta(const GatedDeltaRule& a, F&& f) {
  if constexpr (kForHopper<Kd>) {
    if (a.delta) return f.template operator()<true>();
    if constexpr (Kd::K == 128) f.template operator()<false>();
  }
}

/// Boxes of the rows of 64 tokens of q, k, v or dO.
TensorMap map_rows(const GatedDeltaRule& a, const void* of, int64_t width, int64_t row, int64_t token) {
  return tensor_map(a.dtype, of, {width, a.tokens, a.rows}, {token, std::max(row, token)}, 64);
}
/// And of U, P, D or R.
template <class Kd>
TensorMap map_made(const Plan& plan, const bfloat16* of, int64_t width) {
  return tensor_map(DType::BF16, of, {width, plan.tokens, plan.a.heads * Kd::kMade}, {width, plan.tokens * width}, 64);
}

/// The states of `of`, S or dS, in boxes of `rows` columns of v.
template <class Kd>
TensorMap map_states(const Plan& plan, const bfloat16* of, int rows) {
  const int64_t all = state_rows(plan, Kd::kMade);
  return tensor_map(DType::BF16, of, {Kd::K, all, 1}, {Kd::K, all * Kd::K}, rows);
}

/// made, states: D or R, S or dS, which the kernel writes.
template <class Staged, class Out, class Kd>
void group_chain(void (*kernel)(ChainArgs, ChainMaps), ChainArgs args, const bfloat16* made, const bfloat16* states,
                 Stream s) {
  const Plan& plan = args.plan;
  const GatedDeltaRule& a = plan.a;
  const int64_t blocks = blocks_of_slot(plan), width = a.heads * a.V;
  args.slots = chain_slots(plan);
  ChainMaps maps{.q = map_rows(a, a.q, a.key_heads * a.K, a.q_row, a.q_token),
                 .k = map_rows(a, a.k, a.key_heads * a.K, a.k_row, a.k_token),
                 .rows = args.dout ? map_rows(a, args.dout, width, a.tokens * width, width)
                                   : map_rows(a, a.v, width, a.v_row, a.v_token),
                 .p = map_made<Kd>(plan, plan.p, Kd::C)};
  if (plan.u) maps.u = map_made<Kd>(plan, plan.u, Kd::C);
  if (args.out) maps.out = map_rows(a, args.out, width, a.tokens * width, width);
  if (made) maps.made = map_made<Kd>(plan, made, a.V);
  if (states) maps.states = map_states<Kd>(plan, states, kChainCols);
  if constexpr (Kd::K == 128)
    if (plan.segments) {
      const ChainMaps of{.k = args.dout ? maps.q : maps.k, .rows = maps.rows};
      using Read = GroupStage<Kd, false, false>;
      launch(args.dout ? segment_kernel<Kd, true> : segment_kernel<Kd, false>,
             {(plan.segments - 1) * blocks, dim3(kGroupChainThreads),
              kGroupChainBytes<Read, Outgoing<Kd, false, false, false>>},
             s, args, of);
    }
  launch(kernel, {args.slots * blocks, dim3(kGroupChainThreads), kGroupChainBytes<Staged, Out>}, s, args, maps);
}

template <class Kd, int V, bool kDelta>
void group_gradient(const GradientArgs& args, Stream s) {
  const Plan& plan = args.plan;
  const GatedDeltaRule& a = plan.a;
  const int64_t width = a.heads * V;
  using G = GroupGradient<Kd, V, kDelta>;
  const GradientMaps maps{.q = map_rows(a, a.q, a.key_heads * a.K, a.q_row, a.q_token),
                          .k = map_rows(a, a.k, a.key_heads * a.K, a.k_row, a.k_token),
                          .dout = map_rows(a, args.dout, width, a.tokens * width, width),
                          .d = kDelta ? map_made<Kd>(plan, plan.d, V) : map_rows(a, a.v, width, a.v_row, a.v_token),
                          .r = kDelta ? map_made<Kd>(plan, plan.r, V) : TensorMap{},
                          .s = map_states<Kd>(plan, plan.s, G::kSlice),
                          .ds = map_states<Kd>(plan, plan.ds, G::kSlice)};
  launch(group_gradient_kernel<Kd, V, kDelta>,
         {std::min<int64_t>(multiprocessors(current_device()), chunk_blocks(plan, a.key_heads)), dim3(kGradientThreads),
          int(sizeof(typename G::Memory))},
         s, args, maps);
}

}  // namespace

LIGER_REGISTER(gated_delta_rule_workspace, [](const GatedDeltaRuleWorkspace& w, Stream) {
  with_kind(w.like, [&]<class Kd>() { make_plan<Kd>(w.like, w.backward, *w.bytes, is_lean<Kd>(w.like)); });
});

LIGER_REGISTER(gated_delta_rule_forward, [](const GatedDeltaRuleForward& a, Stream s) {
  with_kind(a, [&]<class Kd>() {
    int64_t bytes;
    const Plan plan = make_plan<Kd>(a, false, bytes, is_lean<Kd>(a));
    prepare<Kd>(plan, s);
    const ChainArgs args{.plan = plan, .out = a.o, .last = a.final_state};
    if (for_hopper<Kd>(a)) {
      with_delta<Kd>(a, [&]<bool kDelta>() {
        group_chain<GroupStage<Kd, kDelta, true>, Outgoing<Kd, false, false, true>, Kd>(
            group_chain_kernel<Kd, kDelta, false>, args, nullptr, nullptr, s);
      });
    } else {
      chain<Stage<Kd, true>>(chain_kernel<Kd, false>, args, s);
    }
  });
});

LIGER_REGISTER(gated_delta_rule_backward, [](const GatedDeltaRuleBackward& a, Stream s) {
  with_kind(a, [&]<class Kd>() {
    int64_t bytes;
    const Plan plan = make_plan<Kd>(a, true, bytes, is_lean<Kd>(a));
    prepare<Kd>(plan, s);
    const ChainArgs there{.plan = plan},
        back{.plan = plan, .out = a.dv, .dout = a.dout, .last = a.dstate, .after = a.dfinal};
    const bool hopper = for_hopper<Kd>(a);
    if (hopper) {
      with_delta<Kd>(a, [&]<bool kDelta>() {
        group_chain<GroupStage<Kd, kDelta, false>, Outgoing<Kd, true, true, false>, Kd>(
            group_chain_kernel<Kd, kDelta, true>, there, plan.d, plan.s, s);
        group_chain<GroupStage<Kd, kDelta, true>, Outgoing<Kd, true, true, true>, Kd>(
            group_reverse_chain_kernel<Kd, kDelta>, back, plan.r, plan.ds, s);
      });
    } else {
      chain<Stage<Kd, false>>(chain_kernel<Kd, true>, there, s);
      chain<Stage<Kd, true>>(reverse_chain_kernel<Kd>, back, s);
    }
    if (hopper && a.K == 128 && (a.V == 64 || a.V == 128)) {
      if constexpr (kForHopper<Kd> && Kd::K == 128) {
        const GradientArgs args{plan, a.dout, a.dq, a.dk, a.dg, a.dbeta, a.dskip, a.dfinal != nullptr, 0};
        with_delta<Kd>(a, [&]<bool kDelta>() {
          if (a.V == 64) group_gradient<Kd, 64, kDelta>(args, s);
          else group_gradient<Kd, 128, kDelta>(args, s);
        });
      }
      return;
    }
    const auto gradients = [&]<bool kRoom>(std::bool_constant<kRoom>) {
      using G = Gradient<Kd, kRoom>;
      const int stages = G::bytes(2) <= shared_bytes_of_block() ? 2 : 1;
      launch(gradient_kernel<Kd, kRoom>, {chunk_blocks(plan, plan.a.key_heads), dim3(G::kThreads), G::bytes(stages)}, s,
             GradientArgs{plan, a.dout, a.dq, a.dk, a.dg, a.dbeta, a.dskip, a.dfinal != nullptr, stages});
    };
    if (kMayBeWide<Kd> && Gradient<Kd, kMayBeWide<Kd>>::bytes(1) <= shared_bytes_of_block())
      gradients(std::bool_constant<kMayBeWide<Kd>>());
    else gradients(std::false_type());
  });
});

}  // namespace liger::cuda::gated_delta_rule
