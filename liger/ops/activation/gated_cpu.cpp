#include "liger/core/cpu/row.h"
#include "liger/ops/activation/gated.h"

namespace LIGER_CPU::gated {
namespace {

template <class T, class Act>
void forward(const GatedForward& g) {
  const Vec m(g.gate_multiplier);
  for_row_chunks(g.rows, g.cols, [&](int64_t r, int64_t begin, int64_t n) {
    row_map(
        n, row_of<T>(g.c, r, g.cols) + begin,
        [&](Vec a, Vec b) { return round_to<T>(Act::template value<Math>(m * a)) * b; },
        row_of<T>(g.a, r, g.a_stride) + begin, row_of<T>(g.b, r, g.b_stride) + begin);
  });
}

template <class T, class Act>
void backward(const GatedBackward& g) {
  const Vec m(g.gate_multiplier);
  for_row_chunks(g.rows, g.cols, [&](int64_t r, int64_t begin, int64_t n) {
    const T *a = row_of<T>(g.a, r, g.a_stride) + begin, *b = row_of<T>(g.b, r, g.b_stride) + begin,
            *dc = row_of<T>(g.dc, r, g.cols) + begin;
    T *da = row_of<T>(g.da, r, g.d_stride) + begin, *db = row_of<T>(g.db, r, g.d_stride) + begin;
    for_each(n, [&](int64_t c, int64_t k) {
      const Vec x = m * read(a + c, k), d = read(dc + c, k), up = read(b + c, k);
      write(round_to<T>(d * up) * Act::template derivative<Math>(x) * m, da + c, k);
      write(d * round_to<T>(Act::template value<Math>(x)), db + c, k);
    });
  });
}

}  // namespace

LIGER_REGISTER(gated_forward, [](const GatedForward& g, Stream) {
  dispatch(g.dtype, [&]<class T>() { dispatch_activation(g.activation, [&]<class Act>() { forward<T, Act>(g); }); });
});
LIGER_REGISTER(gated_backward, [](const GatedBackward& g, Stream) {
  dispatch(g.dtype, [&]<class T>() { dispatch_activation(g.activation, [&]<class Act>() { backward<T, Act>(g); }); });
});

}  // namespace LIGER_CPU::gated
