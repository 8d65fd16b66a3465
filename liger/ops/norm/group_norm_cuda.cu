#include "liger/core/cuda/stream.cuh"
#include "liger/ops/norm/group_norm.h"

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

/// What a thread has of a row that fits into the registers of a block, or of a cluster.
template <class T>
inline constexpr int kItems = 64 / sizeof(T);

/// f(i, its channel) for a thread's packs, each of one channel, that begin at item i.
template <class Tile, class F>
__device__ void each_pack(const GroupNorm& a, const Place& at, F f) {
#pragma unroll
  for (int i = 0; i < Tile::kItems; i += Tile::kWidth)
    if (at.whole<Tile>(i)) f(i, unsigned(Tile::column(i, at)) / unsigned(a.spatial));
}

template <class T, class Tile>
__device__ Place place(const GroupNorm& a) {
  return Place(Tile::row(), a.samples * a.groups, a.channels * a.spatial);
}

template <class T, class Tile>
__global__ void __maxnreg__(80) forward_kernel(GroupNormForward a) {
  await_previous();
  const Place at = place<T, Tile>(a);
  const unsigned group = unsigned(at.row) % unsigned(a.groups);
  RowReduce<Sums<2>, Tile::kSpread> reduce;
  Tile x = load<T, Tile>(a.x, at);
  const float about = reduce({sum(x)}).v[0] / at.cols;
  const Stats of_row = stats(a, about, reduce(moments(x, about, at)), at.cols);
  each_pack<Tile>(a, at, [&](int i, int channel) {
    const float w = of_channel<T>(a, a.w, group, channel, 1), b = of_channel<T>(a, a.b, group, channel, 0);
#pragma unroll
    for (int j = 0; j < Tile::kWidth; ++j) x.v[i + j] = (x.v[i + j] - of_row.mean) * of_row.rstd * w + b;
  });
  store<T>(x, a.y, at);
  if (threadIdx.x == 0 && at.row < at.rows) a.mean[at.row] = of_row.mean, a.rstd[at.row] = of_row.rstd;
}

/// Each pack leaves its part of dw and db in shared memory, where the segments of channels find them.
template <class T, class Tile>
__global__ void __maxnreg__(96) backward_kernel(GroupNormBackward a) {
  await_previous();
  constexpr int kWidth = Tile::kWidth;
  using Projections = Sums<2>;
  using Part = Projections::Value;
  const Place at = place<T, Tile>(a);
  const unsigned group = unsigned(at.row) % unsigned(a.groups), sample = unsigned(at.row) / unsigned(a.groups);
  const bool present = at.row < at.rows;
  const float mean = present ? a.mean[at.row] : 0, rstd = present ? a.rstd[at.row] : 0;
  const auto x = fetch<T, Tile>(a.x, at), dy = fetch<T, Tile>(a.dy, at);
  const auto unpack = [&](int i, float (&xhat)[kWidth], float (&g)[kWidth]) {
    x.packs[i / kWidth].to_float(xhat), dy.packs[i / kWidth].to_float(g);
#pragma unroll
    for (float& v : xhat) v = (v - mean) * rstd;
  };
  const int threads = int(blockDim.x), packs = threads * Tile::kItems / kWidth;
  Part* parts = shared_memory<Part>() + int(threadIdx.y) * packs;
  Part sums{};
  each_pack<Tile>(a, at, [&](int i, int channel) {
    float xhat[kWidth], g[kWidth];
    unpack(i, xhat, g);
    Part part{};
#pragma unroll
    for (int j = 0; j < kWidth; ++j) part.v[0] += g[j], part.v[1] += g[j] * xhat[j];
    parts[i / kWidth * threads + int(threadIdx.x)] = part;
    const float w = of_channel<T>(a, a.w, group, channel, 1);
    sums.v[0] += w * part.v[0], sums.v[1] += w * part.v[1];
  });
  RowReduce<Projections, Tile::kSpread> reduce;
  sums = reduce(sums);
  __syncthreads();
  // A segment's parts are in one block.
  const int lanes = min(threads, 32), lane = int(threadIdx.x) % lanes, a_channel = int(a.segments()),
            begin = Tile::kSpread ? cluster_rank() * packs * kWidth : 0;
  const int first = begin / int(kGroupSegment),
            last = Tile::kSpread ? min(first + packs * kWidth / int(kGroupSegment), int(a.channels) * a_channel)
                                 : int(a.channels) * a_channel;
  for (int s = first + int(threadIdx.x) / lanes; (a.dw || a.db) && s < last; s += threads / lanes) {
    const int channel = s / a_channel, part = s % a_channel,
              from = channel * int(a.spatial) + part * int(kGroupSegment) - begin;
    Part total{};
    for (int k = lane; k < min(int(kGroupSegment), int(a.spatial) - part * int(kGroupSegment)) / kWidth; k += lanes)
      total = Projections()(total, parts[from / kWidth + k]);
    total = reduce_lanes<Projections>(total, lanes);
    const int64_t to = ((int64_t(sample) * a_channel + part) * a.groups + group) * a.channels + channel;
    if (lane > 0 || !present) continue;
    if (a.db) a.db[to] = total.v[0];
    if (a.dw) a.dw[to] = total.v[1];
  }
  if (a.dx) {
    const float mean_g = sums.v[0] / at.cols, onto = sums.v[1] / at.cols;
    Raw<T, Tile> dx{};
    each_pack<Tile>(a, at, [&](int i, int channel) {
      float xhat[kWidth], d[kWidth];
      unpack(i, xhat, d);
      const float w = of_channel<T>(a, a.w, group, channel, 1);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) d[j] = rstd * (d[j] * w - mean_g - xhat[j] * onto);
      dx.packs[i / kWidth] = Pack<T, kWidth>::from_float(d);
    });
    store<T>(dx, a.dx, at);
  }
}

/// Calls f.operator()<Tile>(tiling) where rows are that short, and the packs of a channel its own.
template <class T, class F>
bool dispatch_row(const GroupNorm& a, const Memory& memory, F&& f) {
  constexpr Threads block{.few = 128, .most = 512};
  const int64_t cols = a.channels * a.spatial;
  // The blocks of a cluster meet between two segments.
  if (a.spatial % (16 / sizeof(T)) != 0 || (cols > block.most * kItems<T> && a.spatial % kGroupSegment != 0))
    return false;
  return dispatch_tile<T, kItems<T>, 0, kItems<T> * 32 % kGroupSegment == 0>(cols, block, memory, f);
}

/// A longer row, or one whose channels do not end with a pack — a group of a sample — of kMatrices matrices on a block,
/// or on the blocks of a cluster. Its work comes in segments of channels, each for a team of up to 32 lanes. A thread
/// meets the same packs in every pass: they wait in its slots of shared memory, as far as those go, and all are on
/// their way there at once.
template <class T, int kMatrices>
struct Segments {
  using Pack = typename Row<T>::Pack;
  struct Packs {
    Pack of[kMatrices];
  };
  static constexpr int kWidth = Row<T>::kWidth, kTeams = 8;
  static constexpr int kSlotBytes = 56 * 1024;  // of a block: three share an SM
  const void* matrices[kMatrices];
  int64_t rows;
  int channels, spatial, a_channel, count;  // segments
  int lanes = 1, teams, rounds, cluster = 1, slots;

  template <class... M>
  explicit Segments(const GroupNorm& a, const M*... matrices)
      : matrices{matrices...},
        rows(a.samples * a.groups),
        channels(int(a.channels)),
        spatial(int(a.spatial)),
        a_channel(int((a.spatial + kGroupSegment - 1) / kGroupSegment)),
        count(channels * a_channel) {
    const int packs = int(std::min(a.spatial, kGroupSegment)) / kWidth + 2;
    while (lanes < packs && lanes < 32) lanes *= 2;
    const int a_segment = std::max(1, (packs - 3 + lanes) / lanes), a_warp = 32 / lanes,
              most = kTeams * a_warp;  // slots; teams
    const int64_t enough = 2 * multiprocessors(current_device());
    const auto bytes = [&](int blocks) {
      return int64_t(count + blocks * most - 1) / (blocks * most) * a_segment * most * lanes * int(sizeof(Packs));
    };
    while (has_clusters() && cluster < 8 && count > cluster * a_warp &&
           (bytes(cluster) > kSlotBytes || rows * cluster < enough))
      cluster *= 2;
    rounds = (count + cluster * most - 1) / (cluster * most);
    teams = (count + cluster * rounds - 1) / (cluster * rounds);  // as few as do it in so many rounds
    teams = (teams + a_warp - 1) / a_warp * a_warp;
    slots = std::min(rounds * (a_segment + 1), kSlotBytes / int(threads() * sizeof(Packs)));
  }

  __host__ __device__ int threads() const { return teams * lanes; }
  Grid grid() const {
    return {.blocks = rows * cluster,
            .threads = unsigned(threads()),
            .shared_bytes = int(slots * threads() * sizeof(Packs)),
            .cluster = cluster};
  }
  __device__ unsigned row() const { return blockIdx.x / unsigned(cluster); }
  __device__ int lane() const { return threadIdx.x % lanes; }

  /// One of this team's, if there is one.
  struct Segment {
    int channel, part;
    Row<T> like;  // of the first matrix
    bool present;
  };

  /// To be called before the first pass.
  __device__ void fetch() const {
    each_segment([&](const Segment& segment, int slot) {
      each_pack(segment, [&](int u, int k) {
#pragma unroll
        for (int m = 0; m < kMatrices; ++m)
          if (slot + u < slots) of(m, segment).copy(k, T(0), segment.like, kept(slot + u, m));
      });
    });
    copies_done();
  }

  /// f(segment, each_pack), where each_pack(g) calls g(k, packs) for this lane's; all lanes of a warp come along.
  template <class F>
  __device__ void pass(F f) const {
    each_segment([&](const Segment& segment, int slot) {
      f(segment, [&](auto g) {
        each_pack(segment, [&](int u, int k) {
          Packs v;
#pragma unroll
          for (int m = 0; m < kMatrices; ++m)
            v.of[m] = slot + u < slots ? *kept(slot + u, m) : of(m, segment).load(k, T(0), segment.like);
          g(k, v);
        });
      });
    });
  }

  /// A segment of any matrix.
  __device__ Row<T> of(const void* matrix, int channel, int part) const {
    const int begin = part * int(kGroupSegment);
    return Row<T>(static_cast<const T*>(matrix) + begin, int64_t(row()) * channels + channel, spatial,
                  min(int(kGroupSegment), spatial - begin));
  }
  __device__ Row<T> of(int m, const Segment& s) const { return m == 0 ? s.like : of(matrices[m], s.channel, s.part); }

 private:
  __device__ Pack* kept(int slot, int m) const {
    return shared_memory<Pack>() + (slot * kMatrices + m) * threads() + threadIdx.x;
  }

  /// f(segment, its first slot).
  template <class F>
  __device__ void each_segment(F f) const {
    int slot = 0;
    for (int round = 0; round < rounds; ++round) {
      const int i = (round * cluster + (cluster > 1 ? cluster_rank() : 0)) * teams + int(threadIdx.x) / lanes;
      const bool present = i < count;
      const int channel = present ? i / a_channel : 0, part = present ? i % a_channel : 0;
      const Segment segment{channel, part, of(matrices[0], channel, part), present};
      f(segment, slot);
      slot += (segment.like.packs() - lane() + lanes - 1) / lanes;
    }
  }

  /// f(which of this lane's it is, k).
  template <class F>
  __device__ void each_pack(const Segment& segment, F f) const {
    const int packs = segment.present ? segment.like.packs() : 0;
#pragma unroll 1  // the code that serves any alignment, several times over, would not stay in the instruction cache
    for (int u = 0, k = lane(); k < packs; ++u, k += lanes) f(u, k);
  }
};

template <class T, bool kSpread>
__global__ void __launch_bounds__(256, 4) forward_long_kernel(GroupNormForward a, Segments<T, 1> segments) {
  await_previous();
  constexpr int kWidth = Row<T>::kWidth;
  const unsigned row = segments.row(), group = row % unsigned(a.groups);
  const float n = float(a.channels * a.spatial);
  using Both = Sums<2>;
  RowReduce<Both, kSpread> reduce;
  segments.fetch();
  float sum = 0;
  Both::Value about_mean{};
  segments.pass([&](const auto&, auto each_pack) {
    each_pack([&](int, const auto& packs) {
      float x[kWidth];
      packs.of[0].to_float(x);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) sum += x[j];
    });
  });
  const float about = reduce({sum}).v[0] / n;
  segments.pass([&](const auto& segment, auto each_pack) {
    each_pack([&](int k, const auto& packs) {
      float x[kWidth];
      packs.of[0].to_float(x);
      if (!segment.like.whole(k))
#pragma unroll
        for (int j = 0; j < kWidth; ++j)
          if (const int c = segment.like.column(k) + j; c < 0 || c >= segment.like.n) x[j] = about;
#pragma unroll
      for (int j = 0; j < kWidth; ++j) about_mean = Both()(about_mean, {x[j] - about, (x[j] - about) * (x[j] - about)});
    });
  });
  const Stats of_row = stats(a, about, reduce(about_mean), n);
  segments.pass([&](const auto& segment, auto each_pack) {
    if (!segment.present) return;
    const float w = of_channel<T>(a, a.w, group, segment.channel, 1),
                b = of_channel<T>(a, a.b, group, segment.channel, 0);
    const Row<T> y = segments.of(a.y, segment.channel, segment.part);
    each_pack([&](int k, const auto& packs) {
      float x[kWidth];
      packs.of[0].to_float(x);
#pragma unroll
      for (float& v : x) v = (v - of_row.mean) * of_row.rstd * w + b;
      y.store(k, x, segment.like);
    });
  });
  if (threadIdx.x == 0) a.mean[row] = of_row.mean, a.rstd[row] = of_row.rstd;
}

template <class T, bool kSpread>
__global__ void __launch_bounds__(256, 3) backward_long_kernel(GroupNormBackward a, Segments<T, 2> segments) {
  await_previous();
  constexpr int kWidth = Row<T>::kWidth;
  const unsigned row = segments.row(), sample = row / unsigned(a.groups), group = row % unsigned(a.groups);
  const float n = float(a.channels * a.spatial), mean = a.mean[row], rstd = a.rstd[row];
  using Projections = Sums<2>;
  Projections::Value sums{};
  segments.fetch();
  segments.pass([&](const auto& segment, auto each_pack) {
    Projections::Value part{};
    each_pack([&](int, const auto& packs) {
      float x[kWidth], dy[kWidth];
      packs.of[0].to_float(x), packs.of[1].to_float(dy);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) part.v[0] += dy[j], part.v[1] += dy[j] * ((x[j] - mean) * rstd);
    });
    part = reduce_lanes<Projections>(part, segments.lanes);
    if (!segment.present || segments.lane() > 0) return;
    const float w = of_channel<T>(a, a.w, group, segment.channel, 1);
    sums.v[0] += w * part.v[0], sums.v[1] += w * part.v[1];
    const int64_t to = ((sample * a.segments() + segment.part) * a.groups + group) * a.channels + segment.channel;
    if (a.db) a.db[to] = part.v[0];
    if (a.dw) a.dw[to] = part.v[1];
  });
  RowReduce<Projections, kSpread> reduce;
  sums = reduce(sums);
  const float mean_g = sums.v[0] / n, onto = sums.v[1] / n;
  if (a.dx)
    segments.pass([&](const auto& segment, auto each_pack) {
      if (!segment.present) return;
      const float w = of_channel<T>(a, a.w, group, segment.channel, 1);
      const Row<T> dx = segments.of(a.dx, segment.channel, segment.part);
      each_pack([&](int k, const auto& packs) {
        float x[kWidth], d[kWidth];
        packs.of[0].to_float(x), packs.of[1].to_float(d);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) d[j] = rstd * (d[j] * w - mean_g - (x[j] - mean) * rstd * onto);
        dx.store(k, d, segment.like);
      });
    });
}

}  // namespace

LIGER_REGISTER(group_norm_forward, [](const GroupNormForward& a, Stream s) {
  dispatch(a.dtype, [&]<class T>() {
    if (dispatch_row<T>(a, {{a.x, (const void*)a.y}, {}}, [&]<class Tile>(Tiling t) {
          launch(forward_kernel<T, Tile>, t.of_rows(a.samples * a.groups), s, a);
        }))
      return;
    const Segments<T, 1> segments(a, a.x);
    launch(segments.cluster > 1 ? forward_long_kernel<T, true> : forward_long_kernel<T, false>, segments.grid(), s, a,
           segments);
  });
});
LIGER_REGISTER(group_norm_backward, [](const GroupNormBackward& a, Stream s) {
  dispatch(a.dtype, [&]<class T>() {
    if (dispatch_row<T>(a, {{a.x, a.dy, (const void*)a.dx}, {}}, [&]<class Tile>(Tiling t) {
          const int parts = int(t.threads.x * t.threads.y) * Tile::kItems / Tile::kWidth;
          launch(backward_kernel<T, Tile>, t.of_rows(a.samples * a.groups, parts * int(2 * sizeof(float))), s, a);
        }))
      return;
    const Segments<T, 2> segments(a, a.x, a.dy);
    launch(segments.cluster > 1 ? backward_long_kernel<T, true> : backward_long_kernel<T, false>, segments.grid(), s, a,
           segments);
  });
});

}  // namespace liger::cuda::group_norm
