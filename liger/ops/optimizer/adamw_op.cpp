#include <algorithm>
#include <span>
#include "liger/ops/optimizer/adamw.h"
#include "liger/core/torch/binding.h"
#include "liger/functions/optimizer.h"

namespace liger {
namespace op::adamw {

struct Inputs {
  Tensors parameters, gradients, means, squares, masters, steps;
  OptTensor lr_tensor, factor, found_inf;
  double lr, beta1, beta2, weight_decay, eps;
  bool maximize;
  LIGER_FIELDS(parameters, gradients, means, squares, masters, steps, lr_tensor, factor, found_inf, lr, beta1, beta2,
               weight_decay, eps, maximize)
};

/// Whether two tensors of one shape lie alike. The stride of a dimension of 1 says nothing, and gradients of autograd
/// have another there than their parameters.
bool lie_alike(const Tensor& a, const Tensor& b) {
  for (int64_t d = 0; d < a.dim(); ++d)
    if (a.size(d) != 1 && a.stride(d) != b.stride(d)) return false;
  return true;
}

/// A tensor that is written where it lies, or read as it lies beside one: like the parameter, and dense.
void check(const char* name, const Tensor& t, const Tensor& parameter, bool or_float) {
  const Tensor& p = parameter;
  TORCH_CHECK(t.sizes() == p.sizes() && lie_alike(t, p) && t.device() == p.device(), "adamw_: a tensor of ", name,
              " must be as its parameter, ", p.sizes(), " with strides ", p.strides(), " on ", p.device(), ", got ",
              t.sizes(), " with strides ", t.strides(), " on ", t.device());
  TORCH_CHECK_TYPE(t.scalar_type() == at::kFloat || (or_float && t.scalar_type() == p.scalar_type()), "adamw_: ", name,
                   " must be of ", or_float ? "the parameter's dtype or float32" : "float32", ", got ",
                   t.scalar_type());
}

/// A number that kernels read from where the parameters are.
const float* number(const char* name, const OptTensor& t, const Tensor& parameter) {
  if (!t) return nullptr;
  TORCH_CHECK(t->numel() == 1 && t->device() == parameter.device(), "adamw_: ", name, " must be one number on ",
              parameter.device(), ", got ", t->sizes(), " on ", t->device());
  TORCH_CHECK_TYPE(t->scalar_type() == at::kFloat, "adamw_: ", name, " must be float32, got ", t->scalar_type());
  return data<float>(*t);
}

/// Raises for lists of unlike lengths, and for tensors that the kernels cannot take.
void check(const Inputs& in) {
  const size_t count = in.parameters.size();
  const auto of_each = [&](const char* name, const Tensors& list) {
    TORCH_CHECK(list.size() == count, "adamw_: there are ", count, " parameters and ", list.size(), " ", name);
  };
  of_each("gradients", in.gradients);
  of_each("means", in.means);
  of_each("squares", in.squares);
  of_each("steps", in.steps);
  if (!in.masters.empty()) of_each("masters", in.masters);
  TORCH_CHECK_VALUE(in.beta1 >= 0 && in.beta1 < 1 && in.beta2 >= 0 && in.beta2 < 1,
                    "adamw_: beta1 and beta2 must be in [0, 1), got ", in.beta1, " and ", in.beta2);
  for (size_t i = 0; i < count; ++i) {
    const Tensor& p = in.parameters[i];
    TORCH_CHECK_TYPE(has_dtype(p.scalar_type()), "adamw_: parameters must be float32, float16 or bfloat16, got ",
                     p.scalar_type());
    TORCH_CHECK(p.is_non_overlapping_and_dense(), "adamw_: parameters must be dense, got ", p.sizes(), " with strides ",
                p.strides());
    check("gradients", in.gradients[i], p, true);
    check("means", in.means[i], p, true);
    check("squares", in.squares[i], p, true);
    TORCH_CHECK_TYPE(in.means[i].scalar_type() == in.squares[i].scalar_type(),
                     "adamw_: means and squares must be of one dtype");
    if (!in.masters.empty()) {
      TORCH_CHECK_TYPE(p.scalar_type() != at::kFloat, "adamw_: masters are of parameters in 16 bits, got float32");
      check("masters", in.masters[i], p, false);
      check("means", in.means[i], p, false);
    }
    number("steps", in.steps[i], p);
  }
}

/// One launch for these tensors, which have the same dtypes and device.
void launch(const Inputs& in, std::span<const size_t> indices) {
  std::vector<AdamWTensor> tensors;
  for (const size_t i : indices)
    tensors.push_back({.parameter = in.parameters[i].data_ptr(),
                       .gradient = data(in.gradients[i]),
                       .mean = in.means[i].data_ptr(),
                       .square = in.squares[i].data_ptr(),
                       .master = in.masters.empty() ? nullptr : data<float>(in.masters[i]),
                       .step = data<float>(in.steps[i]),
                       .count = in.parameters[i].numel()});
  const size_t first = indices[0];
  const Tensor& p = in.parameters[first];
  liger::run(liger::adamw, p,
             {.tensors = tensors.data(),
              .tensors_count = int64_t(tensors.size()),
              .lr = number("lr_tensor", in.lr_tensor, p),
              .factor = number("factor", in.factor, p),
              .found_inf = number("found_inf", in.found_inf, p),
              .lr_value = float(in.lr),
              .beta1 = in.beta1,
              .beta2 = in.beta2,
              .weight_decay = float(in.weight_decay),
              .eps = float(in.eps),
              .maximize = in.maximize,
              .parameter = dtype_of(p),
              .gradient = dtype_of(in.gradients[first]),
              .moments = dtype_of(in.means[first])});
}

void run(const Inputs& in) {
  check(in);
  std::vector<size_t> order;
  for (size_t i = 0; i < in.parameters.size(); ++i)
    if (in.parameters[i].numel() > 0 && !in.parameters[i].is_meta()) order.push_back(i);
  const auto kind = [&](size_t i) {
    const Tensor& p = in.parameters[i];
    return std::tuple(p.device().type(), p.device().index(), p.scalar_type(), in.gradients[i].scalar_type(),
                      in.means[i].scalar_type());
  };
  std::ranges::stable_sort(order, {}, kind);
  for (size_t begin = 0, end = 0; begin < order.size(); begin = end) {
    while (end < order.size() && kind(order[end]) == kind(order[begin])) ++end;
    launch(in, std::span(order).subspan(begin, end - begin));
  }
}

}  // namespace op::adamw

using AdamWStep = Undifferentiated<"adamw_", op::adamw::run, "parameters(a!) means(b!) squares(c!) masters(d!)">;

void adamw_(at::TensorList parameters, at::TensorList gradients, at::TensorList means, at::TensorList squares,
            at::TensorList masters, at::TensorList steps, const AdamWOptions& o) {
  const at::NoGradGuard no_gradients;
  AdamWStep::op(op::adamw::Inputs{parameters.vec(), gradients.vec(), means.vec(), squares.vec(), masters.vec(),
                                  steps.vec(), o.lr_tensor, o.factor, o.found_inf, o.lr, o.beta1, o.beta2,
                                  o.weight_decay, o.eps, o.maximize});
}

LIGER_OPERATORS(adamw, AdamWStep)

}  // namespace liger
