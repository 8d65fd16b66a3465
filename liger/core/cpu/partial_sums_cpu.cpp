#include "liger/core/cpu/row.h"
#include "liger/core/partial_sums.h"

namespace LIGER_CPU::partial_sums {

/// A single number for each group, which may be small where its terms are not: summed in double.
template <class T>
static void sum_numbers(const PartialSum& a) {
  for (int64_t group = 0; group < a.groups; ++group) {
    double total = 0;
    for (int64_t s = 0; s < a.partials; ++s) {
      const int64_t index = group * a.partials + s;
      total += a.part[index] * double(a.factor.of ? number(a.factor, index / a.per_factor) + a.plus : 1);
    }
    static_cast<T*>(a.out)[group] = T(float(total));
  }
}

template <class T>
static void sum(const PartialSum& a) {
  // Columns in blocks, so that a block's sums stay in registers and L1.
  constexpr int64_t kBlock = 16 * kLanes;
  const int64_t blocks = ceil_div(a.cols, kBlock);
  for_rows(a.groups * blocks, kBlock * a.partials, [&](int64_t i) {
    const int64_t group = i / blocks, begin = i % blocks * kBlock, n = std::min(kBlock, a.cols - begin);
    float sum[kBlock] = {};
    for (int64_t s = 0; s < a.partials; ++s) {
      const int64_t index = group * a.partials + s;
      const float* part = a.part + index * a.cols + begin;
      if (!a.factor.of) row_map(n, sum, [](Vec sum, Vec part) { return sum + part; }, sum, part);
      else
        dispatch(a.factor.dtype, [&]<class F>() {
          row_map(
              n, sum, [&](Vec sum, Vec part, Vec f) { return sum + part * (f + Vec(a.plus)); }, sum, part,
              row_of<F>(a.factor.of, index / a.per_factor, a.cols) + begin);
        });
    }
    row_map(n, static_cast<T*>(a.out) + group * a.cols + begin, [](Vec sum) { return sum; }, sum);
  });
}

// 64 rows summed in sequence, then the partial sums: the error stays near eager's for any number of rows.
LIGER_REGISTER(row_partials,
               [](const RowPartials& a, Stream) { *a.count = std::max<int64_t>(1, ceil_div(a.rows, 64)); });

LIGER_REGISTER(runs_here, [](const RunsHere& a, Stream) { *a.yes = true; });
LIGER_REGISTER(stream_capturing, [](const StreamCapturing& a, Stream) { *a.yes = false; });

LIGER_REGISTER(add_partials, [](const AddPartials& all, Stream) {
  for (int i = 0; i < all.count; ++i) {
    const PartialSum& a = all.sums[i];
    dispatch(a.dtype, [&]<class T>() { a.cols == 1 ? sum_numbers<T>(a) : sum<T>(a); });
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

}  // namespace LIGER_CPU::partial_sums
