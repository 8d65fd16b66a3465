#include "liger/core/cpu/pair_row.h"
#include "liger/ops/activation/gated.h"

namespace LIGER_CPU::gated {
namespace {

template <class T, class Gate>
void forward(const GatedForward& g) {
  const typename Gate::template Of<Math, Vec> gate(g.form);
  for_row_chunks(g.rows, g.cols, [&](int64_t r, int64_t begin, int64_t n) {
    const PairRow<const T, Gate::kInterleaved> in(g.a, g.b, r, g.a_stride, g.b_stride);
    T* c = row_of<T>(g.c, r, g.cols) + begin;
    for_each(n, [&](int64_t i, int64_t k) {
      const auto [a, b] = in.read(begin + i, k);
      write(round_to<T>(gate.act(a)) * gate.up(b), c + i, k);
    });
  });
}

template <class T, class Gate>
void backward(const GatedBackward& g) {
  const typename Gate::template Of<Math, Vec> gate(g.form);
  for_row_chunks(g.rows, g.cols, [&](int64_t r, int64_t begin, int64_t n) {
    const PairRow<const T, Gate::kInterleaved> in(g.a, g.b, r, g.a_stride, g.b_stride);
    const PairRow<T, Gate::kInterleaved> out(g.da, g.db, r, g.d_stride, g.d_stride);
    const T* dc = row_of<T>(g.dc, r, g.cols) + begin;
    T* c = g.c ? row_of<T>(g.c, r, g.cols) : nullptr;
    for_each(n, [&](int64_t i, int64_t k) {
      const auto [a, b] = in.read(begin + i, k);
      const Vec d = read(dc + i, k);
      // Where g' is 0, so is da, also where the product before it has overflowed T.
      const Vec act = round_to<T>(gate.act(a)), up = gate.up(b);
      out.write(Math::product(gate.slope(a), round_to<T>(d * up)), gate.through_up(b, d * act), begin + i, k);
      if (c) write(act * up, c + begin + i, k);
    });
  });
}

}  // namespace

LIGER_REGISTER(gated_forward, [](const GatedForward& g, Stream) {
  dispatch(g.dtype, [&]<class T>() { dispatch_gate(g.form, [&]<class Gate>() { forward<T, Gate>(g); }); });
});
LIGER_REGISTER(gated_backward, [](const GatedBackward& g, Stream) {
  dispatch(g.dtype, [&]<class T>() { dispatch_gate(g.form, [&]<class Gate>() { backward<T, Gate>(g); }); });
});

}  // namespace LIGER_CPU::gated
