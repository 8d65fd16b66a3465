#include "liger/core/cuda/math.cuh"
#include "liger/core/cuda/stream.cuh"
#include "liger/ops/activation/xielu.h"

namespace liger::cuda::xielu {
namespace {

inline constexpr int kForward = 4, kBackward = 2;  // packs a thread has in flight of each input

template <class T, class Args>
__device__ XIELU<Math<T>, float> formula(const Args& a) {
  return {number(a.alpha_p), number(a.alpha_n), number(a.beta), number(a.eps)};
}

/// A block has a chunk of the elements, a thread kForward packs of it, all in flight at once. The limit is memory.
template <class T>
__global__ void __launch_bounds__(256) forward_kernel(XIELUForward a, RowChunks<T, kForward> chunks) {
  await_previous();
  const auto formula = xielu::formula<T>(a);
  const Row<T> out[] = {chunks.of(a.y, a.count)}, in[] = {chunks.of(a.x, a.count)};
  map_packs<kForward>(out, in, [&](const float (&x)[1], float (&y)[1]) { y[0] = formula.value(x[0]); });
}

/// dx, and the sums of dalpha_p and dalpha_n.
/// A block makes one partial sum and walks along chunks of the elements, of which a thread has kBackward packs of both
/// inputs in flight. The limit is memory.
template <class T>
__global__ void __launch_bounds__(256, 4) backward_kernel(XIELUBackward a, RowChunks<T, kBackward> chunks) {
  await_previous();
  const auto formula = xielu::formula<T>(a);
  Sums<2>::Value total{};
  for (int64_t i = blockIdx.x; i < chunks.count(); i += gridDim.x) {
    const Row<T> out[] = {chunks.of(a.dx, a.count, i)};
    const Row<T> in[] = {chunks.of(a.x, a.count, i), chunks.of(a.dy, a.count, i)};
    Sums<2>::Value sums{};
    map_packs<kBackward>(out, in, [&](const float (&x)[2], float (&dx)[1]) {
      sums.v[0] += x[1] * formula.by_p(x[0]), sums.v[1] += x[1] * formula.by_n(x[0]);
      dx[0] = x[1] * formula.derivative(x[0]);
    });
    total = Sums<2>{}(total, sums);
  }
  RowReduce<Sums<2>> reduce;
  total = reduce(total);
  if (threadIdx.x > 0) return;
  a.dalpha_p[blockIdx.x] = total.v[0] * sigmoid(number(a.alpha_p));
  a.dalpha_n[blockIdx.x] = total.v[1] * sigmoid(number(a.alpha_n));
}

}  // namespace

LIGER_REGISTER(xielu_forward, [](const XIELUForward& a, Stream s) {
  dispatch(a.dtype, [&]<class T>() {
    const RowChunks<T, kForward> chunks(a.count > 0, a.count);
    launch(forward_kernel<T>, chunks.grid(), s, a, chunks);
  });
});
LIGER_REGISTER(xielu_backward, [](const XIELUBackward& a, Stream s) {
  dispatch(a.dtype, [&]<class T>() {
    launch(backward_kernel<T>, {.blocks = a.partials, .threads = 256}, s, a, RowChunks<T, kBackward>(1, a.count));
  });
});

}  // namespace liger::cuda::xielu
