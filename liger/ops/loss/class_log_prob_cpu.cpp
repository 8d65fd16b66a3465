#include "liger/core/cpu/row.h"
#include "liger/ops/loss/class_log_prob.h"

namespace LIGER_CPU::class_log_prob {
namespace {

template <class T>
void log_probs(const ClassLogProbs& a) {
  for (int64_t i = 0; i < a.rows * a.count; ++i)
    if (a.ids[i / a.count] != a.ignore_index && (a.classes[i] < -1 || a.classes[i] >= a.cols))
      return void(*a.bad_class = a.classes[i]);
  for_rows(a.rows, a.count * 8, [&](int64_t r) {
    const float* stats = a.stats + 3 * r;
    const double log_sum = std::log(double(stats[1]));
    for (int64_t i = r * a.count; i < (r + 1) * a.count; ++i) {
      const bool there = a.ids[r] != a.ignore_index && a.classes[i] >= 0;
      const T* x = row_of<T>(a.x, r, a.x_stride) + (there ? a.classes[i] : 0);
      float z[kLanes];
      if (there) map_logit<Math>(a.map, read(x, 1)).store(z);
      a.logp[i] = there ? float((double(z[0]) - stats[0]) * a.inverse_temperature - log_sum) : 0;
      if (a.logits) a.logits[i] = there ? float(*x) : 0;
    }
  });
}

template <class T>
void write(const ClassLogitsWrite& a) {
  for_rows(a.rows, a.count, [&](int64_t r) {
    T* x = row_of<T>(a.x, r, a.x_stride);
    for (int64_t i = r * a.count; i < (r + 1) * a.count && a.ids[r] != a.ignore_index; ++i)
      if (a.classes[i] >= 0) x[a.classes[i]] = T(a.logits ? a.logits[i] : -INFINITY);
  });
}

template <class T>
void gradients(const ClassGradients& a) {
  const auto exp = [](float x) { return std::exp(x); };
  const auto log = [](float x) { return std::log(x); };
  for_rows(a.rows, a.count * 32, [&](int64_t r) {
    T* dx = row_of<T>(a.dx, r, a.cols);
    for (int64_t k = 0; k < a.count; ++k)
      if (float d; class_gradient(a, r, k, exp, log, &d)) dx[a.classes[r * a.count + k] - a.first] = T(d);
  });
}

}  // namespace

LIGER_REGISTER(class_log_probs,
               [](const ClassLogProbs& a, Stream) { dispatch(a.dtype, [&]<class T>() { log_probs<T>(a); }); });
LIGER_REGISTER(class_logits_write,
               [](const ClassLogitsWrite& a, Stream) { dispatch(a.dtype, [&]<class T>() { write<T>(a); }); });
LIGER_REGISTER(class_gradients,
               [](const ClassGradients& a, Stream) { dispatch(a.dtype, [&]<class T>() { gradients<T>(a); }); });

}  // namespace LIGER_CPU::class_log_prob
