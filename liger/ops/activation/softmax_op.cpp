#include "liger/ops/activation/softmax.h"
#include "liger/core/torch/op.h"
#include "liger/ops.h"

namespace liger {
namespace op::softmax {

Simplex parse(int64_t kind) {
  TORCH_CHECK_VALUE(kind >= 0 && kind <= 1, "softmax: kind is 0 (softmax) or 1 (sparsemax), not ", kind);
  return Simplex(kind);
}

Tensor forward(const Tensor& x_, int64_t kind_) {
  Arguments("softmax", "x", x_);
  const Simplex kind = parse(kind_);
  const Tensor y = output(at::empty_symint(x_.sym_sizes(), x_.options()));
  if (y.is_meta()) return y;
  const Rows x(x_);
  run(softmax_forward, y,
      {.x = data(x.tensor),
       .y = y.data_ptr(),
       .rows = rows(y),
       .cols = cols(y),
       .x_stride = x.stride,
       .dtype = dtype_of(y),
       .kind = kind});
  return y;
}

Tensor backward(const Tensor& dy_, const Tensor& y_, int64_t kind_) {
  Arguments("softmax_backward", "y", y_).like("dy", dy_);
  const Simplex kind = parse(kind_);
  const Tensor dx = output(at::empty_symint(y_.sym_sizes(), y_.options()));
  if (dx.is_meta()) return dx;
  const Tensor dy = dy_.contiguous(), y = y_.contiguous();
  run(softmax_backward, dx,
      {.dy = data(dy),
       .y = data(y),
       .dx = dx.data_ptr(),
       .rows = rows(dx),
       .cols = cols(dx),
       .dtype = dtype_of(dx),
       .kind = kind});
  return dx;
}

constexpr Op<"liger::softmax", forward> public_op;
constexpr Op<"liger::softmax_forward", forward> forward_op;
constexpr Op<"liger::softmax_backward", backward> backward_op;

struct Autograd {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, int64_t kind) {
    const Tensor y = forward_op(x, kind);
    ctx->save_for_backward({y});
    ctx->saved_data["kind"] = kind;
    return y;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    return {backward_op(grads[0], ctx->get_saved_variables()[0], ctx->saved_data["kind"].toInt()), {}};
  }
};

}  // namespace op::softmax

Tensor softmax(const Tensor& x) { return op::softmax::public_op(x, int64_t(Simplex::Softmax)); }

Tensor sparsemax(const Tensor& x, int64_t dim) {
  return op::softmax::public_op(x.transpose(dim, -1), int64_t(Simplex::Sparsemax)).transpose(dim, -1);
}

TORCH_LIBRARY_FRAGMENT(liger, m) {
  m.def("softmax(Tensor x, int kind) -> Tensor");
  m.def("softmax_forward(Tensor x, int kind) -> Tensor");
  m.def("softmax_backward(Tensor dy, Tensor y, int kind) -> Tensor");
}
LIGER_IMPL(softmax, m) {
  m.impl("softmax", op::softmax::forward);
  m.impl("softmax_forward", op::softmax::forward);
  m.impl("softmax_backward", op::softmax::backward);
}
TORCH_LIBRARY_IMPL(liger, Autograd, m) {
  m.impl("softmax", differentiated<op::softmax::Autograd, 1>(op::softmax::public_op));
  refuse_derivative(m, {"softmax_forward", "softmax_backward"});
}

}  // namespace liger
