#include "liger/core/cpu/row.h"
#include "liger/ops/rope/rope.h"

namespace LIGER_CPU::rope {
namespace {

using Pair = std::pair<Vec, Vec>;

/// Pairs [c, c + n) of a head.
struct Halves {
  template <class T>
  static Pair load(const T* x, int64_t half, int64_t c, int64_t n) {
    return {read(x + c, n), read(x + half + c, n)};
  }

  template <class T>
  static void store(const Pair& p, T* x, int64_t half, int64_t c, int64_t n) {
    write(p.first, x + c, n), write(p.second, x + half + c, n);
  }

  template <class Table>
  static Pair angles(const Table* cos, const Table* sin, int64_t c, int64_t n) {
    return {read(cos + c, n), read(sin + c, n)};
  }
};

struct Interleaved {
  template <class T>
  static Pair load(const T* x, int64_t, int64_t c, int64_t n) {
    return at::vec::deinterleave2(read(x + 2 * c, std::min(2 * n, kLanes)),
                                  read(x + 2 * c + kLanes, std::max<int64_t>(2 * n - kLanes, 0)));
  }

  template <class T>
  static void store(const Pair& p, T* x, int64_t, int64_t c, int64_t n) {
    const auto [low, high] = at::vec::interleave2(p.first, p.second);
    write(low, x + 2 * c, std::min(2 * n, kLanes)),
        write(high, x + 2 * c + kLanes, std::max<int64_t>(2 * n - kLanes, 0));
  }

  template <class Table>
  static Pair angles(const Table* complex, const Table*, int64_t c, int64_t n) {
    return load(complex, 0, c, n);
  }
};

/// The cosines of a token whose tables begin at `table`, and its sines times the direction: as floats, for all of its
/// heads.
template <class Table, class Pairs>
void angles_of(const Rope& a, int64_t table, float* cosines, float* sines) {
  const int64_t half = a.rotary / 2,
                ends[] = {std::min(a.section_ends[0], half), std::min(a.section_ends[1], half), half};
  for (int64_t plane = 0, begin = 0; plane < 3; begin = ends[plane++]) {
    const int64_t at = table + plane * a.table_plane_stride;
    for_each(ends[plane] - begin, [&](int64_t c, int64_t n) {
      const auto [co, si] =
          Pairs::angles(static_cast<const Table*>(a.cos) + at, static_cast<const Table*>(a.sin) + at, begin + c, n);
      write(co, cosines + begin + c, n), write(si * Vec(a.direction), sines + begin + c, n);
    });
  }
}

template <class T, class Table, class Pairs>
void rotate(const Rope& a) {
  const int64_t half = a.rotary / 2;
  for_runs(a.batch * a.seq, (a.q.heads + a.k.heads + a.v.heads) * a.dim, [&](int64_t first, int64_t last) {
    std::vector<float> angles(size_t(a.rotary));
    float *cosines = angles.data(), *sines = cosines + half;
    const auto rotated = [&](const T* in, T* out) {
      for_each(half, [&](int64_t c, int64_t n) {
        const auto [x1, x2] = Pairs::load(in, half, c, n);
        const Vec co = read(cosines + c, n), si = read(sines + c, n);
        Pairs::store({x1 * co - x2 * si, x2 * co + x1 * si}, out, half, c, n);
      });
      std::copy(in + 2 * half, in + a.dim, out + 2 * half);
    };
    const auto passed = [&](const T* in, T* out) { std::copy(in, in + a.dim, out); };
    for (int64_t token = first; token < last; ++token) {
      const int64_t batch = token / a.seq, seq = token % a.seq;
      const auto for_heads = [&](const RopeTensor& t, auto f) {
        for (int64_t head = 0; head < t.heads; ++head) {
          const auto at = [&](const RopeTensor::Strides& s) { return batch * s.batch + seq * s.seq + head * s.head; };
          f(static_cast<const T*>(t.in) + at(t.in_strides), static_cast<T*>(t.out) + at(t.out_strides));
        }
      };
      angles_of<Table, Pairs>(a, batch * a.table_batch_stride + seq * a.table_seq_stride, cosines, sines);
      for_heads(a.q, rotated), for_heads(a.k, rotated), for_heads(a.v, passed);
    }
  });
}

}  // namespace

LIGER_REGISTER(rope_kernel, [](const Rope& a, Stream) {
  dispatch_weighted(a.dtype, a.table_dtype, [&]<class T, class Table>() {
    a.pairs == RopePairs::Interleaved ? rotate<T, Table, Interleaved>(a) : rotate<T, Table, Halves>(a);
  });
});

}  // namespace LIGER_CPU::rope
