#include "liger/core/cuda/reduce.cuh"
#include "liger/core/cuda/stream.cuh"
#include "liger/ops/norm/group_norm.h"

namespace liger::cuda::group_norm {
namespace {

/// A row — a group of a sample — on a block, or on the blocks of a cluster. Its work comes in segments of channels, each for a team of up
/// to 32 lanes. A thread meets the same packs in every pass: what it has loaded stays in its slots of shared memory, as far as they go.
template <class T, class Value>
struct Segments {
  static constexpr int kWidth = Row<T>::kWidth, kTeams = 8;
  static constexpr int kPacks = kGroupSegment / 32 / kWidth + 1;  // a lane's of a segment, one more for an odd beginning
  static constexpr int kSlotBytes = 56 * 1024;                    // of a block: three share an SM
  int64_t rows;
  int channels, spatial, a_channel, count;  // segments
  int lanes = 1, teams, rounds, cluster = 1, slots;

  explicit Segments(const GroupNorm& a)
      : rows(a.samples * a.groups), channels(int(a.channels)), spatial(int(a.spatial)), a_channel(int((a.spatial + kGroupSegment - 1) / kGroupSegment)), count(channels * a_channel) {
    const int packs = int(std::min(a.spatial, kGroupSegment)) / kWidth + 2;
    while (lanes < packs && lanes < 32) lanes *= 2;
    const int a_segment = std::max(1, (packs - 3 + lanes) / lanes), a_warp = 32 / lanes, most = kTeams * a_warp;  // slots; teams
    const int64_t enough = 2 * multiprocessors(current_device());
    const auto bytes = [&](int blocks) { return int64_t(count + blocks * most - 1) / (blocks * most) * a_segment * most * lanes * int(sizeof(Value)); };
    while (has_clusters() && cluster < 8 && count > cluster * a_warp && (bytes(cluster) > kSlotBytes || rows * cluster < enough)) cluster *= 2;
    rounds = (count + cluster * most - 1) / (cluster * most);
    teams = (count + cluster * rounds - 1) / (cluster * rounds);  // as few as do it in so many rounds
    teams = (teams + a_warp - 1) / a_warp * a_warp;
    slots = std::min(rounds * (a_segment + 1), kSlotBytes / int(threads() * sizeof(Value)));
  }

  __host__ __device__ int threads() const { return teams * lanes; }
  Grid grid() const { return {.blocks = rows * cluster, .threads = unsigned(threads()), .shared_bytes = int(slots * threads() * sizeof(Value)), .cluster = cluster}; }
  __device__ int64_t row() const { return blockIdx.x / cluster; }
  __device__ int lane() const { return threadIdx.x % lanes; }

  /// One of this team's, if there is one.
  struct Segment {
    int channel, part;
    Row<T> like;           // of the first matrix
    bool present;
  };

  /// f(segment, each pack), where each_pack(g) calls g(k, value) for this lane's packs; all lanes of a warp come along.
  template <class Load, class F>
  __device__ void pass(const void* matrix, bool again, Load load, F f) const {
    Value* kept = shared_memory<Value>() + threadIdx.x;
    int slot = 0;
    for (int round = 0; round < rounds; ++round) {
      const int i = (round * cluster + (cluster > 1 ? cluster_rank() : 0)) * teams + int(threadIdx.x) / lanes;
      const int channel = i / a_channel, begin = i % a_channel * int(kGroupSegment);
      const bool present = i < count;
      const Segment segment{channel, i % a_channel, of(matrix, channel, begin, present), present};
      f(segment, [&](auto g) {
        const int packs = present ? segment.like.packs() : 0;
        Value v[kPacks];
#pragma unroll
        for (int u = 0; u < kPacks; ++u)
          if (const int k = u * lanes + lane(); k < packs) v[u] = again && slot + u < slots ? kept[(slot + u) * threads()] : load(segment, begin, k);
#pragma unroll
        for (int u = 0; u < kPacks; ++u)
          if (const int k = u * lanes + lane(); k < packs) {
            if (!again && slot + u < slots) kept[(slot + u) * threads()] = v[u];
            g(k, v[u]);
          }
        slot += (packs - lane() + lanes - 1) / lanes;
      });
    }
  }

  /// A segment of any matrix.
  __device__ Row<T> of(const void* matrix, int channel, int begin, bool present = true) const {
    return Row<T>(static_cast<const T*>(matrix) + begin, row() * channels + (present ? channel : 0), spatial, min(int(kGroupSegment), spatial - begin));
  }

  template <class Sums>
  __device__ typename Sums::Value of_team(typename Sums::Value v) const {
    for (int other = lanes / 2; other > 0; other /= 2) v = Sums()(v, Sums::shuffle(v, other));
    return v;
  }
};

/// w or b of a channel.
template <class T>
__device__ float of_channel(const GroupNorm& a, const void* v, int64_t row, int channel, float absent) {
  const int64_t c = row % a.groups * a.channels + channel;
  return !v ? absent : a.w_dtype == DType::F32 ? static_cast<const float*>(v)[c] : float(static_cast<const T*>(v)[c]);
}

template <class T, bool kSpread>
__global__ void __launch_bounds__(256, 4) forward_kernel(GroupNormForward a, Segments<T, typename Row<T>::Pack> segments) {
  constexpr int kWidth = Row<T>::kWidth;
  const int64_t row = segments.row();
  const float n = float(a.channels * a.spatial);
  const auto load = [&](const auto& segment, int, int k) { return segment.like.load(k, T(0)); };
  RowReduce<Sum, kSpread> reduce;
  float sum = 0, squares = 0;
  segments.pass(a.x, false, load, [&](const auto&, auto each_pack) {
    each_pack([&](int, const auto& pack) {
      float x[kWidth];
      pack.to_float(x);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) sum += x[j];
    });
  });
  const float mean = reduce(sum) / n;
  segments.pass(a.x, true, load, [&](const auto& segment, auto each_pack) {
    each_pack([&](int k, const auto& pack) {
      float x[kWidth];
      pack.to_float(x);
#pragma unroll
      for (int j = 0; j < kWidth; ++j)
        if (const int c = segment.like.column(k) + j; c >= 0 && c < segment.like.n) squares += (x[j] - mean) * (x[j] - mean);
    });
  });
  const float rstd = rsqrtf(reduce(squares) / n + a.eps);
  segments.pass(a.x, true, load, [&](const auto& segment, auto each_pack) {
    if (!segment.present) return;
    const float w = of_channel<T>(a, a.w, row, segment.channel, 1), b = of_channel<T>(a, a.b, row, segment.channel, 0);
    const Row<T> y = segments.of(a.y, segment.channel, segment.part * int(kGroupSegment));
    each_pack([&](int k, const auto& pack) {
      float x[kWidth];
      pack.to_float(x);
#pragma unroll
      for (float& v : x) v = (v - mean) * rstd * w + b;
      y.store(k, x, segment.like);
    });
  });
  if (threadIdx.x == 0) a.mean[row] = mean, a.rstd[row] = rstd;
  reduce.finish();
}

template <class T>
struct Pair { typename Row<T>::Pack x, dy; };

template <class T, bool kSpread>
__global__ void __launch_bounds__(256, 3) backward_kernel(GroupNormBackward a, Segments<T, Pair<T>> segments) {
  constexpr int kWidth = Row<T>::kWidth;
  const int64_t row = segments.row(), sample = row / a.groups;
  const float n = float(a.channels * a.spatial), mean = a.mean[row], rstd = a.rstd[row];
  const auto load = [&](const auto& segment, int begin, int k) { return Pair<T>{segment.like.load(k, T(0)), segments.of(a.dy, segment.channel, begin).load(k, T(0), segment.like)}; };
  using Projections = Sums<2>;
  Projections::Value sums{};
  segments.pass(a.x, false, load, [&](const auto& segment, auto each_pack) {
    Projections::Value part{};
    each_pack([&](int, const Pair<T>& pair) {
      float x[kWidth], dy[kWidth];
      pair.x.to_float(x), pair.dy.to_float(dy);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) part.v[0] += dy[j], part.v[1] += dy[j] * ((x[j] - mean) * rstd);
    });
    part = segments.template of_team<Projections>(part);
    if (!segment.present || segments.lane() > 0) return;
    const float w = of_channel<T>(a, a.w, row, segment.channel, 1);
    sums.v[0] += w * part.v[0], sums.v[1] += w * part.v[1];
    const int64_t to = ((sample * a.segments() + segment.part) * a.groups + row % a.groups) * a.channels + segment.channel;
    if (a.db) a.db[to] = part.v[0];
    if (a.dw) a.dw[to] = part.v[1];
  });
  RowReduce<Projections, kSpread> reduce;
  sums = reduce(sums);
  const float mean_g = sums.v[0] / n, onto = sums.v[1] / n;
  if (a.dx) segments.pass(a.x, true, load, [&](const auto& segment, auto each_pack) {
    if (!segment.present) return;
    const float w = of_channel<T>(a, a.w, row, segment.channel, 1);
    const Row<T> dx = segments.of(a.dx, segment.channel, segment.part * int(kGroupSegment));
    each_pack([&](int k, const Pair<T>& pair) {
      float x[kWidth], d[kWidth];
      pair.x.to_float(x), pair.dy.to_float(d);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) d[j] = rstd * (d[j] * w - mean_g - (x[j] - mean) * rstd * onto);
      dx.store(k, d, segment.like);
    });
  });
  reduce.finish();
}

}  // namespace

LIGER_REGISTER(group_norm_forward, [](const GroupNormForward& a, Stream s) {
  dispatch(a.dtype, [&]<class T>() {
    const Segments<T, typename Row<T>::Pack> segments(a);
    launch(segments.cluster > 1 ? forward_kernel<T, true> : forward_kernel<T, false>, segments.grid(), s, a, segments);
  });
});
LIGER_REGISTER(group_norm_backward, [](const GroupNormBackward& a, Stream s) {
  dispatch(a.dtype, [&]<class T>() {
    const Segments<T, Pair<T>> segments(a);
    launch(segments.cluster > 1 ? backward_kernel<T, true> : backward_kernel<T, false>, segments.grid(), s, a, segments);
  });
});

}  // namespace liger::cuda::group_norm
