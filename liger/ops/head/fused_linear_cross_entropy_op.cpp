#include "liger/ops/head/head_op.h"
#include "liger/ops/loss/cross_entropy_op.h"

namespace liger {
namespace op::fused_linear_cross_entropy {

using cross_entropy::Batch;
using cross_entropy::Results;
using head::gather, head::gradient_dtype, head::scatter;

constexpr auto kName = "fused_linear_cross_entropy";

void check(const char* op, const Tensor& hidden, const Tensor& weight, const OptTensor& bias, const Tensor& target,
           const OptTensor& class_weight, const OptTensor& normalizer, const CrossEntropyOptions& options) {
  const Arguments arguments(op, "hidden", hidden);
  TORCH_CHECK(hidden.dim() == 2 && weight.dim() == 2, op,
              ": hidden must be [tokens, width] and weight [classes, width], got ", hidden.sym_sizes(), " and ",
              weight.sym_sizes());
  const c10::SymInt classes = weight.sym_size(0);
  arguments.shaped("weight", weight, {classes, hidden.sym_size(1)}, Type::Kernels)
      .vector("bias", bias, classes, Type::Kernels)
      .vector("target", target, hidden.sym_size(0), Type::Integer)
      .vector("class_weight", class_weight, classes, Type::Floating)
      .count("normalizer", normalizer, 1, Type::Number);
  cross_entropy::check_options(op, options, classes);
}

using Forward = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

/// The results, then dhidden, dweight, dbias (empty unless wanted) and the power of two that these are still to be
/// divided by (empty but for float16).
Forward forward(const Tensor& hidden_, const Tensor& weight_, const OptTensor& bias_, const Tensor& target_,
                const OptTensor& class_weight, const OptTensor& normalizer, OptInts flags, OptDoubles scales,
                int64_t valid_count, int64_t max_bytes, std::optional<at::ScalarType> asked, bool with_dhidden,
                bool with_dweight, bool with_dbias) {
  const CrossEntropyOptions options = cross_entropy::unpack(flags, scales);
  check(kName, hidden_, weight_, bias_, target_, class_weight, normalizer, options);
  const auto dtype = head::compute_dtype(kName, hidden_, weight_, asked);
  with_dbias &= bias_.has_value();
  const bool scaled = dtype == at::kHalf && (with_dhidden || with_dweight || with_dbias);
  const auto floats = hidden_.options().dtype(at::kFloat);
  if (hidden_.is_meta()) {
    const auto like = [&](bool wanted, const OptTensor& t) {
      return wanted ? at::empty_symint(t->sym_sizes(), t->options().dtype(gradient_dtype(dtype, t->scalar_type())))
                    : at::empty({0}, floats);
    };
    return std::tuple_cat(
        cross_entropy::empty_results(target_, options, at::kFloat, dtype, hidden_.options()),
        std::make_tuple(like(with_dhidden, hidden_), like(with_dweight, weight_), like(with_dbias, bias_),
                        scaled ? at::empty({}, floats) : at::empty({0}, floats)));
  }
  const int64_t tokens = hidden_.size(0);
  const auto of_labels = [&](const Tensor& target) {
    return Batch(target, class_weight, normalizer, weight_.size(0), options, at::kFloat, scaled);
  };
  Batch batch = of_labels(target_);
  const Tensor kept = head::kept_tokens(target_, options.ignore_index,
                                        head::kept_count(target_, weight_, valid_count, [&] { return batch.valid(); }));
  if (kept.defined()) batch = of_labels(gather(kept, target_));
  const head::Pass pass{{gather(kept, hidden_).contiguous().to(dtype), weight_.contiguous().to(dtype),
                         bias_ ? bias_->to(dtype) : Tensor()},
                        {with_dhidden, with_dweight, with_dbias},
                        weight_.scalar_type(),
                        max_bytes};
  const auto d = pass.run(
      [&](const Tensor& z, int64_t begin, int64_t) { batch.run_rows(z, pass.wants.any() ? z : Tensor(), begin, {}); });
  auto [loss, z_loss, accuracy, predicted] = batch.results(dtype);
  if (options.predicted) predicted = scatter(kept, predicted, tokens, -1);
  if (options.reduction == Reduction::None) {
    loss = scatter(kept, loss, tokens, 0);
    if (options.z_loss) z_loss = scatter(kept, z_loss, tokens, 0);
    if (options.accuracy) accuracy = scatter(kept, accuracy, tokens, 0);
  }
  const auto saved = [&](const Tensor& t, const OptTensor& like) {
    return t.defined() ? t.to(gradient_dtype(dtype, like->scalar_type())) : at::empty({0}, floats);
  };
  return {loss,
          z_loss,
          accuracy,
          predicted,
          saved(d.hidden.defined() ? scatter(kept, d.hidden, tokens, 0) : Tensor(), hidden_),
          saved(d.weight, weight_),
          saved(d.bias, bias_),
          scaled ? batch.gradient_scale().clone() : at::empty({0}, floats)};
}

/// The gradients where every token has its own upstream gradient: the logits are made again.
std::tuple<Tensor, Tensor, Tensor> backward(const Tensor& g, const Tensor& hidden, const Tensor& weight,
                                            const OptTensor& bias_, const Tensor& target, const OptTensor& class_weight,
                                            const OptTensor& normalizer, OptInts flags, OptDoubles scales,
                                            int64_t valid_count, int64_t max_bytes, std::optional<at::ScalarType> asked,
                                            bool with_dhidden, bool with_dweight, bool with_dbias) {
  constexpr auto op = "fused_linear_cross_entropy_backward";
  CrossEntropyOptions options = cross_entropy::unpack(flags, scales);
  check(op, hidden, weight, bias_, target, class_weight, normalizer, options);
  Arguments(op, "hidden", hidden)
      .vector("g", g, hidden.sym_size(0), Type::Floating)
      .present("with_dbias", with_dbias, "bias", bias_);
  const auto dtype = head::compute_dtype(kName, hidden, weight, asked);
  const auto none = [&] { return at::empty({0}, hidden.options()); };
  const auto empty = [&](bool wanted, const OptTensor& t) {
    return wanted ? at::empty_symint(t->sym_sizes(), t->options()) : none();
  };
  if (hidden.is_meta()) return {empty(with_dhidden, hidden), empty(with_dweight, weight), empty(with_dbias, bias_)};
  options.z_loss = options.accuracy = options.predicted = false;
  const int64_t tokens = hidden.size(0);
  const bool scaled = dtype == at::kHalf;
  const auto of_labels = [&](const Tensor& target) {
    return Batch(target, class_weight, normalizer, weight.size(0), options, at::kFloat, scaled);
  };
  Batch batch = of_labels(target);
  const Tensor kept = head::kept_tokens(target, options.ignore_index,
                                        head::kept_count(target, weight, valid_count, [&] { return batch.valid(); }));
  if (kept.defined()) batch = of_labels(gather(kept, target));
  Tensor upstream = gather(kept, g).to(at::kFloat).contiguous(), divisor;
  if (scaled) {
    const Tensor power = head::unit_power(upstream);
    upstream = upstream.mul(power), divisor = power.mul(batch.gradient_scale());
  }
  const auto d =
      head::Pass{{gather(kept, hidden).contiguous().to(dtype), weight.contiguous().to(dtype),
                  bias_ ? bias_->to(dtype) : Tensor()},
                 {with_dhidden, with_dweight, with_dbias},
                 weight.scalar_type(),
                 max_bytes}
          .run([&](const Tensor& z, int64_t begin, int64_t) { batch.run_rows(z, z, begin, upstream); }, divisor);
  const auto rounded = [&](const Tensor& t, const OptTensor& like) {
    return t.defined() ? t.to(like->scalar_type()) : none();
  };
  return {d.hidden.defined() ? rounded(scatter(kept, d.hidden, tokens, 0), hidden) : none(), rounded(d.weight, weight),
          rounded(d.bias, bias_)};
}

Results inference(const Tensor& hidden, const Tensor& weight, const OptTensor& bias, const Tensor& target,
                  const OptTensor& class_weight, const OptTensor& normalizer, OptInts flags, OptDoubles scales,
                  int64_t valid_count, int64_t max_bytes, std::optional<at::ScalarType> dtype) {
  const auto all = forward(hidden, weight, bias, target, class_weight, normalizer, flags, scales, valid_count,
                           max_bytes, dtype, false, false, false);
  return {std::get<0>(all), std::get<1>(all), std::get<2>(all), std::get<3>(all)};
}

constexpr Op<"liger::fused_linear_cross_entropy", inference> public_op;
constexpr Op<"liger::fused_linear_cross_entropy_forward", forward> forward_op;
constexpr Op<"liger::fused_linear_cross_entropy_backward", backward> backward_op;

struct Autograd {
  using Attributes = std::tuple<bool, int64_t, int64_t, std::optional<int64_t>, bool, bool, bool>;

  static variable_list forward(AutogradContext* ctx, const Tensor& hidden, const Tensor& weight, const OptTensor& bias,
                               const Tensor& target, const OptTensor& class_weight, const OptTensor& normalizer,
                               OptInts flags, OptDoubles scales, int64_t valid_count, int64_t max_bytes,
                               std::optional<at::ScalarType> dtype, Results* results) {
    const bool reduced = cross_entropy::unpack(flags, scales).reduction != Reduction::None;
    const bool dh = wants_grad(hidden), dw = wants_grad(weight), db = wants_grad(bias);
    auto [loss, z_loss, accuracy, predicted, dhidden, dweight, dbias, scale] =
        forward_op(hidden, weight, bias, target, class_weight, normalizer, flags, scales, valid_count, max_bytes, dtype,
                   dh && reduced, dw && reduced, db && reduced);
    if (reduced) {
      ctx->save_for_backward({dhidden, dweight, dbias, scale});
      ctx->saved_data["dtypes"] = std::make_tuple(int64_t(hidden.scalar_type()), int64_t(weight.scalar_type()),
                                                  int64_t((bias ? *bias : weight).scalar_type()));
    } else {
      ctx->save_for_backward({hidden, weight, value_or_undefined(bias), target, value_or_undefined(class_weight),
                              value_or_undefined(normalizer)});
      const CrossEntropyOptions options = cross_entropy::unpack(flags, scales);
      save_list(ctx, "flags", cross_entropy::flags(options)), save_list(ctx, "scales", cross_entropy::scales(options));
    }
    ctx->saved_data["attrs"] = Attributes(reduced, valid_count, max_bytes,
                                          dtype ? std::optional<int64_t>(int64_t(*dtype)) : std::nullopt, dh, dw, db);
    *results = {loss, z_loss, accuracy, predicted};
    return {loss};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const auto [reduced, valid_count, max_bytes, dtype, dh, dw, db] = ctx->saved_data["attrs"].to<Attributes>();
    variable_list d(3);
    if (reduced) {
      const auto [of_hidden, of_weight, of_bias] =
          ctx->saved_data["dtypes"].to<std::tuple<int64_t, int64_t, int64_t>>();
      const Tensor g = cross_entropy::unscaled(grads[0], saved[3]);
      const auto gradient = [&](int i, bool wanted, int64_t dtype) {
        if (wanted) d[i] = scaled(saved[i], g).to(at::ScalarType(dtype));
      };
      gradient(0, dh, of_hidden), gradient(1, dw, of_weight), gradient(2, db, of_bias);
      return d;
    }
    const auto flags = load_list<int64_t>(ctx, "flags");
    const auto scales = load_list<double>(ctx, "scales");
    const auto asked = dtype ? std::optional<at::ScalarType>(at::ScalarType(*dtype)) : std::nullopt;
    auto [dhidden, dweight, dbias] =
        backward_op(grads[0], saved[0], saved[1], optional(saved[2]), saved[3], optional(saved[4]), optional(saved[5]),
                    OptInts(flags), OptDoubles(scales), valid_count, max_bytes, asked, dh, dw, db);
    d[0] = if_wanted(dh, dhidden), d[1] = if_wanted(dw, dweight), d[2] = if_wanted(db, dbias);
    return d;
  }
};

/// The op takes the float weight and the dtype to compute in, so that its gradient comes back in float, not rounded on
/// the way.
template <c10::DeviceType kDevice>
Results autocast(const Tensor& hidden, const Tensor& weight, const OptTensor& bias, const Tensor& target,
                 const OptTensor& class_weight, const OptTensor& normalizer, OptInts flags, OptDoubles scales,
                 int64_t valid_count, int64_t max_bytes, std::optional<at::ScalarType> dtype) {
  const c10::impl::ExcludeDispatchKeyGuard below_autocast(c10::autocast_dispatch_keyset);
  return public_op(hidden, weight, bias, target, class_weight, normalizer, flags, scales, valid_count, max_bytes,
                   dtype ? dtype : at::autocast::get_autocast_dtype(kDevice));
}

}  // namespace op::fused_linear_cross_entropy

CrossEntropyResult fused_linear_cross_entropy(const Tensor& hidden, const Tensor& weight, const Tensor& target,
                                              const HeadOptions& options, const OptTensor& bias,
                                              const OptTensor& class_weight, const OptTensor& normalizer) {
  using namespace op::cross_entropy;
  const auto f = flags(options);
  const auto s = scales(options);
  return as_struct(
      op::fused_linear_cross_entropy::public_op(hidden, weight, bias, target, class_weight, normalizer, OptInts(f),
                                                OptDoubles(s), options.valid_count, options.max_bytes, std::nullopt),
      options);
}

#define LIGER_HEAD_ARGUMENTS                                                                                  \
  "Tensor? class_weight, Tensor? normalizer, int[]? flags, float[]? scales, int valid_count, int max_bytes, " \
  "ScalarType? dtype"
TORCH_LIBRARY_FRAGMENT(liger, m) {
  // flags and scales as in cross_entropy.
  m.def("fused_linear_cross_entropy(Tensor hidden, Tensor weight, Tensor? bias, Tensor target, " LIGER_HEAD_ARGUMENTS
        ") -> (Tensor loss, Tensor z_loss, Tensor accuracy, Tensor predicted)");
  m.def(
      "fused_linear_cross_entropy_forward(Tensor hidden, Tensor weight, Tensor? bias, Tensor "
      "target, " LIGER_HEAD_ARGUMENTS
      ", bool with_dhidden, bool with_dweight, bool with_dbias) "
      "-> (Tensor loss, Tensor z_loss, Tensor accuracy, Tensor predicted, Tensor dhidden, Tensor dweight, Tensor "
      "dbias, Tensor scale)");
  m.def(
      "fused_linear_cross_entropy_backward(Tensor g, Tensor hidden, Tensor weight, Tensor? bias, Tensor target, "
      "Tensor? class_weight, Tensor? normalizer, int[]? flags, "
      "float[]? scales, int valid_count, int max_bytes, ScalarType? dtype, bool with_dhidden, bool with_dweight, bool "
      "with_dbias) "
      "-> (Tensor dhidden, Tensor dweight, Tensor dbias)");
}
LIGER_IMPL(fused_linear_cross_entropy, m) {
  m.impl("fused_linear_cross_entropy", op::fused_linear_cross_entropy::inference);
  m.impl("fused_linear_cross_entropy_forward", op::fused_linear_cross_entropy::forward);
  m.impl("fused_linear_cross_entropy_backward", op::fused_linear_cross_entropy::backward);
}
TORCH_LIBRARY_IMPL(liger, Autograd, m) {
  m.impl("fused_linear_cross_entropy",
         differentiated<op::fused_linear_cross_entropy::Autograd, 3>(op::fused_linear_cross_entropy::public_op));
  refuse_derivative(m, {"fused_linear_cross_entropy_forward", "fused_linear_cross_entropy_backward"});
}
TORCH_LIBRARY_IMPL(liger, AutocastCUDA, m) {
  m.impl("fused_linear_cross_entropy", op::fused_linear_cross_entropy::autocast<c10::DeviceType::CUDA>);
}
TORCH_LIBRARY_IMPL(liger, AutocastCPU, m) {
  m.impl("fused_linear_cross_entropy", op::fused_linear_cross_entropy::autocast<c10::DeviceType::CPU>);
}

}  // namespace liger
