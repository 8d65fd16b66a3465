#include "liger/ops/norm/norm.cuh"

namespace liger::cuda::norm {
namespace {

/// The rows of a partial sum, within its modulation: of each thread every step-th from first on; those of neighbours in
/// threadIdx.y are `apart`.
struct Walk {
  int64_t first, end, step, apart;

  __device__ bool on(int64_t row) const {
    return row - threadIdx.y * apart < end;
  }  // for one of the block's threads at least

  /// kApart: a block's rows do not follow one another, so that all of a partial sum begin alike: what is not a multiple
  /// of 8 apart is alone.
  template <Norm kNorm, bool kApart = false>
  static __device__ Walk of(const NormBackward& a, int64_t index) {
    const int64_t sets = kNorm == Norm::Modulated ? a.modulations : 1, partials = a.partials / sets,
                  rows = kNorm == Norm::Modulated ? a.per_modulation : a.rows;
    const int64_t set = index / partials, apart = kApart ? partials : 1;
    return {set * rows + index % partials * (kApart ? 1 : blockDim.y) + threadIdx.y * apart, (set + 1) * rows,
            partials * blockDim.y, apart};
  }
};

/// The sums over the rows of a partial sum: dw and db column by column, a thread's own of dalpha.
template <class Tile>
struct Columns {
  Tile dw, db;
  float dalpha = 0;
};

/// One row's way back, or a piece of it: first `project`, whose sums over the row `finish` needs, and `collect`.
template <class T, class Tile, Norm kNorm>
struct Backward {
  using Projections = Sums<centred(kNorm) ? 2 : 1>;
  const NormBackward& a;
  Tile x, dy, w;  // w: for Modulated w · (1 + scale)
  Stats stats;
  float alpha;
  Tile scale{};  // of Each
  Tile xhat{}, g{};

  __device__ Tile dn() const { return kNorm == Norm::Each ? dy * (scale + 1) : dy; }

  __device__ typename Projections::Value project() {
    xhat = normalised<T, Tile, kNorm>(x, stats, alpha);
    g = Tile::map([](float dn, float w) { return __fmul_rn(dn, w); }, dn(), w);  // rounded, also where it meets a sum
    typename Projections::Value sums{};
    if constexpr (!tanh_of(kNorm)) sums.v[0] = sum(g * xhat);
    if constexpr (centred(kNorm)) sums.v[1] = sum(g);
    return sums;
  }

  /// Adds to the sums over rows.
  template <class At>
  __device__ void collect(const At& at, Columns<Tile>& columns) {
    if constexpr (kNorm == Norm::Each) {
      const auto put = [&](const Tile& t, void* to) {
        if (to) a.modulation_dtype == a.dtype ? store<T, true>(t, to, at) : store<float, true>(t, to, at);
      };
      put(dy, a.dshift), put(dy * round_to<T>(weighted<T, kNorm>(xhat, w, a.casting)), a.dscale);
    }
    columns.dw = Tile::map([](float dw, float dn, float xhat) { return fmaf(dn, xhat, dw); }, columns.dw, dn(), xhat);
    if constexpr (biased(kNorm) || kNorm == Norm::Modulated) columns.db = columns.db + dy;
    if constexpr (tanh_of(kNorm)) columns.dalpha += sum(x * slope());
  }

  template <class At>
  __device__ void finish(const typename Projections::Value& sums, const Tile& ds, const At& at) {
    Tile dx;
    if constexpr (tanh_of(kNorm)) {
      dx = slope() * alpha;
    } else {
      const float onto = sums.v[0] * a.inv_cols, mean = centred(kNorm) ? sums.v[centred(kNorm)] * a.inv_cols : 0,
                  rstd = stats.rstd;
      if constexpr (sizeof(T) == 2) {
        const float by = -onto * rstd, plus = -mean * rstd;
        dx = Tile::map(
            [=](float g, float xhat) { return fmaf(g, rstd, centred(kNorm) ? fmaf(xhat, by, plus) : xhat * by); }, g,
            xhat);
      } else {  // g − mean(g) is 0 where it should be
        dx = Tile::map([=](float g, float xhat) { return rstd * (g - mean - xhat * onto); }, g, xhat);
      }
    }
    if constexpr (kNorm == Norm::Added) dx = dx + ds;
    if (a.dx) store<T>(dx, a.dx, at);
  }

  /// tanh' · g
  __device__ Tile slope() const {
    return Tile::map([](float t, float g) { return (1 - t * t) * g; }, xhat, g);
  }
};

template <Norm kNorm>
__device__ Stats stats_of(const NormBackward& a, int64_t row, int64_t rows) {
  const bool present = !tanh_of(kNorm) && row < rows;
  return {present && centred(kNorm) ? a.mean[row] : 0, present ? a.rstd[row] : 0};
}

__device__ inline float offset_of(const NormBackward& a) { return a.w ? a.offset : 1; }

/// The weight that the rows of a partial sum meet, for which the given one is `plus` short.
template <class T, class W, Norm kNorm, class Tile, class At>
__device__ Tile weight(const NormBackward& a, const At& at, float plus) {
  Tile w = load_loose<W, Tile>(a.w, at.vector(a.w)) + plus;
  if constexpr (kNorm == Norm::Modulated)
    w = w * (modulation<T, Tile>(a, a.scale, at.of(modulation_of<kNorm>(a, at.row), a.modulations)) + 1);
  return w;
}

/// f(which of a Columns, where its partial sums go) for those that are wanted.
template <Norm kNorm, class F>
__device__ void each_column_sum(const NormBackward& a, F f) {
  if (a.dw) f([](auto& columns) -> auto& { return columns.dw; }, a.dw);
  if constexpr (biased(kNorm) || kNorm == Norm::Modulated)
    if (a.db) f([](auto& columns) -> auto& { return columns.db; }, a.db);
}

constexpr int kFewThreads = 512;  // of short rows

/// dalpha of a partial sum, from all of its threads.
template <bool kSpread>
__device__ void store_dalpha(const NormBackward& a, float sum, int64_t index) {
  if (!a.dalpha) return;
  __shared__ float of_rows[kFewThreads];
  RowReduce<Sum, kSpread> reduce;
  sum = reduce(sum);
  if (threadIdx.x == 0) of_rows[threadIdx.y] = sum;
  __syncthreads();
  if (threadIdx.x == 0 && threadIdx.y == 0 && (!kSpread || cluster_rank() == 0)) {
    for (int y = 1; y < int(blockDim.y); ++y) sum += of_rows[y];
    a.dalpha[index] = sum;
  }
}

/// What backward_kernel has in shared memory: rows in flight, and, resident there, the weight, and what a thread
/// keeps for what the tile leaves out.
template <class T, class W, class Tile, Norm kNorm, int kPieces>
struct BackwardShared {
  static constexpr bool kThird = kNorm == Norm::Each || kNorm == Norm::Added;
  using Weight =
      std::conditional_t<kNorm == Norm::Modulated || kPieces <= 2, float, W>;  // as floats, where there is room
  struct alignas(16) OfEdge {
    float w, dw, db;
  };
  static constexpr int kWeights = kPieces * int(sizeof(Raw<Weight, Tile>)) / 16;
  static constexpr int kDepth =
      kPieces == 2 && !kThird && !tanh_of(kNorm) ? 3 : 2;  // measured: slower for the others, and forward
  using Pipeline = cuda::Pipeline<T, Tile, kThird ? 3 : 2, kPieces, kWeights + Tile::kEdged, kDepth>;

  static __device__ Pipeline rows(const NormBackward& a, const Walk& walk) {
    if constexpr (kThird)
      return Pipeline(walk.first, walk.step, walk.end, a.cols, a.x, a.dy, kNorm == Norm::Each ? a.scale : a.ds);
    else return Pipeline(walk.first, walk.step, walk.end, a.cols, a.x, a.dy);
  }
};

/// Few threads, so that each has registers for the column sums of its pieces, but for short rows, of one piece.
constexpr int kBackwardThreads = 512;
constexpr int backward_registers(int pieces) { return pieces == 1 ? 64 : 128; }

/// The block of a partial sum keeps column sums in registers; its next row is in flight to shared memory while it
/// works on one.
template <class T, class W, class Tile, Norm kNorm, int kPieces>
__global__ void __maxnreg__(backward_registers(kPieces)) backward_kernel(NormBackward a) {
  await_previous();
  constexpr bool kKeep = kPieces <= 2;  // registers allow to keep what `project` makes
  using Backward = norm::Backward<T, Tile, kNorm>;
  using Projections = typename Backward::Projections;
  using Shared = BackwardShared<T, W, Tile, kNorm, kPieces>;
  using Weight = typename Shared::Weight;
  const float alpha = tanh_of(kNorm) ? number(a.alpha) : 0;
  const int64_t index = Tile::group();
  const Walk walk = Walk::of<kNorm, Tile::kEdged>(a, index);
  const int64_t first = walk.first;
  auto pipeline = Shared::rows(a, walk);
  RowReduce<Projections, Tile::kSpread> reduce;
  Columns<Tile> columns[kPieces];
  constexpr bool kWhole =
      std::is_same_v<Weight, float> || biased(kNorm);  // its offset, of which the latter have none, is in it
  for_each_piece<kPieces>([&](int piece) {
    pipeline.template resident<Raw<Weight, Tile>>(piece) =
        packed<Weight>(weight<T, W, kNorm, Tile>(a, pipeline.at(piece).of(first, walk.end), kWhole ? offset_of(a) : 0));
  });
  using EdgeTile = cuda::Tile<1, 1>;
  const auto of_edge = [&]() ->
      typename Shared::OfEdge& { return pipeline.template resident<typename Shared::OfEdge>(Shared::kWeights); };
  if constexpr (Tile::kEdged)
    if (pipeline.edge >= 0)
      of_edge() = {weight<T, W, kNorm, EdgeTile>(a, pipeline.edge_at().of(first, walk.end), offset_of(a)).v[0]};
  Stats next_stats = stats_of<kNorm>(a, first, walk.end);
  for (int64_t row = first; walk.on(Tile::kEdged ? pipeline.row + pipeline.step : row);
       row += walk.step) {  // the same, for which those have no registers
    const Stats stats = next_stats;
    pipeline.advance();
    next_stats = stats_of<kNorm>(a, (Tile::kEdged ? pipeline.row : row) + walk.step, walk.end);
    const auto of_piece = [&](int piece) {
      return [&, piece](int matrix) { return to_tile(pipeline.get(matrix, piece)); };
    };
    const auto edge = [&](auto matrix) { return pipeline.get_edge(matrix); };
    const auto projected = [&](auto get, auto w, typename Projections::Value& sums) {
      norm::Backward<T, decltype(w), kNorm> b{
          .a = a, .x = get(0), .dy = get(1), .w = w, .stats = stats, .alpha = alpha};
      if constexpr (kNorm == Norm::Each) b.scale = get(2);
      sums = Projections()(sums, b.project());
      return b;
    };
    const auto projected_piece = [&](int piece, typename Projections::Value& sums) {
      const Tile w = to_tile(pipeline.template resident<Raw<Weight, Tile>>(piece));
      return projected(of_piece(piece), kWhole ? w : w + offset_of(a), sums);
    };
    const auto projected_edge = [&](auto& sums) { return projected(edge, EdgeTile{of_edge().w}, sums); };
    const auto finish = [&](auto get, auto& b, const typename Projections::Value& sums, const auto& at) {
      decltype(b.x) ds;
      if constexpr (kNorm == Norm::Added)
        if (a.ds) ds = get(2);
      b.finish(sums, ds, at);
    };
    typename Projections::Value sums{}, again{};
    Tile xhat[kPieces], g[kPieces];
    for_each_piece<kPieces>([&](int piece) {
      Backward b = projected_piece(piece, sums);
      b.collect(pipeline.at(piece), columns[piece]);
      xhat[piece] = b.xhat, g[piece] = b.g;
      if constexpr (tanh_of(kNorm)) finish(of_piece(piece), b, sums, pipeline.at(piece));
    });
    if constexpr (Tile::kEdged)
      if (pipeline.has_edge()) {
        auto b = projected_edge(sums);
        auto& kept = of_edge();
        Columns<EdgeTile> sum{.dw = {kept.dw}, .db = {kept.db}};
        b.collect(pipeline.edge_at(), sum);
        kept.dw = sum.dw.v[0], kept.db = sum.db.v[0], columns[0].dalpha += sum.dalpha;
        if constexpr (tanh_of(kNorm)) finish(edge, b, sums, pipeline.edge_at());
      }
    if constexpr (!tanh_of(kNorm)) {
      sums = reduce(sums);
      for_each_piece<kPieces>([&](int piece) {
        if constexpr (kKeep) {
          Backward b{.a = a, .stats = stats, .alpha = alpha, .xhat = xhat[piece], .g = g[piece]};
          finish(of_piece(piece), b, sums, pipeline.at(piece));
        } else {
          Backward b = projected_piece(piece, again);
          finish(of_piece(piece), b, sums, pipeline.at(piece));
        }
      });
      if constexpr (Tile::kEdged)
        if (pipeline.has_edge()) {
          auto b = projected_edge(again);
          finish(edge, b, sums, pipeline.edge_at());
        }
    }
  }
  copies_done();  // the last one's zeros too, where sums meet now
  Columns<EdgeTile> edge_columns{};
  if constexpr (Tile::kEdged)
    if (pipeline.edge >= 0) edge_columns.dw = {of_edge().dw}, edge_columns.db = {of_edge().db};
  each_column_sum<kNorm>(a, [&](auto part, float* partials) {
    // A block makes one partial sum. Half of its rows' sums meet the other half's, again and again.
    constexpr int kItems = kPieces * Tile::kItems;
    const auto met = [&](int y, int i,
                         int thread) -> float& {  // of threads side by side, packs of columns are in different banks
      return shared_memory<float>()[(y * (kItems + Tile::kEdged) + i) *
                                        (int(blockDim.x) + (Tile::kEdged ? 32 / Tile::kWidth : 0)) +
                                    thread];
    };
    const auto each = [&](int from, int n, auto f) {
      __syncthreads();
      const int y = int(threadIdx.y) - from;
      if (unsigned(y) >= unsigned(n)) return;
      for_each_piece<kPieces>([&](int piece) {
#pragma unroll
        for (int i = 0; i < Tile::kItems; ++i)
          f(part(columns[piece]).v[i], met(y, piece * Tile::kItems + i, threadIdx.x));
      });
      if constexpr (Tile::kEdged) f(part(edge_columns).v[0], met(y, kItems, threadIdx.x));
    };
    const auto leave = [](float v, float& sum) { sum = v; };
    for (int half = kPieces <= 2 ? int(blockDim.y) / 2 : 0; half > 0; half /= 2) {
      each(half, half, leave);
      each(0, half, [](float& v, float sum) { v += sum; });
    }
    if constexpr (Tile::kEdged) each(0, 1, leave), __syncthreads();
    if (threadIdx.y > 0) return;
    for_each_piece<kPieces>([&](int piece) {
      if constexpr (Tile::kEdged) {
        // Neighbours go out together: by the thread that has them, a warp's store would be one of 32 sectors, a tenth
        // of all the time and more.
        const int first = pipeline.column + piece * Tile::covered() - int(threadIdx.x) * Tile::kWidth;
        for (int i = int(threadIdx.x); i < int(blockDim.x) * Tile::kWidth; i += int(blockDim.x)) {
          const int thread = i / Tile::kWidth, item = i % Tile::kWidth;
          if (first + (thread + 1) * Tile::kWidth <= a.cols)
            partials[index * a.cols + first + i] = met(0, piece * Tile::kItems + item, thread);
        }
      } else {
        store<float>(part(columns[piece]), partials, Place(index, a.partials, a.cols, 0, piece * Tile::covered()));
      }
    });
    if constexpr (Tile::kEdged)
      if (pipeline.edge >= 0) partials[index * a.cols + pipeline.edge] = part(edge_columns).v[0];
  });
  if constexpr (tanh_of(kNorm)) {
    float dalpha = 0;
    for (const auto& of_piece : columns) dalpha += of_piece.dalpha;
    store_dalpha<Tile::kSpread>(a, dalpha, index);
  }
}

/// As forward_long_kernel; the column sums grow in memory.
template <class T, class W, class Tile, Norm kNorm>
__global__ void __launch_bounds__(kTileThreads) backward_long_kernel(NormBackward a) {
  await_previous();
  const float alpha = tanh_of(kNorm) ? number(a.alpha) : 0;
  const Walk walk = Walk::of<kNorm>(a, blockIdx.x);
  using Backward = norm::Backward<T, Tile, kNorm>;
  using Projections = typename Backward::Projections;
  RowReduce<Projections> reduce;
  float dalpha = 0;
  for (int64_t row = walk.first; row < walk.end; row += walk.step) {
    const Place whole = Tile::template place<T>(a.x, row, walk.end, a.cols);
    const auto piece = [&](const Place& at) {
      Backward b{.a = a,
                 .x = load<T, Tile>(a.x, at),
                 .dy = load<T, Tile>(a.dy, at),
                 .w = weight<T, W, kNorm, Tile>(a, at, offset_of(a)),
                 .stats = stats_of<kNorm>(a, row, walk.end),
                 .alpha = alpha};
      if constexpr (kNorm == Norm::Each)
        b.scale = modulation<T, Tile>(a, a.scale, at.of(modulation_of<kNorm>(a, at.row), a.modulations));
      return b;
    };
    typename Projections::Value sums{};
    if constexpr (!tanh_of(kNorm))
      for_each_place<Tile>(whole, [&](const Place& at) { sums = Projections()(sums, piece(at).project()); });
    sums = reduce(sums);
    for_each_place<Tile>(whole, [&](const Place& at) {
      Columns<Tile> columns;
      auto b = piece(at);
      b.project();
      b.collect(at, columns);
      b.finish(sums, kNorm == Norm::Added && a.ds ? load<T, Tile>(a.ds, at) : Tile(), at);
      dalpha += columns.dalpha;
      each_column_sum<kNorm>(a, [&](auto part, float* partials) {
        const Place place(blockIdx.x, a.partials, a.cols, at.shift, at.from);
        const Tile before = row != walk.first ? load_loose<float, Tile>(partials, place) : Tile();
        store<float, true>(before + part(columns), partials, place);
      });
    });
  }
  if constexpr (tanh_of(kNorm)) store_dalpha<false>(a, dalpha, blockIdx.x);
}

}  // namespace

LIGER_REGISTER(norm_backward, [](const NormBackward& a, Stream s) {
  if (a.rows == 0) return;
  dispatch_args(a, [&]<class T, class W, Norm kNorm>() {
    constexpr bool each = kNorm == Norm::Each;
    const bool alike = a.modulation_dtype == a.dtype;
    const Memory memory{
        {a.dy, a.ds, a.x, (const void*)a.dx, each && alike ? a.scale : nullptr},
        {a.w, a.scale, (const void*)a.dw, (const void*)a.db, (const void*)a.dscale, (const void*)a.dshift}};
    constexpr int kVec = 16 / sizeof(T);
    const auto in_pieces = [&]<int kPieces>() {
      constexpr int kFew = kPieces == 1 ? kFewThreads : 256;
      const Threads block = Threads{.few = kFew, .most = kPieces == 1 ? 128 : kBackwardThreads}.with(
          BackwardShared<T, W, Piece<T, Fit::Whole>, kNorm, kPieces>::Pipeline::kBytes);
      return dispatch_tile<T, kVec * kPieces, kPieces == 1 ? 0 : kVec * kPieces, kPieces == 4>(
          a.cols, block, memory, [&]<class Tile>(Tiling t) {
            using In = Piece<T, Tile::kFit>;
            launch(backward_kernel<T, W, In, kNorm, kPieces>,
                   t.grid(a.partials, BackwardShared<T, W, In, kNorm, kPieces>::Pipeline::bytes(t.threads)), s, a);
          });
    };
    if ((!each || alike) && (in_pieces.template operator()<1>() || in_pieces.template operator()<2>() ||
                             in_pieces.template operator()<4>()))
      return;
    dispatch_walk<T, 8>(a.cols, memory, [&]<class Tile>(Tiling t) {
      launch(backward_long_kernel<T, W, Tile, kNorm>, t.grid(a.partials), s, a);
    });
  });
});

}  // namespace liger::cuda::norm
