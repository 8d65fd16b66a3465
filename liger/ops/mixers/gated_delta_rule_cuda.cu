#include "liger/ops/mixers/gated_delta_rule_gradient.cuh"
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
// alone would be off by a multiple of what the float computation is, where keys are alike.

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
  launch(prepare_kernel<Kd>, {chunk_blocks(plan, plan.a.key_heads), dim3(Prepare<Kd>::kThreads), Prepare<Kd>::kBytes},
         s, plan);
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
    const auto gradients = [&]<bool kRoom>(std::bool_constant<kRoom>) {
      using G = Gradient<Kd, kRoom>;
      const int stages = G::bytes(2) <= shared_bytes_of_block() ? 2 : 1;
      launch(gradient_kernel<Kd, kRoom>, {chunk_blocks(plan, plan.a.key_heads), dim3(G::kThreads), G::bytes(stages)}, s,
             GradientArgs{plan, a.dout, a.dq, a.dk, a.dg, a.dbeta, a.dfinal != nullptr, stages});
    };
    if (kMayBeWide<Kd> && Gradient<Kd, kMayBeWide<Kd>>::bytes(1) <= shared_bytes_of_block())
      gradients(std::bool_constant<kMayBeWide<Kd>>());
    else gradients(std::false_type());
  });
});

}  // namespace liger::cuda::gated_delta_rule
