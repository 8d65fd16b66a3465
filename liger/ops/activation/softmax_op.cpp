#include "liger/ops/activation/softmax.h"
#include "liger/core/torch/operator.h"
#include "liger/ops.h"

namespace liger {
namespace op::softmax {

Simplex parse(int64_t kind) {
  TORCH_CHECK_VALUE(kind >= 0 && kind <= 1, "softmax: kind is 0 (softmax) or 1 (sparsemax), not ", kind);
  return Simplex(kind);
}

struct Definition {
  static constexpr Name kName = "softmax";
  static constexpr std::array kInputs{"x", "kind"}, kAll{"y"}, kSaved{"y", "kind"}, kGradients{"dx"};

  static Tensor forward(const Tensor& x_, int64_t kind_) {
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

  static Tensor backward(const Tensor& dy_, const Tensor& y_, int64_t kind_) {
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
};

}  // namespace op::softmax

Tensor softmax(const Tensor& x) { return call<op::softmax::Definition>(x, int64_t(Simplex::Softmax)); }

Tensor sparsemax(const Tensor& x, int64_t dim) {
  return call<op::softmax::Definition>(x.transpose(dim, -1), int64_t(Simplex::Sparsemax)).transpose(dim, -1);
}

LIGER_OPERATORS(softmax, r) { Operator<op::softmax::Definition>::describe(r); }

}  // namespace liger
