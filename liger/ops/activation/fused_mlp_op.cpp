#include "liger/core/torch/operator.h"
#include "liger/ops/activation/gated_op.h"
#include "liger/ops.h"

namespace liger {
namespace op::fused_mlp {

/// Tokens that are worked on at once: 0 asks for all.
int64_t chunk_of(int64_t tokens, int64_t asked) {
  return std::max<int64_t>(1, asked > 0 ? std::min(asked, tokens) : tokens);
}

Arguments check(const char* op, const Tensor& x, const Tensor& gate, const Tensor& up, const Tensor& down,
                const OptTensor& gate_bias, const OptTensor& up_bias, const OptTensor& down_bias) {
  const Arguments arguments(op, "x", x);
  TORCH_CHECK(gate.dim() == 2 && down.dim() == 2, op, ": gate must be [width, ", x.sym_size(-1),
              "] and down [out, width], got ", gate.sym_sizes(), " and ", down.sym_sizes());
  const c10::SymInt width = gate.sym_size(0), out = down.sym_size(0);
  arguments.shaped("gate", gate, {width, x.sym_size(-1)}, Type::Same)
      .shaped("up", up, gate.sym_sizes(), Type::Same)
      .shaped("down", down, {out, width}, Type::Same)
      .vector("gate_bias", gate_bias, width, Type::Same)
      .vector("up_bias", up_bias, width, Type::Same)
      .vector("down_bias", down_bias, out, Type::Same);
  return arguments;
}

Tensor forward(const Tensor& x_, const Tensor& gate, const Tensor& up, const Tensor& down, const OptTensor& gate_bias,
               const OptTensor& up_bias, const OptTensor& down_bias, int64_t activation, double gate_multiplier,
               double down_multiplier, int64_t chunk_) {
  check("fused_mlp", x_, gate, up, down, gate_bias, up_bias, down_bias);
  const Activation act = gated::parse("fused_mlp", activation);
  c10::SymDimVector shape(x_.sym_sizes());
  shape.back() = down.sym_size(0);
  const Tensor y = output(at::empty_symint(shape, x_.options()));
  if (y.is_meta() || y.numel() == 0) return y;
  const Tensor x = x_.reshape({-1, x_.size(-1)}), out = y.view({x.size(0), down.size(0)});
  const int64_t tokens = x.size(0), chunk = chunk_of(tokens, chunk_);
  const Tensor gates = output(at::empty({chunk, gate.size(0)}, x.options())), ups = output(at::empty_like(gates));
  for_chunks(tokens, chunk, [&](int64_t begin, int64_t n) {
    const Tensor rows = x.narrow(0, begin, n), g = gates.narrow(0, 0, n), u = ups.narrow(0, 0, n);
    project(g, rows, gate, value_or_undefined(gate_bias));
    project(u, rows, up, value_or_undefined(up_bias));
    gated::run_forward(g, u, g, act, gate_multiplier);
    project(out.narrow(0, begin, n), g, down, value_or_undefined(down_bias));
  });
  if (down_multiplier != 1) out.mul_(down_multiplier);
  return y;
}

using Gradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

/// The gradients of forward's first seven arguments: of argument i where bit i of `wants` is set, else an empty tensor.
/// The activations are made again; of the weights' gradients, the sums over chunks are in float.
Gradients backward(const Tensor& dy_, const Tensor& x_, const Tensor& gate, const Tensor& up, const Tensor& down,
                   const OptTensor& gate_bias, const OptTensor& up_bias, int64_t activation, double gate_multiplier,
                   double down_multiplier, int64_t chunk_, int64_t wants) {
  const Arguments arguments = check("fused_mlp_backward", x_, gate, up, down, gate_bias, up_bias, {});
  c10::SymDimVector shape(x_.sym_sizes());
  shape.back() = down.sym_size(0);
  arguments.shaped("dy", dy_, shape, Type::Same)
      .present("wants", (wants >> 4 & 1) != 0, "gate_bias", gate_bias)
      .present("wants", (wants >> 5 & 1) != 0, "up_bias", up_bias);
  const auto wanted = [&](int i) { return (wants >> i & 1) != 0; };
  const auto empty = [&](int i, c10::SymIntArrayRef shape) {
    return wanted(i) ? output(at::empty_symint(shape, x_.options())) : at::empty({0}, x_.options());
  };
  const Tensor dx = empty(0, x_.sym_sizes());
  const auto width = gate.sym_sizes().slice(0, 1), out_width = down.sym_sizes().slice(0, 1);
  if (dx.is_meta()) {
    return {dx,
            empty(1, gate.sym_sizes()),
            empty(2, up.sym_sizes()),
            empty(3, down.sym_sizes()),
            empty(4, width),
            empty(5, width),
            empty(6, out_width)};
  }
  const Activation act = gated::parse("fused_mlp", activation);
  const Tensor x = x_.reshape({-1, x_.size(-1)}), dy = dy_.reshape({x.size(0), down.size(0)});
  const int64_t tokens = x.size(0), chunk = chunk_of(tokens, chunk_);
  // One chunk needs no accumulator: its GEMM sums in float and rounds once.
  const auto sum_of = [&](int i, const Tensor& w) {
    const Tensor sum =
        wanted(i) ? output(at::empty(w.sizes(), w.options().dtype(chunk >= tokens ? w.scalar_type() : at::kFloat)))
                  : at::empty({0}, w.options());
    return tokens == 0 ? sum.zero_() : sum;
  };
  const auto bias_sum = [&](int i, const Tensor& w) {
    return at::zeros({wanted(i) ? w.size(0) : 0}, x.options().dtype(at::kFloat));
  };
  Tensor dgate = sum_of(1, gate), dup = sum_of(2, up), ddown = sum_of(3, down);
  const Tensor dgate_bias = bias_sum(4, gate), dup_bias = bias_sum(5, up), ddown_bias = bias_sum(6, down);
  const Tensor gates = output(at::empty({chunk, gate.size(0)}, x.options())), ups = output(at::empty_like(gates)),
               products = output(at::empty_like(gates));
  for_chunks(tokens, chunk, [&](int64_t begin, int64_t n) {
    const Tensor rows = x.narrow(0, begin, n), g = gates.narrow(0, 0, n), u = ups.narrow(0, 0, n);
    Tensor c = products.narrow(0, 0, n), d = dy.narrow(0, begin, n);
    if (down_multiplier != 1) d = d * down_multiplier;
    if (wanted(6)) ddown_bias.add_(d.sum(0, false, at::kFloat));
    if ((wants & 0b0111111) == 0) return;
    project(g, rows, gate, value_or_undefined(gate_bias));
    project(u, rows, up, value_or_undefined(up_bias));
    if (wanted(3)) {
      gated::run_forward(g, u, c, act, gate_multiplier);
      accumulate(ddown, d, c, begin == 0);
    }
    if ((wants & 0b0110111) == 0) return;
    at::mm_out(c, d, down);
    gated::run_backward(c, g, u, g, u, gate.size(0), act, gate_multiplier);
    if (wanted(1)) accumulate(dgate, g, rows, begin == 0);
    if (wanted(2)) accumulate(dup, u, rows, begin == 0);
    if (wanted(4)) dgate_bias.add_(g.sum(0, false, at::kFloat));
    if (wanted(5)) dup_bias.add_(u.sum(0, false, at::kFloat));
    if (!wanted(0)) return;
    Tensor out = dx.view({tokens, x.size(1)}).narrow(0, begin, n);
    at::mm_out(out, g, gate);
    at::addmm_out(out, out, u, up);
  });
  const auto dtype = x.scalar_type();
  return {dx,
          dgate.to(dtype),
          dup.to(dtype),
          ddown.to(dtype),
          dgate_bias.to(dtype),
          dup_bias.to(dtype),
          ddown_bias.to(dtype)};
}

constexpr Op<"liger::fused_mlp", forward> public_op;
constexpr Op<"liger::fused_mlp_forward", forward> forward_op;
constexpr Op<"liger::fused_mlp_backward", backward> backward_op;

/// Keeps the input alone: gate, up and their product, each as wide as the MLP, are made again in backward.
struct Autograd {
  using Attributes = std::tuple<int64_t, double, double, int64_t, int64_t>;

  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& gate, const Tensor& up, const Tensor& down,
                        const OptTensor& gate_bias, const OptTensor& up_bias, const OptTensor& down_bias,
                        int64_t activation, double gate_multiplier, double down_multiplier, int64_t chunk) {
    const bool wanted[] = {wants_grad(x),         wants_grad(gate),    wants_grad(up),       wants_grad(down),
                           wants_grad(gate_bias), wants_grad(up_bias), wants_grad(down_bias)};
    int64_t wants = 0;
    for (int i = 0; i < 7; ++i) wants |= int64_t(wanted[i]) << i;
    ctx->save_for_backward({x, gate, up, down, value_or_undefined(gate_bias), value_or_undefined(up_bias)});
    ctx->saved_data["attrs"] = Attributes(activation, gate_multiplier, down_multiplier, chunk, wants);
    return forward_op(x, gate, up, down, gate_bias, up_bias, down_bias, activation, gate_multiplier, down_multiplier,
                      chunk);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto s = ctx->get_saved_variables();
    const auto [activation, gate_multiplier, down_multiplier, chunk, wants] = ctx->saved_data["attrs"].to<Attributes>();
    auto [dx, dgate, dup, ddown, dgate_bias, dup_bias, ddown_bias] =
        backward_op(grads[0], s[0], s[1], s[2], s[3], optional(s[4]), optional(s[5]), activation, gate_multiplier,
                    down_multiplier, chunk, wants);
    variable_list d{dx, dgate, dup, ddown, dgate_bias, dup_bias, ddown_bias};
    for (int i = 0; i < 7; ++i)
      if ((wants >> i & 1) == 0) d[i] = Tensor();
    d.resize(11);
    return d;
  }
};

/// As for the linear layers that it replaces: everything is cast, a weight once for a forward pass.
template <c10::DeviceType kDevice>
Tensor autocast(const Tensor& x, const Tensor& gate, const Tensor& up, const Tensor& down, const OptTensor& gate_bias,
                const OptTensor& up_bias, const OptTensor& down_bias, int64_t activation, double gate_multiplier,
                double down_multiplier, int64_t chunk) {
  const c10::impl::ExcludeDispatchKeyGuard below_autocast(c10::autocast_dispatch_keyset);
  const auto cast = [](const auto& t) {
    return at::autocast::cached_cast(at::autocast::get_autocast_dtype(kDevice), t, kDevice);
  };
  return public_op(cast(x), cast(gate), cast(up), cast(down), cast(gate_bias), cast(up_bias), cast(down_bias),
                   activation, gate_multiplier, down_multiplier, chunk);
}

}  // namespace op::fused_mlp

Tensor fused_mlp(const Tensor& x, const Tensor& gate, const Tensor& up, const Tensor& down, const MLPOptions& options,
                 const OptTensor& gate_bias, const OptTensor& up_bias, const OptTensor& down_bias) {
  return op::fused_mlp::public_op(x, gate, up, down, gate_bias, up_bias, down_bias, int64_t(options.activation),
                                  options.gate_multiplier, options.down_multiplier, options.chunk);
}

LIGER_OPERATORS(fused_mlp, r) {
  using namespace op::fused_mlp;
  const Names inputs{"x",
                     "gate",
                     "up",
                     "down",
                     "gate_bias",
                     "up_bias",
                     "down_bias",
                     "activation",
                     "gate_multiplier",
                     "down_multiplier",
                     "chunk"};
  r.add<Autograd, 7>(public_op, inputs, {"y"});
  r.add(forward_op, inputs, {"y"});
  r.add(backward_op,
        {"dy", "x", "gate", "up", "down", "gate_bias", "up_bias", "activation", "gate_multiplier", "down_multiplier",
         "chunk", "wants"},
        {"dx", "dgate", "dup", "ddown", "dgate_bias", "dup_bias", "ddown_bias"});
}
TORCH_LIBRARY_IMPL(liger, AutocastCUDA, m) { m.impl("fused_mlp", op::fused_mlp::autocast<c10::DeviceType::CUDA>); }
TORCH_LIBRARY_IMPL(liger, AutocastCPU, m) { m.impl("fused_mlp", op::fused_mlp::autocast<c10::DeviceType::CPU>); }

}  // namespace liger
