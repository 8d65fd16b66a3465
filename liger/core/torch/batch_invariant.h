#pragma once
#include "liger/core/torch/op.h"

/// Products whose rows have the same bits whatever the other rows are.
namespace liger {

/// Whether liger_kernel.batch_invariant is on. It is of the process: torch's kernels are switched with this library's.
bool is_batch_invariant();

/// `block` rows of t from `first` on, of which `count` are there and the others 0. Rows begin at multiples of 16 bytes,
/// for GEMMs of CPUs also choose their sums by that: a copy of t's where they do not.
Tensor block_of_rows(const Tensor& t, int64_t first, int64_t count, int64_t block);

/// product(out's rows, {each input's rows}) of `block` rows after the other, rows being the last dimension but one. All
/// blocks have one shape, for which a GEMM chooses one algorithm: the last block is padded with zeros.
template <size_t n, class F>
void in_blocks(const Tensor& out, const std::array<Tensor, n>& inputs, int64_t block, F product) {
  for_chunks(out.size(-2), block, [&](int64_t first, int64_t count) {
    std::array<Tensor, n> rows;
    for (size_t i = 0; i < n; ++i)
      if (inputs[i].defined()) rows[i] = block_of_rows(inputs[i], first, count, block);
    const Tensor to = out.narrow(-2, first, count);
    if (count == block) return product(to, rows);
    auto shape = out.sizes().vec();
    shape[shape.size() - 2] = block;
    const Tensor whole = at::empty(shape, out.options());
    product(whole, rows);
    to.copy_(whole.narrow(-2, 0, count));
  });
}

/// Within, products are made as they are asked for: in_blocks has asked for them.
class AsAsked {
 public:
  AsAsked();
  ~AsAsked();
  AsAsked(const AsAsked&) = delete;
  AsAsked& operator=(const AsAsked&) = delete;

 private:
  bool before_;
};

}  // namespace liger
