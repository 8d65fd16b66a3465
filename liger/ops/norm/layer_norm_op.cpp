#include "liger/core/torch/operator.h"
#include "liger/ops/norm/norm_op.h"
#include "liger/functions/norm.h"

namespace liger {
namespace op {

struct LayerNorm {
  static constexpr Name kName = "layer_norm";
  struct Inputs {
    Tensor x;
    OptTensor weight, bias;
    double eps;
    LIGER_FIELDS(x, weight, bias, eps)
  };
  using Results = norm::WithMoments;
  struct Saved {
    Tensor x;
    OptTensor weight, bias;
    Tensor mean, rstd;
    LIGER_FIELDS(x, weight, bias, mean, rstd)
  };
  using Upstream = Dy;
  template <class T>
  using Gradients = norm::OfWeightAndBias<T>;

  static Results forward(const Inputs& in) {
    const auto out = norm::forward("layer_norm", {.x = in.x, .w = in.weight, .b = in.bias, .centred = true}, in.eps);
    return {out.y, out.mean, out.rstd};
  }

  static Saved save(const Inputs& in, const Results& out) { return {in.x, in.weight, in.bias, out.mean, out.rstd}; }

  static Gradients<Tensor> backward(const Upstream& up, const Saved& s, const Gradients<bool>& wanted) {
    const auto d =
        norm::backward("layer_norm_backward", up.dy, {}, {.x = s.x, .w = s.weight, .b = s.bias, .centred = true},
                       s.mean, s.rstd, {.x = wanted.dx, .w = wanted.dw, .b = wanted.db});
    return {d.x, d.w, d.b};
  }
};

}  // namespace op

Tensor layer_norm(const Tensor& x, const OptTensor& w, const OptTensor& b, double eps) {
  return Operator<op::LayerNorm>::public_op(x, w, b, eps);
}

LIGER_OPERATORS(layer_norm, Operator<op::LayerNorm>)

}  // namespace liger
