#include "liger/core/cuda/dispatch.h"
#include "liger/core/cuda/math.cuh"
#include "liger/core/cuda/pack.cuh"
#include "liger/core/cuda/reduce.cuh"
#include "liger/ops/mixers/channel_gates.h"

namespace liger::cuda::channel_gates {
namespace {

constexpr int kThreads = 256, kRowsOfThread = 8;  // of forward
constexpr int kForward = 4, kBackward = 2;        // packs a thread has in flight of each input
using Gate = ChannelGate<Math<float>, float>;

/// A block has one head of a run of rows: a thread for each pack of the head's channels, up to all threads, and as many
/// rows at once as threads remain for. Neighbouring blocks have neighbouring heads of the same rows.
template <int kWidth>
struct Tiles {
  unsigned heads, packs, width;  // blocks of a run; packs of a head; threads along them

  explicit Tiles(const ChannelGates& a)
      : heads(unsigned(a.heads)), packs(unsigned(a.channels / kWidth)), width(std::min<unsigned>(packs, kThreads)) {}

  __host__ __device__ unsigned rows_at_once() const { return kThreads / width; }
  Grid grid(int64_t runs) const { return {.blocks = runs * heads, .threads = kThreads}; }
  __device__ unsigned head() const { return blockIdx.x % heads; }
  __device__ int64_t run() const { return blockIdx.x / heads; }
  __device__ bool mine() const { return threadIdx.x < rows_at_once() * width; }
};

__device__ inline Gate gate_of(const ChannelGates& a, int64_t head) { return {expf(number(a.A, head)), a.low}; }

template <int kWidth>
__device__ Vec<kWidth> bias_of(const ChannelGates& a, int64_t column) {
  Vec<kWidth> bias;
  if (a.dt_bias.of)
#pragma unroll
    for (int j = 0; j < kWidth; ++j) bias.v[j] = number(a.dt_bias, column + j);
  return bias;
}

/// f(row, load(row)) for this thread's rows of a run of rows_of_run, kAtOnce loads in flight.
template <int kAtOnce, int kWidth, class Load, class F>
__device__ void for_rows_of(const Tiles<kWidth>& tiles, int64_t rows, int64_t rows_of_run, Load load, F f) {
  const int64_t first = tiles.run() * rows_of_run, end = min(rows, first + rows_of_run), step = tiles.rows_at_once();
  for (int64_t row = first + threadIdx.x / tiles.width; row < end; row += kAtOnce * step) {
    decltype(load(row)) loaded[kAtOnce];
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u)
      if (row + u * step < end) loaded[u] = load(row + u * step);
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u)
      if (row + u * step < end) f(row + u * step, loaded[u]);
  }
}

template <class T, class G, int kWidth>
__global__ void __launch_bounds__(kThreads) forward_kernel(ChannelGatesForward a, Tiles<kWidth> tiles) {
  await_previous();
  if (!tiles.mine()) return;
  using PackOfT = Pack<T, kWidth>;
  const Gate gate = gate_of(a, tiles.head());
  for (unsigned pack = threadIdx.x % tiles.width; pack < tiles.packs; pack += tiles.width) {
    const int64_t column = int64_t(tiles.head()) * a.channels + pack * kWidth;
    const Vec<kWidth> bias = bias_of<kWidth>(a, column);
    const auto load = [&](int64_t row) {
      return PackOfT::read(static_cast<const T*>(a.a) + row * a.a_stride + column);
    };
    for_rows_of<kForward>(
        tiles, a.rows, int64_t(tiles.rows_at_once()) * kRowsOfThread, load, [&](int64_t row, PackOfT x) {
          const Vec<kWidth> g = Vec<kWidth>::map([&](float x) { return gate.value(x); }, to_vec(x) + bias);
          packed<G>(g).write(static_cast<G*>(a.g) + row * a.heads * a.channels + column);
        });
  }
}

/// Also makes the block's partial sums. Each thread sums its rows; the threads of the first row add these sums per
/// channel, and all threads add theirs for the head.
template <class T, class G, int kWidth>
__global__ void __launch_bounds__(kThreads, 3) backward_kernel(ChannelGatesBackward a, Tiles<kWidth> tiles) {
  await_previous();
  __shared__ float of_channels[kWidth][kThreads];
  struct Packs {
    Pack<T, kWidth> x;
    Pack<G, kWidth> dg;
  };
  const int64_t columns = a.heads * a.channels;
  const Gate gate = gate_of(a, tiles.head());
  float dA = 0;
  for (unsigned begin = 0; begin < tiles.packs; begin += tiles.width) {
    const unsigned pack = begin + threadIdx.x % tiles.width;
    const int64_t column = int64_t(tiles.head()) * a.channels + pack * kWidth;
    Vec<kWidth> ddt_bias;
    if (tiles.mine() && pack < tiles.packs) {
      const Vec<kWidth> bias = bias_of<kWidth>(a, column);
      const auto load = [&](int64_t row) {
        return Packs{Pack<T, kWidth>::read(static_cast<const T*>(a.a) + row * a.a_stride + column),
                     Pack<G, kWidth>::read(static_cast<const G*>(a.dg) + row * columns + column)};
      };
      for_rows_of<kBackward>(tiles, a.rows, ceil_div(a.rows, a.partials), load, [&](int64_t row, const Packs& packs) {
        const Vec<kWidth> x = to_vec(packs.x) + bias, dg = to_vec(packs.dg);
        Vec<kWidth> da;
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
          const Gate::Slopes slopes = gate.slopes(x.v[j]);
          da.v[j] = dg.v[j] * slopes.by_x;
          dA += dg.v[j] * slopes.by_A;
        }
        packed<T>(da).write(static_cast<T*>(a.da) + row * columns + column);
        ddt_bias = ddt_bias + da;
      });
    }
    if (!a.ddt_bias) continue;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) of_channels[j][threadIdx.x] = ddt_bias.v[j];
    __syncthreads();
    if (threadIdx.x < tiles.width && pack < tiles.packs)
      for (int j = 0; j < kWidth; ++j) {
        float total = 0;
        for (unsigned i = threadIdx.x; i < tiles.rows_at_once() * tiles.width; i += tiles.width)
          total += of_channels[j][i];
        a.ddt_bias[tiles.run() * columns + column + j] = total;
      }
    __syncthreads();
  }
  if (!a.dA) return;
  RowReduce<Sum> reduce;
  dA = reduce(dA);
  if (threadIdx.x == 0) a.dA[tiles.run() * a.heads + tiles.head()] = dA;
}

/// f<T, G, width>() with the types of a and g, and the widest packs that every head and row begins with one of.
template <class F>
void dispatch_packs(const ChannelGates& a, std::initializer_list<const void*> pointers, F f) {
  dispatch_weighted(a.dtype, a.g_dtype, [&]<class T, class G>() {
    constexpr int kWidth = 16 / sizeof(T);
    const bool whole = a.channels % kWidth == 0 && a.a_stride % kWidth == 0 && aligned16(pointers);
    whole ? f.template operator()<T, G, kWidth>() : f.template operator()<T, G, 1>();
  });
}

}  // namespace

LIGER_REGISTER(channel_gates_forward, [](const ChannelGatesForward& a, Stream s) {
  dispatch_packs(a, {a.a, a.g}, [&]<class T, class G, int kWidth>() {
    const Tiles<kWidth> tiles(a);
    const int64_t runs = ceil_div(a.rows, int64_t(tiles.rows_at_once()) * kRowsOfThread);
    launch(forward_kernel<T, G, kWidth>, tiles.grid(runs), s, a, tiles);
  });
});
LIGER_REGISTER(channel_gates_backward, [](const ChannelGatesBackward& a, Stream s) {
  dispatch_packs(a, {a.a, a.dg, a.da}, [&]<class T, class G, int kWidth>() {
    const Tiles<kWidth> tiles(a);
    launch(backward_kernel<T, G, kWidth>, tiles.grid(a.partials), s, a, tiles);
  });
});

}  // namespace liger::cuda::channel_gates
