#include "liger/core/cuda/cluster.cuh"
#include "liger/core/cuda/softmax.cuh"
#include "liger/ops/loss/cross_entropy.h"

namespace liger::cuda::cross_entropy {
namespace {

__global__ void __launch_bounds__(1024) norm_kernel(CrossEntropyNorm a) {
  RowReduce<Sum> reduce;
  float n = 0, weight = 0, all = 0;
  for (int64_t r = threadIdx.x; r < a.rows; r += blockDim.x) {
    const int64_t y = a.target[r];
    if (y == a.ignore_index) continue;
    if (y < 0 || y >= a.cols) fail_label(y, a.cols);
    n += 1;
    weight += a.class_weight ? a.class_weight[y] : 1;
  }
  if (a.class_weight)
    for (int64_t c = threadIdx.x; c < a.cols; c += blockDim.x) all += a.class_weight[c];
  n = reduce(n), weight = reduce(weight), all = reduce(all);
  if (threadIdx.x > 0) return;
  a.norm[0] = a.normalizer ? *a.normalizer : a.mean ? weight : 1;
  a.norm[1] = a.normalizer ? *a.normalizer : a.mean ? n : 1;
  a.norm[2] = a.class_weight ? all : float(a.cols);
  a.norm[3] = n;
}

/// What a row's blocks tell each other.
template <class Softmax>
struct Part {
  typename Softmax::Value sum;
  float weighted;
  ArgMax::Value best;
};

/// kPlain: no class weight, smoothing, softcap or argmax.
template <class T, bool kPlain>
__global__ void __launch_bounds__(Clusters<T>::kThreads, Clusters<T>::kBlocks) rows_kernel(CrossEntropy a, Clusters<T> cluster) {
  using Softmax = OnlineSoftmax<T>;
  constexpr int kWidth = Row<T>::kWidth;
  const int64_t row = cluster.row(), y = a.target[row];
  const Row<T> x(a.x, row, a.x_stride, a.cols), dx(a.dx ? a.dx : a.x, row, a.dx ? a.dx_stride : a.x_stride, a.cols);
  const Packs<T> load{x, T(-INFINITY)};
  typename Clusters<T>::Kept kept;

  if (y == a.ignore_index) {
    constexpr float zeros[kWidth] = {};
    if (a.dx) cluster.again(kept, x.packs(), [](int) { return typename Row<T>::Pack(); }, [&](int k, const auto&) { dx.store(k, zeros, x); });
    if (cluster.first()) {
      a.loss[row] = a.z_loss[row] = 0;
      if (a.correct) a.correct[row] = 0;
      if (a.predicted) a.predicted[row] = -1;
    }
    return;
  }

  Post<Part<Softmax>> post;
  const float inverse_cap = kPlain || a.softcap == 0 ? 0 : 1 / a.softcap;
  const auto logit = [&](float v) { return kPlain || a.softcap == 0 ? v : a.softcap * Math<float>::tanh(v * inverse_cap); };
  const auto weight = [&](int c) { return a.class_weight ? a.class_weight[c] : 1; };
  const float z_y = logit(float(x.first[x.shift + y]));

  typename Softmax::Value sum = Softmax::identity();
  ArgMax::Value best = ArgMax::identity();
  float weighted = 0;
  cluster.pass(kept, x.packs(), load, [&](int k, const auto& pack) {
    float z[kWidth];
    pack.to_float(z);
    if constexpr (!kPlain) {
      for (int j = 0; j < kWidth; ++j) {
        const int c = x.column(k) + j;
        if (c < 0 || c >= x.n) continue;  // stays −inf, which a softcap would lift
        z[j] = logit(z[j]);
        if (a.label_smoothing > 0) weighted += weight(c) * z[j];
        if (z[j] > best.max) best = {z[j], c};
      }
    }
    Softmax::push(sum, z);
  });
  sum = RowReduce<Softmax, false, true>()(sum);
  if constexpr (!kPlain) best = RowReduce<ArgMax>()(best), weighted = RowReduce<Sum>()(weighted);
  const Part<Softmax> part{sum, weighted, best};
  sum = Softmax::identity(), best = ArgMax::identity(), weighted = 0;
  post(part, [&](const Part<Softmax>& p) {
    sum = Softmax()(sum, p.sum);
    if constexpr (!kPlain) best = ArgMax()(best, p.best), weighted += p.weighted;
  });

  // A row's own numbers are long products: where that shows they are rounded once, at the end.
  using Scalar = std::conditional_t<kPlain && sizeof(T) == 2, float, double>;
  const float lse = Softmax::lse(sum);
  const auto div = [](Scalar x, Scalar y) {
    if constexpr (sizeof(Scalar) == 4) return Math<T>::div(x, y);
    else return x / y;
  };
  const Scalar p_y = div(Softmax::exp(z_y, sum.max), sum.sum), by_0 = a.norm[0] > 0 ? div(1, a.norm[0]) : 0, by_1 = a.norm[1] > 0 ? div(1, a.norm[1]) : 0;
  const Scalar smooth = kPlain ? 0 : a.label_smoothing / Scalar(a.cols);
  const Scalar w_y = kPlain ? 1 : (1 - Scalar(a.label_smoothing)) * weight(int(y)), scale = a.token_scaling ? p_y : 1;
  if (cluster.first()) {
    const Scalar z_loss = Scalar(a.lse_square_scale) * lse * lse * by_1 * scale;
    const Scalar smoothing = smooth > 0 ? smooth * (Scalar(lse) * a.norm[2] - weighted) : 0;
    a.loss[row] = float((w_y * (Scalar(sum.max) - z_y + logf(sum.sum)) + smoothing) * by_0 * scale + z_loss);  // lse loses log Σ beside a large max
    a.z_loss[row] = float(z_loss);
    if (a.correct) a.correct[row] = best.at == y;
    if (a.predicted) a.predicted[row] = best.at;
  }
  if (!a.dx) return;

  const Scalar s = scale * (a.upstream ? a.upstream[row] : 1);
  // exp(z − max) / Σ instead of exp(z − lse): the rounding of lse would be in every p.
  const Scalar all = s * ((w_y + smooth * (kPlain ? 0 : a.norm[2])) * by_0 + 2 * a.lse_square_scale * lse * by_1);
  const Scalar each = s * smooth * by_0, t_y = z_y * inverse_cap;
  const float all_by_sum = float(div(all, sum.sum)), each_float = float(each);
  const float d_y = float((all * p_y - (kPlain ? 0 : each * weight(int(y))) - s * w_y * by_0) * (1 - t_y * t_y));
  const auto gradient = [&](float v, int c) {
    const float z = logit(v);
    float d = all_by_sum * Softmax::exp(z, sum.max);
    if constexpr (!kPlain) {
      if (each_float != 0) d -= each_float * weight(c);
      d *= 1 - z * inverse_cap * (z * inverse_cap);
    }
    return d;
  };
  cluster.again(kept, x.packs(), load, [&](int k, const auto& pack) {
    const int first = x.column(k), at = int(y) - first;  // the label's place in this pack, or outside of it
    float f[kWidth];
    pack.to_float(f);
#pragma unroll
    for (int j = 0; j < kWidth; ++j)
      if (kPlain || (first + j >= 0 && first + j < x.n)) f[j] = gradient(f[j], first + j);
    if (unsigned(at) < unsigned(kWidth)) {
#pragma unroll
      for (int j = 0; j < kWidth; ++j) f[j] = j == at ? d_y : f[j];
    }
    dx.store(k, f, x);
  });
}

template <class T>
__global__ void __launch_bounds__(1024) total_kernel(CrossEntropyTotal a) {
  RowReduce<Sum> reduce;
  float loss = 0, z_loss = 0, correct = 0;
  for (int64_t r = threadIdx.x; r < a.rows; r += blockDim.x) {
    loss += a.loss[r], z_loss += a.z_loss[r];
    if (a.correct) correct += a.correct[r];
  }
  loss = reduce(loss), z_loss = reduce(z_loss), correct = reduce(correct);
  if (threadIdx.x > 0) return;
  *static_cast<T*>(a.loss_total) = T(loss);
  *static_cast<T*>(a.z_loss_total) = T(z_loss);
  if (a.accuracy) *a.accuracy = correct / a.norm[3];
}

}  // namespace

LIGER_REGISTER(cross_entropy_norm, [](const CrossEntropyNorm& a, Stream s) { launch(norm_kernel, {.blocks = 1, .threads = 1024}, s, a); });

LIGER_REGISTER(cross_entropy_rows, [](const CrossEntropy& a, Stream s) {
  dispatch(a.dtype, [&]<class T>() {
    const Clusters<T> cluster(a.rows, a.cols, a.dx != nullptr);
    const bool plain = !a.class_weight && a.label_smoothing == 0 && a.softcap == 0 && !a.correct && !a.predicted;
    launch(plain ? rows_kernel<T, true> : rows_kernel<T, false>, cluster.grid(), s, a, cluster);
  });
});

LIGER_REGISTER(cross_entropy_total, [](const CrossEntropyTotal& a, Stream s) {
  dispatch(a.dtype, [&]<class T>() { launch(total_kernel<T>, {.blocks = 1, .threads = 1024}, s, a); });
});

}  // namespace liger::cuda::cross_entropy
