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

/// A cluster of blocks on a row of both matrices. Three passes over it: the softmaxes, the sums over classes, the
/// gradient; the second and the third read what the block has kept in shared memory. kPlain: z is what the GEMM gave,
/// and the temperature is 1.
template <class T, class Formula, bool kPlain>
__global__ void __launch_bounds__((Clusters<T, 2>::kThreads), (Clusters<T, 2>::kBlocks))
    rows_kernel(LinearDistillation a, Clusters<T, 2> rows) {
  await_previous();
  using Rows = Clusters<T, 2>;
  using Softmax = OnlineSoftmax<T>;
  using M = Math<T>;
  using Pack = typename Row<T>::Pack;
  constexpr int kWidth = Row<T>::kWidth, kSums = Formula::kSums;
  const int64_t row = rows.row();
  const RowSet<T, 2> set{{Row<T>(a.x, row, a.cols, a.cols), Row<T>(a.y, row, a.cols, a.cols)}, T(-INFINITY)};
  const Row<T>& x = set.of[0];
  const Row<T> dx(a.dx ? a.dx : a.x, row, a.cols, a.cols);
  typename Rows::Kept kept;
  rows.begin(kept, set);
  int64_t label = a.labels ? a.labels[row] : -1;
  const bool ignored = a.labels && label == a.ignore_index;
  if (ignored) label = -1;
  else if (a.labels && (label < 0 || label >= a.cols)) fail_label(label, a.cols);
  if (ignored && a.skip_ignored) {
    if (a.dx)
      rows.template again<1>(kept, set, [&](int k, auto&) {
        constexpr float zeros[kWidth] = {};
        dx.store(k, zeros, x);
      });
    if (rows.first()) {
      a.divergence[row] = a.nll[row] = 0;
      if (a.entropy) a.entropy[row] = 0;
    }
    return copies_done();
  }
  typename Rows::template Reduce<Softmaxes<Softmax>> reduce_softmaxes;
  typename Rows::template Reduce<Sums<kSums + 1>> reduce_sums;

  const bool tempered = a.inverse_temperature != 1;
  /// z of one class.
  const auto mapped = [&](const LogitMap& map, float y) { return kPlain ? y : map_logit<M>(map, y); };
  /// z at the temperature: rounded, as it was when the maximum was taken of it. In one instruction with the subtraction
  /// of that maximum, the largest class's own exponent would be what the maximum was rounded by, and not 0.
  const auto at_temperature = [&](float z) { return M::rounded_product(z, a.inverse_temperature); };
  /// f(j, column, the student's z, the teacher's) for each class of a pack that is the row's.
  const auto each = [&](int k, auto& packs, auto f) {
    float s[kWidth], t[kWidth];
    packs.of[0].to_float(s), packs.of[1].to_float(t);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      const int c = x.column(k) + j;
      // Where nothing is mapped, −inf stands for what is beside the row, and weighs nothing.
      if ((kPlain && Formula::kLogs) || (c >= 0 && c < x.n)) f(j, c, mapped(a.x_map, s[j]), mapped(a.y_map, t[j]));
    }
  };

  auto softmaxes = Softmaxes<Softmax>::identity();
  rows.template pass<kPlain ? 2 : 1, kPlain>(kept, set, [&](int k, auto& values) {
    constexpr int n = std::extent_v<std::remove_reference_t<decltype(values)>>;
    if constexpr (kPlain) {
      Pack of[2][n];
#pragma unroll
      for (int i = 0; i < n; ++i) of[0][i] = values[i].of[0], of[1][i] = values[i].of[1];
      Softmax::push(softmaxes.of[0], of[0]), Softmax::push(softmaxes.of[1], of[1]);
    } else {
      float z[3][kWidth];
#pragma unroll
      for (auto& of : z)
#pragma unroll
        for (float& v : of) v = -INFINITY;
      each(k, values[0], [&](int j, int, float s, float t) {
        z[0][j] = at_temperature(s), z[1][j] = at_temperature(t), z[2][j] = s;
      });
#pragma unroll
      for (int i = 0; i < 3; ++i) {
        const cuda::Pack<float, kWidth> of[] = {cuda::Pack<float, kWidth>::from_float(z[i])};
        if (i < 2 || tempered) Softmax::push(softmaxes.of[i], of);
      }
    }
  });
  const float y_label = label >= 0 ? float(x.first[x.shift + label]) : 0;  // before another block writes there
  softmaxes = reduce_softmaxes(softmaxes);
  const LogSoftmax<Softmax> of_x(softmaxes.of[0]), of_t(softmaxes.of[1]),
      hard = kPlain || !tempered ? of_x : LogSoftmax<Softmax>(softmaxes.of[2]);
  /// A class's arguments of the formula.
  const auto student = [&](float z) { return Formula::kLogs ? of_x(at_temperature(z)) : at_temperature(z); };
  const auto teacher = [&](float z) { return Formula::kLogs ? of_t(at_temperature(z)) : at_temperature(z); };

  typename Sums<kSums + 1>::Value sums{};
  rows.template again<1>(kept, set, [&](int k, auto& values) {
    each(k, values[0], [&](int, int, float s, float t) {
      const auto terms = Formula::template terms<M>(student(s), teacher(t), a.beta);
#pragma unroll
      for (int i = 0; i < kSums; ++i) sums.v[i] += terms.v[i];
      if (a.entropy) {
        const float log_q = of_x(at_temperature(s));
        sums.v[kSums] -= M::product(M::exp(log_q), log_q);
      }
    });
  });
  sums = reduce_sums(sums);
  if (rows.first()) {
    a.divergence[row] = Formula::value(sums.v);
    a.nll[row] = label >= 0 ? -hard(mapped(a.x_map, y_label)) : 0;
    if (a.entropy) a.entropy[row] = sums.v[kSums];
  }
  if (!a.dx) return;

  const auto factors = Formula::factors(sums.v);
  const float soft = a.soft ? a.soft[row] * a.inverse_temperature : 0, h = a.hard && label >= 0 ? a.hard[row] : 0;
  rows.template again<1>(kept, set, [&](int k, auto& values) {
    float d[kWidth] = {};
    each(k, values[0], [&](int j, int c, float s, float t) {
      d[j] = soft * Formula::template slope<M>(student(s), teacher(t), a.beta, factors);
      if (h != 0) d[j] += h * (M::exp(hard(s)) - (c == label));
      if constexpr (!kPlain) d[j] *= map_slope(a.x_map, s);
    });
    dx.store(k, d, x);
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
