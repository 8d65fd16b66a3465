#include "liger/core/cuda/row_layout.cuh"
#include "liger/ops/research/connections/attention_residuals.h"

namespace liger::cuda::attention_residuals {
namespace {

constexpr int kPacks = 2, kThreads = 512;

/// What both kernels read: rows of blocks, and query · weight, at the columns of the packs of `like`.
template <class T, class W, class Layout>
struct Blocks {
  using Row = typename Layout::template Row<T>;
  using Weights = typename Layout::template Row<W>;
  static constexpr int kWidth = Row::kWidth, kHeld = std::max(1, Layout::kPacks);
  static constexpr bool kHolds = Layout::kPacks > 0;
  using Vec = cuda::Vec<kWidth>;
  const void* v;
  int64_t rows, cols;
  Row like;
  Weights query, weight;
  Vec held[kHeld];

  template <class Args>
  __device__ Blocks(const Args& a, const Row& like)
      : v(a.v),
        rows(a.rows),
        cols(a.cols),
        like(like),
        query(a.query, 0, a.cols, a.cols),
        weight(a.weight, 0, a.cols, a.cols) {
    if constexpr (kHolds) each([&](int p, int k) { held[p] = make_u(k); });
  }

  /// f(p, k) for each pack k of a row that this thread has, its p-th; of a row that registers do not hold it has any
  /// number, and p is 0.
  template <class F>
  __device__ void each(F f) const {
    if constexpr (!kHolds) for_each_pack_of(like, [&](int k) { f(0, k); });
    unrolled<Layout::kPacks>([&](int p) {
      if (const int k = Layout::pack(p); k < like.packs()) f(p, k);
    });
  }
  __device__ Vec make_u(int k) const { return to_vec(query.load(k, W(0), like)) * to_vec(weight.load(k, W(0), like)); }
  __device__ Vec u(int p, int k) const {
    if constexpr (kHolds) return held[p];
    else return make_u(k);
  }
  __device__ auto load(int n, int64_t row, int k) const {
    return Row(v, n * rows + row, cols, cols).load(k, T(0), like);
  }
};

/// h, α and r.
/// A block has blockDim.y rows, or a cluster one. It reads the blocks' rows in their order, the next one while it
/// reduces the present one, and scales what it has summed when a larger score comes. The limit is memory: v is read
/// once. Rows that registers do not hold are read again for h.
template <class T, class W, class Layout>
__global__ void __launch_bounds__(kThreads) forward_kernel(AttentionResidualsForward a) {
  await_previous();
  using Blocks = attention_residuals::Blocks<T, W, Layout>;
  using Vec = typename Blocks::Vec;
  const int64_t row = Layout::row();
  const Blocks blocks(a, {a.h, row, a.cols, row < a.rows ? a.cols : 0});
  const auto& h = blocks.like;
  float *alpha = a.alpha + row * a.blocks, *rstd = a.rstd + row * a.blocks;
  const bool leads = row < a.rows && (!Layout::kSpread || cluster_rank() == 0);
  typename Blocks::Row::Pack ahead[Blocks::kHeld], now[Blocks::kHeld];
  const auto send = [&](int n) {
    if (Blocks::kHolds && n < a.blocks) blocks.each([&](int p, int k) { ahead[p] = blocks.load(n, row, k); });
  };
  RowReduce<Sums<2>, Layout::kSpread> reduce;
  Vec sum[Blocks::kHeld];
  float max = -INFINITY, total = 0;
  send(0);
  for (int n = 0; n < a.blocks; ++n) {
    if (Blocks::kHolds) unrolled<Blocks::kHeld>([&](int p) { now[p] = ahead[p]; });
    send(n + 1);
    Sums<2>::Value sums{};
    blocks.each([&](int p, int k) {
      const Vec x = to_vec(Blocks::kHolds ? now[p] : blocks.load(n, row, k)), u = blocks.u(p, k);
      unrolled<Blocks::kWidth>([&](int i) { sums.v[0] += x.v[i] * x.v[i], sums.v[1] += x.v[i] * u.v[i]; });
    });
    sums = reduce(sums);
    const float r = 1 / sqrtf(sums.v[0] / a.cols + a.eps), score = r * sums.v[1], before = max;
    max = fmaxf(max, score);
    const float rescale = expf(before - max), e = expf(score - max);
    total = total * rescale + e;
    if (Blocks::kHolds) blocks.each([&](int p, int) { sum[p] = sum[p] * rescale + to_vec(now[p]) * e; });
    if (leads && threadIdx.x == 0) rstd[n] = r, alpha[n] = score;
  }
  const float inverse = 1 / total;
  __syncthreads();  // the scores stand in alpha
  blocks.each([&](int p, int k) {
    Vec y = sum[p];
    if (!Blocks::kHolds) {
      y = {};
      for (int n = 0; n < a.blocks; ++n) y = y + to_vec(blocks.load(n, row, k)) * expf(alpha[n] - max);
    }
    h.store(k, packed<T>(y * inverse), h);
  });
  if (!Blocks::kHolds) __syncthreads();
  if (!leads) return;
  for (int n = int(threadIdx.x); n < a.blocks; n += int(blockDim.x)) alpha[n] = expf(alpha[n] - max) * inverse;
}

/// dv, and the sums over rows of g.
/// A block, or a cluster, makes one partial sum and walks along its rows. It reads the blocks' rows twice, the second
/// time from a cache. The limit is memory. Of rows that registers do not hold, g is summed where it is stored, each
/// column by one thread.
template <class T, class W, class Layout>
__global__ void __launch_bounds__(kThreads) backward_kernel(AttentionResidualsBackward a) {
  await_previous();
  using Blocks = attention_residuals::Blocks<T, W, Layout>;
  using Vec = typename Blocks::Vec;
  using Row = typename Blocks::Row;
  const Blocks blocks(a, {a.dh, Layout::row(), a.cols, a.cols});  // a thread has the same columns of all rows
  const Row& like = blocks.like;
  const typename Layout::template Row<float> partial(a.g, Layout::group(), a.cols, a.cols);
  RowReduce<Sums<2>, Layout::kSpread> reduce;
  Vec g[Blocks::kHeld];
  if (!Blocks::kHolds) blocks.each([&](int, int k) { partial.store(k, packed<float>(Vec()), like); });
  for (int64_t row = Layout::row(); row - threadIdx.y < a.rows; row += Layout::step()) {
    const bool mine = row < a.rows;
    const Row dh(a.dh, row, a.cols, a.cols);
    const float *alpha = a.alpha + row * a.blocks, *rstd = a.rstd + row * a.blocks;
    float dalpha[AttentionResiduals::kMostBlocks], along[AttentionResiduals::kMostBlocks];
    for (int n = 0; n < a.blocks; ++n) {
      Sums<2>::Value sums{};
      if (mine)
        blocks.each([&](int p, int k) {
          const Vec x = to_vec(blocks.load(n, row, k)), d = to_vec(dh.load(k, T(0), like)), u = blocks.u(p, k);
          unrolled<Blocks::kWidth>([&](int i) { sums.v[0] += x.v[i] * d.v[i], sums.v[1] += x.v[i] * u.v[i]; });
        });
      sums = reduce(sums);
      dalpha[n] = sums.v[0], along[n] = sums.v[1];
    }
    const float mean = mine ? AttentionResiduals::mean_from_heaviest(alpha, dalpha, a.blocks) : 0;
    for (int n = 0; mine && n < a.blocks; ++n) {
      const float r = rstd[n], of_u = alpha[n] * (dalpha[n] - mean) * r, of_v = of_u * r * r / a.cols * along[n];
      const Row dv(a.dv, n * a.rows + row, a.cols, a.cols);
      blocks.each([&](int p, int k) {
        const Vec x = to_vec(blocks.load(n, row, k));
        if (a.dv)
          dv.store(k, packed<T>(to_vec(dh.load(k, T(0), like)) * alpha[n] + blocks.u(p, k) * of_u + x * -of_v), like);
        if (Blocks::kHolds) g[p] = g[p] + x * of_u;
        else partial.store(k, packed<float>(to_vec(partial.load(k, 0.f, like)) + x * of_u), like);
      });
    }
  }
  if constexpr (Blocks::kHolds) {
    sum_over_rows(g);
    if (threadIdx.y == 0) blocks.each([&](int p, int k) { partial.store(k, packed<float>(g[p]), like); });
  }
}

template <class Args, class F>
void dispatch_weighted_rows(const Args& a, std::initializer_list<const void*> pointers, F f) {
  dispatch_rows<kPacks>(a.dtype, a.cols, pointers, {.few = 128, .most = kThreads},
                        [&]<class T, class Layout>(const RowThreads& t) {
                          if (a.weight_dtype == DType::F32) f.template operator()<T, float, Layout>(t);
                          else f.template operator()<T, T, Layout>(t);
                        });
}

}  // namespace

LIGER_REGISTER(attention_residuals_forward, [](const AttentionResidualsForward& a, Stream s) {
  dispatch_weighted_rows(a, {a.v, a.query, a.weight, a.h}, [&]<class T, class W, class Layout>(const RowThreads& t) {
    launch(forward_kernel<T, W, Layout>, t.of_rows(a.rows), s, a);
  });
});
LIGER_REGISTER(attention_residuals_backward, [](const AttentionResidualsBackward& a, Stream s) {
  dispatch_weighted_rows(
      a, {a.dh, a.v, a.query, a.weight, a.dv}, [&]<class T, class W, class Layout>(const RowThreads& t) {
        const int of_sums = int(t.threads.y / 2 * t.threads.x) * kPacks * Row<T>::kWidth * int(sizeof(float));
        launch(backward_kernel<T, W, Layout>, t.grid(a.partials, of_sums), s, a);
      });
});

}  // namespace liger::cuda::attention_residuals
