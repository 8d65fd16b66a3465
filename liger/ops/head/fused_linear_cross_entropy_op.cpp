#include "liger/ops/head/head_op.h"
#include "liger/core/torch/gradient_in_forward.h"
#include "liger/ops/loss/cross_entropy_op.h"

namespace liger {
namespace op {

using head::gather, head::gradient_dtype, head::scatter;

struct FusedLinearCrossEntropy {
  static constexpr Name kName = "fused_linear_cross_entropy";
  static constexpr Autocast kAutocast = Autocast::Compute;
  struct Inputs {
    Tensor hidden, weight;
    OptTensor bias;
    Tensor target;
    OptTensor class_weight, normalizer;
    OptDtype dtype;
    LIGER_FIELDS(hidden, weight, bias, target, class_weight, normalizer, dtype)
  };
  using Options = HeadOptions;
  using Saved = Inputs;
  template <class T>
  struct Gradients {
    T dhidden, dweight, dbias;
    LIGER_FIELDS(dhidden, dweight, dbias)
  };
  using Made = liger::Made<CrossEntropyResult, Gradients>;

  static CrossEntropyOptions checked(const char* op, const Inputs& in, const Options& options) {
    const Arguments arguments(op, "hidden", in.hidden);
    TORCH_CHECK(in.hidden.dim() == 2 && in.weight.dim() == 2, op,
                ": hidden must be [tokens, width] and weight [classes, width], got ", in.hidden.sym_sizes(), " and ",
                in.weight.sym_sizes());
    const c10::SymInt classes = in.weight.sym_size(0);
    arguments.shaped("weight", in.weight, {classes, in.hidden.sym_size(1)}, Type::Kernels)
        .vector("bias", in.bias, classes, Type::Kernels)
        .vector("target", in.target, in.hidden.sym_size(0), Type::Integer)
        .vector("class_weight", in.class_weight, classes, Type::Floating)
        .count("normalizer", in.normalizer, 1, Type::Number);
    return cross_entropy::checked(op, options, classes);
  }

  /// The tokens that count, and the head on them.
  struct Tokens {
    Tensor kept;
    cross_entropy::Batch batch;
    head::Pass pass;

    Tokens(const Inputs& in, const Options& given, const CrossEntropyOptions& options, at::ScalarType dtype,
           const Gradients<bool>& wanted, bool scaled)
        : batch(of_labels(in, in.target, options, scaled)) {
      const int64_t count = head::kept_count(in.target, in.weight, given.valid_count, [&] { return batch.valid(); });
      kept = head::kept_tokens(in.target, options.ignore_index, count);
      if (kept.defined()) batch = of_labels(in, gather(kept, in.target), options, scaled);
      pass = {{gather(kept, in.hidden).contiguous().to(dtype), in.weight.contiguous().to(dtype),
               in.bias ? in.bias->to(dtype) : Tensor()},
              {wanted.dhidden, wanted.dweight, wanted.dbias && in.bias},
              in.weight.scalar_type(),
              given.max_bytes};
    }

    static cross_entropy::Batch of_labels(const Inputs& in, const Tensor& target, const CrossEntropyOptions& options,
                                          bool scaled) {
      return {target, in.class_weight, in.normalizer, in.weight.size(0), options, at::kFloat, scaled};
    }
  };

  static Made forward(const Inputs& in, const Gradients<bool>& asked, const Options& given) {
    const CrossEntropyOptions options = checked(kName.text, in, given);
    const auto dtype = head::compute_dtype(kName.text, in.hidden, in.weight, in.dtype);
    const Gradients<bool> wanted{asked.dhidden, asked.dweight, asked.dbias && in.bias};
    const bool scaled = dtype == at::kHalf && any(wanted);
    const auto floats = in.hidden.options().dtype(at::kFloat);
    if (in.hidden.is_meta()) {
      const auto like = [&](bool wanted, const OptTensor& t) {
        return wanted ? at::empty_symint(t->sym_sizes(), t->options().dtype(gradient_dtype(dtype, t->scalar_type())))
                      : Tensor();
      };
      return {cross_entropy::empty_results(in.target, options, at::kFloat, dtype, in.hidden.options()),
              {like(wanted.dhidden, in.hidden), like(wanted.dweight, in.weight), like(wanted.dbias, in.bias)},
              scaled ? at::empty({}, floats) : Tensor()};
    }
    Tokens tokens(in, given, options, dtype, wanted, scaled);
    const auto d = tokens.pass.run([&](const Tensor& z, int64_t begin, int64_t) {
      tokens.batch.run_rows(z, tokens.pass.wants.any() ? z : Tensor(), begin, {});
    });
    const auto of_tokens = [&](const Tensor& t, double fill) {
      return t.defined() ? scatter(tokens.kept, t, in.hidden.size(0), fill) : t;
    };
    CrossEntropyResult r = tokens.batch.results(dtype);
    r.predicted = of_tokens(r.predicted, -1);
    if (options.reduction == Reduction::None)
      for (Tensor* t : {&r.loss, &r.z_loss, &r.accuracy}) *t = of_tokens(*t, 0);
    const auto kept_as = [&](const Tensor& t, const OptTensor& like) {
      return t.defined() ? t.to(gradient_dtype(dtype, like->scalar_type())) : t;
    };
    return {r,
            {kept_as(of_tokens(d.hidden, 0), in.hidden), kept_as(d.weight, in.weight), kept_as(d.bias, in.bias)},
            scaled ? tokens.batch.gradient_scale().clone() : Tensor()};
  }

  static bool in_forward(const Inputs&, const Options& options) { return options.reduction != Reduction::None; }
  static Saved save(const Inputs& in) { return in; }

  /// The gradients where every token has its own upstream gradient: the logits are recomputed.
  static Gradients<Tensor> backward(const LossGradient& up, const Saved& in, const Gradients<bool>& wanted,
                                    const Options& given) {
    constexpr auto op = "fused_linear_cross_entropy_backward";
    CrossEntropyOptions options = checked(op, in, given);
    Arguments(op, "hidden", in.hidden)
        .vector("g", up.g, in.hidden.sym_size(0), Type::Floating)
        .present("with_dbias", wanted.dbias, "bias", in.bias);
    const auto dtype = head::compute_dtype(kName.text, in.hidden, in.weight, in.dtype);
    if (in.hidden.is_meta()) {
      const auto like = [](bool wanted, const OptTensor& t) {
        return wanted ? at::empty_symint(t->sym_sizes(), t->options()) : Tensor();
      };
      return {like(wanted.dhidden, in.hidden), like(wanted.dweight, in.weight), like(wanted.dbias, in.bias)};
    }
    options.z_loss = options.accuracy = options.predicted = false;
    const bool scaled = dtype == at::kHalf;
    Tokens tokens(in, given, options, dtype, wanted, scaled);
    Tensor upstream = gather(tokens.kept, up.g).to(at::kFloat).contiguous(), divisor;
    if (scaled) {
      const Tensor power = head::unit_power(upstream);
      upstream = upstream.mul(power), divisor = power.mul(tokens.batch.gradient_scale());
    }
    const auto d = tokens.pass.run(
        [&](const Tensor& z, int64_t begin, int64_t) { tokens.batch.run_rows(z, z, begin, upstream); }, divisor);
    const auto rounded = [](const Tensor& t, const OptTensor& like) {
      return t.defined() ? t.to(like->scalar_type()) : t;
    };
    return {d.hidden.defined() ? rounded(scatter(tokens.kept, d.hidden, in.hidden.size(0), 0), in.hidden) : Tensor(),
            rounded(d.weight, in.weight), rounded(d.bias, in.bias)};
  }
};

}  // namespace op

CrossEntropyResult fused_linear_cross_entropy(const Tensor& hidden, const Tensor& weight, const Tensor& target,
                                              const HeadOptions& options, const OptTensor& bias,
                                              const OptTensor& class_weight, const OptTensor& normalizer) {
  using namespace op::cross_entropy;
  return asked_for(as_fields<CrossEntropyResult>(Operator<GradientInForward<op::FusedLinearCrossEntropy>>::public_op(
                       hidden, weight, bias, target, class_weight, normalizer, OptDtype(), options)),
                   options);
}

LIGER_OPERATORS(fused_linear_cross_entropy, Operator<GradientInForward<op::FusedLinearCrossEntropy>>)

}  // namespace liger
