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

/// dx = dy · f'(x), and with kResult f(x) again, in y. As forward_kernel, with kBackward packs of both inputs. A thread
/// has read its dy when it writes y over that.
template <class T, class Act, bool kResult>
__global__ void __launch_bounds__(256) backward_kernel(ActivateBackward a, RowChunks<T, kBackward> chunks) {
  await_previous();
  const auto gradient = [](const float (&x)[2]) { return x[1] * Act::template derivative<Math<T>>(x[0]); };
  const Row<T> dx = chunks.of(a.dx, a.count), in[] = {chunks.of(a.x, a.count), chunks.of(a.dy, a.count)};
  if constexpr (kResult) {
    const Row<T> out[] = {dx, chunks.of(a.y, a.count)};
    map_packs<kBackward>(out, in, [&](const float (&x)[2], float (&y)[2]) {
      y[0] = gradient(x), y[1] = Act::template value<Math<T>>(x[0]);
    });
  } else {
    const Row<T> out[] = {dx};
    map_packs<kBackward>(out, in, [&](const float (&x)[2], float (&y)[1]) { y[0] = gradient(x); });
  }
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
    launch(a.y ? backward_kernel<T, Act, true> : backward_kernel<T, Act, false>, chunks.grid(), s, a, chunks);
  });
});

}  // namespace liger::cuda::activate
