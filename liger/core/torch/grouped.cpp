#include "liger/core/torch/grouped.h"
#include <ATen/Parallel.h>
#include "liger/core/torch/batch_invariant.h"

namespace liger {
namespace {

LIGER_OPTIONAL(has_grouped);
LIGER_OPTIONAL(grouped_rows);
LIGER_OPTIONAL(grouped_outer_products);

/// Whether rows, or columns, of a matrix or of each of several begin at multiples of 16 bytes, which ATen's grouped
/// GEMM and ours need.
bool fits(const Tensor& t) {
  int units = 0;
  for (int64_t d = 0; d < t.dim(); ++d) {
    if (t.stride(d) == 1 && d >= t.dim() - 2) ++units;
    else if (t.stride(d) % 8 != 0 || t.stride(d) <= 0) return false;
  }
  return units == 1 && reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0;
}

bool is_16_bit(const Tensor& t) { return t.scalar_type() == at::kBFloat16 || t.scalar_type() == at::kHalf; }

bool fits_aten(const Tensor& a, const Tensor& b) {
  return a.is_cuda() && a.scalar_type() == at::kBFloat16 && fits(a) && fits(b);
}

/// Whether the kernels of this library take a, rows [rows, ...], and b, whose last size is that of the result's rows.
/// Groups of many rows are ATen's where it takes them: measured on an H100, its GEMMs are up to 1.12 times as fast from
/// 2048 rows per group on, and ours 1.03 to 1.3 times up to 1024. But only ours add terms in the same pass.
bool fits_ours(const Tensor& a, const Tensor& b, int64_t groups, bool terms = false) {
  const int64_t rows = a.size(0);
  constexpr int64_t kMostRows = 1536, kMost = std::numeric_limits<int>::max();
  if (!is_16_bit(a) || !has_grouped.has(Backend(a.device().type())) || groups > kGroupedMost || a.stride(1) != 1 ||
      b.size(-1) % 8 != 0 || !fits(a) || !fits(b) || rows > kMost || a.size(1) > kMost || b.size(-1) > kMost ||
      b.size(-2) > kMost || (rows > kMostRows * groups && !terms && fits_aten(a, b) && !is_batch_invariant()))
    return false;
  bool yes = false;
  run(has_grouped, a, {&yes});
  return yes;
}

/// f(group, its first row, its rows) for each group.
template <class F>
void for_groups(const Tensor& ends_, F f) {
  const Tensor ends = ends_.to(at::kCPU);
  const int* end = ends.const_data_ptr<int>();
  const int64_t groups = ends.numel();
  const auto run = [&](int64_t first, int64_t last) {
    for (int64_t g = first; g < last; ++g) {
      const int64_t begin = g > 0 ? end[g - 1] : 0;
      f(g, begin, end[g] - begin);
    }
  };
  // Many small products on a CPU: a thread each. It has no state of the caller's: what f uses must not be recorded.
  if (ends_.is_cpu() && groups >= 2 * at::get_num_threads()) at::parallel_for(0, groups, 1, run);
  else run(0, groups);
}

}  // namespace

Tensor groups_of_rows(const Tensor& ends, int64_t rows) {
  return at::searchsorted(ends, at::arange(rows, ends.options()), true, true).clamp_max_(ends.numel() - 1);
}

std::optional<GroupedRows> grouped_by_kernel(const Tensor& x, const Tensor& w, const Tensor& ends,
                                             GroupedTerms& terms) {
  const bool along_depth = w.stride(1) == 1, low = terms.low.defined();
  if (!fits_ours(x, w, w.size(0), terms.bias || low) || (low && terms.low.size(1) % 8 != 0)) return {};
  if (low) {  // a copy where it is not laid out as the matrix is, or begins anywhere, as parameters in a flat buffer do
    const Tensor& m = terms.low_matrix;
    Tensor laid_out = (along_depth ? m.transpose(1, 2) : m).contiguous();
    if (!fits(laid_out)) laid_out = laid_out.clone();
    terms.low_matrix = along_depth ? laid_out.transpose(1, 2) : laid_out;
  }
  return GroupedRows{.x = x.const_data_ptr(),
                     .matrix = w.const_data_ptr(),
                     .out = nullptr,
                     .ends = data<int>(ends),
                     .rows = x.size(0),
                     .groups = w.size(0),
                     .depth = w.size(1),
                     .cols = w.size(2),
                     .x_stride = x.stride(0),
                     .matrix_stride = w.stride(along_depth ? 2 : 1),
                     .group_stride = w.stride(0),
                     .along_depth = along_depth,
                     .dtype = dtype_of(x),
                     .bias = terms.bias ? terms.bias->const_data_ptr() : nullptr,
                     .low = low ? terms.low.const_data_ptr() : nullptr,
                     .low_matrix = low ? terms.low_matrix.const_data_ptr() : nullptr,
                     .rank = low ? terms.low.size(1) : 0};
}

Tensor grouped(const Tensor& x, const Tensor& w_, const Tensor& ends, const GroupedTerms& terms_) {
  const Tensor w = w_.detach();
  GroupedTerms terms = terms_;
  if (terms.bias) terms.bias = terms.bias->detach();
  if (std::optional<GroupedRows> product = grouped_by_kernel(x, w, ends, terms)) {
    const Tensor out = output(at::empty({x.size(0), w.size(2)}, x.options()));
    product->out = out.data_ptr();
    run(grouped_rows, x, *product);
    return out;
  }
  const auto with_low = [&](const Tensor& out) {
    return terms.low.defined() ? out.add_(grouped(terms.low, terms.low_matrix, ends)) : out;
  };
  const bool invariant = is_batch_invariant();
  if (fits_aten(x, w) && !invariant) {
    const Tensor out = at::_grouped_mm(x, w, ends).contiguous();  // its rows begin at multiples of 16 bytes
    return with_low(terms.bias ? out.add_(terms.bias->index_select(0, groups_of_rows(ends, x.size(0)))) : out);
  }
  const Tensor out = output(at::empty({x.size(0), w.size(2)}, x.options()));
  for_groups(ends, [&](int64_t g, int64_t begin, int64_t n) {
    Tensor part = out.narrow(0, begin, n);
    if (n == 0) return;
    if (!invariant || !x.is_cpu()) {
      at::mm_out(part, x.narrow(0, begin, n), w.select(0, g));
    } else {
      constexpr int64_t kBlock = 64;  // groups have fewer rows than a batch
      const AsAsked asked;
      in_blocks<1>(part, {x.narrow(0, begin, n)}, kBlock,
                   [&](Tensor y, const auto& rows) { at::mm_out(y, rows[0], w.select(0, g)); });
    }
    if (terms.bias) part.add_(terms.bias->select(0, g));
  });
  return with_low(out);
}

Tensor grouped_outer(const Tensor& a, const Tensor& b, const Tensor& ends) {
  if (b.stride(1) == 1 && fits_ours(a, b, ends.numel())) {
    const Tensor out = output(at::empty({ends.numel(), a.size(1), b.size(1)}, a.options()));
    run(grouped_outer_products, a,
        {.a = a.const_data_ptr(),
         .b = b.const_data_ptr(),
         .out = out.data_ptr(),
         .ends = data<int>(ends),
         .rows = a.size(0),
         .groups = ends.numel(),
         .cols_a = a.size(1),
         .cols_b = b.size(1),
         .a_stride = a.stride(0),
         .b_stride = b.stride(0),
         .dtype = dtype_of(a)});
    return out;
  }
  if (fits_aten(a.t(), b)) return at::_grouped_mm(a.t(), b, ends).contiguous();
  const Tensor out = output(at::empty({ends.numel(), a.size(1), b.size(1)}, a.options()));
  for_groups(ends, [&](int64_t g, int64_t begin, int64_t n) {
    Tensor part = out.select(0, g);
    if (n > 0) at::mm_out(part, a.narrow(0, begin, n).t(), b.narrow(0, begin, n));
    else part.zero_();
  });
  return out;
}

Tensor grouped_sum(const Tensor& rows, const Tensor& ends) {
  if (is_16_bit(rows) && !rows.is_cpu()) {  // by a product with ones, in the fewest columns that its kernels take
    const Tensor ones = at::ones({rows.size(0), 8}, rows.options());
    return grouped_outer(ones, rows, ends).select(1, 0).contiguous();
  }
  const Tensor out = at::empty({ends.numel(), rows.size(1)}, rows.options());
  for_groups(ends, [&](int64_t g, int64_t begin, int64_t n) {
    out.select(0, g).copy_(rows.narrow(0, begin, n).sum(0, false, at::kFloat));
  });
  return out;
}

}  // namespace liger
