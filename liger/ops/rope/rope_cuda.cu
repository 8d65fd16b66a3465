#include "liger/core/cuda/dispatch.h"
#include "liger/core/cuda/math.cuh"
#include "liger/core/cuda/pack.cuh"
#include "liger/ops/rope/rope.h"

namespace liger::cuda::rope {
namespace {

using Math = cuda::Math<float>;

__device__ inline int64_t offset(const RopeTensor::Strides& s, int64_t batch, int64_t seq, int64_t head) {
  return batch * s.batch + seq * s.seq + head * s.head;
}

template <class Table, int kWidth>
__device__ void load(const void* table, int64_t at, float* f) {
  reinterpret_cast<const Pack<Table, kWidth>*>(static_cast<const Table*>(table) + at)->to_float(f);
}

// Where the two packs u and v lie that hold item c's kWidth pairs, how far apart, and how they turn.

struct Halves {
  static constexpr int kAtOnce = 1;
  template <int kWidth>
  static __device__ int first(int c) {
    return c;
  }
  template <int kWidth>
  static __device__ int apart(int half) {
    return half;
  }

  template <class Table, int kWidth>
  static __device__ void angles(const Rope& a, int64_t row, int c, float* cos, float* sin) {
    load<Table, kWidth>(a.cos, row + c, cos), load<Table, kWidth>(a.sin, row + c, sin);
  }

  template <int kWidth>
  static __device__ void turn(float* u, float* v, const float* cos, const float* sin, float direction) {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      const float s = sin[j] * direction, o = rotated<Math>(u[j], v[j], cos[j], -s);
      v[j] = rotated<Math>(v[j], u[j], cos[j], s);
      u[j] = o;
    }
  }
};

struct Sections : Halves {
  template <class Table, int kWidth>
  static __device__ void angles(const Rope& a, int64_t row, int c, float* cos, float* sin) {
    const auto at = [&](int i) {
      return row + i + a.table_plane_stride * ((i >= a.section_ends[0]) + (i >= a.section_ends[1]));
    };
    if (at(c + kWidth - 1) == at(c) + kWidth - 1) {
      load<Table, kWidth>(a.cos, at(c), cos), load<Table, kWidth>(a.sin, at(c), sin);
    } else {  // a section ends inside
#pragma unroll
      for (int j = 0; j < kWidth; ++j)
        load<Table, 1>(a.cos, at(c + j), cos + j), load<Table, 1>(a.sin, at(c + j), sin + j);
    }
  }
};

/// Each pack holds whole pairs, and its angles lie as they do; but a pack of one column holds half a pair.
struct Interleaved {
  static constexpr int kAtOnce = 2;
  template <int kWidth>
  static __device__ int first(int c) {
    return kWidth > 1 ? c : 2 * c;
  }
  template <int kWidth>
  static __device__ int apart(int half) {
    return kWidth > 1 ? half : 1;
  }

  template <class Table, int kWidth>
  static __device__ void angles(const Rope& a, int64_t row, int c, float* of_u, float* of_v) {
    row += first<kWidth>(c);
    load<Table, kWidth>(a.cos, row, of_u), load<Table, kWidth>(a.cos, row + apart<kWidth>(int(a.rotary / 2)), of_v);
  }

  template <int kWidth>
  static __device__ void turn(float* u, float* v, const float* of_u, const float* of_v, float direction) {
    if constexpr (kWidth == 1) {
      Halves::turn<1>(u, v, of_u, of_v, direction);
    } else {
#pragma unroll
      for (int j = 0; j < kWidth; j += 2)
        Halves::turn<1>(u + j, u + j + 1, of_u + j, of_u + j + 1, direction),
            Halves::turn<1>(v + j, v + j + 1, of_v + j, of_v + j + 1, direction);
    }
  }
};

/// finish(fetch(i)) for every i below n, by one block: kAtOnce of a thread are fetched before the first of them is
/// finished, since nothing says that what one writes the next does not read.
template <int kAtOnce, class Fetch, class Finish>
__device__ void for_each_item(int n, Fetch fetch, Finish finish) {
#pragma unroll 1
  for (int i = threadIdx.x; i < n; i += kAtOnce * int(blockDim.x)) {
    decltype(fetch(0)) items[kAtOnce];
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u)
      if (const int k = i + u * int(blockDim.x); k < n) items[u] = fetch(k);
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u)
      if (i + u * int(blockDim.x) < n) finish(items[u]);
  }
}

/// q and k, rotated by the angles of their tokens, and what is beside those columns, and v, copied.
/// A block has a token. A thread takes kWidth pairs of a head at a time, of all heads of q and then of k, kAtOnce of
/// them in flight; the token's angles come from L1. The limit is memory: each number is read and written once.
template <class T, class Table, int kWidth, class Pairs>
__global__ void __maxnreg__(Pairs::kAtOnce == 1 ? 64 : 80) rotate_kernel(Rope a) {
  await_previous();
  using Values = Pack<T, kWidth>;
  const int64_t batch = blockIdx.x / a.seq, seq = blockIdx.x % a.seq;
  const int half = int(a.rotary / 2), packs = half / kWidth, q_heads = int(a.q.heads),
            apart = Pairs::template apart<kWidth>(half);
  const int64_t table = batch * a.table_batch_stride + seq * a.table_seq_stride;
  struct Item {
    T* out;
    Values u, v;
    float cos[kWidth], sin[kWidth];
  };
  for_each_item<Pairs::kAtOnce>(
      int(a.q.heads + a.k.heads) * packs,
      [&](int i) {
        const int head = i / packs, c = (i - head * packs) * kWidth;
        const RopeTensor& t = head < q_heads ? a.q : a.k;
        const int h = head < q_heads ? head : head - q_heads, first = Pairs::template first<kWidth>(c);
        const T* in = static_cast<const T*>(t.in) + offset(t.in_strides, batch, seq, h) + first;
        Item item{static_cast<T*>(t.out) + offset(t.out_strides, batch, seq, h) + first, Values::read(in),
                  Values::read(in + apart)};
        Pairs::template angles<Table, kWidth>(a, table, c, item.cos, item.sin);
        return item;
      },
      [&](const Item& item) {
        float u[kWidth], v[kWidth];
        item.u.to_float(u), item.v.to_float(v);
        Pairs::template turn<kWidth>(u, v, item.cos, item.sin, a.direction);
        *reinterpret_cast<Values*>(item.out) = Values::from_float(u);
        *reinterpret_cast<Values*>(item.out + apart) = Values::from_float(v);
      });
  // What does not turn: the columns past `rotary`, and v.
  struct Copy {
    T* out;
    Values values;
  };
  const auto copy = [&](const RopeTensor& t, int begin) {
    const int rest = (int(a.dim) - begin) / kWidth;
    for_each_item<4>(
        int(t.heads) * rest,
        [&](int i) {
          const int h = i / rest, c = begin + (i - h * rest) * kWidth;
          return Copy{static_cast<T*>(t.out) + offset(t.out_strides, batch, seq, h) + c,
                      Values::read(static_cast<const T*>(t.in) + offset(t.in_strides, batch, seq, h) + c)};
        },
        [](const Copy& c) { *reinterpret_cast<Values*>(c.out) = c.values; });
  };
  copy(a.q, 2 * half), copy(a.k, 2 * half), copy(a.v, 0);
}

/// Calls f.operator()<Pairs>() with the layout of `p`.
template <class F>
void dispatch_pairs(RopePairs p, F&& f) {
  switch (p) {
    case RopePairs::Halves: return f.template operator()<Halves>();
    case RopePairs::Sections: return f.template operator()<Sections>();
    case RopePairs::Interleaved: return f.template operator()<Interleaved>();
  }
}

bool divisible(int64_t by, std::initializer_list<int64_t> strides) {
  for (auto s : strides)
    if (s % by != 0) return false;
  return true;
}

}  // namespace

LIGER_REGISTER(rope_kernel, [](const Rope& a, Stream s) {
  dispatch_weighted(a.dtype, a.table_dtype, [&]<class T, class Table>() {
    constexpr int kVec = 16 / sizeof(T);
    const auto fits = [](const RopeTensor& t) {
      return aligned16({t.in, t.out}) && divisible(kVec, {t.in_strides.batch, t.in_strides.head, t.in_strides.seq,
                                                          t.out_strides.batch, t.out_strides.head, t.out_strides.seq});
    };
    // The sine is half of a complex number, or aligned as the cosine is.
    const bool wide =
        fits(a.q) && fits(a.k) && fits(a.v) && aligned16({a.cos, a.pairs == RopePairs::Interleaved ? a.cos : a.sin}) &&
        divisible(kVec, {a.dim, a.rotary / 2, a.table_plane_stride, a.table_batch_stride, a.table_seq_stride});
    const int64_t items = (a.q.heads + a.k.heads) * std::max<int64_t>(1, a.rotary / 2 / (wide ? kVec : 1));
    // Two items a thread in flight.
    const unsigned threads = unsigned(std::clamp<int64_t>(round_up(items / 2, 32), 32, 512));
    dispatch_pairs(a.pairs, [&]<class Pairs>() {
      launch(wide ? rotate_kernel<T, Table, kVec, Pairs> : rotate_kernel<T, Table, 1, Pairs>,
             {.blocks = a.batch * a.seq, .threads = threads}, s, a);
    });
  });
});

}  // namespace liger::cuda::rope
