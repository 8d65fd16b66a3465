#include "liger/ops/rope/rope.h"
#include "liger/core/torch/op.h"
#include "liger/ops.h"

namespace liger {
namespace op::rope {

void check(const Tensor& q, const Tensor& k, const Tensor& cos, const Tensor& sin) {
  check_rows("rope", q);
  TORCH_CHECK(q.dim() == 4 && k.dim() == 4, "rope: q and k must be [batch, heads, seq, dim], got ", q.sym_sizes(), " and ", k.sym_sizes());
  TORCH_CHECK(q.sym_size(0) == k.sym_size(0) && q.sym_size(2) == k.sym_size(2) && q.sym_size(3) == k.sym_size(3),
              "rope: q and k differ in more than heads: ", q.sym_sizes(), " and ", k.sym_sizes());
  TORCH_CHECK_TYPE(q.scalar_type() == k.scalar_type(), "rope: q is ", q.scalar_type(), ", k is ", k.scalar_type());
  TORCH_CHECK(cos.sym_sizes() == sin.sym_sizes(), "rope: cos is ", cos.sym_sizes(), ", sin is ", sin.sym_sizes());
  TORCH_CHECK((cos.dim() == 2 || (cos.dim() == 3 && (cos.sym_size(0) == 1 || cos.sym_size(0) == q.sym_size(0)))) && cos.sym_size(-2) == q.sym_size(2),
              "rope: cos and sin must be [", q.sym_size(2), ", d], [1, ", q.sym_size(2), ", d] or [", q.sym_size(0), ", ", q.sym_size(2), ", d], got ", cos.sym_sizes());
  TORCH_CHECK(cos.sym_size(-1) <= q.sym_size(3), "rope: cos and sin are wider (", cos.sym_size(-1), ") than a head (", q.sym_size(3), ")");
  TORCH_CHECK(k.device() == q.device() && cos.device() == q.device() && sin.device() == q.device(),
              "rope: q, k, cos and sin must be on one device, got ", q.device(), ", ", k.device(), ", ", cos.device(), ", ", sin.device());
}

/// [batch, heads, seq, dim] over [batch, seq, heads, dim], the order in which the projections around attention read and write.
Tensor empty_heads(const Tensor& t) {
  return output(at::empty_symint({t.sym_size(0), t.sym_size(2), t.sym_size(1), t.sym_size(3)}, t.options())).transpose(1, 2);
}

Tensor with_unit_stride(const Tensor& t) { return t.stride(-1) == 1 || t.size(-1) == 1 ? t : t.contiguous(); }

RopeTensor describe(const Tensor& in, const Tensor& out) {
  const auto strides = [](const Tensor& t) { return RopeTensor::Strides{t.stride(0), t.stride(1), t.stride(2)}; };
  return {.in = data(in), .out = out.data_ptr(), .heads = in.size(1), .in_strides = strides(in), .out_strides = strides(out)};
}

std::tuple<Tensor, Tensor> forward(const Tensor& q_, const Tensor& k_, const Tensor& cos_, const Tensor& sin_, bool inverse) {
  check(q_, k_, cos_, sin_);
  const Tensor q_out = empty_heads(q_), k_out = empty_heads(k_);
  if (q_.is_meta()) return {q_out, k_out};
  const Tensor q = with_unit_stride(q_), k = with_unit_stride(k_);
  const auto table = [&](const Tensor& t) { return (t.scalar_type() == q.scalar_type() ? t : t.to(at::kFloat)).contiguous(); };
  const Tensor cos = table(cos_), sin = table(sin_);
  run(rope_kernel, q,
      {.q = describe(q, q_out), .k = describe(k, k_out), .cos = data(cos), .sin = data(sin),
       .table_batch_stride = cos.dim() == 3 && cos.size(0) > 1 ? cos.stride(0) : 0, .table_seq_stride = cos.size(-1),
       .batch = q.size(0), .seq = q.size(2), .dim = q.size(3), .rotary = cos.size(-1), .dtype = dtype_of(q), .table_dtype = dtype_of(cos),
       .direction = inverse ? -1.f : 1.f});
  return {q_out, k_out};
}

constexpr Op<"liger::rope", forward> public_op;
constexpr Op<"liger::rope_forward", forward> forward_op;

/// The rotation is linear: its gradient is the rotation back, differentiable in turn.
struct Autograd : torch::autograd::Function<Autograd> {
  static variable_list forward(AutogradContext* ctx, const Tensor& q, const Tensor& k, const Tensor& cos, const Tensor& sin, bool inverse) {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    ctx->save_for_backward({cos, sin});
    ctx->saved_data["inverse"] = inverse;
    auto [q_out, k_out] = forward_op(q, k, cos, sin, inverse);
    return {q_out, k_out};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    auto [dq, dk] = public_op(grads[0], grads[1], saved[0], saved[1], !ctx->saved_data["inverse"].toBool());
    return {dq, dk, {}, {}, {}};
  }
};

}  // namespace op::rope

std::tuple<Tensor, Tensor> rope(const Tensor& q, const Tensor& k, const Tensor& cos, const Tensor& sin, bool inverse) {
  return op::rope::public_op(q, k, cos, sin, inverse);
}

TORCH_LIBRARY_FRAGMENT(liger, m) {
  m.def("rope(Tensor q, Tensor k, Tensor cos, Tensor sin, bool inverse) -> (Tensor q_out, Tensor k_out)");
  m.def("rope_forward(Tensor q, Tensor k, Tensor cos, Tensor sin, bool inverse) -> (Tensor q_out, Tensor k_out)");
}
LIGER_IMPL(rope, m) {
  m.impl("rope", op::rope::forward);
  m.impl("rope_forward", op::rope::forward);
}
TORCH_LIBRARY_IMPL(liger, Autograd, m) {
  m.impl("rope", differentiated<op::rope::Autograd, 2>(op::rope::public_op));
  refuse_derivative(m, {"rope_forward"});
}

}  // namespace liger
