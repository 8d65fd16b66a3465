#include "liger/core/cuda/math.cuh"
#include "liger/core/cuda/stream.cuh"
#include "liger/ops/activation/activate.h"

namespace liger::cuda::activate {
namespace {

inline constexpr int kForward = 4, kBackward = 2;  // packs a thread has in flight of each input

/// y = f(x). A block has a chunk of the elements, a thread kForward packs of it, all in flight at once. The limit is
/// memory.
template <class T, class Act>
__global__ void __launch_bounds__(256) forward_kernel(ActivateForward a, RowChunks<T, kForward> chunks) {
  await_previous();
  const Row<T> out[] = {chunks.of(a.y, a.count)}, in[] = {chunks.of(a.x, a.count)};
  map_packs<kForward>(out, in, [](const float (&x)[1], float (&y)[1]) { y[0] = Act::template value<Math<T>>(x[0]); });
}

/// dx = dy · f'(x). As forward_kernel, with kBackward packs of both inputs.
template <class T, class Act>
__global__ void __launch_bounds__(256) backward_kernel(ActivateBackward a, RowChunks<T, kBackward> chunks) {
  await_previous();
  const Row<T> out[] = {chunks.of(a.dx, a.count)}, in[] = {chunks.of(a.x, a.count), chunks.of(a.dy, a.count)};
  map_packs<kBackward>(
      out, in, [](const float (&x)[2], float (&dx)[1]) { dx[0] = x[1] * Act::template derivative<Math<T>>(x[0]); });
}

/// backward_kernel that also writes f(x), which may lie where dy does.
template <class T, class Act>
__global__ void __launch_bounds__(256) recomputing_kernel(ActivateBackward a, RowChunks<T, kBackward> chunks) {
  await_previous();
  const Row<T> out[] = {chunks.of(a.dx, a.count), chunks.of(a.y, a.count)},
               in[] = {chunks.of(a.x, a.count), chunks.of(a.dy, a.count)};
  map_packs<kBackward>(out, in, [](const float (&x)[2], float (&y)[2]) {
    y[0] = x[1] * Act::template derivative<Math<T>>(x[0]);
    y[1] = Act::template value<Math<T>>(x[0]);
  });
}

/// The elements are one row.
template <int kUnroll, class Args, class F>
void run(const Args& a, F f) {
  dispatch(a.dtype, [&]<class T>() {
    dispatch_activation(
        a.activation, [&]<class Act>() { f.template operator()<T, Act>(RowChunks<T, kUnroll>(a.count > 0, a.count)); });
  });
}

}  // namespace

LIGER_REGISTER(activate_forward, [](const ActivateForward& a, Stream s) {
  run<kForward>(
      a, [&]<class T, class Act>(const auto& chunks) { launch(forward_kernel<T, Act>, chunks.grid(), s, a, chunks); });
});
LIGER_REGISTER(activate_backward, [](const ActivateBackward& a, Stream s) {
  run<kBackward>(a, [&]<class T, class Act>(const auto& chunks) {
    launch(a.y ? recomputing_kernel<T, Act> : backward_kernel<T, Act>, chunks.grid(), s, a, chunks);
  });
});

}  // namespace liger::cuda::activate
