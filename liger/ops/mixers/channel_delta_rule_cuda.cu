#include "liger/ops/mixers/channel_delta_rule_gradient.cuh"
#include "liger/ops/mixers/gated_delta_rule_plan.cuh"

// As gated_delta_rule_cuda.cu, whose chains it shares: they take q and k with their decays, as the first kernel makes
// them. What lies inside of a chunk is summed channel by channel, in float.

namespace liger::cuda::gated_delta_rule {
namespace {

template <class F>
void with_channels(const GatedDeltaRule& a, F&& f) {
  dispatch(a.dtype, [&]<class T>() {
    if (a.K <= 64) return f.template operator()<Kind<T, 64, true>>();
    if (a.K <= 128) return f.template operator()<Kind<T, 128, true>>();
    if (a.K <= 256) return f.template operator()<Kind<T, 256, true>>();
    throw std::runtime_error("gated_delta_rule: q and k may have up to 256 columns on a GPU");
  });
}

template <class Kd>
void prepare_channels(const Plan& plan, Stream s) {
  if (plan.table) launch(table_kernel, {1, dim3(kTableThreads)}, s, plan);
  using P = PrepareChannels<Kd>;
  launch(prepare_channels_kernel<Kd>, {chunk_blocks(plan, plan.a.heads), dim3(P::kThreads), P::kBytes}, s, plan);
}

}  // namespace

LIGER_REGISTER(channel_delta_rule_workspace, [](const GatedDeltaRuleWorkspace& w, Stream) {
  with_channels(w.like, [&]<class Kd>() { make_plan<Kd>(w.like, w.backward, *w.bytes); });
});

LIGER_REGISTER(channel_delta_rule_forward, [](const GatedDeltaRuleForward& a, Stream s) {
  with_channels(a, [&]<class Kd>() {
    int64_t bytes;
    const Plan plan = make_plan<Kd>(a, false, bytes);
    prepare_channels<Kd>(plan, s);
    chain<Stage<Kd, true>>(chain_kernel<Kd, false>, {.plan = plan, .out = a.o, .last = a.final_state}, s);
  });
});

LIGER_REGISTER(channel_delta_rule_backward, [](const GatedDeltaRuleBackward& a, Stream s) {
  with_channels(a, [&]<class Kd>() {
    int64_t bytes;
    const Plan plan = make_plan<Kd>(a, true, bytes);
    prepare_channels<Kd>(plan, s);
    chain<Stage<Kd, false>>(chain_kernel<Kd, true>, {.plan = plan}, s);
    chain<Stage<Kd, true>>(reverse_chain_kernel<Kd>,
                           {.plan = plan, .out = a.dv, .dout = a.dout, .last = a.dstate, .after = a.dfinal}, s);
    using G = ChannelGradient<Kd>;
    const int stages = G::bytes(2) <= shared_bytes_of_block() ? 2 : 1;
    launch(channel_gradient_kernel<Kd>, {chunk_blocks(plan, a.key_heads), dim3(G::kThreads), G::bytes(stages)}, s,
           GradientArgs{plan, a.dout, a.dq, a.dk, a.dg, a.dbeta, nullptr, a.dfinal != nullptr, stages});
  });
});

}  // namespace liger::cuda::gated_delta_rule
