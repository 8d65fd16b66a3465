#include "liger/core/cuda/cluster.cuh"
#include "liger/core/cuda/softmax.cuh"
#include "liger/ops/loss/cross_entropy.h"

namespace liger::cuda::cross_entropy {
namespace {

/// What the rows are divided by: how many labels count, and their class weights. One block, a thread of which has eight
/// labels in flight.
__global__ void __launch_bounds__(1024) norm_kernel(CrossEntropyNorm a) {
  await_previous();
  int64_t n = 0;
  Sums<2>::Value sums{};
  float &weight = sums.v[0], &all = sums.v[1];
  for_each_in_batches<8>(
      a.rows, [&](int64_t r) { return a.target[r]; },
      [&](int64_t y) {
        if (y == a.ignore_index) return;
        if (y < 0 || y >= a.cols) fail_label(y, a.cols);
        n += 1;
        weight += a.class_weight ? a.class_weight[y] : 1;
      });
  if (a.class_weight)
    for_each_in_batches<8>(a.cols, [&](int64_t c) { return a.class_weight[c]; }, [&](float w) { all += w; });
  n = RowReduce<SumOf<int64_t>>()(n);
  sums = RowReduce<Sums<2>>()(sums);
  if (threadIdx.x > 0) return;
  const float divisor = a.normalizer ? *a.normalizer
                        : a.mean     ? weight
                                     : 1,
              z_divisor = a.normalizer ? divisor
                          : a.mean     ? float(n)
                                       : 1;
  *a.sums = {
      .divisor = divisor,
      .z_divisor = z_divisor,
      .class_weights = a.class_weight ? all : float(a.cols),
      .gradient_scale =
          a.z_bound >= 0 ? gradient_scale(divisor, z_divisor, a.largest_weight ? *a.largest_weight : 1, a.z_bound) : 1,
      .blocks_done = 0,
      .valid = n};
}

/// This thread's part of the sums over rows, of the first `threads` of a block.
__device__ Sums<3>::Value sum_rows(const CrossEntropyTotals& a, unsigned threads) {
  Sums<3>::Value sums{};
  for_each_in_batches<8>(
      a.rows,
      [&](int64_t r) { return Sums<3>::Value{a.loss[r], a.z_loss ? a.z_loss[r] : 0, a.correct ? a.correct[r] : 0}; },
      [&](const Sums<3>::Value& row) { sums = Sums<3>()(sums, row); }, threads);
  return sums;
}

__device__ void write_totals(const CrossEntropyTotals& a, const Sums<3>::Value& sums, int64_t valid) {
  write_number(a.loss_total, a.dtype, 0, sums.v[0]);
  if (a.z_loss_total) write_number(a.z_loss_total, a.dtype, 0, sums.v[1]);
  if (a.accuracy) *a.accuracy = sums.v[2] / float(valid);
}

/// The last block to come here makes the totals of a batch that is not large, in the same order whichever block it is.
__device__ void total_when_last(const CrossEntropy& a, unsigned blocks) {
  __syncthreads();
  if (threadIdx.y > 0 || threadIdx.x >= 32) return;
  __threadfence();
  int before = threadIdx.x == 0 ? atomicAdd(&a.sums->blocks_done, 1) : 0;
  before = __shfl_sync(~0u, before, 0);
  if (before != int(blocks) - 1) return;
  __threadfence();
  const auto sums = reduce_lanes<Sums<3>>(sum_rows(a.totals, 32), 32);
  if (threadIdx.x == 0) write_totals(a.totals, sums, a.sums->valid);
}

/// The losses of all rows added up, where there are too many for the rows' last block (total_when_last). One block, a
/// thread of which has eight rows in flight.
__global__ void __launch_bounds__(1024) total_kernel(CrossEntropyTotals a, const CrossEntropySums* of_labels) {
  await_previous();
  const auto sums = RowReduce<Sums<3>>()(sum_rows(a, 1024));
  if (threadIdx.x == 0) write_totals(a, sums, of_labels->valid);
}

/// What is known of a part of a row.
template <class Softmax, bool kPlain>
struct Part {
  typename Softmax::Value sum = Softmax::identity();
  float weighted = 0;
  ArgMax::Value best = ArgMax::identity();
};

template <class Softmax>
struct Part<Softmax, true> {
  typename Softmax::Value sum = Softmax::identity();
};

/// A row, and this thread's packs of it, which KeptRows (cluster.cuh) keeps on chip from the first pass to the second.
template <class T, bool kPlain, class KeptRows, bool kGradient>
struct RowLoss {
  using Softmax = OnlineSoftmax<T>;
  using Part = cross_entropy::Part<Softmax, kPlain>;
  using Pack = typename Row<T>::Pack;
  static constexpr int kWidth = Row<T>::kWidth, kAtOnce = kPlain ? 4 : 1;
  // A gradient of 16-bit numbers is made of exponentials in 16 bits: two a logit are what the pass waits for (most of
  // all after a GEMM, as in the linear loss: 1.22 -> 1.14 ms for 4096 x 248320).
  static constexpr bool kKeeps = kPlain && kGradient && Softmax::kFast;
  // A row's own numbers are long products: where that shows they are rounded once, at the end.
  using Scalar = std::conditional_t<kPlain && sizeof(T) == 2, float, double>;

  const CrossEntropy& a;
  const KeptRows& rows;
  const int64_t row, y;
  const RowSet<T, 1> set;
  const Row<T> dx;
  typename KeptRows::State state;
  float inverse_cap;

  /// Sends for the row.
  __device__ RowLoss(const CrossEntropy& a, const KeptRows& rows)
      : a(a),
        rows(rows),
        row(rows.row()),
        y(a.target[row]),
        set{{Row<T>(a.x, row, a.x_stride, a.cols)}, T(-INFINITY)},
        dx(a.dx ? a.dx : a.x, row, a.dx ? a.dx_stride : a.x_stride, a.cols) {
    rows.begin(state, set);
  }

  __device__ const Row<T>& x() const { return set.of[0]; }
  __device__ float logit(float v) const {
    return kPlain || a.softcap == 0 ? v : a.softcap * Math<float>::tanh(v * inverse_cap);
  }
  __device__ float weight(int c) const { return a.class_weight ? a.class_weight[c] : 1; }
  static __device__ Scalar div(Scalar x, Scalar y) {
    if constexpr (sizeof(Scalar) == 4) return Math<T>::div(x, y);
    else return x / y;
  }

  /// Of a label that does not count.
  __device__ void ignore() {
    if (kGradient && a.dx)
      rows.template again<1>(state, set, [&](int k, auto& packs) {
        packs[0] = {};
        dx.template store<KeptRows::kThreads>(k, packs, x());
      });
    if (rows.first()) {
      a.loss[row] = 0;
      if (a.z_loss) a.z_loss[row] = 0;
      if (a.correct) a.correct[row] = 0;
      if (a.predicted) a.predicted[row] = -1;
    }
    copies_done();
  }

  /// The first pass: what this thread knows of the row.
  __device__ Part read() {
    Part part;
    if (kKeeps && rows.replaces()) {
      if constexpr (kKeeps)
        rows.replace(state, set, [&](auto& packs) { return Softmax::push_exponentials(part.sum, packs); });
      part.sum.sum *= Softmax::half_scale(part.sum.max);
    } else {
      rows.template pass<kAtOnce, kPlain>(state, set, [&](int k, const auto& packs) {
        if constexpr (kPlain) {
          Softmax::push(part.sum, packs);
        } else {
          float z[kWidth];
          packs[0].to_float(z);
          for (int j = 0; j < kWidth; ++j) {
            const int c = x().column(k) + j;
            if (c < 0 || c >= x().n) continue;  // stays −inf, which a softcap would lift
            z[j] = logit(z[j]);
            if (a.label_smoothing > 0) part.weighted += weight(c) * z[j];
            if (ArgMax::before({z[j], c}, part.best)) part.best = {z[j], c};
          }
          const cuda::Pack<float, kWidth> logits[] = {cuda::Pack<float, kWidth>::from_float(z)};
          Softmax::push(part.sum, logits);
        }
      });
    }
    return part;
  }

  /// What all threads of the row know together.
  template <class Exchange>
  __device__ static Part together(Part part, Exchange& exchange) {
    part.sum = typename KeptRows::template ReduceBlock<Softmax, true>()(part.sum);
    if constexpr (!kPlain)
      part.best = typename KeptRows::template ReduceBlock<ArgMax>()(part.best),
      part.weighted = typename KeptRows::template ReduceBlock<Sum>()(part.weighted);
    Part all;
    exchange(part, [&](const Part& p) {
      all.sum = Softmax()(all.sum, p.sum);
      if constexpr (!kPlain) all.best = ArgMax()(all.best, p.best), all.weighted += p.weighted;
    });
    return all;
  }

  /// The second pass's factors: a gradient is of_p · p − each · weight, but for the label's.
  struct Factors {
    Scalar p_y, w_y, scale, by_0, by_1, smooth;
    Scalar s, of_p, each, t_y;
  };

  /// Writes the loss; returns the factors that follow from scale, label smoothing and divisors.
  __device__ Factors write(const Part& all, const float (&divisors)[2], float class_weights, float z_y) {
    Factors f;
    const auto sum = all.sum;
    const float lse = Softmax::lse(sum);
    f.p_y = div(Softmax::exp(z_y, sum.max), sum.sum), f.by_0 = divisors[0] != 0 ? div(1, divisors[0]) : 0,
    f.by_1 = divisors[1] != 0 ? div(1, divisors[1]) : 0;
    f.smooth = kPlain ? 0 : a.label_smoothing / Scalar(a.cols);
    f.w_y = kPlain ? 1 : (1 - Scalar(a.label_smoothing)) * weight(int(y)), f.scale = a.token_scaling ? f.p_y : 1;
    if (rows.first()) {
      const Scalar z_loss = Scalar(a.lse_square_scale) * lse * lse * f.by_1 * f.scale;
      Scalar smoothing = 0;
      if constexpr (!kPlain) {
        if (f.smooth > 0) smoothing = f.smooth * (Scalar(lse) * class_weights - all.weighted);
        if (a.correct) a.correct[row] = all.best.at == y;
        if (a.predicted) a.predicted[row] = all.best.at;
      }
      a.loss[row] = float((f.w_y * (Scalar(sum.max) - z_y + Softmax::log_sum(sum)) + smoothing) * f.by_0 * f.scale +
                          z_loss);  // lse loses log Σ when max is large
      if (a.z_loss) a.z_loss[row] = float(z_loss);
    }
    return f;
  }

  /// The factors of the gradient. exp(z − max) / Σ instead of exp(z − lse): the rounding of lse would be in every p.
  __device__ void scale(Factors& f, const Part& all, float class_weights, float upstream, float z_y) const {
    const float lse = Softmax::lse(all.sum);
    f.s = f.scale * upstream;
    f.of_p = f.s * ((f.w_y + f.smooth * (kPlain ? 0 : class_weights)) * f.by_0 + 2 * a.lse_square_scale * lse * f.by_1);
    f.each = f.s * f.smooth * f.by_0, f.t_y = z_y * inverse_cap;
  }

  /// The second pass: dx, and the label's own, by the thread that has stored its pack, and after that.
  __device__ void differentiate(const Factors& f, const typename Softmax::Value& sum) {
    const float of_exp = float(div(f.of_p, sum.sum)), each = float(f.each);
    if (kKeeps && rows.replaces()) write_kept(of_exp, sum.max);
    else write_gradient(of_exp, each, sum.max);
    if (rows.mine(x().pack(int(y))))
      dx.first[dx.shift + y] = T(float(
          (f.of_p * f.p_y - (kPlain ? 0 : f.each * weight(int(y))) - f.s * f.w_y * f.by_0) * (1 - f.t_y * f.t_y)));
  }

  /// From the exponentials that the first pass has left.
  __device__ void write_kept(float of_exp, float row_max) {
    if constexpr (kKeeps)
      rows.again_replaced(state, set, [&](int k, auto& packs, float max) {
        const float by = of_exp * Softmax::rescale(max, row_max) * Softmax::half_scale(max);
#pragma unroll
        for (Pack& pack : packs) {
#pragma unroll
          for (unsigned& word : pack.words) {
            const float2 e = to_floats<half>(word);
            word = to_word<T>(e.x * by, e.y * by);
          }
        }
        dx.template store<KeptRows::kThreads>(k, packs, x());
      });
  }

  /// From the logits.
  __device__ void write_gradient(float of_exp, float each, float row_max) {
    const auto gradient = [&](float v, int c) {
      const float z = logit(v);
      float d = of_exp * Softmax::exp(z, row_max);
      if constexpr (!kPlain) {
        if (each != 0) d -= each * weight(c);
        d *= 1 - z * inverse_cap * (z * inverse_cap);
      }
      return d;
    };
    rows.template again<kAtOnce>(state, set, [&](int k, auto& packs) {
      int first = x().column(k);
#pragma unroll
      for (Pack& pack : packs) {
        float f[kWidth];
        pack.to_float(f);
#pragma unroll
        for (int j = 0; j < kWidth; ++j)
          if (kPlain || (first + j >= 0 && first + j < x().n)) f[j] = gradient(f[j], first + j);
        pack = Pack::from_float(f);
        first += KeptRows::kThreads * kWidth;
      }
      dx.template store<KeptRows::kThreads>(k, packs, x());
    });
  }
};

/// The loss of this thread's row and, where it is asked for, its gradient: two passes over what is kept on chip.
template <class T, bool kPlain, class KeptRows, bool kGradient>
__device__ void do_row(const CrossEntropy& a, const KeptRows& rows) {
  if (rows.row() >= a.rows) return;
  RowLoss<T, kPlain, KeptRows, kGradient> loss(a, rows);
  const float divisors[] = {a.sums->divisor, a.sums->z_divisor}, class_weights = a.sums->class_weights,
              upstream = a.sums->gradient_scale * (a.upstream ? a.upstream[loss.row] : 1);
  if (loss.y == a.ignore_index) return loss.ignore();
  ClusterExchange<typename decltype(loss)::Part, 1> exchange;
  loss.inverse_cap = kPlain || a.softcap == 0 ? 0 : 1 / a.softcap;
  const float z_y = loss.logit(float(loss.x().first[loss.x().shift + loss.y]));
  const auto all = loss.together(loss.read(), exchange);
  auto factors = loss.write(all, divisors, class_weights, z_y);
  if (!kGradient || !a.dx) return;
  loss.scale(factors, all, class_weights, upstream, z_y);
  loss.differentiate(factors, all.sum);
}

/// The loss of each row and its gradient. A row belongs to a part of a block's threads or to a cluster of blocks, as
/// KeptRows says (cluster.cuh), which brings it to registers or shared memory with asynchronous copies, so that the
/// second pass does not read it again. The limit is memory, and for 16-bit logits two exponentials each.
/// kPlain: no class weight, smoothing, softcap or argmax. kGradient: there may be one.
template <class T, bool kPlain, class KeptRows, bool kGradient = true>
__global__ void __launch_bounds__(KeptRows::kThreads, kGradient ? KeptRows::kBlocks : KeptRows::kBlocksReading)
    rows_kernel(CrossEntropy a, KeptRows rows) {
  await_previous();
  do_row<T, kPlain, KeptRows, kGradient>(a, rows);
  if (a.totals.loss_total && rows.leads()) total_when_last(a, gridDim.x / cluster_size());
}

}  // namespace

LIGER_REGISTER(cross_entropy_norm,
               [](const CrossEntropyNorm& a, Stream s) { launch(norm_kernel, {.blocks = 1, .threads = 1024}, s, a); });

LIGER_REGISTER(cross_entropy_rows, [](const CrossEntropy& given, Stream s) {
  // A launch saved is worth more than what each block takes to say that it is done, where there are few.
  constexpr int64_t kFewRows = 1024;
  const bool later = given.totals.loss_total && (given.rows > kFewRows || given.rows < given.totals.rows);
  CrossEntropy a = given;
  if (later) a.totals = {};
  dispatch(a.dtype, [&]<class T>() {
    const bool plain = !a.class_weight && a.label_smoothing == 0 && a.softcap == 0 && !a.correct && !a.predicted;
    dispatch_kept_rows<T, 1>(
        a.x, a.rows, a.cols, a.x_stride, true, a.dx != nullptr, [&]<class KeptRows>(const KeptRows& rows) {
          if (plain && !a.dx) return launch(rows_kernel<T, true, KeptRows, false>, rows.grid(), s, a, rows);
          launch(plain ? rows_kernel<T, true, KeptRows> : rows_kernel<T, false, KeptRows>, rows.grid(), s, a, rows);
        });
  });
  if (later)
    launch(total_kernel, {.blocks = 1, .threads = 1024}, s, given.totals, static_cast<const CrossEntropySums*>(a.sums));
});

}  // namespace liger::cuda::cross_entropy
