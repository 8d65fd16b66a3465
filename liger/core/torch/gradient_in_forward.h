#pragma once
#include "liger/core/torch/operator.h"

namespace liger {

namespace detail {

template <class D, bool kMayBeLater>
struct LaterOf {
  using Type = NoFields;
};
template <class D>
struct LaterOf<D, true> {
  using Type = std::optional<typename D::Saved>;
};

}  // namespace detail

/// What the forward pass of a loss returns. float16 gradients are multiplied by grad_scale, so that they neither vanish
/// nor overflow before the loss scale reaches them; for other types it is empty.
template <class R, template <class> class G>
struct Made {
  R results;
  G<Tensor> gradients;
  Tensor grad_scale;
  LIGER_FIELDS(results, gradients, grad_scale)

  /// The upstream gradient of the loss as that of what is kept.
  static Tensor upstream(const Tensor& g, const Tensor& grad_scale) {
    return grad_scale.dim() > 0 ? g : g.to(at::kFloat) / grad_scale;
  }
};

/// The upstream gradient of a loss.
struct LossGradient {
  Tensor g;
  LIGER_FIELDS(g)
};

/// A loss whose gradients are computed in forward, where the logits are at hand; backward multiplies them by the
/// upstream gradient. D is as for Operator, but without Upstream, Saved, save and backward, and
///   forward(const Inputs&, const Gradients<bool>& wanted, ...)
/// returns Made. Calls with an upstream gradient per token need backward after all. For those, in_forward(const
/// Inputs&, const Options&) is false, forward is asked for no gradients, and D has Saved, save(const Inputs&) and
/// backward.
template <class D>
struct GradientInForward : D {
  using Upstream = LossGradient;
  using Results = typename Flat<&D::forward>::Result;
  using Inputs = typename D::Inputs;
  using Options = typename detail::OptionsOf<D>::Type;
  using Wanted = typename D::template Gradients<bool>;
  static constexpr size_t kResults = kLeaves<decltype(Results::results)>;

  static constexpr bool kMayBeLater =
      requires(const Inputs& in, const Options& options) { D::in_forward(in, options); };
  using Later = typename detail::LaterOf<D, kMayBeLater>::Type;
  struct Saved {
    typename D::template Gradients<Tensor> gradients;
    Tensor grad_scale;
    Later later;  // where the gradients are made in backward
    LIGER_FIELDS(gradients, grad_scale, later)
  };

  static bool in_forward(const Inputs& in, const Options& options) {
    if constexpr (kMayBeLater) return D::in_forward(in, options);
    else return true;
  }

  static Wanted record(const Inputs& in, const Options& options, const Wanted& wanted) {
    return in_forward(in, options) ? wanted : Wanted{};
  }

  static Saved save(const Inputs& in, const Results& made, const Options& options) {
    Saved saved;
    if constexpr (kMayBeLater)
      if (!in_forward(in, options)) {
        saved.later = D::save(in);
        return saved;
      }
    saved.gradients = made.gradients, saved.grad_scale = made.grad_scale;
    return saved;
  }

  /// Autograd casts gradients to their inputs' dtypes.
  static typename D::template Gradients<Tensor> differentiate(const Upstream& up, const Saved& saved,
                                                              const Wanted& wanted, const Options& options) {
    typename D::template Gradients<Tensor> gradients;
    if constexpr (kMayBeLater)
      if (saved.later)
        return as_fields<decltype(gradients)>(call_as<&D::backward>(Operator<GradientInForward>::backward_op,
                                                                    std::tie(up, *saved.later, wanted, options)));
    const Tensor g = Results::upstream(up.g, saved.grad_scale);
    for_each_index<kLeaves<Wanted>>([&](auto i) {
      if (get<i>(leaves(wanted))) get<i>(leaves(gradients)) = scaled(get<i>(leaves(saved.gradients)), g);
    });
    return gradients;
  }
};

}  // namespace liger
