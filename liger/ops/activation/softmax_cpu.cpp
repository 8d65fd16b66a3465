#include "liger/core/cpu/row.h"
#include "liger/ops/activation/softmax.h"

namespace LIGER_CPU::softmax {
namespace {

/// The exponentials wait as floats, in y where it has room: to make them once more costs more than the way to a cache
/// and back.
template <class T>
void softmax_row(const T* x, T* y, int64_t n, std::vector<float>& scratch) {
  const Vec max(row_reduce(n, -INFINITY, Max{}, [](Vec x) { return x; }, x));
  float* const e = float_row(y, n, scratch);
  row_map(n, e, [&](Vec x) { return Math::exp(x - max); }, x);
  const Vec by(1 / row_sum(n, [](Vec e) { return e; }, e));
  row_map(n, y, [&](Vec e) { return e * by; }, e);
}

template <class T>
void softmax_row_backward(const T* dy, const T* y, T* dx, int64_t n) {
  const Vec sum(row_sum(n, [](Vec dy, Vec y) { return dy * y; }, dy, y));
  row_map(n, dx, [&](Vec dy, Vec y) { return y * (dy - sum); }, dy, y);
}

}  // namespace

LIGER_REGISTER(softmax_forward, [](const SoftmaxForward& a, Stream) {
  dispatch(a.dtype, [&]<class T>() {
    for_runs(a.rows, a.cols * 8, [&](int64_t begin, int64_t end) {
      std::vector<float> scratch;
      for (int64_t r = begin; r < end; ++r) {
        const T* x = row_of<T>(a.x, r, a.x_stride);
        T* y = row_of<T>(a.y, r, a.cols);
        const int64_t n = length(a, r);
        softmax_row(x, y, n, scratch);
        std::fill(y + n, y + a.cols, T(0));
      }
    });
  });
});

LIGER_REGISTER(softmax_backward, [](const SoftmaxBackward& a, Stream) {
  dispatch(a.dtype, [&]<class T>() {
    for_rows(a.rows, a.cols, [&](int64_t r) {
      softmax_row_backward(row_of<T>(a.dy, r, a.cols), row_of<T>(a.y, r, a.cols), row_of<T>(a.dx, r, a.cols), a.cols);
    });
  });
});

}  // namespace LIGER_CPU::softmax
