#include "liger/core/cpu/row.h"
#include "liger/ops/activation/experts.h"

namespace LIGER_CPU::experts {
namespace {

template <class T>
void combine(const CombineExperts& a) {
  for_row_chunks(a.tokens, a.cols, [&](int64_t t, int64_t begin, int64_t n) {
    T* y = row_of<T>(a.y, t, a.cols) + begin;
    for_each(n, [&](int64_t c, int64_t count) {
      Vec sum(0.f);
      for (int64_t k = t * a.k; k < (t + 1) * a.k; ++k) {
        if (a.place[k] < 0) continue;
        sum = Math::fma(Vec(a.weights ? a.weights[k] : 1.f),
                        read(row_of<T>(a.rows, a.place[k], a.cols) + begin + c, count), sum);
      }
      write(sum, y + c, count);
    });
  });
}

template <class T, class Act>
void backward(const ExpertsBackward& a) {
  for_rows(a.pairs, a.cols * 8, [&](int64_t r) {
    T *gate = row_of<T>(a.a, r, 2 * a.cols), *up = gate + a.cols, *dh = row_of<T>(a.dh, r, a.cols);
    const Vec weight(a.weights[r]);
    LongSum sum;
    for_each(a.cols, [&](int64_t c, int64_t k) {
      const Vec x = read(gate + c, k), u = read(up + c, k), d = read(dh + c, k),
                act = round_to<T>(Act::template value<Math>(x)), h = round_to<T>(act * u), dc = weight * d;
      sum.add(h * d, k);
      write(dc * u * Act::template derivative<Math>(x), gate + c, k);
      write(dc * act, up + c, k);
      write(weight * h, dh + c, k);
    });
    a.dweights[r] = float(sum.value());
  });
}

}  // namespace

LIGER_REGISTER(combine_experts,
               [](const CombineExperts& a, Stream) { dispatch(a.dtype, [&]<class T>() { combine<T>(a); }); });
LIGER_REGISTER(experts_backward, [](const ExpertsBackward& a, Stream) {
  dispatch(a.dtype, [&]<class T>() { dispatch_activation(a.activation, [&]<class Act>() { backward<T, Act>(a); }); });
});

}  // namespace LIGER_CPU::experts
