#include "liger/core/cuda/staged_rows.cuh"
#include "liger/ops/research/norm/poly_norm.h"

namespace liger::cuda::poly_norm {
namespace {

constexpr int kThreads = 512, kBackwardThreads = 1024;

/// y and each row's three roots.
/// A block has blockDim.y rows, or a cluster one; a thread has Layout's packs of a row, in registers. The limit is
/// memory: x is read once.
template <class T, class Layout>
__global__ void __launch_bounds__(kThreads, 2) forward_kernel(PolyNormForward a) {
  await_previous();
  const int64_t row = Layout::row();
  const HeldRow<T, Layout> x(row, a.rows, a.cols, a.x);
  RowReduce<Sums<3>, Layout::kSpread> reduce;
  Sums<3>::Value rstd = reduce(row_sums<3>(x, PolyNorm::Squares{}));
  for (float& r : rstd.v)  // exact to a float's last place where that shows
    r = sizeof(T) == 2 ? rsqrtf(r * (1.f / a.cols) + a.eps) : 1 / sqrtf(r / a.cols + a.eps);
  row_map(x, a.y, PolyNorm::Value<float>(numbers<3>(a.w).data(), rstd.v, number(a.b)));
  if (threadIdx.x == 0 && row < a.rows)
    for (int i = 0; i < 3; ++i) a.rstd[row * 3 + i] = rstd.v[i];
}

/// dx, and the sums over rows of dw and db.
/// A block, or a cluster, makes one partial sum and walks along its rows, which come through stages of shared memory
/// and are read there twice. The limit is memory.
template <class T, class Layout>
__global__ void __launch_bounds__(kBackwardThreads) backward_kernel(PolyNormBackward a) {
  await_previous();
  RowReduce<Sums<4>, Layout::kSpread> reduce;
  Vec<4> total[1];
  StagedRows<T, Layout> rows(Layout::row(), Layout::row(), Layout::step(), a.rows, a.rows, a.cols, 2, a.x, a.dy);
  const auto w = numbers<3>(a.w);
  for (int64_t row = Layout::row(); row - threadIdx.y < a.rows; row += Layout::step()) {
    const auto r = numbers<3>({a.rstd + min(row, a.rows - 1) * 3, DType::F32});
    rows.advance();
    const Sums<4>::Value sums = reduce(row_sums<4>(rows, PolyNorm::Products{}));
    for (int i = 0; i < 4; ++i) total[0].v[i] += i < 3 ? r[i] * sums.v[i] : sums.v[i];
    if (a.dx) row_map(rows, a.dx, PolyNorm::Slope<float>(w.data(), r.data(), sums.v, a.cols));
  }
  copies_done();
  sum_over_rows(total);
  if (threadIdx.x > 0 || threadIdx.y > 0 || (Layout::kSpread && cluster_rank() > 0)) return;
  for (int i = 0; i < 3; ++i) a.dw[Layout::group() * 3 + i] = total[0].v[i];
  a.db[Layout::group()] = total[0].v[3];
}

}  // namespace

LIGER_REGISTER(poly_norm_forward, [](const PolyNormForward& a, Stream s) {
  const Threads block{.few = 128, .most = kThreads, .spread = 256};
  dispatch_rows<4>(a.dtype, a.cols, {a.x, a.y}, block, [&]<class T, class Layout>(const RowThreads& t) {
    launch(forward_kernel<T, Layout>, t.of_rows(a.rows), s, a);
  });
});
LIGER_REGISTER(poly_norm_backward, [](const PolyNormBackward& a, Stream s) {
  constexpr int kPacks = 2, kBytes = 2 * 2 * kPacks * 16;  // of shared memory a thread
  const Threads block{.few = 512, .most = std::min(kBackwardThreads, shared_bytes_of_block() / kBytes / 32 * 32)};
  dispatch_rows<kPacks>(a.dtype, a.cols, {a.dy, a.x, a.dx}, block, [&]<class T, class Layout>(const RowThreads& t) {
    launch(backward_kernel<T, Layout>, t.grid(a.partials, StagedRows<T, Layout>::bytes(t.threads, 2, 2)), s, a);
  });
});

}  // namespace liger::cuda::poly_norm
