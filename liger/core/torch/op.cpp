#include "liger/core/torch/op.h"
#ifdef __linux__
#include <sys/mman.h>
#endif

namespace liger {

Tensor output(Tensor t) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr uintptr_t kPage = 2 << 20;
  if (t.is_cpu() && t.key_set().has_backend(c10::BackendComponent::CPUBit) && t.nbytes() >= 4 * kPage && t.has_storage()) {
    const auto begin = (reinterpret_cast<uintptr_t>(t.data_ptr()) + kPage - 1) / kPage * kPage;
    const auto end = (reinterpret_cast<uintptr_t>(t.data_ptr()) + t.nbytes()) / kPage * kPage;
    madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);  // a hint: refusal is no error
  }
#endif
  return t;
}

Rows::Rows(const Tensor& t) : tensor(t), stride(cols(t)) {
  if (t.is_contiguous()) return;
  bool one_stride = t.dim() > 1 && t.stride(-1) == 1 && t.stride(-2) >= cols(t);
  for (int64_t d = t.dim() - 2; d > 0; --d) one_stride &= t.stride(d - 1) == t.stride(d) * t.size(d);
  if (one_stride) stride = t.stride(-2);
  else tensor = t.contiguous();
}

int64_t row_share_count(const Tensor& x, int64_t groups) {
  int64_t count;
  run(row_shares, x, {.device = x.device().index(), .groups = groups, .rows = rows(x) / groups, .cols = cols(x), .count = &count});
  return count;
}

Tensor empty_shares(const Tensor& x, int64_t shares, int64_t cols) { return at::empty({1, shares, cols}, x.options().dtype(at::kFloat)); }

Tensor Totals::of(const Tensor& shares, const Tensor& like, const Tensor& factor, double plus) {
  const Tensor out = at::empty(like.sizes(), shares.options().dtype(like.scalar_type()));
  const int64_t count = shares.size(0) * shares.size(1);
  TORCH_INTERNAL_ASSERT(args_.count < SumShares::kMost);
  args_.sums[args_.count++] = {.part = data<float>(shares), .factor = numbers(factor), .out = out.data_ptr(), .groups = shares.size(0), .shares = shares.size(1),
                               .cols = shares.size(2), .per_factor = factor.defined() ? count / rows(factor) : count, .plus = float(plus), .dtype = dtype_of(out)};
  first_ = shares;
  return out;
}

void Totals::run() {
  if (args_.count > 0) liger::run(sum_shares, first_, args_);
}

void accumulate(Tensor& sum, const Tensor& a, const Tensor& b, bool first) {
  if (sum.scalar_type() != a.scalar_type() && a.is_cpu()) return accumulate(sum, a.to(sum.scalar_type()), b.to(sum.scalar_type()), first);
  if (sum.scalar_type() == a.scalar_type()) first ? at::mm_out(sum, a.t(), b) : at::addmm_out(sum, sum, a.t(), b);
  else first ? at::mm_out(sum, a.t(), b, sum.scalar_type()) : at::addmm_out(sum, sum, a.t(), b, sum.scalar_type());
}

namespace {

Tensor scale_backward(const Tensor& saved, const Tensor& g) {
  return saved.mul(g.dim() > 0 ? g.unsqueeze(-1) : g).to(saved.scalar_type());
}

}  // namespace

Tensor scaled(const Tensor& saved, const Tensor& g) {
  if (!saved.defined() || saved.sym_numel() == 0) return saved;
  const bool traced = saved.is_meta() || saved.key_set().has_any(c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::Functionalize}));
  if (traced || torch::autograd::get_current_graph_task_keep_graph()) {
    return Op<"liger::scale_backward", scale_backward>()(saved, g);
  }
  const Tensor factor = (g.scalar_type() == at::kDouble ? g.to(at::kFloat) : g).contiguous();
  run(scale_rows, saved,
      {.x = saved.data_ptr(), .g = numbers(factor), .rows = rows(saved), .cols = cols(saved), .per_row = g.dim() > 0, .dtype = dtype_of(saved)});
  return saved;
}

TORCH_LIBRARY_FRAGMENT(liger, m) { m.def("scale_backward(Tensor saved, Tensor g) -> Tensor"); }
LIGER_IMPL(scale, m) { m.impl("scale_backward", scale_backward); }
TORCH_LIBRARY_IMPL(liger, Autograd, m) { refuse_derivative(m, {"scale_backward"}); }

void check_rows(const char* op, const Tensor& x) {
  TORCH_CHECK(x.dim() >= 1, op, ": expected at least one dimension, got a scalar");
  dtype_of(x);
}

void check_row_vector(const char* op, const char* what, const Tensor& v, const Tensor& x) {
  TORCH_CHECK(v.dim() == 1 && v.sym_size(0) == x.sym_size(-1), op, ": ", what, " must be [", x.sym_size(-1), "], got ", v.sym_sizes());
  TORCH_CHECK(v.device() == x.device(), op, ": ", what, " is on ", v.device(), ", the input on ", x.device());
  TORCH_CHECK_TYPE(v.scalar_type() == x.scalar_type() || v.scalar_type() == at::kFloat,
                   op, ": ", what, " must be ", x.scalar_type(), " or float, got ", v.scalar_type());
}

void check_like(const char* what, const Tensor& t, const Tensor& x) {
  TORCH_CHECK(t.sym_sizes() == x.sym_sizes() && t.device() == x.device() && t.scalar_type() == x.scalar_type(),
              what, " must be ", x.scalar_type(), " ", x.sym_sizes(), " on ", x.device(), ", got ",
              t.scalar_type(), " ", t.sym_sizes(), " on ", t.device());
}

}  // namespace liger
