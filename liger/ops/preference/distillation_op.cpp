#include "liger/ops/preference/distillation.h"
#include "liger/core/torch/op.h"

namespace liger {

Tensor cosine_distance(const Tensor& x, const Tensor& y) {
  const auto unit = [](const Tensor& t) {
    const Tensor wide = t.to(at::promote_types(t.scalar_type(), at::kFloat));
    return wide / wide.norm(2, {-1}, true).clamp_min(1e-12);
  };
  return 1 - (unit(x) * unit(y)).sum(-1);
}

TORCH_LIBRARY_FRAGMENT(liger, m) { m.def("cosine_distance(Tensor x, Tensor y) -> Tensor", cosine_distance); }

}  // namespace liger
