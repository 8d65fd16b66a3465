#pragma once
#include <utility>
#include "liger/core/cpu/row.h"

namespace LIGER_CPU {

/// A row of numbers and one of their partners, or one row of both in turn.
template <class T, bool kInterleaved>
class PairRow {
  using Element = std::remove_const_t<T>;

 public:
  PairRow(auto* a, auto* b, int64_t row, int64_t a_stride, int64_t b_stride)
      : a_(row_of<Element>(a, row, a_stride)), b_(kInterleaved ? nullptr : row_of<Element>(b, row, b_stride)) {}

  /// The first n of the vectors at column c.
  std::pair<Vec, Vec> read(int64_t c, int64_t n) const {
    if constexpr (!kInterleaved) return {cpu::read(a_ + c, n), cpu::read(b_ + c, n)};
    const int64_t more = std::max<int64_t>(0, 2 * n - kLanes);
    const T* p = a_ + 2 * c;
    return at::vec::deinterleave2(cpu::read(p, 2 * n - more), more > 0 ? cpu::read(p + kLanes, more) : Vec(0.f));
  }

  void write(const Vec& a, const Vec& b, int64_t c, int64_t n) const {
    if constexpr (!kInterleaved) return cpu::write(a, a_ + c, n), cpu::write(b, b_ + c, n);
    const int64_t more = std::max<int64_t>(0, 2 * n - kLanes);
    const auto [first, second] = at::vec::interleave2(a, b);
    T* p = a_ + 2 * c;
    cpu::write(first, p, 2 * n - more);
    if (more > 0) cpu::write(second, p + kLanes, more);
  }

 private:
  T *a_, *b_;
};

}  // namespace LIGER_CPU
