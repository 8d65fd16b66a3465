#include "liger/core/cpu/row.h"
#include "liger/ops/activation/xielu.h"

namespace LIGER_CPU::xielu {
namespace {

using Formula = XIELU<Math, Vec>;
constexpr int64_t kChunk = 4096;  // elements that stay in a core's cache between two passes

template <class Args>
Formula formula(const Args& a) {
  return {number(a.alpha_p), number(a.alpha_n), number(a.beta), number(a.eps)};
}

template <class T>
void forward(const XIELUForward& a) {
  const Formula f = formula(a);
  for_row_chunks(1, a.count, [&](int64_t, int64_t begin, int64_t n) {
    row_map(n, static_cast<T*>(a.y) + begin, [&](Vec x) { return f.value(x); }, static_cast<const T*>(a.x) + begin);
  });
}

/// Partial sum s is that of a run of elements.
template <class T>
void backward(const XIELUBackward& a) {
  const Formula f = formula(a);
  const int64_t run = ceil_div(a.count, a.partials);
  for_rows(a.partials, run * 8, [&](int64_t s) {
    double total[2] = {};
    const int64_t end = std::min(a.count, (s + 1) * run);
    for (int64_t begin = s * run; begin < end; begin += kChunk) {
      const int64_t n = std::min(kChunk, end - begin);
      const T *x = static_cast<const T*>(a.x) + begin, *dy = static_cast<const T*>(a.dy) + begin;
      const auto sums =
          row_sums<2>(n, [&](Vec x, Vec dy) { return std::array{dy * f.by_p(x), dy * f.by_n(x)}; }, x, dy);
      total[0] += sums[0], total[1] += sums[1];
      row_map(n, static_cast<T*>(a.dx) + begin, [&](Vec x, Vec dy) { return dy * f.derivative(x); }, x, dy);
    }
    a.dalpha_p[s] = float(total[0] * sigmoid(number(a.alpha_p)));
    a.dalpha_n[s] = float(total[1] * sigmoid(number(a.alpha_n)));
  });
}

}  // namespace

LIGER_REGISTER(xielu_forward,
               [](const XIELUForward& a, Stream) { dispatch(a.dtype, [&]<class T>() { forward<T>(a); }); });
LIGER_REGISTER(xielu_backward,
               [](const XIELUBackward& a, Stream) { dispatch(a.dtype, [&]<class T>() { backward<T>(a); }); });

}  // namespace LIGER_CPU::xielu
