#include "liger/core/cuda/math.cuh"
#include "liger/core/cuda/row_bytes.cuh"
#include "liger/ops/activation/gate_up.cuh"

namespace liger::cuda::gated {
namespace {

inline constexpr int kPacks = 2;  // that a thread has in flight of each input

/// c = g(a) · u(b); g is rounded as eager torch rounds it.
template <class T, class GateOf>
__device__ auto product(const GateOf& gate) {
  return [&gate](const float (&x)[2], float (&c)[1]) { c[0] = round_to<T>(gate.act(x[0])) * gate.up(x[1]); };
}

///   da = dc · u(b) · g'(a)
///   db = dc · g(a) · u'(b)
/// of a, b and dc; g is recomputed. With kProduct, c is the third result.
template <class T, bool kProduct, class GateOf>
__device__ auto gradients(const GateOf& gate) {
  return [&gate](const float (&x)[3], float (&d)[2 + kProduct]) {
    const float act = round_to<T>(gate.act(x[0])), up = gate.up(x[1]);
    // Where g' is 0, so is da, also where the product before it has overflowed T.
    d[0] = Math<T>::product(gate.slope(x[0]), round_to<T>(x[2] * up));
    d[1] = gate.through_up(x[1], x[2] * act);
    if constexpr (kProduct) d[2] = act * up;
  };
}

/// A block has a row chunk, a thread kPacks packs of each input, all in flight at once. The limit is memory.
template <class T, class Gate>
__global__ void __launch_bounds__(256) forward_kernel(GatedForward g, RowChunks<T, kPacks> chunks) {
  await_previous();
  const typename Gate::template Of<Math<T>, float> gate(g.form);
  const Row<T> out[] = {chunks.of(g.c, g.cols)}, in[] = {chunks.of(g.a, g.a_stride), chunks.of(g.b, g.b_stride)};
  map_packs<kPacks>(out, in, product<T>(gate));
}

/// As forward_kernel, with three inputs. A thread has read its dc when it writes c over that.
template <class T, class Gate, bool kProduct>
__global__ void __launch_bounds__(256) backward_kernel(GatedBackward g, RowChunks<T, kPacks> chunks) {
  await_previous();
  const typename Gate::template Of<Math<T>, float> gate(g.form);
  const Row<T> da = chunks.of(g.da, g.d_stride), db = chunks.of(g.db, g.d_stride);
  const Row<T> in[] = {chunks.of(g.a, g.a_stride), chunks.of(g.b, g.b_stride), chunks.of(g.dc, g.cols)};
  if constexpr (kProduct) {
    const Row<T> out[] = {da, db, chunks.of(g.c, g.cols)};
    map_packs<kPacks>(out, in, gradients<T, true>(gate));
  } else {
    const Row<T> out[] = {da, db};
    map_packs<kPacks>(out, in, gradients<T, false>(gate));
  }
}

inline constexpr int kRowPacks = 4;  // of a row, that a thread holds of each result
static_assert(kMostByteColumns <= 8 * kRowPacks * kLongRowThreads);

/// forward_kernel, which gives c in 8 bits too. A block has a row.
template <class T, class Gate>
__global__ void __launch_bounds__(kLongRowThreads) forward_bytes_kernel(GatedForwardBytes args) {
  await_previous();
  const GatedForward& g = args.gated;
  const typename Gate::template Of<Math<T>, float> gate(g.form);
  const auto row = [&](const void* p, int64_t stride) { return AlignedRow<T>(p, blockIdx.x, stride, g.cols); };
  const RowsOut<T, 1> out{{row(g.c, g.cols)}, {}, args.c};
  const AlignedRow<T> in[] = {row(g.a, g.a_stride), row(g.b, g.b_stride)};
  map_row_to_bytes<kRowPacks, 2>(out, in, blockIdx.x, product<T>(gate));
}

/// The same of backward_kernel.
template <class T, class Gate>
__global__ void __launch_bounds__(kLongRowThreads) backward_bytes_kernel(GatedBackwardBytes args) {
  await_previous();
  const GatedBackward& g = args.gated;
  const typename Gate::template Of<Math<T>, float> gate(g.form);
  const auto row = [&](const void* p, int64_t stride) { return AlignedRow<T>(p, blockIdx.x, stride, g.cols); };
  const RowsOut<T, 2> out{{row(g.da, g.d_stride), row(g.db, g.d_stride)}, {args.a_factor, args.b_factor}, args.d};
  const AlignedRow<T> in[] = {row(g.a, g.a_stride), row(g.b, g.b_stride), row(g.dc, g.cols)};
  map_row_to_bytes<kRowPacks, 1>(out, in, blockIdx.x, gradients<T, false>(gate));
}

/// Starts such a kernel.
template <class Args>
void launch_rows(void (*kernel)(Args), const Args& args, Stream s) {
  const int64_t threads = round_up(ceil_div(args.gated.cols, 8 * kRowPacks), 32);
  launch(kernel, {.blocks = args.gated.rows, .threads = unsigned(threads)}, s, args);
}

inline constexpr int kSteps = 2;  // that a thread has in flight of each input

/// f(step, i) for the steps of this thread, its i-th.
template <class T, class F>
__device__ void each_step(const Interleaved<T>& in, F f) {
  const int64_t first = int64_t(blockIdx.x) * blockDim.x * kSteps + threadIdx.x;
  unrolled<kSteps>([&](int i) {
    if (const int64_t step = first + i * int64_t(blockDim.x); step < in.steps()) f(step, i);
  });
}

/// The same of pairs in turn, which are one row. A thread has kSteps steps, all in flight at once.
template <class T, class Gate>
__global__ void __launch_bounds__(256) forward_pairs_kernel(GatedForward g, Interleaved<T> in) {
  await_previous();
  constexpr int kPairs = Interleaved<T>::kPairs;
  const typename Gate::template Of<Math<T>, float> gate(g.form);
  float a[kSteps][kPairs], b[kSteps][kPairs];
  each_step(in, [&](int64_t step, int i) { in.load(static_cast<const T*>(g.a), step, a[i], b[i]); });
  each_step(in, [&](int64_t step, int i) {
    unrolled<kPairs>([&](int j) { a[i][j] = round_to<T>(gate.act(a[i][j])) * gate.up(b[i][j]); });
    in.store(static_cast<T*>(g.c), step, a[i]);
  });
}

template <class T, class Gate>
__global__ void __launch_bounds__(256) backward_pairs_kernel(GatedBackward g, Interleaved<T> in) {
  await_previous();
  constexpr int kPairs = Interleaved<T>::kPairs;
  const typename Gate::template Of<Math<T>, float> gate(g.form);
  float a[kSteps][kPairs], b[kSteps][kPairs], dc[kSteps][kPairs];
  each_step(in, [&](int64_t step, int i) {
    in.load(static_cast<const T*>(g.a), step, a[i], b[i]), in.load(static_cast<const T*>(g.dc), step, dc[i]);
  });
  each_step(in, [&](int64_t step, int i) {
    unrolled<kPairs>([&](int j) {
      const float x = a[i][j], up = b[i][j], d = dc[i][j];
      a[i][j] = Math<T>::product(gate.slope(x), round_to<T>(d * gate.up(up)));
      b[i][j] = gate.through_up(up, d * round_to<T>(gate.act(x)));
    });
    in.store(static_cast<T*>(g.da), step, a[i], b[i]);
  });
}

template <class T>
Grid grid(const Interleaved<T>& in) {
  return {.blocks = ceil_div(in.steps(), 256 * kSteps), .threads = 256};
}

/// Rows that follow one another are one row.
template <class Args>
Args flat(Args g, bool contiguous) {
  if (contiguous) g.cols *= g.rows, g.rows = g.cols > 0;
  return g;
}

}  // namespace

LIGER_REGISTER(gated_forward, [](const GatedForward& args, Stream s) {
  const GatedForward g =
      flat(args, args.form.interleaved || (args.a_stride == args.cols && args.b_stride == args.cols));
  dispatch(g.dtype, [&]<class T>() {
    dispatch_gate(g.form, [&]<class Gate>() {
      if constexpr (Gate::kInterleaved) {
        const Interleaved<T> in(g.cols, {g.a, g.c});
        launch(forward_pairs_kernel<T, Gate>, grid(in), s, g, in);
      } else {
        const RowChunks<T, kPacks> chunks(g.rows, g.cols);
        launch(forward_kernel<T, Gate>, chunks.grid(), s, g, chunks);
      }
    });
  });
});
LIGER_REGISTER(gated_backward, [](const GatedBackward& args, Stream s) {
  const bool rows_follow = args.a_stride == args.cols && args.b_stride == args.cols && args.d_stride == args.cols;
  const GatedBackward g = flat(args, args.form.interleaved || rows_follow);
  dispatch(g.dtype, [&]<class T>() {
    dispatch_gate(g.form, [&]<class Gate>() {
      if constexpr (Gate::kInterleaved) {
        const Interleaved<T> in(g.cols, {g.a, g.dc, g.da});
        launch(backward_pairs_kernel<T, Gate>, grid(in), s, g, in);
      } else {
        const RowChunks<T, kPacks> chunks(g.rows, g.cols);
        launch(g.c ? backward_kernel<T, Gate, true> : backward_kernel<T, Gate, false>, chunks.grid(), s, g, chunks);
      }
    });
  });
});

LIGER_REGISTER(gated_forward_bytes, [](const GatedForwardBytes& g, Stream s) {
  dispatch16(g.gated.dtype, [&]<class T>() {
    dispatch_activation(g.gated.form.activation,
                        [&]<class Act>() { launch_rows(forward_bytes_kernel<T, PlainGate<Act>>, g, s); });
  });
});
LIGER_REGISTER(gated_backward_bytes, [](const GatedBackwardBytes& g, Stream s) {
  dispatch16(g.gated.dtype, [&]<class T>() {
    dispatch_activation(g.gated.form.activation,
                        [&]<class Act>() { launch_rows(backward_bytes_kernel<T, PlainGate<Act>>, g, s); });
  });
});

}  // namespace liger::cuda::gated
