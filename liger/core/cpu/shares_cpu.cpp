#include "liger/core/cpu/row.h"
#include "liger/core/shares.h"

namespace LIGER_CPU::shares {

template <class T>
static void sum(const ShareSum& a) {
  // Columns in blocks, so that a block's sums stay in registers and the first-level cache.
  constexpr int64_t kBlock = 16 * kLanes;
  const int64_t blocks = (a.cols + kBlock - 1) / kBlock;
  for_rows(a.groups * blocks, kBlock * a.shares, [&](int64_t i) {
    const int64_t group = i / blocks, begin = i % blocks * kBlock, n = std::min(kBlock, a.cols - begin);
    float sum[kBlock] = {};
    for (int64_t s = 0; s < a.shares; ++s) {
      const int64_t share = group * a.shares + s;
      const float* part = a.part + share * a.cols + begin;
      if (!a.factor.of) row_map(n, sum, [](Vec sum, Vec part) { return sum + part; }, sum, part);
      else dispatch(a.factor.dtype, [&]<class F>() {
        row_map(n, sum, [&](Vec sum, Vec part, Vec f) { return sum + part * (f + Vec(a.plus)); }, sum, part, row_of<F>(a.factor.of, share / a.per_factor, a.cols) + begin);
      });
    }
    row_map(n, static_cast<T*>(a.out) + group * a.cols + begin, [](Vec sum) { return sum; }, sum);
  });
}

// 64 rows summed in sequence, then the shares: the error stays near eager's for any number of rows.
LIGER_REGISTER(row_shares, [](const RowShares& a, Stream) { *a.count = std::max<int64_t>(1, (a.rows + 63) / 64); });

LIGER_REGISTER(stream_capturing, [](const StreamCapturing& a, Stream) { *a.yes = false; });

LIGER_REGISTER(sum_shares, [](const SumShares& all, Stream) {
  for (int i = 0; i < all.count; ++i) {
    const ShareSum& a = all.sums[i];
    dispatch(a.dtype, [&]<class T>() { sum<T>(a); });
  }
});

LIGER_REGISTER(scale_rows, [](const ScaleRows& a, Stream) {
  if (!a.per_row && number(a.g) == 1) return;
  dispatch(a.dtype, [&]<class T>() {
    for_rows(a.rows, a.cols, [&](int64_t r) {
      const float g = number(a.g, a.per_row ? r : 0);
      if (g == 1) return;
      T* x = row_of<T>(a.x, r, a.cols);
      row_map(a.cols, x, [&](Vec x) { return x * Vec(g); }, x);
    });
  });
});

}  // namespace LIGER_CPU::shares
