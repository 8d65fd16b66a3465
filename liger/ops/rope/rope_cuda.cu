#include "liger/core/cuda/tile.cuh"
#include "liger/ops/rope/rope.h"

namespace liger::cuda::rope {
namespace {

__device__ inline int64_t offset(const RopeTensor::Strides& s, int64_t batch, int64_t seq, int64_t head) {
  return batch * s.batch + seq * s.seq + head * s.head;
}

/// One block per token. A thread takes kWidth columns of both halves of a head, of all heads of q and then of k in turn.
template <class T, class Table, int kWidth>
__global__ void __launch_bounds__(1024) rotate_kernel(Rope a) {
  using Values = Pack<T, kWidth>;
  using Angles = Pack<Table, kWidth>;
  const int64_t batch = blockIdx.x / a.seq, seq = blockIdx.x % a.seq;
  const int half = int(a.rotary / 2), packs = half / kWidth, q_heads = int(a.q.heads);
  const int64_t table = batch * a.table_batch_stride + seq * a.table_seq_stride;
  const int heads = int(a.q.heads + a.k.heads);
#pragma unroll 2
  for (int i = threadIdx.x; i < heads * packs; i += blockDim.x) {
    const int head = i / packs, c = i % packs * kWidth;
    const RopeTensor& t = head < q_heads ? a.q : a.k;
    const int h = head < q_heads ? head : head - q_heads;
    const T* in = static_cast<const T*>(t.in) + offset(t.in_strides, batch, seq, h) + c;
    T* out = static_cast<T*>(t.out) + offset(t.out_strides, batch, seq, h) + c;
    const Values x1 = *reinterpret_cast<const Values*>(in), x2 = *reinterpret_cast<const Values*>(in + half);
    const Angles cos = *reinterpret_cast<const Angles*>(static_cast<const Table*>(a.cos) + table + c);
    const Angles sin = *reinterpret_cast<const Angles*>(static_cast<const Table*>(a.sin) + table + c);
    float u[kWidth], v[kWidth], co[kWidth], si[kWidth];
    x1.to_float(u), x2.to_float(v), cos.to_float(co), sin.to_float(si);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      const float c1 = u[j] * co[j] - v[j] * si[j] * a.direction;
      v[j] = v[j] * co[j] + u[j] * si[j] * a.direction;
      u[j] = c1;
    }
    *reinterpret_cast<Values*>(out) = Values::from_float(u);
    *reinterpret_cast<Values*>(out + half) = Values::from_float(v);
  }
  const int rest = int(a.dim) - 2 * half;
  for (int i = threadIdx.x; i < heads * rest; i += blockDim.x) {
    const int head = i / rest, c = 2 * half + i % rest;
    const RopeTensor& t = head < q_heads ? a.q : a.k;
    const int h = head < q_heads ? head : head - q_heads;
    static_cast<T*>(t.out)[offset(t.out_strides, batch, seq, h) + c] = static_cast<const T*>(t.in)[offset(t.in_strides, batch, seq, h) + c];
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
    const auto strides = [](const RopeTensor& t) {
      return divisible(kVec, {t.in_strides.batch, t.in_strides.head, t.in_strides.seq, t.out_strides.batch, t.out_strides.head, t.out_strides.seq});
    };
    const bool wide = strides(a.q) && strides(a.k) && divisible(kVec, {a.rotary / 2, a.table_batch_stride, a.table_seq_stride}) &&
                      aligned16({a.q.in, a.q.out, a.k.in, a.k.out, a.cos, a.sin});
    const int64_t items = (a.q.heads + a.k.heads) * std::max<int64_t>(1, a.rotary / 2 / (wide ? kVec : 1));
    // Two items a thread in flight.
    const unsigned threads = unsigned(std::clamp<int64_t>((items / 2 + 31) / 32 * 32, 32, 1024));
    launch(wide ? rotate_kernel<T, Table, kVec> : rotate_kernel<T, Table, 1>, {.blocks = a.batch * a.seq, .threads = threads}, s, a);
  });
});

}  // namespace liger::cuda::rope
