#pragma once
#include "liger/core/torch/operator.h"
#include "liger/ops/activation/softmax.h"

namespace liger::op {

/// kCausal: of [..., queries, keys], a query's keys up to its own place.
template <Name kName_, bool kCausal>
struct SoftmaxOf {
  static constexpr auto kName = kName_;
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

  /// The kernel of this kind.
  template <class Args>
  static const Kernel<Args>& pick(int64_t kind, const Kernel<Args>& softmax, const Kernel<Args>& sparsemax) {
    TORCH_CHECK_VALUE(kind >= 0 && kind <= 1, kName.text, ": kind is 0 (softmax) or 1 (sparsemax), not ", kind);
    return Simplex(kind) == Simplex::Softmax ? softmax : sparsemax;
  }

  static Tensor forward(const Inputs& in) {
    Arguments(kName.text, "x", in.x);
    TORCH_CHECK(!kCausal || in.x.dim() >= 2, kName.text, ": x must be [..., queries, keys], got ", in.x.sym_sizes());
    const auto& kernel = pick(in.kind, softmax_forward, sparsemax_forward);
    const Tensor y = output(at::empty_symint(in.x.sym_sizes(), in.x.options()));
    if (y.is_meta()) return y;
    const Rows x(in.x);
    run(kernel, y,
        {.x = data(x.tensor),
         .y = y.data_ptr(),
         .rows = rows(y),
         .cols = cols(y),
         .x_stride = x.stride,
         .queries = kCausal ? y.size(-2) : 0,
         .dtype = dtype_of(y)});
    return y;
  }

  static Saved save(const Inputs& in, const Tensor& y) { return {y, in.kind}; }

  static Tensor backward(const Upstream& up, const Saved& s) {
    static constexpr auto kBackward = qualified(kName, "_backward");
    Arguments(kBackward.text + std::string_view("liger::").size(), "y", s.y).like("dy", up.dy);
    const auto& kernel = pick(s.kind, softmax_backward, sparsemax_backward);
    const Tensor dx = output(at::empty_symint(s.y.sym_sizes(), s.y.options()));
    if (dx.is_meta()) return dx;
    const Tensor dy = up.dy.contiguous(), y = s.y.contiguous();
    run(kernel, dx,
        {.dy = data(dy), .y = data(y), .dx = dx.data_ptr(), .rows = rows(dx), .cols = cols(dx), .dtype = dtype_of(dx)});
    return dx;
  }
};
using Softmax = SoftmaxOf<"softmax", false>;
using CausalSoftmax = SoftmaxOf<"causal_softmax", true>;

}  // namespace liger::op
