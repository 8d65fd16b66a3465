#include "liger/core/cpu/row.h"
#include "liger/ops/loss/cross_entropy.h"

namespace LIGER_CPU::cross_entropy {
namespace {

void norm(const CrossEntropyNorm& a) {
  int64_t n = 0;
  double weight = 0, all = 0;
  for (int64_t r = 0; r < a.rows; ++r) {
    const int64_t y = a.target[r];
    if (y == a.ignore_index) continue;
    if (y < 0 || y >= a.cols) return void(*a.bad_label = y);
    n += 1;
    weight += a.class_weight ? a.class_weight[y] : 1;
  }
  for (int64_t c = 0; a.class_weight && c < a.cols; ++c) all += a.class_weight[c];
  const float divisor = a.normalizer ? *a.normalizer
                        : a.mean     ? float(weight)
                                     : 1,
              z_divisor = a.normalizer ? divisor
                          : a.mean     ? float(n)
                                       : 1;
  *a.sums = {
      .divisor = divisor,
      .z_divisor = z_divisor,
      .class_weights = a.class_weight ? float(all) : float(a.cols),
      .gradient_scale =
          a.z_bound >= 0 ? gradient_scale(divisor, z_divisor, a.largest_weight ? *a.largest_weight : 1, a.z_bound) : 1,
      .blocks_done = 0,
      .valid = n};
}

void totals(const CrossEntropyTotals& a, int64_t valid) {
  double loss = 0, z_loss = 0, correct = 0;
  for (int64_t r = 0; r < a.rows; ++r)
    loss += a.loss[r], z_loss += a.z_loss ? a.z_loss[r] : 0, correct += a.correct ? a.correct[r] : 0;
  dispatch(a.dtype, [&]<class T>() {
    *static_cast<T*>(a.loss_total) = T(float(loss));
    if (a.z_loss_total) *static_cast<T*>(a.z_loss_total) = T(float(z_loss));
  });
  if (a.accuracy) *a.accuracy = float(correct / double(valid));
}

/// Writes the results of a row whose label does not count.
template <class T>
void ignore(const CrossEntropy& a, int64_t r, T* dx) {
  if (dx) std::fill_n(dx, a.cols, T(0));
  a.loss[r] = 0;
  if (a.z_loss) a.z_loss[r] = 0;
  if (a.correct) a.correct[r] = 0;
  if (a.predicted) a.predicted[r] = -1;
}

/// The first column whose logit is max, or NaN.
template <class T, class F>
int64_t first_of(int64_t n, float max, F logit, const T* x) {
  float lanes[kLanes];
  int64_t best = n;
  const auto is_best = [&](float v) { return v == max || std::isnan(v); };
  for_each(n, [&](int64_t c, int64_t k) {
    if (best < n) return;
    logit(read(x + c, k)).store(lanes);
    if (const int64_t at = std::find_if(lanes, lanes + k, is_best) - lanes; at < k) best = c + at;
  });
  return best;
}

template <class T>
void row(const CrossEntropy& a, int64_t r, float* exps) {
  const T* x = static_cast<const T*>(a.x) + r * a.x_stride;
  T* dx = a.dx ? static_cast<T*>(a.dx) + r * a.dx_stride : nullptr;
  const int64_t y = a.target[r], n = a.cols;
  if (y == a.ignore_index) return ignore(a, r, dx);
  const Vec cap(a.softcap), inverse_cap(a.softcap == 0 ? 0 : 1 / a.softcap);
  const bool capped = a.softcap != 0;
  const auto logit = [&](Vec v) { return capped ? cap * Math::tanh(v * inverse_cap) : v; };

  // The maximum of the values that argmax compares with it: those of the vector form of tanh.
  const float max = row_reduce(n, -INFINITY, Max{}, logit, x);
  if (a.correct || a.predicted) {
    const int64_t best = first_of(n, max, logit, x);
    if (a.correct) a.correct[r] = best == y;
    if (a.predicted) a.predicted[r] = best;
  }
  const float z_y = capped ? a.softcap * std::tanh(float(x[y]) / a.softcap) : float(x[y]);
  float sum = 0;
  const auto exp_of = [&](Vec v) { return Math::exp(logit(v) - Vec(max)); };
  if (exps) row_map(n, exps, exp_of, x), sum = row_sum(n, [](Vec e) { return e; }, exps);
  else sum = row_sum(n, exp_of, x);
  // A row's own numbers in double: the label's gradient, p − 1 in essence, is then rounded once.
  const double log_sum = std::log(double(sum)), lse = max + log_sum, p_y = std::exp(double(z_y) - max) / sum;

  const auto weight = [&](int64_t c) { return a.class_weight ? a.class_weight[c] : 1; };
  const double by_0 = a.sums->divisor != 0 ? 1. / a.sums->divisor : 0,
               by_1 = a.sums->z_divisor != 0 ? 1. / a.sums->z_divisor : 0;
  const double smooth = double(a.label_smoothing) / n, w_y = (1. - a.label_smoothing) * weight(y),
               scale = a.token_scaling ? p_y : 1;
  double smoothing = 0;
  if (smooth > 0) {
    // Σ w (L − z) about max: the rounding of a large logit times its weight would be in the loss.
    const auto below = [&](Vec v) { return logit(v) - Vec(max); };
    const auto weighted = [&](Vec v, Vec w) { return below(v) * w; };
    const float sum_z = a.class_weight ? row_sum(n, weighted, x, a.class_weight) : row_sum(n, below, x);
    smoothing = smooth * (log_sum * a.sums->class_weights - sum_z);
  }
  const double z_loss = a.lse_square_scale * lse * lse * by_1 * scale;
  a.loss[r] = float((w_y * (double(max) - z_y + log_sum) + smoothing) * by_0 * scale +
                    z_loss);  // lse loses log Σ when max is large
  if (a.z_loss) a.z_loss[r] = float(z_loss);
  if (!dx) return;

  const double s = scale * a.sums->gradient_scale * (a.upstream ? a.upstream[r] : 1);
  const double all = s * ((w_y + smooth * a.sums->class_weights) * by_0 + 2 * a.lse_square_scale * lse * by_1),
               label = s * w_y * by_0;
  const Vec by{float(all / sum)}, each{float(s * smooth * by_0)}, shift(max);
  const double t_y = capped ? std::tanh(double(x[y]) / a.softcap) : 0;  // 1 − t² multiplies a float's rounding
  const double d_y = (all * p_y - s * smooth * by_0 * weight(y) - label) * (1 - t_y * t_y);
  if (exps && !capped && smooth == 0) {
    row_map(n, dx, [&](Vec e) { return flushed(e * by); }, exps);
  } else {
    for_each(n, [&](int64_t c, int64_t k) {
      const Vec v = read(x + c, k), t = capped ? Math::tanh(v * inverse_cap) : v;
      Vec d = by * Math::exp((capped ? cap * t : v) - shift);
      if (smooth > 0) d = d - each * (a.class_weight ? read(a.class_weight + c, k) : Vec(1.f));
      write(flushed(capped ? d * (Vec(1.f) - t) * (Vec(1.f) + t) : d), dx + c, k);  // 1 − t² without the rounding of t²
    });
  }
  dx[y] = T(float(d_y));
}

}  // namespace

LIGER_REGISTER(cross_entropy_norm, [](const CrossEntropyNorm& a, Stream) { norm(a); });

LIGER_REGISTER(cross_entropy_rows, [](const CrossEntropy& a, Stream) {
  dispatch(a.dtype, [&]<class T>() {
    for_runs(a.rows, a.cols * 8, [&](int64_t begin, int64_t end) {
      // A row's exponentials wait for the second pass, unless x is still needed there.
      std::vector<float> scratch;
      const bool reuse = a.dx && a.softcap == 0 && a.label_smoothing == 0;
      for (int64_t r = begin; r < end; ++r)
        row<T>(a, r, reuse ? float_row(static_cast<T*>(a.dx) + r * a.dx_stride, a.cols, scratch) : nullptr);
    });
  });
  if (a.totals.loss_total) totals(a.totals, a.sums->valid);
});

}  // namespace LIGER_CPU::cross_entropy
