#include "liger/core/cuda/staged_rows.cuh"
#include "liger/ops/norm/norm.cuh"

namespace liger::cuda::norm {
namespace {

/// The rows of a partial sum, within its modulation, which has rows [begin, end): of each thread every step-th from
/// first on, all of which begin alike between 16-byte boundaries (row_partials).
struct Walk {
  int64_t first, begin, end, step;

  /// Where the block's first row is when this thread's is `row`, and in the beginning.
  __device__ int64_t of_block(int64_t row) const { return row - threadIdx.y * (step / blockDim.y); }
  __device__ int64_t of_block() const { return of_block(first); }

  template <Kind kKind>
  static __device__ Walk of(const NormBackward& a, int64_t index) {
    const int64_t sets = kKind == Kind::SharedModulation ? a.modulations : 1, partials = a.partials / sets,
                  rows = kKind == Kind::SharedModulation ? a.per_modulation : a.rows, set = index / partials;
    return {set * rows + index % partials + threadIdx.y * partials, set * rows, (set + 1) * rows,
            partials * blockDim.y};
  }
};

template <Kind kKind>
__device__ Stats stats_of(const NormBackward& a, int64_t row, int64_t end) {
  return row < end ? Stats{centred(kKind) ? a.mean[row] : 0, a.rstd[row]} : Stats{};
}

/// w + offset and, where the rows of a partial sum have a modulation together, that times 1 + scale.
/// load(p, dtype, row): the same columns of row `row` of a matrix, or of a vector.
template <Kind kKind, class Vec, class Load>
__device__ Vec weight(const NormBackward& a, int64_t row, Load load) {
  const Vec w = (a.w ? load(a.w, a.w_dtype, 0) : Vec{}) + (a.w ? a.offset : 1);
  if constexpr (kKind != Kind::SharedModulation) return w;
  else return w * (load(a.scale, a.modulation_dtype, modulation_of(a, row)) + 1);
}

/// A row's own gradients of scale and shift: put(v, p) writes a pack of p.
template <class T, class Vec, Kind kKind, class Put>
__device__ void put_modulation(const NormBackward& a, const Gradient<T, Vec, kKind>& d, const Vec& dy, const Vec& w,
                               Put put) {
  if (a.dshift) put(dy, a.dshift);
  if (a.dscale) put(dy * round_to<T>(weighted<T>(d.xhat, w, a.casting)), a.dscale);
}

/// The weights of a thread's packs in shared memory, as floats: neighbours read neighbouring 16 bytes.
template <class T, int kPacks>
struct SharedWeights {
  static constexpr int kQuads = Row<T>::kWidth / 4;
  float4* begin;

  static int bytes(dim3 threads) { return int(threads.x * kPacks * kQuads * sizeof(float4)); }
  __device__ float4& at(int pack, int quad) const {
    return begin[(pack * kQuads + quad) * int(blockDim.x) + int(threadIdx.x)];
  }
  /// With those of this thread's packs of a row; `row` is one of those that have its modulation.
  template <class Layout, Kind kKind, class Like>
  __device__ void fill(const NormBackward& a, int64_t row, const Like& like) const {
    unrolled<kPacks>([&](int p) {
      const int k = Layout::pack(p);
      if (k >= like.packs()) return;
      const auto w = weight<kKind, Vec<Row<T>::kWidth>>(
          a, row, [&](const void* v, DType dtype, int64_t of) { return load_like(v, dtype, of, a.cols, k, like); });
      unrolled<kQuads>([&](int q) { at(p, q) = {w.v[4 * q], w.v[4 * q + 1], w.v[4 * q + 2], w.v[4 * q + 3]}; });
    });
  }
  __device__ Vec<Row<T>::kWidth> get(int pack) const {
    Vec<Row<T>::kWidth> w;
    unrolled<kQuads>([&](int q) {
      const float4 v = at(pack, q);
      w.v[4 * q] = v.x, w.v[4 * q + 1] = v.y, w.v[4 * q + 2] = v.z, w.v[4 * q + 3] = v.w;
    });
    return w;
  }
};

/// So few that each has registers for the column sums of its packs. A row between 16-byte boundaries has a pack more.
constexpr int backward_threads(bool aligned) { return aligned ? 512 : 576; }

/// dx, and the sums over rows of dw and db.
/// A block, or a cluster, makes one partial sum: it walks along rows, blockDim.y at once, of which a thread has
/// Layout's packs; it keeps their column sums in registers. Rows come through stages of shared memory. What makes a
/// row's projections makes its dx, too: registers keep it of two whole packs, otherwise it is recomputed. The limit is
/// memory: x and dy are read once.
template <class T, class Layout, Kind kKind>
__global__ void __launch_bounds__(backward_threads(Layout::kAligned), 1) backward_kernel(NormBackward a, int stages) {
  await_previous();
  constexpr int kPacks = Layout::kPacks;
  constexpr bool kKeep = kPacks <= 2 && Layout::kAligned;
  using Vec = cuda::Vec<cuda::Row<T>::kWidth>;
  using Gradient = norm::Gradient<T, Vec, kKind>;
  const int64_t index = Layout::group();
  const Walk walk = Walk::of<kKind>(a, index);
  const bool own = kKind == Kind::Rms && a.scale;
  StagedRows<T, Layout> rows(walk.of_block(), walk.first, walk.step, walk.end, a.rows, a.cols, stages, a.x, a.dy,
                             own ? a.scale : a.ds);
  using Row = typename Layout::template Row<T>;
  const Row like = rows.like;
  const SharedWeights<T, kPacks> weights{rows.template behind<float4>()};
  weights.template fill<Layout, kKind>(a, walk.begin, like);
  const auto gradient = [&](int p, Stats stats) {
    Vec dn = rows.get(1, p);
    if (own) dn = dn * (rows.get(2, p) + 1);
    return Gradient(rows.get(0, p), dn, weights.get(p), stats);
  };
  RowReduce<Projections<kKind>, Layout::kSpread> reduce;
  Vec dw[kPacks], db[kPacks];
  const auto add = [&](int p, const Gradient& d) {
    dw[p] = Vec::map([](float dw, float dn, float xhat) { return fmaf(dn, xhat, dw); }, dw[p], d.dn, d.xhat);
    if constexpr (has_db(kKind)) db[p] = db[p] + d.dn;
  };
  Gradient kept[kKeep ? kPacks : 1];
  Stats next_stats = stats_of<kKind>(a, walk.first, walk.end);
  for (int64_t row = walk.first; walk.of_block(row) < walk.end; row += walk.step) {
    const Stats stats = arrived(next_stats);
    rows.advance();
    next_stats = stats_of<kKind>(a, row + walk.step, walk.end);
    typename Projections<kKind>::Value sums{};
    unrolled<kPacks>([&](int p) {
      if (!rows.has(p)) return;
      const Gradient d = gradient(p, stats);
      sums = Projections<kKind>()(sums, d.project());
      if constexpr (has_db(kKind)) add(p, d);  // two sums a column leave no registers for dn until dx is made
      if constexpr (kKeep) kept[p] = d;
    });
    sums = reduce(sums);
    unrolled<kPacks>([&](int p) {
      if (!rows.has(p)) return;
      if constexpr (!kKeep) kept[0] = gradient(p, stats);
      const Gradient& d = kept[kKeep ? p : 0];
      const auto put = [&](const Vec& v, void* matrix) {
        Row(matrix, row, a.cols, a.cols).store(Layout::pack(p), packed<T>(v), like);
      };
      if constexpr (!has_db(kKind)) add(p, d);
      if (own) put_modulation(a, d, rows.get(1, p), weights.get(p), put);
      if (!a.dx) return;
      const Vec dx = d.dx(a, sums, stats);
      put(!own && a.ds ? dx + rows.get(2, p) : dx, a.dx);
    });
  }
  copies_done();
  put_columns<Layout>(dw, a.dw, index, a.cols, like);
  if constexpr (has_db(kKind)) put_columns<Layout>(db, a.db, index, a.cols, like);
}

/// The same for longer rows, of any alignment: a block walks along each row twice, from a cache, and its column sums
/// grow in memory.
template <class T, Kind kKind>
__global__ void __launch_bounds__(kLongRowThreads) backward_long_kernel(NormBackward a) {
  await_previous();
  using Vec = cuda::Vec<Row<T>::kWidth>;
  using Gradient = norm::Gradient<T, Vec, kKind>;
  const bool own = kKind == Kind::Rms && a.scale;
  const Walk walk = Walk::of<kKind>(a, blockIdx.x);
  RowReduce<Projections<kKind>> reduce;
  for (int64_t row = walk.first; row < walk.end; row += walk.step) {
    const Stats stats = stats_of<kKind>(a, row, walk.end);
    const Row<T> like(a.x, row, a.cols, a.cols);
    const auto pack = [&](int k) {
      return [&, k](const void* p, DType dtype, int64_t row) { return load_like(p, dtype, row, a.cols, k, like); };
    };
    const auto gradient = [&](int k) {
      const auto of = pack(k);
      Vec dn = of(a.dy, a.dtype, row);
      if (own) dn = dn * (of(a.scale, a.modulation_dtype, modulation_of(a, row)) + 1);
      return Gradient(of(a.x, a.dtype, row), dn, weight<kKind, Vec>(a, row, of), stats);
    };
    typename Projections<kKind>::Value sums{};
    for_each_pack_of(like, [&](int k) {  // dy is 0 outside the row
      sums = Projections<kKind>()(sums, gradient(k).project());
    });
    sums = reduce(sums);
    for_each_pack_of(like, [&](int k) {
      const Gradient d = gradient(k);
      const auto of = pack(k);
      add_columns(a.dw, d.dn * d.xhat, row == walk.first, a.cols, k, like);
      if constexpr (has_db(kKind)) add_columns(a.db, d.dn, row == walk.first, a.cols, k, like);
      if (own)
        put_modulation(a, d, of(a.dy, a.dtype, row), weight<kKind, Vec>(a, row, of), [&](const Vec& v, void* p) {
          if (a.modulation_dtype == DType::F32) Row<float>(p, row, a.cols, a.cols).store(k, v.v, like);
          else Row<T>(p, row, a.cols, a.cols).store(k, v.v, like);
        });
      if (!a.dx) return;
      const Vec dx = d.dx(a, sums, stats);
      Row<T>(a.dx, row, a.cols, a.cols).store(k, (a.ds ? dx + of(a.ds, a.dtype, row) : dx).v, like);
    });
  }
}

/// Launches backward_kernel where registers and shared memory hold rows, of a cluster where kSpread.
template <class T, Kind kKind, int kPacks, bool kAligned, bool kSpread>
bool backward_in_registers(const NormBackward& a, int matrices, Stream s) {
  constexpr int kThreads = backward_threads(kAligned);
  const int a_thread = kPacks * (2 * matrices + int(sizeof(float)) / int(sizeof(T))) * 16,  // bytes, in two stages
      most = std::min(kThreads, shared_bytes_of_block() / a_thread / 32 * 32);
  const Threads block{.few = a.cols > 4096 ? kThreads : kThreads / 2, .most = most, .spread = most};
  return dispatch_layout<T, kPacks, kAligned, kSpread>(a.cols, block, [&]<class Layout>(const RowThreads& t) {
    const auto bytes = [&](int stages) {
      return StagedRows<T, Layout>::bytes(t.threads, matrices, stages) + SharedWeights<T, kPacks>::bytes(t.threads);
    };
    const int blocks = std::max(1, kThreads / int(t.threads.x * t.threads.y));  // on a multiprocessor
    const int stages = bytes(3) <= std::min(shared_bytes_of_block(), shared_bytes() / blocks - 2048) ? 3 : 2;
    launch(backward_kernel<T, Layout, kKind>, t.grid(a.partials, bytes(stages)), s, a, stages);
  });
}

template <class T, Kind kKind>
void backward(const NormBackward& a, Stream s) {
  const bool own = a.own_modulation(),
             aligned = whole_packs<T>(a.cols, {a.dy, a.ds, a.x, a.dx, a.w, a.scale, a.dw, a.db, a.dscale, a.dshift});
  const void* third = own ? a.scale : a.ds;
  const bool alike = (!own || a.modulation_dtype == a.dtype) && misalignment<T>(a.dy) == misalignment<T>(a.x) &&
                     (!third || misalignment<T>(third) == misalignment<T>(a.x));
  const int matrices = third ? 3 : 2;
  if (alike && (aligned ? backward_in_registers<T, kKind, 2, true, false>(a, matrices, s) ||
                              backward_in_registers<T, kKind, 4, true, true>(a, matrices, s)
                        : backward_in_registers<T, kKind, 2, false, false>(a, matrices, s)))
    return;
  launch(backward_long_kernel<T, kKind>, {.blocks = a.partials, .threads = kLongRowThreads}, s, a);
}

}  // namespace

LIGER_REGISTER(norm_backward, [](const NormBackward& a, Stream s) {
  if (a.rows == 0) return;
  dispatch(a.dtype, [&]<class T>() {
    if (a.centred) backward<T, Kind::Layer>(a, s);
    else if (a.shared_modulation()) backward<T, Kind::SharedModulation>(a, s);
    else backward<T, Kind::Rms>(a, s);
  });
});

}  // namespace liger::cuda::norm
