#include "liger/core/cpu/row.h"
#include "liger/ops/rope/rope.h"

namespace LIGER_CPU::rope {
namespace {

using Pair = std::pair<Vec, Vec>;

/// Pairs [c, c + n) of a head.
struct Halves {
  template <class T>
  static Pair load(const T* x, int64_t half, int64_t c, int64_t n) { return {read(x + c, n), read(x + half + c, n)}; }

  template <class T>
  static void store(const Pair& p, T* x, int64_t half, int64_t c, int64_t n) { write(p.first, x + c, n), write(p.second, x + half + c, n); }

  template <class Table>
  static Pair angles(const Table* cos, const Table* sin, int64_t c, int64_t n) { return {read(cos + c, n), read(sin + c, n)}; }
};

struct Interleaved {
  template <class T>
  static Pair load(const T* x, int64_t, int64_t c, int64_t n) {
    return at::vec::deinterleave2(read(x + 2 * c, std::min(2 * n, kLanes)), read(x + 2 * c + kLanes, std::max<int64_t>(2 * n - kLanes, 0)));
  }

  template <class T>
  static void store(const Pair& p, T* x, int64_t, int64_t c, int64_t n) {
    const auto [low, high] = at::vec::interleave2(p.first, p.second);
    write(low, x + 2 * c, std::min(2 * n, kLanes)), write(high, x + 2 * c + kLanes, std::max<int64_t>(2 * n - kLanes, 0));
  }

  template <class Table>
  static Pair angles(const Table* complex, const Table*, int64_t c, int64_t n) { return load(complex, 0, c, n); }
};

template <class T, class Table, class Pairs>
void rotate(const Rope& a) {
  const int64_t half = a.rotary / 2, ends[] = {std::min(a.section_ends[0], half), std::min(a.section_ends[1], half), half};
  const Vec direction(a.direction);
  for_rows(a.batch * a.seq, (a.q.heads + a.k.heads + a.v.heads) * a.dim, [&](int64_t token) {
    const int64_t batch = token / a.seq, seq = token % a.seq, table = batch * a.table_batch_stride + seq * a.table_seq_stride;
    const auto for_heads = [&](const RopeTensor& t, auto f) {
      for (int64_t head = 0; head < t.heads; ++head) {
        const auto at = [&](const RopeTensor::Strides& s) { return batch * s.batch + seq * s.seq + head * s.head; };
        f(static_cast<const T*>(t.in) + at(t.in_strides), static_cast<T*>(t.out) + at(t.out_strides));
      }
    };
    for (const RopeTensor* t : {&a.q, &a.k})
      for_heads(*t, [&](const T* in, T* out) {
        for (int64_t plane = 0, begin = 0; plane < 3; begin = ends[plane++]) {
          const int64_t at = table + plane * a.table_plane_stride;
          for_each(ends[plane] - begin, [&](int64_t c, int64_t n) {
            const auto [x1, x2] = Pairs::load(in, half, begin + c, n);
            const auto [co, si] = Pairs::angles(static_cast<const Table*>(a.cos) + at, static_cast<const Table*>(a.sin) + at, begin + c, n);
            const Vec s = si * direction;
            Pairs::store({x1 * co - x2 * s, x2 * co + x1 * s}, out, half, begin + c, n);
          });
        }
        std::copy(in + 2 * half, in + a.dim, out + 2 * half);
      });
    for_heads(a.v, [&](const T* in, T* out) { std::copy(in, in + a.dim, out); });
  });
}

}  // namespace

LIGER_REGISTER(rope_kernel, [](const Rope& a, Stream) {
  dispatch_weighted(a.dtype, a.table_dtype, [&]<class T, class Table>() {
    a.pairs == RopePairs::Interleaved ? rotate<T, Table, Interleaved>(a) : rotate<T, Table, Halves>(a);
  });
});

}  // namespace LIGER_CPU::rope
