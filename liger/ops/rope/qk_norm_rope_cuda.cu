#include "liger/core/cuda/async_copy.cuh"
#include "liger/ops/norm/norm.cuh"
#include "liger/ops/rope/qk_norm_rope.h"

namespace liger::cuda::qk_norm_rope {
namespace {

using norm::Kind;
using norm::Stats;

/// Where a row of a tensor begins.
__device__ inline int64_t offset(const QkNormRope& a, const NormedHeads& t, const NormedHeads::Strides& s,
                                 int64_t row) {
  if (row >> 32) {
    const int64_t token = row / t.heads, batch = token / a.seq;
    return batch * s.batch + (token - batch * a.seq) * s.seq + (row - token * t.heads) * s.head;
  }
  // In 32 bits where it can be.
  const unsigned heads = unsigned(t.heads), seq = unsigned(a.seq), token = unsigned(row) / heads, batch = token / seq;
  return batch * s.batch + int64_t(token - batch * seq) * s.seq + int64_t(unsigned(row) - token * heads) * s.head;
}

/// Where a row's token has its angles.
__device__ inline int64_t angles_of(const QkNormRope& a, const NormedHeads& t, int64_t row) {
  const int64_t token = row >> 32 ? row / t.heads : unsigned(row) / unsigned(t.heads),
                batch = token >> 32 ? token / a.seq : unsigned(token) / unsigned(a.seq);
  return batch * a.table_batch_stride + (token - batch * a.seq) * a.table_seq_stride;
}

/// Pack k of the weight with its offset; 1 where there is none.
template <class T>
__device__ Vec<Row<T>::kWidth> weight_of(const QkNormRope& a, const NormedHeads& t, int k, const AlignedRow<T>& like) {
  if (!t.w) return Vec<Row<T>::kWidth>{} + 1.f;
  return norm::load_like(t.w, t.w_dtype, 0, a.cols, k, like) + a.offset;
}

/// The columns of a pair's pack: own · c + other · s.
template <class Vec>
__device__ Vec turned(const Vec& own, const Vec& other, const Vec& c, const Vec& s, float direction) {
  return Vec::map(
      [=](float own, float other, float c, float s) { return rotated<Math<float>>(own, other, c, s * direction); }, own,
      other, c, s);
}

/// How the leading 2 · half packs of a row are turned: pack k < half with pack k + half. kPaired: all of the row's
/// packs turn, and a thread has both of each pair, its p-th and its (p + kPacks / 2)-th. Elsewhere other_of(k) gives
/// the pack of another thread.
template <int kPacks, bool kPaired>
struct Turn {
  static constexpr int kAngles = kPaired ? kPacks / 2 : kPacks;  // packs of the tables that a thread reads
  int half;

  /// Which pack of the tables goes with this thread's p-th pack, k.
  __device__ int column(int k) const { return k < half ? k : k - half; }
  __device__ bool turns(int k) const { return k < 2 * half; }
  __device__ static int angle(int p) { return p % kAngles; }

  /// own(p): this thread's p-th pack.
  template <class Vec, class Own, class OtherOf>
  __device__ Vec operator()(Own own, int p, int k, const Vec& c, const Vec& s, float direction,
                            OtherOf other_of) const {
    if constexpr (kPaired)
      return turned(own(p), own((p + kPacks / 2) % kPacks), c, s, p < kPacks / 2 ? -direction : direction);
    else return turned(own(p), other_of(k < half ? k + half : k - half), c, s, k < half ? -direction : direction);
  }
};

constexpr int kForwardThreads = 128;

/// y and rstd of q's rows, and after its blocks of k's.
/// A block has blockDim.y rows; a thread has Layout's packs of one, in registers, and threads of a warp share a row.
/// Threads that do not have both packs of a pair exchange them through shared memory. The limit is memory: x is read
/// once, and angles, which all heads of a token share, and weights come from L1.
template <class T, class Table, class Layout, bool kPaired>
__global__ void __launch_bounds__(kForwardThreads, 5) forward_kernel(QkNormRope a, int64_t q_blocks) {
  await_previous();
  constexpr int kPacks = Layout::kPacks;
  using Row = AlignedRow<T>;
  using Vec = cuda::Vec<Row::kWidth>;
  using Angles = Pack<Table, Row::kWidth>;
  const bool of_q = blockIdx.x < q_blocks;
  const NormedHeads& t = of_q ? a.q : a.k;
  const int64_t row = (blockIdx.x - (of_q ? 0 : q_blocks)) * blockDim.y + threadIdx.y;
  const bool there = row < a.rows(t);
  const Row in(static_cast<const T*>(t.x) + (there ? offset(a, t, t.x_strides, row) : 0), 0, 0, a.cols);
  const int packs = in.packs();
  const Turn<kPacks, kPaired> turn{int(a.rotary / 2) / Row::kWidth};
  typename Row::Pack x[kPacks];
  Angles cos[turn.kAngles], sin[turn.kAngles];
  const auto each = [&](auto f) {
    unrolled<kPacks>([&](int p) {
      if (const int k = Layout::pack(p); there && k < packs) f(p, k);
    });
  };
  unrolled<kPacks>([&](int p) { x[p] = {}; });
  each([&](int p, int k) { x[p] = in.load(k, T(0)); });
  const int64_t angles = there ? angles_of(a, t, row) : 0;
  each([&](int p, int k) {
    if (p >= turn.kAngles || !turn.turns(k)) return;
    const int64_t at = angles + turn.column(k) * Row::kWidth;
    cos[p] = Angles::read(static_cast<const Table*>(a.cos) + at);
    sin[p] = Angles::read(static_cast<const Table*>(a.sin) + at);
  });
  norm::RootMeanSquare<T> statistics;
  const Stats stats = statistics(a, [&](auto f) { each([&](int p, int) { f(to_vec(x[p]), 0, Row::kWidth); }); });
  each([&](int p, int k) {
    x[p] =
        packed<T>(norm::weighted<T>(norm::normalised<false>(to_vec(x[p]), stats), weight_of(a, t, k, in), a.casting));
  });
  typename Row::Pack* const shared = shared_memory<typename Row::Pack>() + int(threadIdx.y) * packs;
  if constexpr (!kPaired) {
    each([&](int p, int k) { shared[k] = x[p]; });
    __syncwarp();
  }
  const Row out(static_cast<T*>(t.out) + (there ? offset(a, t, t.out_strides, row) : 0), 0, 0, a.cols);
  each([&](int p, int k) {
    if (!turn.turns(k)) return out.store(k, x[p], in);
    const int i = turn.angle(p);
    const Vec y = turn([&](int p) { return to_vec(x[p]); }, p, k, to_vec(cos[i]), to_vec(sin[i]), 1.f,
                       [&](int k) { return to_vec(shared[k]); });
    out.store(k, packed<T>(y), in);
  });
  if (threadIdx.x == 0 && there) t.rstd[row] = stats.rstd;
}

constexpr int kBackwardThreads = 256;

/// The packs that a thread reads of its rows, in stages of shared memory: of the present row, and of the next ones,
/// which come meanwhile. Threads of the same warp may read them, too.
template <class T, class Table, class Layout, bool kPaired>
class Stages {
  static constexpr int kPacks = Layout::kPacks, kAngles = Turn<kPacks, kPaired>::kAngles, kWidth = Row<T>::kWidth;
  using Pack = cuda::Pack<T, kWidth>;
  static constexpr int kParts = kWidth * sizeof(Table) / 16, kSlots = 2 * kPacks + 2 * kAngles * kParts;

 public:
  static int bytes(dim3 threads, int stages) { return int(stages * kSlots * threads.x * threads.y) * 16; }

  /// This thread's rows are first, first + step, … below `rows`.
  __device__ Stages(const QkNormRope& a, const NormedHeads& t, int64_t first, int64_t step, int64_t rows, int stages)
      : a_(a), t_(t), row_(first - step), step_(step), rows_(rows), stages_(stages), present_(stages - 1) {
    for (int ahead = 1; ahead < stages; ++ahead) send(ahead);
  }

  __device__ void advance() {
    await_copies(stages_ - 2);
    __syncwarp();  // the warp's copies have come, and it has read the stage before, which is filled next
    row_ += step_, present_ = later(1);
    send(stages_ - 1);
  }

  __device__ Vec<kWidth> x(int p) const { return to_vec(*at<Pack>(present_, p, threadIdx.x)); }
  /// Pack k of dy, whichever thread has it.
  __device__ Vec<kWidth> dy(int k) const {
    return to_vec(*at<Pack>(present_, kPacks + k / int(blockDim.x), k % int(blockDim.x)));
  }
  __device__ Vec<kWidth> cos(int i) const { return angles(2 * kPacks + i * kParts); }
  __device__ Vec<kWidth> sin(int i) const { return angles(2 * kPacks + (kAngles + i) * kParts); }

 private:
  __device__ int later(int rows) const {
    const int stage = present_ + rows;
    return stage < stages_ ? stage : stage - stages_;
  }
  template <class P>
  __device__ P* at(int stage, int slot, int thread) const {
    const int threads = int(blockDim.x * blockDim.y);
    return reinterpret_cast<P*>(shared_memory<uint4>() + (stage * kSlots + slot) * threads +
                                int(threadIdx.y * blockDim.x) + thread);
  }
  __device__ Vec<kWidth> angles(int slot) const {
    using Part = cuda::Pack<Table, kWidth / kParts>;
    Vec<kWidth> v;
    unrolled<kParts>([&](int i) { at<Part>(present_, slot + i, threadIdx.x)->to_float(v.v + i * Part::kWidth); });
    return v;
  }

  __device__ void send(int ahead) {
    const int64_t row = row_ + ahead * step_;
    const int stage = later(ahead), me = int(threadIdx.x);
    if (row < rows_) {
      const T *x = static_cast<const T*>(t_.x) + offset(a_, t_, t_.x_strides, row),
              *dy = static_cast<const T*>(t_.dy) + offset(a_, t_, t_.dy_strides, row);
      const int64_t angles = angles_of(a_, t_, row);
      const Turn<kPacks, kPaired> turn{int(a_.rotary / 2) / kWidth};
      unrolled<kPacks>([&](int p) {
        const int k = Layout::pack(p);
        if (k >= int(a_.cols) / kWidth) return;
        copy_async16(at<uint4>(stage, p, me), x + k * kWidth);
        copy_async16(at<uint4>(stage, kPacks + p, me), dy + k * kWidth);
        if (p >= kAngles || !turn.turns(k)) return;
        const auto table = [&](const void* table, int slot) {
          const auto* from = static_cast<const char*>(table) + (angles + turn.column(k) * kWidth) * sizeof(Table);
          unrolled<kParts>([&](int part) { copy_async16(at<uint4>(stage, slot + part, me), from + part * 16); });
        };
        table(a_.cos, 2 * kPacks + p * kParts), table(a_.sin, 2 * kPacks + (kAngles + p) * kParts);
      });
    }
    close_copies();
  }

  const QkNormRope& a_;
  const NormedHeads& t_;
  int64_t row_, step_, rows_;
  int stages_, present_;
};

/// dx, and the partial sums of dw, of q's rows, and after its blocks of k's.
/// A block makes one partial sum: it walks along rows, blockDim.y at once, of which a thread has Layout's packs; it
/// keeps their weights and column sums in registers. Rows and their angles come through stages of shared memory. The
/// limit is memory: x and dy are read once.
template <class T, class Table, class Layout, bool kPaired>
__global__ void __launch_bounds__(kBackwardThreads, 2) backward_kernel(QkNormRope a, int count) {
  await_previous();
  constexpr int kPacks = Layout::kPacks;
  using Row = AlignedRow<T>;
  using Vec = cuda::Vec<Row::kWidth>;
  using Gradient = norm::Gradient<T, Vec, Kind::Rms>;
  const bool of_q = blockIdx.x < a.q.partials;
  const NormedHeads& t = of_q ? a.q : a.k;
  const int64_t index = blockIdx.x - (of_q ? 0 : a.q.partials), rows = a.rows(t),
                first = index + threadIdx.y * t.partials, step = t.partials * blockDim.y;
  Stages<T, Table, Layout, kPaired> stages(a, t, first, step, rows, count);
  const Row like(t.x, 0, 0, a.cols);
  const int packs = like.packs();
  const Turn<kPacks, kPaired> turn{int(a.rotary / 2) / Row::kWidth};
  Vec w[kPacks], dw[kPacks];
  unrolled<kPacks>([&](int p) {
    if (const int k = Layout::pack(p); k < packs) w[p] = weight_of(a, t, k, like);
  });
  RowReduce<norm::Projections<Kind::Rms>> reduce;
  const auto rstd_of = [&](int64_t row) { return row < rows ? t.rstd[row] : 0; };
  float next_rstd = rstd_of(first);
  for (int64_t row = first; row - threadIdx.y * t.partials < rows; row += step) {
    const Stats stats = norm::arrived({0, next_rstd});
    stages.advance();
    next_rstd = rstd_of(row + step);
    const auto each = [&](auto f) {
      unrolled<kPacks>([&](int p) {
        if (const int k = Layout::pack(p); row < rows && k < packs) f(p, k);
      });
    };
    Gradient d[kPacks];
    typename norm::Projections<Kind::Rms>::Value sums{};
    each([&](int p, int k) {
      Vec g = stages.dy(k);
      if (turn.turns(k)) {
        const int i = turn.angle(p);
        g = round_to<T>(turn([&](int p) { return stages.dy(Layout::pack(p)); }, p, k, stages.cos(i), stages.sin(i),
                             -1.f, [&](int k) { return stages.dy(k); }));
      }
      d[p] = Gradient(stages.x(p), g, w[p], stats);
      sums = norm::Projections<Kind::Rms>()(sums, d[p].project());
    });
    sums = reduce(sums);
    Row out(static_cast<T*>(t.out) + (row < rows ? offset(a, t, t.out_strides, row) : 0), 0, 0, a.cols);
    each([&](int p, int k) {
      dw[p] = Vec::map([](float dw, float g, float xhat) { return fmaf(g, xhat, dw); }, dw[p], d[p].dn, d[p].xhat);
      if (t.out) out.store(k, packed<T>(d[p].dx(a, sums, stats)), like);
    });
  }
  copies_done();
  norm::put_columns<Layout>(dw, t.dw, index, a.cols, like);
}

/// Calls f.operator()<T, Table, Layout, kPaired>(threads) with kPacks packs of a row for each thread.
template <int kPacks, class F>
void dispatch_turn(const QkNormRope& a, Threads block, F&& f) {
  dispatch_weighted(a.dtype, a.table_dtype, [&]<class T, class Table>() {
    dispatch_layout<T, kPacks, true, false>(a.cols, block, [&]<class Layout>(const RowThreads& t) {
      const bool paired = a.rotary == a.cols && a.cols == int64_t(kPacks) * t.threads.x * Row<T>::kWidth;
      if (paired) f.template operator()<T, Table, Layout, true>(t.threads);
      else f.template operator()<T, Table, Layout, false>(t.threads);
    });
  });
}

}  // namespace

LIGER_REGISTER(qk_norm_rope_forward, [](const QkNormRope& a, Stream s) {
  const Threads block{.few = kForwardThreads, .most = 32};  // a warp's threads share a row
  dispatch_turn<4>(a, block, [&]<class T, class Table, class Layout, bool kPaired>(dim3 threads) {
    const int64_t q_blocks = ceil_div(a.rows(a.q), threads.y), k_blocks = ceil_div(a.rows(a.k), threads.y);
    const int bytes = kPaired ? 0 : int(threads.y * a.cols * sizeof(T));
    launch(forward_kernel<T, Table, Layout, kPaired>,
           {.blocks = q_blocks + k_blocks, .threads = threads, .shared_bytes = bytes}, s, a, q_blocks);
  });
});
LIGER_REGISTER(qk_norm_rope_backward, [](const QkNormRope& a, Stream s) {
  constexpr int kPacks = 2, kThread = 2 * 6 * kPacks * 16;  // the most bytes of a thread in two stages
  const Threads block{.few = std::min(kBackwardThreads, shared_bytes_of_block() / kThread), .most = 32};
  dispatch_turn<kPacks>(a, block, [&]<class T, class Table, class Layout, bool kPaired>(dim3 threads) {
    const auto bytes = [&](int stages) { return Stages<T, Table, Layout, kPaired>::bytes(threads, stages); };
    const int stages = bytes(3) <= std::min(shared_bytes_of_block(), shared_bytes() / 2 - 2048) ? 3 : 2;
    launch(backward_kernel<T, Table, Layout, kPaired>,
           {.blocks = a.q.partials + a.k.partials, .threads = threads, .shared_bytes = bytes(stages)}, s, a, stages);
  });
});

}  // namespace liger::cuda::qk_norm_rope
