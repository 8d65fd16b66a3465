#include "liger/core/cuda/math.cuh"
#include "liger/core/cuda/stream.cuh"
#include "liger/ops/activation/gated.h"

namespace liger::cuda::gated {
namespace {

inline constexpr int kForward = 4, kBackward = 2;  // packs a thread has in flight of each input

template <class T, class Act>
__global__ void __launch_bounds__(256) forward_kernel(GatedForward g, Pieces<T, kForward> pieces) {
  const Row<T> a = pieces.of(g.a, g.a_stride), b = pieces.of(g.b, g.b_stride), c = pieces.of(g.c, g.cols);
  const int packs = c.packs();
  typename Row<T>::Pack pa[kForward + 1], pb[kForward + 1];  // one more where the row begins inside a pack
#pragma unroll
  for (int u = 0; u <= kForward; ++u)
    if (const int k = u * blockDim.x + threadIdx.x; k < packs) pa[u] = a.load(k, T(0), c), pb[u] = b.load(k, T(0), c);
#pragma unroll
  for (int u = 0; u <= kForward; ++u)
    if (const int k = u * blockDim.x + threadIdx.x; k < packs) {
      float gate[Row<T>::kWidth], up[Row<T>::kWidth];
      pa[u].to_float(gate), pb[u].to_float(up);
#pragma unroll
      for (int j = 0; j < Row<T>::kWidth; ++j) gate[j] = round_to<T>(Act::template value<Math<T>>(g.gate_multiplier * gate[j])) * up[j];
      c.store(k, gate, c);
    }
}

template <class T, class Act>
__global__ void __launch_bounds__(256) backward_kernel(GatedBackward g, Pieces<T, kBackward> pieces) {
  const Row<T> a = pieces.of(g.a, g.a_stride), b = pieces.of(g.b, g.b_stride), dc = pieces.of(g.dc, g.cols);
  const Row<T> da = pieces.of(g.da, g.d_stride), db = pieces.of(g.db, g.d_stride);
  const int packs = da.packs();
  typename Row<T>::Pack pa[kBackward + 1], pb[kBackward + 1], pc[kBackward + 1];
#pragma unroll
  for (int u = 0; u <= kBackward; ++u)
    if (const int k = u * blockDim.x + threadIdx.x; k < packs)
      pa[u] = a.load(k, T(0), da), pb[u] = b.load(k, T(0), da), pc[u] = dc.load(k, T(0), da);
#pragma unroll
  for (int u = 0; u <= kBackward; ++u)
    if (const int k = u * blockDim.x + threadIdx.x; k < packs) {
      float gate[Row<T>::kWidth], up[Row<T>::kWidth], d[Row<T>::kWidth];
      pa[u].to_float(gate), pb[u].to_float(up), pc[u].to_float(d);
#pragma unroll
      for (int j = 0; j < Row<T>::kWidth; ++j) {
        const float x = g.gate_multiplier * gate[j];
        gate[j] = round_to<T>(d[j] * up[j]) * Act::template derivative<Math<T>>(x) * g.gate_multiplier;
        up[j] = d[j] * round_to<T>(Act::template value<Math<T>>(x));
      }
      da.store(k, gate, da);
      db.store(k, up, da);
    }
}

/// Rows that follow one another are one row.
template <class Args>
Args flat(Args g, bool contiguous) {
  if (contiguous) g.cols *= g.rows, g.rows = g.cols > 0;
  return g;
}

}  // namespace

LIGER_REGISTER(gated_forward, [](const GatedForward& args, Stream s) {
  const GatedForward g = flat(args, args.a_stride == args.cols && args.b_stride == args.cols);
  dispatch(g.dtype, [&]<class T>() {
    dispatch_activation(g.activation, [&]<class Act>() {
      const Pieces<T, kForward> pieces(g.rows, g.cols);
      launch(forward_kernel<T, Act>, pieces.grid(), s, g, pieces);
    });
  });
});
LIGER_REGISTER(gated_backward, [](const GatedBackward& args, Stream s) {
  const GatedBackward g = flat(args, args.a_stride == args.cols && args.b_stride == args.cols && args.d_stride == args.cols);
  dispatch(g.dtype, [&]<class T>() {
    dispatch_activation(g.activation, [&]<class Act>() {
      const Pieces<T, kBackward> pieces(g.rows, g.cols);
      launch(backward_kernel<T, Act>, pieces.grid(), s, g, pieces);
    });
  });
});

}  // namespace liger::cuda::gated
