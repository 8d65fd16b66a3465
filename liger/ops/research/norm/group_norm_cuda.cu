#include "liger/core/cuda/row_layout.cuh"
#include "liger/ops/research/norm/group_norm.h"

namespace liger::cuda::group_norm {
namespace {

/// w or b of a channel.
template <class T>
__device__ float of_channel(const GroupNorm& a, const void* v, int64_t group, int channel, float absent) {
  const int64_t c = group * a.channels + channel;
  return !v ? absent : a.w_dtype == DType::F32 ? static_cast<const float*>(v)[c] : float(static_cast<const T*>(v)[c]);
}

struct Stats {
  float mean, rstd;
};

/// Of Σ (x − about) and Σ (x − about)², where about is the mean but for the rounding of its sum: of a constant row, 0
/// remains.
__device__ inline Stats stats(const GroupNormForward& a, float about, Sums<2>::Value s, float n) {
  const float d = s.v[0] / n;
  return {about + d, rsqrtf(fmaxf(0, s.v[1] - s.v[0] * d) / n + a.eps)};
}

constexpr int kPacks = 4, kThreads = 512;  // of a thread; of a block

/// f(p, k, its channel) for this thread's packs k of a row, each of one channel.
template <class Layout, class T, class F>
__device__ void each_pack(const GroupNorm& a, const AlignedRow<T>& row, F f) {
  unrolled<Layout::kPacks>([&](int p) {
    if (const int k = Layout::pack(p); k < row.packs()) f(p, k, unsigned(row.column(k)) / unsigned(a.spatial));
  });
}

/// This thread's row of a matrix.
template <class Layout, class T>
__device__ AlignedRow<T> row_of(const GroupNorm& a, const void* matrix) {
  const int64_t row = Layout::row(), cols = a.channels * a.spatial;
  return {matrix, row, cols, row < a.samples * a.groups ? cols : 0};
}

/// y, and mean and rstd of each row: a group of a sample.
/// A block has blockDim.y rows, or a cluster one. A thread keeps Layout's packs of a row in registers as they came, so
/// that 64 registers are enough, and a multiprocessor has a thousand threads; the sums that it takes are first Σ x,
/// then those about that mean. The limit is memory: x is read once.
template <class T, class Layout>
__global__ void __launch_bounds__(kThreads, 2) forward_kernel(GroupNormForward a) {
  await_previous();
  using Vec = cuda::Vec<Row<T>::kWidth>;
  const int64_t index = Layout::row();
  const AlignedRow<T> in = row_of<Layout, T>(a, a.x), out = row_of<Layout, T>(a, a.y);
  const unsigned group = unsigned(index) % unsigned(a.groups);
  const float n = float(a.channels * a.spatial);
  RowReduce<Sums<2>, Layout::kSpread> reduce;
  typename Row<T>::Pack x[kPacks];
  float all = 0;
  each_pack<Layout>(a, in, [&](int p, int k, int) { x[p] = in.load(k, T(0)); });
  each_pack<Layout>(a, in, [&](int p, int, int) { all += sum(to_vec(x[p])); });
  const float about = reduce({all}).v[0] / n;
  Sums<2>::Value about_mean{};
  each_pack<Layout>(a, in, [&](int p, int, int) {
    const Vec d = to_vec(x[p]) + -about;
    about_mean = Sums<2>()(about_mean, {sum(d), sum(d * d)});
  });
  const Stats of_row = stats(a, about, reduce(about_mean), n);
  each_pack<Layout>(a, in, [&](int p, int k, int channel) {
    const float w = of_channel<T>(a, a.w, group, channel, 1), b = of_channel<T>(a, a.b, group, channel, 0);
    const auto y = [=](float x) { return (x - of_row.mean) * of_row.rstd * w + b; };
    out.store(k, packed<T>(Vec::map(y, to_vec(x[p]))), in);
  });
  if (threadIdx.x == 0 && index < a.samples * a.groups) a.mean[index] = of_row.mean, a.rstd[index] = of_row.rstd;
}

using Projections = Sums<2>;  // of g and g · x̂

/// Adds up the parts of each segment of channels, which the packs of a block have left in shared memory. begin, packs:
/// of the row, what the block has.
template <int kWidth>
__device__ void sum_segments(const GroupNormBackward& a, const Projections::Value* parts, int64_t row, bool spread,
                             int begin, int packs) {
  const unsigned group = unsigned(row) % unsigned(a.groups), sample = unsigned(row) / unsigned(a.groups);
  const int threads = int(blockDim.x), lanes = min(threads, 32), lane = int(threadIdx.x) % lanes,
            a_channel = int(a.segments()), first = begin / int(kGroupSegment), all = int(a.channels) * a_channel,
            last = spread ? min(first + packs * kWidth / int(kGroupSegment), all) : all;
  for (int s = first + int(threadIdx.x) / lanes; s < last; s += threads / lanes) {
    const int channel = s / a_channel, part = s % a_channel,
              from = channel * int(a.spatial) + part * int(kGroupSegment) - begin;
    Projections::Value total{};
    for (int k = lane; k < min(int(kGroupSegment), int(a.spatial) - part * int(kGroupSegment)) / kWidth; k += lanes)
      total = Projections()(total, parts[from / kWidth + k]);
    total = reduce_lanes<Projections>(total, lanes);
    const int64_t to = ((int64_t(sample) * a_channel + part) * a.groups + group) * a.channels + channel;
    if (lane > 0 || row >= a.samples * a.groups) continue;
    if (a.db) a.db[to] = total.v[0];
    if (a.dw) a.dw[to] = total.v[1];
  }
}

/// dx, and dw and db of each segment of channels.
/// As forward_kernel, with x and dy in registers. A pack leaves its sums for dw and db in shared memory; when dx is
/// written, a warp adds up those of a segment.
template <class T, class Layout>
__global__ void __launch_bounds__(kThreads, 2) backward_kernel(GroupNormBackward a) {
  await_previous();
  constexpr int kWidth = Row<T>::kWidth;
  using Vec = cuda::Vec<kWidth>;
  const int64_t index = Layout::row();
  const AlignedRow<T> in = row_of<Layout, T>(a, a.x), upstream = row_of<Layout, T>(a, a.dy),
                      out = row_of<Layout, T>(a, a.dx);
  const unsigned group = unsigned(index) % unsigned(a.groups);
  const bool present = index < a.samples * a.groups;
  const float mean = present ? a.mean[index] : 0, rstd = present ? a.rstd[index] : 0, n = float(a.channels * a.spatial);
  typename Row<T>::Pack x[kPacks], dy[kPacks];
  each_pack<Layout>(a, in, [&](int p, int k, int) { x[p] = in.load(k, T(0)), dy[p] = upstream.load(k, T(0), in); });
  const auto normalised = [&](int p) { return (to_vec(x[p]) + -mean) * rstd; };
  const int packs = int(blockDim.x) * kPacks;
  auto* parts = shared_memory<Projections::Value>() + int(threadIdx.y) * packs;
  Projections::Value sums{};
  each_pack<Layout>(a, in, [&](int p, int, int channel) {
    const Vec g = to_vec(dy[p]);
    const Projections::Value part{sum(g), sum(g * normalised(p))};
    parts[p * int(blockDim.x) + int(threadIdx.x)] = part;
    const float w = of_channel<T>(a, a.w, group, channel, 1);
    sums.v[0] += w * part.v[0], sums.v[1] += w * part.v[1];
  });
  RowReduce<Projections, Layout::kSpread> reduce;
  sums = reduce(sums);
  const float mean_g = sums.v[0] / n, onto = sums.v[1] / n;
  if (a.dx)
    each_pack<Layout>(a, in, [&](int p, int k, int channel) {
      const float w = of_channel<T>(a, a.w, group, channel, 1);
      const auto dx = [=](float dy, float xhat) { return rstd * (dy * w - mean_g - xhat * onto); };
      out.store(k, packed<T>(Vec::map(dx, to_vec(dy[p]), normalised(p))), in);
    });
  __syncthreads();
  // A segment's parts are in one block.
  if (a.dw || a.db)
    sum_segments<kWidth>(a, parts, index, Layout::kSpread, Layout::kSpread ? cluster_rank() * packs * kWidth : 0,
                         packs);
}

/// Calls f.operator()<RowLayout>(threads) where rows are that short, and the packs of a channel its own.
template <class T, class F>
bool dispatch_row(const GroupNorm& a, bool aligned, F&& f) {
  constexpr int kItems = kPacks * Row<T>::kWidth;
  const int64_t cols = a.channels * a.spatial;
  // The blocks of a cluster meet between two segments.
  const bool spread = cols > kThreads * kItems;
  if (!aligned || a.spatial % Row<T>::kWidth != 0 ||
      (spread && (a.spatial % kGroupSegment != 0 || kItems * 32 % kGroupSegment != 0)))
    return false;
  return dispatch_layout<T, kPacks, true, true>(cols, {.few = 128, .most = kThreads}, f);
}

constexpr int kLongThreads = 512;  // of a block, at most

/// A longer row, or one whose channels do not end with a pack, on the blocks of a cluster: a team of up to 32 lanes has
/// a segment of a channel at a time. Each pass reads it again, from a cache.
template <class T>
struct Segments {
  int64_t rows;
  int channels, spatial, per_channel;
  int lanes = 1, cluster = 1, threads;

  explicit Segments(const GroupNorm& a)
      : rows(a.samples * a.groups), channels(int(a.channels)), spatial(int(a.spatial)), per_channel(int(a.segments())) {
    const int packs = int(Row<T>::packs(std::min(a.spatial, kGroupSegment), false));
    while (lanes < packs && lanes < 32) lanes *= 2;
    const int64_t enough = 2 * multiprocessors(current_device());
    while (has_clusters() && cluster < 8 && rows * cluster < enough && count() > cluster * (kLongThreads / lanes))
      cluster *= 2;
    threads = int(std::min<int64_t>(kLongThreads, round_up(int64_t(ceil_div(count(), cluster)) * lanes, 32)));
  }
  __host__ __device__ int count() const { return channels * per_channel; }
  __device__ int teams() const { return threads / lanes; }
  Grid grid() const { return {.blocks = rows * cluster, .threads = unsigned(threads), .cluster = cluster}; }

  __device__ unsigned row() const { return blockIdx.x / unsigned(cluster); }
  __device__ int lane() const { return int(threadIdx.x) % lanes; }

  /// A team's segment; `present` is false where the other teams of its warp have one more.
  struct Segment {
    int channel, part;
    bool present;
  };

  /// f(segment) for each segment of this team; all lanes of a warp come along.
  template <class F>
  __device__ void each(F f) const {
    const int step = cluster * teams(), first = (cluster > 1 ? cluster_rank() : 0) * teams();
    for (int base = first; base < count(); base += step) {
      const int i = base + int(threadIdx.x) / lanes;
      f(Segment{i / per_channel, i % per_channel, i < count()});
    }
  }

  /// A segment of a matrix, and f(k) for its packs k that are this lane's.
  __device__ Row<T> of(const void* matrix, Segment s) const {
    const int begin = s.part * int(kGroupSegment);
    return Row<T>(static_cast<const T*>(matrix) + begin, int64_t(row()) * channels + s.channel, spatial,
                  s.present ? min(int(kGroupSegment), spatial - begin) : 0);
  }
  template <class F>
  __device__ void each_pack(const Row<T>& like, F f) const {
    const int packs = like.n > 0 ? like.packs() : 0;
#pragma unroll 1  // the code that serves any alignment, several times over, would not stay in the instruction cache
    for (int k = lane(); k < packs; k += lanes) f(k);
  }
};

/// The same for such rows.
template <class T>
__global__ void __launch_bounds__(kLongThreads, 2) forward_long_kernel(GroupNormForward a, Segments<T> segments) {
  await_previous();
  using Vec = cuda::Vec<Row<T>::kWidth>;
  const unsigned row = segments.row(), group = row % unsigned(a.groups);
  const float n = float(a.channels * a.spatial);
  using Both = Sums<2>;
  RowReduce<Both, true> reduce;
  float all = 0;
  segments.each([&](auto segment) {
    const Row<T> x = segments.of(a.x, segment);
    segments.each_pack(x, [&](int k) { all += sum(to_vec(x.load(k, T(0)))); });
  });
  const float about = reduce({all}).v[0] / n;
  Both::Value about_mean{};
  segments.each([&](auto segment) {
    const Row<T> x = segments.of(a.x, segment);
    segments.each_pack(x, [&](int k) {
      const Vec v = to_vec(x.load(k, T(0)));
      unrolled<Vec::kWidth>([&](int j) {
        const float d = j >= x.begin(k) && j < x.end(k) ? v.v[j] - about : 0;
        about_mean = Both()(about_mean, {d, d * d});
      });
    });
  });
  const Stats of_row = stats(a, about, reduce(about_mean), n);
  segments.each([&](auto segment) {
    if (!segment.present) return;
    const float w = of_channel<T>(a, a.w, group, segment.channel, 1),
                b = of_channel<T>(a, a.b, group, segment.channel, 0);
    const Row<T> x = segments.of(a.x, segment), y = segments.of(a.y, segment);
    const auto f = [=](float x) { return (x - of_row.mean) * of_row.rstd * w + b; };
    segments.each_pack(x, [&](int k) { y.store(k, Vec::map(f, to_vec(x.load(k, T(0)))).v, x); });
  });
  if (threadIdx.x == 0) a.mean[row] = of_row.mean, a.rstd[row] = of_row.rstd;
}

/// The same backward: the lanes that have a segment add up its dw and db in their first pass.
template <class T>
__global__ void __launch_bounds__(kLongThreads, 2) backward_long_kernel(GroupNormBackward a, Segments<T> segments) {
  await_previous();
  using Vec = cuda::Vec<Row<T>::kWidth>;
  const unsigned row = segments.row(), sample = row / unsigned(a.groups), group = row % unsigned(a.groups);
  const float n = float(a.channels * a.spatial), mean = a.mean[row], rstd = a.rstd[row];
  /// f(k, dy, x̂) for this lane's packs; dy is 0 outside the row.
  const auto each_pack = [&](const Row<T>& x, const Row<T>& dy, auto f) {
    segments.each_pack(x, [&](int k) { f(k, to_vec(dy.load(k, T(0), x)), (to_vec(x.load(k, T(0))) + -mean) * rstd); });
  };
  Projections::Value sums{};
  segments.each([&](auto segment) {
    Projections::Value part{};
    each_pack(segments.of(a.x, segment), segments.of(a.dy, segment),
              [&](int, const Vec& dy, const Vec& xhat) { part = Projections()(part, {sum(dy), sum(dy * xhat)}); });
    part = reduce_lanes<Projections>(part, segments.lanes);
    if (!segment.present || segments.lane() > 0) return;
    const float w = of_channel<T>(a, a.w, group, segment.channel, 1);
    sums = Projections()(sums, {w * part.v[0], w * part.v[1]});
    const int64_t to = ((sample * a.segments() + segment.part) * a.groups + group) * a.channels + segment.channel;
    if (a.db) a.db[to] = part.v[0];
    if (a.dw) a.dw[to] = part.v[1];
  });
  RowReduce<Projections, true> reduce;
  sums = reduce(sums);
  const float mean_g = sums.v[0] / n, onto = sums.v[1] / n;
  if (!a.dx) return;
  segments.each([&](auto segment) {
    if (!segment.present) return;
    const float w = of_channel<T>(a, a.w, group, segment.channel, 1);
    const Row<T> x = segments.of(a.x, segment), dx = segments.of(a.dx, segment);
    const auto f = [=](float dy, float xhat) { return rstd * (dy * w - mean_g - xhat * onto); };
    each_pack(x, segments.of(a.dy, segment),
              [&](int k, const Vec& dy, const Vec& xhat) { dx.store(k, Vec::map(f, dy, xhat).v, x); });
  });
}

}  // namespace

LIGER_REGISTER(group_norm_forward, [](const GroupNormForward& a, Stream s) {
  dispatch(a.dtype, [&]<class T>() {
    if (dispatch_row<T>(a, aligned16({a.x, a.y}), [&]<class Layout>(const RowThreads& t) {
          launch(forward_kernel<T, Layout>, t.of_rows(a.samples * a.groups), s, a);
        }))
      return;
    const Segments<T> segments(a);
    launch(forward_long_kernel<T>, segments.grid(), s, a, segments);
  });
});
LIGER_REGISTER(group_norm_backward, [](const GroupNormBackward& a, Stream s) {
  dispatch(a.dtype, [&]<class T>() {
    if (dispatch_row<T>(a, aligned16({a.x, a.dy, a.dx}), [&]<class Layout>(const RowThreads& t) {
          const int parts = int(t.threads.x * t.threads.y) * kPacks;
          launch(backward_kernel<T, Layout>, t.of_rows(a.samples * a.groups, parts * int(sizeof(Projections::Value))),
                 s, a);
        }))
      return;
    const Segments<T> segments(a);
    launch(backward_long_kernel<T>, segments.grid(), s, a, segments);
  });
});

}  // namespace liger::cuda::group_norm
