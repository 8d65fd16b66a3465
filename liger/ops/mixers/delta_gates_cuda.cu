#include "liger/core/cuda/dispatch.h"
#include "liger/core/cuda/math.cuh"
#include "liger/ops/mixers/delta_gates.h"

namespace liger::cuda::delta_gates {
namespace {

constexpr int kThreads = 256, kRowsOfThread = 4;

/// Which heads and rows a block has: up to kThreads neighbouring heads, a thread for each, and as many rows at once as
/// threads remain for. So each thread stays with its head, whose numbers it keeps.
struct Tiles {
  int64_t rows, heads;
  unsigned width, across;  // heads of a block, and blocks for all of them

  explicit Tiles(const DeltaGates& a)
      : rows(a.rows),
        heads(a.heads),
        width(unsigned(std::min<int64_t>(a.heads, kThreads))),
        across(unsigned(ceil_div(a.heads, int64_t(width)))) {}

  __host__ __device__ unsigned at_once() const { return kThreads / width; }
  Grid grid(int64_t runs) const { return {.blocks = runs * across, .threads = kThreads}; }
};

/// What a head has in common for all rows.
struct Head {
  float factor, bias, low, high;

  __device__ Head(const DeltaGates& a, int64_t head) : low(a.low), high(a.high) {
    const float A = number(a.A, head);
    factor = a.log ? -expf(A) : A;
    bias = a.dt_bias.of ? number(a.dt_bias, head) : 0;
  }

  __device__ float clamped(float s) const { return fminf(fmaxf(s, low), high); }
};

/// f(row) for the rows of a run that are this thread's.
template <class F>
__device__ void for_rows_of(const Tiles& tiles, int64_t run, int64_t rows_of_run, F f) {
  const int64_t end = min(tiles.rows, (run + 1) * rows_of_run);
  for (int64_t row = run * rows_of_run + threadIdx.x / tiles.width; row < end; row += tiles.at_once()) f(row);
}

/// Memory is the limit, and these are few bytes beside a layer's others.
template <class T>
__global__ void __launch_bounds__(kThreads) forward_kernel(DeltaGatesForward a, Tiles tiles) {
  await_previous();
  const int64_t head = int64_t(blockIdx.x % tiles.across) * tiles.width + threadIdx.x % tiles.width;
  if (head >= a.heads || threadIdx.x >= tiles.at_once() * tiles.width) return;
  const Head of(a, head);
  const int64_t rows_of_run = int64_t(tiles.at_once()) * kRowsOfThread;
  for_rows_of(tiles, blockIdx.x / tiles.across, rows_of_run, [&](int64_t row) {
    const float dt = of.clamped(softplus(float(static_cast<const T*>(a.a)[row * a.a_stride + head]) + of.bias));
    a.g[row * a.heads + head] = of.factor * dt;
    a.beta[row * a.heads + head] = a.b ? sigmoid(float(static_cast<const T*>(a.b)[row * a.b_stride + head])) : dt;
  });
}

/// A block makes the partial sums of a run of rows: each thread those of its rows, which one of a head's adds up.
template <class T>
__global__ void __launch_bounds__(kThreads) backward_kernel(DeltaGatesBackward a, Tiles tiles) {
  await_previous();
  __shared__ float of_A[kThreads], of_bias[kThreads];
  const int64_t head = int64_t(blockIdx.x % tiles.across) * tiles.width + threadIdx.x % tiles.width;
  const int64_t run = blockIdx.x / tiles.across;
  const bool mine = head < a.heads && threadIdx.x < tiles.at_once() * tiles.width;
  const Head of(a, mine ? head : 0);
  float dA = 0, dbias = 0;
  if (mine)
    for_rows_of(tiles, run, ceil_div(a.rows, a.partials), [&](int64_t row) {
      const int64_t i = row * a.heads + head;
      const float x = float(static_cast<const T*>(a.a)[row * a.a_stride + head]) + of.bias, s = softplus(x),
                  dg = a.dg ? a.dg[i] : 0, dbeta = a.dbeta ? a.dbeta[i] : 0;
      const float ddt = of.factor * dg + (a.b ? 0 : dbeta);
      const float d = s >= of.low && s <= of.high ? ddt * sigmoid(x) : 0;
      static_cast<T*>(a.da)[i] = T(d);
      dA += dg * of.clamped(s), dbias += d;
      if (a.db) {
        const float beta = sigmoid(float(static_cast<const T*>(a.b)[row * a.b_stride + head]));
        static_cast<T*>(a.db)[i] = T(dbeta * beta * (1 - beta));
      }
    });
  of_A[threadIdx.x] = dA, of_bias[threadIdx.x] = dbias;
  __syncthreads();
  if (!mine || threadIdx.x >= tiles.width) return;
  dA = dbias = 0;
  for (unsigned i = threadIdx.x; i < tiles.at_once() * tiles.width; i += tiles.width)
    dA += of_A[i], dbias += of_bias[i];
  if (a.dA) a.dA[run * a.heads + head] = dA * (a.log ? of.factor : 1);
  if (a.ddt_bias) a.ddt_bias[run * a.heads + head] = dbias;
}

}  // namespace

LIGER_REGISTER(delta_gates_forward, [](const DeltaGatesForward& a, Stream s) {
  dispatch(a.dtype, [&]<class T>() {
    const Tiles tiles(a);
    const int64_t runs = ceil_div(a.rows, int64_t(tiles.at_once()) * kRowsOfThread);
    launch(forward_kernel<T>, tiles.grid(runs), s, a, tiles);
  });
});
LIGER_REGISTER(delta_gates_backward, [](const DeltaGatesBackward& a, Stream s) {
  dispatch(a.dtype, [&]<class T>() {
    const Tiles tiles(a);
    launch(backward_kernel<T>, tiles.grid(a.partials), s, a, tiles);
  });
});

}  // namespace liger::cuda::delta_gates
