#include "liger/ops/activation/softmax.h"
#include "liger/core/torch/operator.h"
#include "liger/ops.h"

namespace liger {
namespace op {

struct Softmax {
  static constexpr Name kName = "softmax";
  struct Inputs {
    Tensor x;
    int64_t kind;
    LIGER_FIELDS(x, kind)
  };
  struct Saved {
    Tensor y;
    int64_t kind;
    LIGER_FIELDS(y, kind)
  };
  using Upstream = Dy;
  template <class T>
  using Gradients = Dx<T>;

  static Simplex parse(int64_t kind) {
    TORCH_CHECK_VALUE(kind >= 0 && kind <= 1, "softmax: kind is 0 (softmax) or 1 (sparsemax), not ", kind);
    return Simplex(kind);
  }

  static Tensor forward(const Inputs& in) {
    Arguments("softmax", "x", in.x);
    const Simplex kind = parse(in.kind);
    const Tensor y = output(at::empty_symint(in.x.sym_sizes(), in.x.options()));
    if (y.is_meta()) return y;
    const Rows x(in.x);
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

  static Saved save(const Inputs& in, const Tensor& y) { return {y, in.kind}; }

  static Tensor backward(const Upstream& up, const Saved& s) {
    Arguments("softmax_backward", "y", s.y).like("dy", up.dy);
    const Simplex kind = parse(s.kind);
    const Tensor dx = output(at::empty_symint(s.y.sym_sizes(), s.y.options()));
    if (dx.is_meta()) return dx;
    const Tensor dy = up.dy.contiguous(), y = s.y.contiguous();
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

}  // namespace op

Tensor softmax(const Tensor& x) { return Operator<op::Softmax>::public_op(x, Simplex::Softmax); }

Tensor sparsemax(const Tensor& x, int64_t dim) {
  return Operator<op::Softmax>::public_op(x.transpose(dim, -1), Simplex::Sparsemax).transpose(dim, -1);
}

LIGER_OPERATORS(softmax, Operator<op::Softmax>)

}  // namespace liger
