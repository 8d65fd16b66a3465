#include "liger/core/cpu/row.h"
#include "liger/ops/head/linear_distillation.h"

namespace LIGER_CPU::linear_distillation {
namespace {

/// ln softmax(z · inverse_temperature) = (z − max) · inverse_temperature − log_sum.
struct LogSoftmax {
  float max, inverse_temperature, log_sum;
  Vec operator()(const Vec& z) const { return (z - Vec(max)) * Vec(inverse_temperature) - Vec(log_sum); }
};

template <class T>
LogSoftmax log_softmax(const T* y, int64_t cols, const LogitMap& map, float inverse_temperature) {
  // finite, so that −inf − max is no NaN
  const float max =
      std::max(row_reduce(cols, -INFINITY, Max{}, [&](Vec y) { return map_logit<Math>(map, y); }, y), -3.402823466e38f);
  LogSoftmax of{max, inverse_temperature, 0};
  of.log_sum = float(std::log(row_sum(cols, [&](Vec y) { return Math::exp(of(map_logit<Math>(map, y))); }, y)));
  return of;
}

template <class T, class Formula>
void rows(const LinearDistillation& a) {
  constexpr int kSums = Formula::kSums;
  if (a.labels)
    for (int64_t r = 0; r < a.rows; ++r)
      if (const int64_t y = a.labels[r]; y != a.ignore_index && (y < 0 || y >= a.cols)) return void(*a.bad_label = y);
  const Vec beta(a.beta), inverse(a.inverse_temperature);
  for_rows(a.rows, a.cols * 32, [&](int64_t r) {
    const T *x = row_of<T>(a.x, r, a.cols), *y = row_of<T>(a.y, r, a.cols);
    T* dx = a.dx ? row_of<T>(a.dx, r, a.cols) : nullptr;
    const bool ignored = a.labels && a.labels[r] == a.ignore_index;
    if (ignored && a.skip_ignored) {
      a.divergence[r] = a.nll[r] = 0;
      if (a.entropy) a.entropy[r] = 0;
      if (dx) std::fill_n(dx, a.cols, T(0));
      return;
    }
    const int64_t label = a.labels && !ignored ? a.labels[r] : -1;
    const LogSoftmax of_x = log_softmax(x, a.cols, a.x_map, a.inverse_temperature),
                     of_y = log_softmax(y, a.cols, a.y_map, a.inverse_temperature);
    const LogSoftmax hard = a.inverse_temperature == 1 || label < 0 ? of_x : log_softmax(x, a.cols, a.x_map, 1);
    const auto of_student = [&](const Vec& z) { return Formula::kLogs ? of_x(z) : z * inverse; };
    const auto of_teacher = [&](const Vec& z) { return Formula::kLogs ? of_y(z) : z * inverse; };
    const auto sums = row_sums<kSums + 1>(
        a.cols,
        [&](const Vec& x, const Vec& y) {
          const Vec z = map_logit<Math>(a.x_map, x), log_q = of_x(z);
          const auto terms =
              Formula::template terms<Math>(of_student(z), of_teacher(map_logit<Math>(a.y_map, y)), beta);
          std::array<Vec, kSums + 1> all;
          std::copy_n(terms.v, kSums, all.begin());
          all[kSums] = a.entropy ? Math::product(Math::exp(log_q), log_q) : Vec(0.f);
          return all;
        },
        x, y);
    a.divergence[r] = Formula::value(sums.data());
    if (a.entropy) a.entropy[r] = float(-sums[kSums]);
    a.nll[r] = 0;
    float lanes[kLanes];
    if (label >= 0) hard(map_logit<Math>(a.x_map, read(x + label, 1))).store(lanes), a.nll[r] = -lanes[0];
    if (!dx) return;
    const float h = a.hard && label >= 0 ? a.hard[r] : 0;
    const auto factors = Formula::factors(sums.data());
    const Vec soft((a.soft ? a.soft[r] : 0.f) * a.inverse_temperature), of_label(h);
    const auto gradient = [&](const Vec& x, const Vec& y, const Vec& minus) {
      const Vec z = map_logit<Math>(a.x_map, x);
      Vec d =
          soft * Formula::template slope<Math>(of_student(z), of_teacher(map_logit<Math>(a.y_map, y)), beta, factors);
      if (h != 0) d = Math::fma(of_label, Math::exp(hard(z)), d) - minus;
      return flushed(is_plain(a.x_map) ? d : d * map_slope(a.x_map, z));
    };
    if (label >= 0)
      gradient(read(x + label, 1), read(y + label, 1), of_label)
          .store(lanes);  // before x is overwritten, which may be dx
    row_map(a.cols, dx, [&](const Vec& x, const Vec& y) { return gradient(x, y, Vec(0.f)); }, x, y);
    if (label >= 0) dx[label] = T(lanes[0]);
  });
}

}  // namespace

LIGER_REGISTER(linear_distillation_rows, [](const LinearDistillation& a, Stream) {
  dispatch(a.dtype, [&]<class T>() { dispatch_distillation(a.kind, [&]<class Formula>() { rows<T, Formula>(a); }); });
});

}  // namespace LIGER_CPU::linear_distillation
