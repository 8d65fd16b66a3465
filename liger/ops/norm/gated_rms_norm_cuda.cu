#include "liger/core/cuda/staged_rows.cuh"
#include "liger/ops/norm/gated_rms_norm.h"
#include "liger/ops/norm/norm.cuh"

namespace liger::cuda::gated_rms_norm {
namespace {

constexpr int kThreads = 512;

/// act(gate) of a pack.
template <class T, class Vec>
__device__ Vec activated(const GatedRMSNorm& a, const Vec& gate) {
  return Vec::map([act = a.act](float x) { return gate_value<Math<T>>(act, x); }, gate);
}

/// x̂ · w of a pack, as it meets the gate.
template <class T, class Vec>
__device__ Vec weighted(const GatedRMSNorm& a, const Vec& xhat, const Vec& w) {
  const Vec n = norm::weighted<T>(xhat, w, a.casting);
  return a.rounds_product() ? round_to<T>(n) : n;
}

/// Pack k of the weight that row `row` meets.
template <class T, template <class> class R>
__device__ Vec<R<T>::kWidth> weight_of(const GatedRMSNorm& a, int64_t row, int k, const R<T>& like) {
  const int64_t group = row >> 32 ? row % a.groups : unsigned(row) % unsigned(a.groups);  // in 32 bits where it can be
  return norm::load_like(a.w, a.w_dtype, group, a.cols, k, like);
}

/// y, and rstd of each row.
/// A block has blockDim.y rows, or a cluster one; a thread has Layout's packs of x and of the gate, in registers. The
/// limit is memory: both are read once.
template <class T, class Layout>
__global__ void __launch_bounds__(kThreads, 2) forward_kernel(GatedRMSNormForward a) {
  await_previous();
  const int64_t row = Layout::row();
  const HeldRow<T, Layout, 2> rows(row, a.rows, a.cols, a.x, a.gate);
  RowReduce<Sum, Layout::kSpread> reduce;
  float squares = 0;
  rows.each([&](int, const auto& x, const auto& gate) {
    const auto u = a.gate_first ? x * activated<T>(a, gate) : x;
    squares += sum(u * u);
  });
  squares = reduce(squares);
  // Exact to a float's last place where that shows.
  const float rstd = sizeof(T) == 2 ? rsqrtf(squares * (1.f / a.cols) + a.eps) : 1 / sqrtf(squares / a.cols + a.eps);
  rows.each([&](int k, const auto& x, const auto& gate) {
    const auto w = weight_of(a, row, k, rows.like()), act = activated<T>(a, gate);
    rows.store(a.y, k,
               a.gate_first ? norm::weighted<T>(x * act * rstd, w, a.casting) : weighted<T>(a, x * rstd, w) * act);
  });
  if (threadIdx.x == 0 && row < a.rows) a.rstd[row] = rstd;
}

/// What both passes over a pack need.
template <class T, class Vec>
struct Gradient {
  Vec act, xhat, dn, g;  // g = dn · w, rounded, also where it meets a sum

  __device__ Gradient(const GatedRMSNorm& a, const Vec& x, const Vec& gate, const Vec& dy, const Vec& w, float rstd)
      : act(activated<T>(a, gate)),
        xhat((a.gate_first ? x * act : x) * rstd),
        dn(a.gate_first ? dy : dy * act),
        g(Vec::map([](float dn, float w) { return __fmul_rn(dn, w); }, dn, w)) {}

  /// put(v, matrix) writes a pack of dx or dgate.
  template <class Put>
  __device__ void finish(const GatedRMSNormBackward& a, const Vec& x, const Vec& gate, const Vec& dy, const Vec& w,
                         float rstd, float onto, Put put) const {
    const Vec du = Vec::map([=](float g, float xhat) { return rstd * (g - xhat * onto); }, g, xhat);
    if (a.dx) put(a.gate_first ? du * act : du, a.dx);
    if (!a.dgate) return;
    const Vec dact = a.gate_first ? du * x : dy * weighted<T>(a, xhat, w);
    put(dact * Vec::map([act = a.act](float x) { return gate_slope<Math<T>>(act, x); }, gate), a.dgate);
  }
};

/// dx, dgate, and the sums over a group's rows of dw.
/// A block, or a cluster, makes one partial sum: it walks along rows of a group, blockDim.y at once, of which a thread
/// has Layout's packs; registers keep their weights and column sums. Rows come through stages of shared memory and are
/// read there twice. The limit is memory.
template <class T, class Layout>
__global__ void __launch_bounds__(kThreads, 1) backward_kernel(GatedRMSNormBackward a) {
  await_previous();
  constexpr int kPacks = Layout::kPacks;
  using Row = typename Layout::template Row<T>;
  using Vec = cuda::Vec<Row::kWidth>;
  const int64_t index = Layout::group(), group = index / a.partials,
                first = (index % a.partials * blockDim.y + threadIdx.y) * a.groups + group,
                step = a.partials * blockDim.y * a.groups;
  StagedRows<T, Layout> rows(first, first, step, a.rows, a.rows, a.cols, 2, a.x, a.gate, a.dy);
  const Row like = rows.like;
  Vec w[kPacks], dw[kPacks];
  unrolled<kPacks>([&](int p) {
    if (const int k = Layout::pack(p); k < like.packs()) w[p] = weight_of(a, group, k, like);
  });
  RowReduce<Sum, Layout::kSpread> reduce;
  const auto rstd_of = [&](int64_t row) { return row < a.rows ? a.rstd[row] : 0; };
  float next_rstd = rstd_of(first);
  for (int64_t row = first; row - threadIdx.y * a.groups < a.rows; row += step) {
    const float rstd = norm::arrived({0, next_rstd}).rstd;
    const auto gradient = [&](int p) {
      return Gradient<T, Vec>(a, rows.get(0, p), rows.get(1, p), rows.get(2, p), w[p], rstd);
    };
    rows.advance();
    next_rstd = rstd_of(row + step);
    float sums = 0;
    unrolled<kPacks>([&](int p) {
      if (!rows.has(p)) return;
      const Gradient<T, Vec> d = gradient(p);
      sums += sum(d.g * d.xhat);
    });
    const float onto = reduce(sums) / a.cols;
    unrolled<kPacks>([&](int p) {
      if (!rows.has(p)) return;
      const Gradient<T, Vec> d = gradient(p);
      dw[p] = dw[p] + d.dn * d.xhat;
      d.finish(a, rows.get(0, p), rows.get(1, p), rows.get(2, p), w[p], rstd, onto,
               [&](const Vec& v, void* to) { rows.store(to, Layout::pack(p), v); });
    });
  }
  copies_done();
  norm::put_columns<Layout>(dw, a.dw, index, a.cols, like);
}

/// The same for longer rows, and of any alignment: a block walks along each row twice, from a cache, and its column
/// sums grow in memory.
template <class T>
__global__ void __launch_bounds__(kThreads) backward_long_kernel(GatedRMSNormBackward a) {
  await_previous();
  using Vec = cuda::Vec<Row<T>::kWidth>;
  const int64_t group = blockIdx.x / a.partials, first = blockIdx.x % a.partials * a.groups + group;
  RowReduce<Sum> reduce;
  for (int64_t row = first; row < a.rows; row += a.partials * a.groups) {
    const float rstd = a.rstd[row];
    const HeldRow<T, RowLayout<0, false>, 3> rows(row, a.rows, a.cols, a.x, a.gate, a.dy);
    float sums = 0;
    rows.each([&](int k, const Vec& x, const Vec& gate, const Vec& dy) {
      const Gradient<T, Vec> d(a, x, gate, dy, weight_of(a, group, k, rows.like()), rstd);
      sums += sum(d.g * d.xhat);
    });
    const float onto = reduce(sums) / a.cols;
    rows.each([&](int k, const Vec& x, const Vec& gate, const Vec& dy) {
      const Vec w = weight_of(a, group, k, rows.like());
      const Gradient<T, Vec> d(a, x, gate, dy, w, rstd);
      norm::add_columns(a.dw, d.dn * d.xhat, row == first, a.cols, k, rows.like());
      d.finish(a, x, gate, dy, w, rstd, onto, [&](const Vec& v, void* to) { rows.store(to, k, v); });
    });
  }
}

template <class T>
void backward(const GatedRMSNormBackward& a, Stream s) {
  constexpr int kPacks = 2, kMatrices = 3, kStages = 2, kBytes = kStages * kMatrices * kPacks * 16;  // a thread's
  const Threads block{.few = kThreads / 2, .most = std::min(kThreads, shared_bytes_of_block() / kBytes / 32 * 32)};
  const int64_t sums = a.groups * a.partials;
  if (whole_packs<T>(a.cols, {a.x, a.gate, a.w, a.dy, a.dx, a.dgate, a.dw}) &&
      dispatch_layout<T, kPacks, true, true>(a.cols, block, [&]<class Layout>(const RowThreads& t) {
        launch(backward_kernel<T, Layout>, t.grid(sums, StagedRows<T, Layout>::bytes(t.threads, kMatrices, kStages)), s,
               a);
      }))
    return;
  launch(backward_long_kernel<T>, {.blocks = sums, .threads = kThreads}, s, a);
}

}  // namespace

LIGER_REGISTER(gated_rms_norm_forward, [](const GatedRMSNormForward& a, Stream s) {
  const Threads block{.few = 128, .most = kThreads, .spread = 256};
  dispatch_rows<4>(a.dtype, a.cols, {a.x, a.gate, a.w, a.y}, block, [&]<class T, class Layout>(const RowThreads& t) {
    launch(forward_kernel<T, Layout>, t.of_rows(a.rows), s, a);
  });
});
LIGER_REGISTER(gated_rms_norm_backward, [](const GatedRMSNormBackward& a, Stream s) {
  dispatch(a.dtype, [&]<class T>() { backward<T>(a, s); });
});

}  // namespace liger::cuda::gated_rms_norm
