#include "liger/core/cpu/row.h"
#include "liger/ops/rope/rope.h"

namespace LIGER_CPU::rope {
namespace {

template <class T, class Table>
void rotate(const Rope& a) {
  const int64_t half = a.rotary / 2;
  const Vec direction(a.direction);
  for_rows(a.batch * a.seq, (a.q.heads + a.k.heads) * a.dim, [&](int64_t token) {
    const int64_t batch = token / a.seq, seq = token % a.seq, table = batch * a.table_batch_stride + seq * a.table_seq_stride;
    const Table *cos = static_cast<const Table*>(a.cos) + table, *sin = static_cast<const Table*>(a.sin) + table;
    for (const RopeTensor* t : {&a.q, &a.k})
      for (int64_t head = 0; head < t->heads; ++head) {
        const auto at = [&](const RopeTensor::Strides& s) { return batch * s.batch + seq * s.seq + head * s.head; };
        const T* in = static_cast<const T*>(t->in) + at(t->in_strides);
        T* out = static_cast<T*>(t->out) + at(t->out_strides);
        for_each(half, [&](int64_t c, int64_t n) {
          const Vec x1 = read(in + c, n), x2 = read(in + half + c, n), co = read(cos + c, n), si = read(sin + c, n) * direction;
          write(x1 * co - x2 * si, out + c, n);
          write(x2 * co + x1 * si, out + half + c, n);
        });
        std::copy(in + 2 * half, in + a.dim, out + 2 * half);
      }
  });
}

}  // namespace

LIGER_REGISTER(rope_kernel, [](const Rope& a, Stream) {
  dispatch_weighted(a.dtype, a.table_dtype, [&]<class T, class Table>() { rotate<T, Table>(a); });
});

}  // namespace LIGER_CPU::rope
