#include "liger/core/cuda/cluster.cuh"
#include "liger/core/cuda/softmax.cuh"
#include "liger/ops/head/linear_distillation.h"

namespace liger::cuda::linear_distillation {
namespace {

/// The softmaxes of a row: the student's and the teacher's at the temperature, and the student's at 1.
template <class Softmax>
struct Softmaxes {
  struct Value {
    typename Softmax::Value of[3];
  };
  static __device__ Value identity() { return {Softmax::identity(), Softmax::identity(), Softmax::identity()}; }
  __device__ Value operator()(Value a, const Value& b) const {
#pragma unroll
    for (int i = 0; i < 3; ++i) a.of[i] = Softmax()(a.of[i], b.of[i]);
    return a;
  }
  __device__ static Value shuffle(Value v, int lane) {
#pragma unroll
    for (auto& of : v.of) of = Softmax::shuffle(of, lane);
    return v;
  }
};

/// ln softmax(z) = z − max − ln Σ exp(z − max).
template <class Softmax>
struct LogSoftmax {
  float max, log_sum;
  __device__ explicit LogSoftmax(const typename Softmax::Value& v) : max(v.max), log_sum(Softmax::log_sum(v)) {}
  __device__ float operator()(float z) const { return z - max - log_sum; }
};

/// A row of the student's and the teacher's logits. kPlain: z is what the GEMM gave, and the temperature is 1.
template <class T, class Formula, bool kPlain>
struct Logits {
  using KeptRows = Clusters<T, 2>;
  using Softmax = OnlineSoftmax<T>;
  using M = Math<T>;
  static constexpr int kWidth = Row<T>::kWidth, kSums = Formula::kSums;
  using Sums = cuda::Sums<kSums + 1>;  // of the formula's terms, and the entropy

  const LinearDistillation& a;
  const KeptRows& rows;
  int64_t row;
  RowSet<T, 2> set;
  typename KeptRows::State state;

  __device__ Logits(const LinearDistillation& a, const KeptRows& rows)
      : a(a),
        rows(rows),
        row(rows.row()),
        set{{Row<T>(a.x, row, a.cols, a.cols), Row<T>(a.y, row, a.cols, a.cols)}, T(-INFINITY)} {
    rows.begin(state, set);
  }
  __device__ const Row<T>& x() const { return set.of[0]; }
  __device__ bool tempered() const { return a.inverse_temperature != 1; }

  /// z of one class.
  __device__ float mapped(const LogitMap& map, float y) const { return kPlain ? y : map_logit<M>(map, y); }
  /// z at the temperature: rounded, as it was when the maximum was taken of it. In one instruction with the subtraction
  /// of that maximum, the largest class's own exponent would be what the maximum was rounded by, and not 0.
  __device__ float at_temperature(float z) const { return M::rounded_product(z, a.inverse_temperature); }
  /// f(j, column, the student's z, the teacher's) for each class of a pack that is the row's.
  template <class Packs, class F>
  __device__ void each(int k, Packs& packs, F f) const {
    float s[kWidth], t[kWidth];
    packs.of[0].to_float(s), packs.of[1].to_float(t);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      const int c = x().column(k) + j;
      // Where nothing is mapped, −inf stands for what is outside the row, and weighs nothing.
      if ((kPlain && Formula::kLogs) || (c >= 0 && c < x().n)) f(j, c, mapped(a.x_map, s[j]), mapped(a.y_map, t[j]));
    }
  }
  /// f(k, gradient of pack k, the pack of both) makes the gradient.
  template <class F>
  __device__ void store(F f) const {
    const Row<T> dx(a.dx, row, a.cols, a.cols);
    rows.template again<1>(state, set, [&](int k, auto& values) {
      float d[kWidth] = {};
      f(k, d, values[0]);
      dx.store(k, d, x());
    });
  }

  /// What a thread's packs give.
  __device__ typename Softmaxes<Softmax>::Value softmaxes() {
    auto sums = Softmaxes<Softmax>::identity();
    rows.template pass<kPlain ? 2 : 1, kPlain>(state, set, [&](int k, auto& values) {
      constexpr int n = std::extent_v<std::remove_reference_t<decltype(values)>>;
      if constexpr (kPlain) {
        typename Row<T>::Pack of[2][n];
#pragma unroll
        for (int i = 0; i < n; ++i) of[0][i] = values[i].of[0], of[1][i] = values[i].of[1];
        Softmax::push(sums.of[0], of[0]), Softmax::push(sums.of[1], of[1]);
      } else {
        push_mapped(sums, k, values[0]);
      }
    });
    return sums;
  }
  template <class Packs>
  __device__ void push_mapped(typename Softmaxes<Softmax>::Value& sums, int k, Packs& packs) const {
    float z[3][kWidth];
#pragma unroll
    for (auto& of : z)
#pragma unroll
      for (float& v : of) v = -INFINITY;
    each(k, packs,
         [&](int j, int, float s, float t) { z[0][j] = at_temperature(s), z[1][j] = at_temperature(t), z[2][j] = s; });
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      const cuda::Pack<float, kWidth> of[] = {cuda::Pack<float, kWidth>::from_float(z[i])};
      if (i < 2 || tempered()) Softmax::push(sums.of[i], of);
    }
  }

  /// Both logits as the formula's arguments.
  struct Arguments {
    LogSoftmax<Softmax> student, teacher;
  };
  __device__ float argument(const LogSoftmax<Softmax>& of, float z) const {
    return Formula::kLogs ? of(at_temperature(z)) : at_temperature(z);
  }

  /// What a thread's packs give.
  __device__ typename Sums::Value sums(const Arguments& of) const {
    typename Sums::Value sums{};
    rows.template again<1>(state, set, [&](int k, auto& values) {
      each(k, values[0], [&](int, int, float s, float t) {
        const auto terms = Formula::template terms<M>(argument(of.student, s), argument(of.teacher, t), a.beta);
#pragma unroll
        for (int i = 0; i < kSums; ++i) sums.v[i] += terms.v[i];
        if (a.entropy) {
          const float log_q = of.student(at_temperature(s));
          sums.v[kSums] -= M::product(M::exp(log_q), log_q);
        }
      });
    });
    return sums;
  }

  __device__ void put(float divergence, float nll, float entropy) const {
    if (!rows.first()) return;
    a.divergence[row] = divergence, a.nll[row] = nll;
    if (a.entropy) a.entropy[row] = entropy;
  }
};

/// A cluster of blocks on a row of both matrices. Three passes over it: the softmaxes, the sums over classes, the
/// gradient; the second and the third read what the block has kept in shared memory.
template <class T, class Formula, bool kPlain>
__global__ void __launch_bounds__((Clusters<T, 2>::kThreads), (Clusters<T, 2>::kBlocks))
    rows_kernel(LinearDistillation a, Clusters<T, 2> rows) {
  await_previous();
  using Logits = linear_distillation::Logits<T, Formula, kPlain>;
  using Softmax = typename Logits::Softmax;
  using M = Math<T>;
  Logits row(a, rows);
  int64_t label = a.labels ? a.labels[row.row] : -1;
  const bool ignored = a.labels && label == a.ignore_index;
  if (ignored) label = -1;
  else if (a.labels && (label < 0 || label >= a.cols)) fail_label(label, a.cols);
  if (ignored && a.skip_ignored) {
    if (a.dx) row.store([](int, float*, auto&) {});
    row.put(0, 0, 0);
    return copies_done();
  }
  typename Clusters<T, 2>::template Reduce<Softmaxes<Softmax>> reduce_softmaxes;
  typename Clusters<T, 2>::template Reduce<typename Logits::Sums> reduce_sums;

  auto softmaxes = row.softmaxes();
  const Row<T>& x = row.x();
  const float y_label = label >= 0 ? float(x.first[x.shift + label]) : 0;  // before another block writes there
  softmaxes = reduce_softmaxes(softmaxes);
  const typename Logits::Arguments of{LogSoftmax<Softmax>(softmaxes.of[0]), LogSoftmax<Softmax>(softmaxes.of[1])};
  const auto hard = kPlain || !row.tempered() ? of.student : LogSoftmax<Softmax>(softmaxes.of[2]);
  const auto sums = reduce_sums(row.sums(of));
  row.put(Formula::value(sums.v), label >= 0 ? -hard(row.mapped(a.x_map, y_label)) : 0, sums.v[Formula::kSums]);
  if (!a.dx) return;

  const auto factors = Formula::factors(sums.v);
  const float soft = a.soft ? a.soft[row.row] * a.inverse_temperature : 0,
              h = a.hard && label >= 0 ? a.hard[row.row] : 0;
  row.store([&](int k, float* d, auto& packs) {
    row.each(k, packs, [&](int j, int c, float s, float t) {
      d[j] =
          soft * Formula::template slope<M>(row.argument(of.student, s), row.argument(of.teacher, t), a.beta, factors);
      if (h != 0) d[j] += h * (M::exp(hard(s)) - (c == label));
      if constexpr (!kPlain) d[j] *= map_slope(a.x_map, s);
    });
  });
}

}  // namespace

LIGER_REGISTER(linear_distillation_rows, [](const LinearDistillation& a, Stream s) {
  const bool plain = is_plain(a.x_map) && is_plain(a.y_map) && a.inverse_temperature == 1;
  dispatch(a.dtype, [&]<class T>() {
    dispatch_distillation(a.kind, [&]<class Formula>() {
      const Clusters<T, 2> rows(a.rows, a.cols, aligned16({a.x, a.y}) && a.cols % Row<T>::kWidth == 0);
      launch(plain ? rows_kernel<T, Formula, true> : rows_kernel<T, Formula, false>, rows.grid(), s, a, rows);
    });
  });
});

}  // namespace liger::cuda::linear_distillation
