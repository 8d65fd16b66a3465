#include "liger/core/cuda/math.cuh"
#include "liger/core/cuda/stream.cuh"
#include "liger/ops/activation/gated.h"

namespace liger::cuda::gated {
namespace {

inline constexpr int kPacks = 2;  // that a thread has in flight of each input

/// c = f(m · a) · b, m being the gate's multiplier; f is rounded as eager torch rounds it.
/// A block has a row chunk, a thread kPacks packs of each input, all in flight at once. The limit is memory.
template <class T, class Act>
__global__ void __launch_bounds__(256) forward_kernel(GatedForward g, RowChunks<T, kPacks> chunks) {
  await_previous();
  const Row<T> out[] = {chunks.of(g.c, g.cols)}, in[] = {chunks.of(g.a, g.a_stride), chunks.of(g.b, g.b_stride)};
  map_packs<kPacks>(out, in, [&](const float (&x)[2], float (&c)[1]) {
    c[0] = round_to<T>(Act::template value<Math<T>>(g.gate_multiplier * x[0])) * x[1];
  });
}

///   da = dc · b · f'(m · a) · m
///   db = dc · f(m · a)
/// f is made again. As forward_kernel, with three inputs.
template <class T, class Act>
__global__ void __launch_bounds__(256) backward_kernel(GatedBackward g, RowChunks<T, kPacks> chunks) {
  await_previous();
  const Row<T> out[] = {chunks.of(g.da, g.d_stride), chunks.of(g.db, g.d_stride)};
  const Row<T> in[] = {chunks.of(g.a, g.a_stride), chunks.of(g.b, g.b_stride), chunks.of(g.dc, g.cols)};
  map_packs<kPacks>(out, in, [&](const float (&x)[3], float (&d)[2]) {
    const float gate = g.gate_multiplier * x[0], dc = x[2];
    d[0] = round_to<T>(dc * x[1]) * Act::template derivative<Math<T>>(gate) * g.gate_multiplier;
    d[1] = dc * round_to<T>(Act::template value<Math<T>>(gate));
  });
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
      const RowChunks<T, kPacks> chunks(g.rows, g.cols);
      launch(forward_kernel<T, Act>, chunks.grid(), s, g, chunks);
    });
  });
});
LIGER_REGISTER(gated_backward, [](const GatedBackward& args, Stream s) {
  const GatedBackward g =
      flat(args, args.a_stride == args.cols && args.b_stride == args.cols && args.d_stride == args.cols);
  dispatch(g.dtype, [&]<class T>() {
    dispatch_activation(g.activation, [&]<class Act>() {
      const RowChunks<T, kPacks> chunks(g.rows, g.cols);
      launch(backward_kernel<T, Act>, chunks.grid(), s, g, chunks);
    });
  });
});

}  // namespace liger::cuda::gated
