#include "liger/core/cpu/row.h"
#include "liger/ops/optimizer/adamw.h"

namespace LIGER_CPU::optimizer {
namespace {

template <class P, class G, class M, bool kMaster>
void update(const AdamW& a, const AdamWTensor& t) {
  using Source = std::conditional_t<kMaster, float, P>;
  const float lr = a.lr ? *a.lr : a.lr_value, factor = (a.maximize ? -1 : 1) * (a.factor ? *a.factor : 1);
  const Vec of_gradient(factor), keep(1 - lr * a.weight_decay), beta2(float(a.beta2)), eps(a.eps),
      rest1(float(1 - a.beta1)), rest2(float(1 - a.beta2)), step_size(lr / -std::expm1(*t.step * a.log_beta1())),
      root(std::sqrt(-std::expm1(*t.step * a.log_beta2())));
  auto* source = kMaster ? reinterpret_cast<Source*>(t.master) : static_cast<Source*>(t.parameter);
  for_row_chunks(1, t.count, [&](int64_t, int64_t begin, int64_t n) {
    for (int64_t i = begin; i < begin + n; i += kLanes) {
      const int64_t lanes = std::min(kLanes, begin + n - i);
      M *mean = static_cast<M*>(t.mean) + i, *square = static_cast<M*>(t.square) + i;
      const Vec g = read(static_cast<const G*>(t.gradient) + i, lanes) * of_gradient, m_ = read(mean, lanes);
      const Vec m = m_ + (g - m_) * rest1, v = read(square, lanes) * beta2 + g * g * rest2;
      const Vec p = read(source + i, lanes) * keep - step_size * m / (v.sqrt() / root + eps);
      write(m, mean, lanes), write(v, square, lanes), write(p, source + i, lanes);
      if constexpr (kMaster) write(p, static_cast<P*>(t.parameter) + i, lanes);
    }
  });
}

}  // namespace

LIGER_REGISTER(adamw, [](const AdamW& a, Stream) {
  if (a.found_inf && *a.found_inf != 0) return;
  dispatch_weighted(a.parameter, a.gradient, [&]<class P, class G>() {
    const auto all = [&](auto update_one) {
      for (int64_t i = 0; i < a.tensors_count; ++i) update_one(a, a.tensors[i]);
    };
    if constexpr (!std::is_same_v<P, float>) {
      if (a.tensors[0].master) return all(update<P, G, float, true>);
      if (a.moments != DType::F32) return all(update<P, G, P, false>);
    }
    all(update<P, G, float, false>);
  });
});

}  // namespace LIGER_CPU::optimizer
