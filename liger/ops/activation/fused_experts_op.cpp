#include <ATen/Parallel.h>
#include "liger/core/torch/options.h"
#include "liger/ops.h"
#include "liger/ops/activation/experts.h"
#include "liger/ops/activation/gated_op.h"

namespace liger {
namespace op::fused_experts {

constexpr auto kName = "fused_experts";

struct Options {
  int64_t activation = 0;   // a row of the table
  bool transposed = false;  // weights are [experts, in, out]
  bool clamped = false;     // the gate is GPT-OSS's, whose columns interleave
  double alpha = 1.702, limit = 7;
  bool recompute = true;  // backward makes gate and up again
  LIGER_OPTIONS(activation, transposed, clamped, alpha, limit, recompute)
};

/// Which tokens an expert gets: pairs of token and expert, sorted by expert, in their order.
struct Routing {
  Tensor tokens;  // [pairs] of each sorted pair, int64
  Tensor place;   // [tokens, k]: where a pair stands when sorted, −1 for an id that is no expert; int64
  Tensor ends;    // [experts]: where each expert's pairs end, int32
};

Routing route(const Tensor& index, int64_t experts) {
  const int64_t k = index.size(1), pairs = index.numel();
  const Tensor ids = index.reshape(-1).to(at::kLong), valid = ids.ge(0).logical_and_(ids.lt(experts));
  auto [sorted, order] =
      at::sort(at::where(valid, ids, at::scalar_tensor(experts, ids.options())), std::optional<bool>(true), 0, false);
  const auto longs = ids.options();
  const Tensor place =
      at::empty({pairs}, longs).scatter_(0, order, at::arange(pairs, longs)).masked_fill_(valid.logical_not(), -1);
  return {order.div(k, "floor"), place.view(index.sizes()),
          at::searchsorted(sorted, at::arange(experts, longs), /*out_int32=*/true, /*right=*/true)};
}

/// ATen's grouped GEMM takes 16-bit operands whose rows begin at multiples of 16 bytes. f(expert, first pair, pairs)
/// for each expert elsewhere.
bool grouped_by_aten(const Tensor& a, const Tensor& b) {
  const auto fits = [](const Tensor& t) {
    int units = 0;
    for (int64_t d = t.dim() - 2; d < t.dim(); ++d) {
      if (t.stride(d) == 1) ++units;
      else if (t.stride(d) % 8 != 0) return false;
    }
    return units == 1 && reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0;
  };
  return a.is_cuda() && a.scalar_type() == at::kBFloat16 && fits(a) && fits(b);
}

template <class F>
void for_experts(const Tensor& ends_, F f) {
  const Tensor ends = ends_.to(at::kCPU);
  const int* end = ends.const_data_ptr<int>();
  const int64_t experts = ends.numel();
  const auto run = [&](int64_t first, int64_t last) {
    for (int64_t e = first; e < last; ++e) {
      const int64_t begin = e > 0 ? end[e - 1] : 0;
      f(e, begin, end[e] - begin);
    }
  };
  // Many small products on a CPU: a thread each. It has no state of the caller's: what f uses must not be recorded.
  if (ends_.is_cpu() && experts >= 2 * at::get_num_threads()) at::parallel_for(0, experts, 1, run);
  else run(0, experts);
}

/// out[p] = x[p] w[e] for the pairs p of each expert e: x [pairs, in], w [experts, in, out].
Tensor grouped(const Tensor& x, const Tensor& w_, const Tensor& ends) {
  const Tensor w = w_.detach();
  if (grouped_by_aten(x, w))
    return at::_grouped_mm(x, w, ends).contiguous();  // its rows begin at multiples of 16 bytes
  const Tensor out = output(at::empty({x.size(0), w.size(2)}, x.options()));
  for_experts(ends, [&](int64_t e, int64_t begin, int64_t n) {
    Tensor part = out.narrow(0, begin, n);
    if (n > 0) at::mm_out(part, x.narrow(0, begin, n), w.select(0, e));
  });
  return out;
}

/// out[e] = Σ a[p]ᵀ b[p] over the pairs p of each expert e: [experts, columns of a, columns of b].
Tensor grouped_outer(const Tensor& a, const Tensor& b, const Tensor& ends) {
  if (grouped_by_aten(a.t(), b)) return at::_grouped_mm(a.t(), b, ends).contiguous();
  const Tensor out = output(at::empty({ends.numel(), a.size(1), b.size(1)}, a.options()));
  for_experts(ends, [&](int64_t e, int64_t begin, int64_t n) {
    Tensor part = out.select(0, e);
    if (n > 0) at::mm_out(part, a.narrow(0, begin, n).t(), b.narrow(0, begin, n));
    else part.zero_();
  });
  return out;
}

/// The expert of each sorted pair; the last one for pairs that have none, whose results nobody reads.
Tensor experts_of(const Routing& r) {
  const int64_t experts = r.ends.numel(), pairs = r.tokens.numel();
  return at::searchsorted(r.ends, at::arange(pairs, r.ends.options()), false, true).clamp_max_(experts - 1);
}

Tensor add_bias(const Tensor& t, const OptTensor& bias, const Tensor& experts) {
  return bias ? t.add_(bias->index_select(0, experts)) : t;
}

/// Σ rows[p] over the pairs of each expert, in float: [experts, cols].
Tensor sum_by_expert(const Tensor& rows, const Routing& r, const Tensor& experts) {
  const Tensor one_hot = at::zeros({r.ends.numel(), rows.size(0)}, rows.options().dtype(at::kFloat));
  const Tensor valid = at::arange(rows.size(0), r.ends.options()).lt(r.ends[-1]);
  const Tensor kept = at::where(valid.unsqueeze(1), rows.to(at::kFloat), at::scalar_tensor(0., one_hot.options()));
  return one_hot.scatter_(0, experts.to(at::kLong).unsqueeze(0), 1).mm(kept);
}

Tensor combine(const Tensor& rows, const Routing& r, const OptTensor& weights) {
  const Tensor y = output(at::empty({r.place.size(0), rows.size(1)}, rows.options()));
  run(combine_experts, y,
      {.rows = data(rows),
       .weights = data<float>(value_or_undefined(weights)),
       .place = data<int64_t>(r.place),
       .y = y.data_ptr(),
       .tokens = y.size(0),
       .k = r.place.size(1),
       .cols = y.size(1),
       .dtype = dtype_of(y)});
  return y;
}

Tensor activated(const Options& o, const Tensor& a) {
  const int64_t width = a.size(1) / 2;
  if (!o.clamped) {
    const Tensor h = output(at::empty({a.size(0), width}, a.options()));
    gated::run_forward(a.narrow(1, 0, width), a.narrow(1, width, width), h, Activation(o.activation), 1);
    return h;
  }
  const Tensor gate = a.slice(1, 0, std::nullopt, 2).clamp_max(o.limit),
               up = a.slice(1, 1, std::nullopt, 2).clamp(-o.limit, o.limit);
  return (up + 1) * (gate * at::sigmoid(gate * o.alpha));
}

/// As the kernel ExpertsBackward for GPT-OSS's gate (up + 1) · gate · σ(alpha · gate), both clamped: (da, weight · h,
/// dweights).
std::tuple<Tensor, Tensor, Tensor> clamped_backward(const Options& o, const Tensor& a, const Tensor& dh_,
                                                    const Tensor& weights) {
  const Tensor x = a.slice(1, 0, std::nullopt, 2).to(at::kFloat), y = a.slice(1, 1, std::nullopt, 2).to(at::kFloat),
               dh = dh_.to(at::kFloat), w = weights.unsqueeze(1);
  const Tensor gate = x.clamp_max(o.limit), up = y.clamp(-o.limit, o.limit), s = at::sigmoid(gate * o.alpha),
               glu = gate * s, h = (up + 1) * glu, dc = dh * w;
  const Tensor dx = (dc * (up + 1) * (s + o.alpha * glu * (1 - s))).mul_(x.le(o.limit)),
               dy = (dc * glu).mul_(y.abs().le(o.limit));
  return {at::stack({dx, dy}, 2).view(a.sizes()).to(a.scalar_type()), (h * w).to(a.scalar_type()), (h * dh).sum(1)};
}

void check(const char* op, const Options& o, const Tensor& x, const Tensor& gate_up, const Tensor& down,
           const Tensor& weights, const OptTensor& gate_up_bias, const OptTensor& down_bias,
           c10::SymIntArrayRef pairs) {
  const Arguments arguments(op, "x", x);
  TORCH_CHECK(x.dim() == 2 && gate_up.dim() == 3 && pairs.size() == 2, op,
              ": x must be [tokens, width], gate_up three-dimensional and index [tokens, k], got ", x.sym_sizes(), ", ",
              gate_up.sym_sizes(), " and ", pairs);
  const c10::SymInt experts = gate_up.sym_size(0), width = x.sym_size(1),
                    twice = gate_up.sym_size(o.transposed ? 2 : 1);
  TORCH_CHECK(twice % 2 == 0, op, ": gate_up must hold gate and up, got ", gate_up.sym_sizes());
  const auto shaped = [&](const c10::SymInt& out, const c10::SymInt& in) {
    return o.transposed ? std::array{experts, in, out} : std::array{experts, out, in};
  };
  arguments.shaped("gate_up", gate_up, shaped(twice, width), Type::Same)
      .shaped("down", down, shaped(width, twice / 2), Type::Same)
      .shaped("weights", weights, pairs, Type::Floating)
      .shaped("gate_up_bias", gate_up_bias, std::array{experts, twice}, Type::Same)
      .shaped("down_bias", down_bias, std::array{experts, width}, Type::Same);
  gated::parse(op, o.activation);
}

/// w [experts, out, in] as [experts, in, out], for products of rows with it.
Tensor inputs_first(const Options& o, const Tensor& w) { return o.transposed ? w : w.transpose(1, 2); }
Tensor outputs_first(const Options& o, const Tensor& w) { return o.transposed ? w.transpose(1, 2) : w; }

using Forward = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

/// (y, tokens, place, ends, gate and up [pairs, 2 width] or empty).
Forward forward(const Options& o, const Tensor& x_, const Tensor& gate_up, const Tensor& down, const Tensor& weights,
                const OptTensor& gate_up_bias, const OptTensor& down_bias, const Tensor& index, bool keep) {
  check(kName, o, x_, gate_up, down, weights, gate_up_bias, down_bias, index.sym_sizes());
  Arguments(kName, "x", x_).shaped("index", index, {x_.sym_size(0), index.sym_size(1)}, Type::Integer);
  const c10::SymInt pairs = index.sym_numel();
  const auto longs = x_.options().dtype(at::kLong);
  if (x_.is_meta())
    return {at::empty_symint(x_.sym_sizes(), x_.options()), at::empty_symint({pairs}, longs),
            at::empty_symint(index.sym_sizes(), longs), at::empty_symint({gate_up.sym_size(0)}, longs.dtype(at::kInt)),
            at::empty_symint({keep ? pairs : c10::SymInt(0),
                              keep ? 2 * (down.sym_numel() / (down.sym_size(0) * x_.sym_size(1))) : c10::SymInt(0)},
                             x_.options())};
  const Routing r = route(index, gate_up.size(0));
  const Tensor x = x_.index_select(0, r.tokens), experts = gate_up_bias || down_bias ? experts_of(r) : Tensor();
  const Tensor a = add_bias(grouped(x, inputs_first(o, gate_up), r.ends), gate_up_bias, experts);
  const Tensor outputs = add_bias(grouped(activated(o, a), inputs_first(o, down), r.ends), down_bias, experts);
  return {combine(outputs, r, weights.to(at::kFloat).contiguous()), r.tokens, r.place, r.ends,
          keep ? a : at::empty({0, 0}, x.options())};
}

using Gradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

/// The gradients of x, gate_up, down, weights and both biases, empty unless wanted. kept: forward's gate and up, or
/// empty.
Gradients backward(const Options& o, const Tensor& dy_, const Tensor& x_, const Tensor& gate_up, const Tensor& down,
                   const Tensor& weights, const OptTensor& gate_up_bias, const OptTensor& down_bias,
                   const Tensor& tokens_, const Tensor& place_, const Tensor& ends_, const Tensor& kept, bool with_dx,
                   bool with_dgate_up, bool with_ddown, bool with_dweights, bool with_dgate_up_bias,
                   bool with_ddown_bias) {
  constexpr auto op = "fused_experts_backward";
  check(op, o, x_, gate_up, down, weights, gate_up_bias, down_bias, place_.sym_sizes());
  const Arguments arguments(op, "x", x_);
  arguments.like("dy", dy_)
      .shaped("place", place_, {x_.sym_size(0), place_.sym_size(1)}, Type::Integer)
      .vector("tokens", tokens_, place_.sym_numel(), Type::Integer)
      .vector("ends", ends_, gate_up.sym_size(0), Type::Integer)
      .present("with_dgate_up_bias", with_dgate_up_bias, "gate_up_bias", gate_up_bias)
      .present("with_ddown_bias", with_ddown_bias, "down_bias", down_bias);
  if (kept.sym_numel() == 0) arguments.any("kept", kept, Type::Same);
  else arguments.shaped("kept", kept, {place_.sym_numel(), gate_up.sym_size(o.transposed ? 2 : 1)}, Type::Same);
  const auto none = [&] { return at::empty({0}, x_.options()); };
  if (x_.is_meta()) {
    const auto like = [&](bool wanted, const OptTensor& t) {
      return wanted ? at::empty_symint(t->sym_sizes(), t->options()) : none();
    };
    return {like(with_dx, x_),
            like(with_dgate_up, gate_up),
            like(with_ddown, down),
            like(with_dweights, weights),
            like(with_dgate_up_bias, gate_up_bias),
            like(with_ddown_bias, down_bias)};
  }
  const Routing r{tokens_.to(at::kLong).contiguous(), place_.to(at::kLong).contiguous(),
                  ends_.to(at::kInt).contiguous()};
  const auto& [tokens, place, ends] = r;
  const int64_t pairs = tokens.numel();
  const Tensor x = x_.index_select(0, tokens), dy = dy_.index_select(0, tokens),
               experts = gate_up_bias || down_bias ? experts_of(r) : Tensor();
  Tensor a =
      kept.numel() > 0 ? kept.clone() : add_bias(grouped(x, inputs_first(o, gate_up), ends), gate_up_bias, experts);
  Tensor h = grouped(dy, outputs_first(o, down), ends);  // dy down, and then weight · h
  // The weight of each sorted pair; 0 for those that have none.
  const Tensor flat_place = place.view(-1), sorted = at::zeros({pairs}, x.options().dtype(at::kFloat));
  sorted.scatter_(
      0, at::where(flat_place.ge(0), flat_place, pairs - 1),
      at::where(flat_place.ge(0), weights.reshape(-1).to(at::kFloat), at::scalar_tensor(0., sorted.options())));
  Tensor dsorted = at::empty({pairs}, sorted.options());
  if (o.clamped) std::tie(a, h, dsorted) = clamped_backward(o, a, h, sorted);
  else
    run(experts_backward, a,
        {.a = a.data_ptr(),
         .dh = h.data_ptr(),
         .weights = data<float>(sorted),
         .dweights = data<float>(dsorted),
         .pairs = pairs,
         .cols = h.size(1),
         .dtype = dtype_of(a),
         .activation = Activation(o.activation)});
  if (down_bias && with_dweights) dsorted.add_((dy * down_bias->index_select(0, experts)).sum(1, false, at::kFloat));
  const auto outer = [&](const Tensor& d_out, const Tensor& in) {
    return o.transposed ? grouped_outer(in, d_out, ends) : grouped_outer(d_out, in, ends);
  };
  const auto by_expert = [&](const Tensor& rows, const Tensor& like) {
    return sum_by_expert(rows, r, experts).to(like.scalar_type());
  };
  const Tensor zero = at::scalar_tensor(0., dsorted.options());
  return {with_dx ? combine(grouped(a, outputs_first(o, gate_up), ends), r, std::nullopt) : none(),
          with_dgate_up ? outer(a, x) : none(),
          with_ddown ? outer(dy, h) : none(),
          with_dweights
              ? at::where(place.ge(0), dsorted.index_select(0, flat_place.clamp_min(0)).view(place.sizes()), zero)
                    .to(weights.scalar_type())
              : none(),
          with_dgate_up_bias ? by_expert(a, *gate_up_bias) : none(),
          with_ddown_bias ? by_expert(dy * sorted.unsqueeze(1), *down_bias) : none()};
}

Tensor inference(const Options& o, const Tensor& x, const Tensor& gate_up, const Tensor& down, const Tensor& weights,
                 const OptTensor& gate_up_bias, const OptTensor& down_bias, const Tensor& index) {
  return std::get<0>(forward(o, x, gate_up, down, weights, gate_up_bias, down_bias, index, false));
}

constexpr Op<"liger::fused_experts", flat<inference>> public_op;
constexpr Op<"liger::fused_experts_forward", flat<forward>> forward_op;
constexpr Op<"liger::fused_experts_backward", flat<backward>> backward_op;

struct Autograd {
  using Wanted = std::tuple<bool, bool, bool, bool, bool, bool>;

  static Tensor forward(AutogradContext* ctx, const Options& o, const Tensor& x, const Tensor& gate_up,
                        const Tensor& down, const Tensor& weights, const OptTensor& gate_up_bias,
                        const OptTensor& down_bias, const Tensor& index) {
    auto [y, tokens, place, ends, kept] =
        with_options(forward_op, o, x, gate_up, down, weights, gate_up_bias, down_bias, index, !o.recompute);
    ctx->save_for_backward({x, gate_up, down, weights, value_or_undefined(gate_up_bias), value_or_undefined(down_bias),
                            tokens, place, ends, kept});
    save_options(ctx, o);
    ctx->saved_data["wanted"] = Wanted(wants_grad(x), wants_grad(gate_up), wants_grad(down), wants_grad(weights),
                                       wants_grad(gate_up_bias), wants_grad(down_bias));
    return y;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto s = ctx->get_saved_variables();
    const auto [dx, dgate_up, ddown, dweights, dgub, ddb] = ctx->saved_data["wanted"].to<Wanted>();
    auto [of_x, of_gate_up, of_down, of_weights, of_gub, of_db] =
        with_options(backward_op, load_options<Options>(ctx), grads[0], s[0], s[1], s[2], s[3], optional(s[4]),
                     optional(s[5]), s[6], s[7], s[8], s[9], dx, dgate_up, ddown, dweights, dgub, ddb);
    return {if_wanted(dx, of_x),       if_wanted(dgate_up, of_gate_up),
            if_wanted(ddown, of_down), if_wanted(dweights, of_weights),
            if_wanted(dgub, of_gub),   if_wanted(ddb, of_db)};
  }
};

/// As for the linear layers that it replaces: everything is cast, a weight once for a forward pass. The weights of
/// experts stay as they are.
template <c10::DeviceType kDevice>
Tensor autocast(const Options& o, const Tensor& x, const Tensor& gate_up, const Tensor& down, const Tensor& weights,
                const OptTensor& gate_up_bias, const OptTensor& down_bias, const Tensor& index) {
  const c10::impl::ExcludeDispatchKeyGuard below_autocast(c10::autocast_dispatch_keyset);
  const auto cast = [](const auto& t) {
    return at::autocast::cached_cast(at::autocast::get_autocast_dtype(kDevice), t, kDevice);
  };
  return with_options(public_op, o, cast(x), cast(gate_up), cast(down), weights, cast(gate_up_bias), cast(down_bias),
                      index);
}

}  // namespace op::fused_experts

Tensor fused_experts(const Tensor& x, const Tensor& gate_up, const Tensor& down, const Tensor& index,
                     const Tensor& weights, const ExpertsOptions& o, const OptTensor& gate_up_bias,
                     const OptTensor& down_bias) {
  const op::fused_experts::Options options{.activation = int64_t(o.activation),
                                           .transposed = o.transposed,
                                           .clamped = o.clamped,
                                           .alpha = o.alpha,
                                           .limit = o.limit,
                                           .recompute = o.recompute};
  return with_options(op::fused_experts::public_op, options, x, gate_up, down, weights, gate_up_bias, down_bias, index);
}

#define LIGER_INPUTS "Tensor x, Tensor gate_up, Tensor down, Tensor weights, Tensor? gate_up_bias, Tensor? down_bias"
TORCH_LIBRARY_FRAGMENT(liger, m) {
  using op::fused_experts::Options;
  m.def(schema<Options>("fused_experts(" LIGER_INPUTS ", Tensor index", "Tensor y"));
  m.def(schema<Options>("fused_experts_forward(" LIGER_INPUTS ", Tensor index, bool keep",
                        "Tensor y, Tensor tokens, Tensor place, Tensor ends, Tensor kept"));
  m.def(schema<Options>(
      "fused_experts_backward(Tensor dy, " LIGER_INPUTS
      ", Tensor tokens, Tensor place, Tensor ends, Tensor kept, bool with_dx, bool with_dgate_up, "
      "bool with_ddown, bool with_dweights, bool with_dgate_up_bias, bool with_ddown_bias",
      "Tensor dx, Tensor dgate_up, Tensor ddown, Tensor dweights, Tensor dgate_up_bias, Tensor ddown_bias"));
}
#undef LIGER_INPUTS
LIGER_IMPL(fused_experts, m) {
  m.impl("fused_experts", flat<op::fused_experts::inference>);
  m.impl("fused_experts_forward", flat<op::fused_experts::forward>);
  m.impl("fused_experts_backward", flat<op::fused_experts::backward>);
}
TORCH_LIBRARY_IMPL(liger, Autograd, m) {
  m.impl("fused_experts", differentiated<OptionsNode<op::fused_experts::Autograd>, 6>(op::fused_experts::public_op));
  refuse_derivative(m, {"fused_experts_forward", "fused_experts_backward"});
}
TORCH_LIBRARY_IMPL(liger, AutocastCUDA, m) {
  m.impl("fused_experts", flat<op::fused_experts::autocast<c10::DeviceType::CUDA>>);
}
TORCH_LIBRARY_IMPL(liger, AutocastCPU, m) {
  m.impl("fused_experts", flat<op::fused_experts::autocast<c10::DeviceType::CPU>>);
}

}  // namespace liger
