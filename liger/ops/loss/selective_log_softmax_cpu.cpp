#include "liger/core/cpu/row.h"
#include "liger/ops/loss/selective_log_softmax.h"

namespace LIGER_CPU::selective_log_softmax {
namespace {

template <class T>
void parts(const SelectiveParts& a) {
  const int64_t per_row = ceil_div(a.cols, a.chunk);
  const Vec inverse(a.inverse_temperature), lowest(kSelectiveLowest);
  for_row_chunks(
      a.rows, a.cols,
      [&](int64_t r, int64_t begin, int64_t n) {
        if (a.ids[r] == a.ignore_index) return;
        const T* x = row_of<T>(a.x, r, a.x_stride) + begin;
        const float max = std::max(row_reduce(
                                       n, -INFINITY, Max{}, [&](Vec x) { return map_logit<Math>(a.map, x); }, x),
                                   -3.402823466e38f);  // finite, so that −inf − max is no NaN
        LongSum sum, weighted, logits;
        for_each(n, [&](int64_t c, int64_t k) {
          const Vec z = map_logit<Math>(a.map, read(x + c, k)), d = (z - Vec(max)) * inverse, e = Math::exp(d);
          sum.add(e, k), weighted.add(e * Math::max(d, lowest), k);
          if (a.mean_logit) logits.add(z, k);
        });
        float* part = a.parts + (r * per_row + begin / a.chunk) * kSelectiveParts;
        part[0] = max, part[1] = float(sum.value()), part[2] = float(weighted.value()), part[3] = float(logits.value());
      },
      a.chunk);
}

template <class T>
void rows(const SelectiveLogSoftmax& a) {
  for (int64_t r = 0; r < a.rows; ++r)
    if (a.ids[r] != a.ignore_index && (a.ids[r] < 0 || a.ids[r] >= a.cols)) return void(*a.bad_id = a.ids[r]);
  for_rows(a.rows, a.per_row * 8, [&](int64_t r) {
    a.logp[r] = a.entropy[r] = 0;
    if (a.lse) a.lse[r] = 0;
    if (a.mean_logit) a.mean_logit[r] = 0;
    if (a.ids[r] == a.ignore_index) return;
    const float* part = a.parts + r * a.per_row * kSelectiveParts;
    float max = part[0];
    for (int64_t i = 1; i < a.per_row; ++i) max = Max{}(max, part[kSelectiveParts * i]);
    double sum = 0, weighted = 0, logits = 0;
    for (int64_t i = 0; i < a.per_row; ++i, part += kSelectiveParts) {
      const double d = std::max((double(part[0]) - max) * a.inverse_temperature, double(kSelectiveLowest)),
                   e = std::exp(d);
      sum += e * part[1], weighted += e * (part[2] + d * part[1]), logits += part[3];
    }
    float z[kLanes];
    map_logit<Math>(a.map, read(row_of<T>(a.x, r, a.x_stride) + a.ids[r], 1)).store(z);
    if (a.lse) a.lse[r] = float(double(max) * a.inverse_temperature + std::log(sum));
    if (a.mean_logit) a.mean_logit[r] = float(logits * a.inverse_temperature / double(a.cols));
    a.logp[r] = float((double(z[0]) - max) * a.inverse_temperature - std::log(sum));
    a.entropy[r] = float(std::log(sum) - weighted / sum);
    float* stats = a.stats + 3 * r;
    stats[0] = max, stats[1] = float(sum), stats[2] = float(weighted / sum);
  });
}

template <class T>
void backward(const SelectiveBackward& a) {
  const Vec inverse(a.inverse_temperature), lowest(kSelectiveLowest);
  for_row_chunks(a.rows, a.cols, [&](int64_t r, int64_t begin, int64_t n) {
    const int64_t id = a.ids[r] - a.first - begin;
    const T* x = row_of<T>(a.x, r, a.x_stride) + begin;
    T* dx = row_of<T>(a.dx, r, a.cols) + begin;
    if (a.ids[r] == a.ignore_index) return void(std::fill_n(dx, n, T(0)));
    const float *stats = a.stats + 3 * r, g = a.dlogp[r] * a.inverse_temperature,
                h = a.dentropy[r] * a.inverse_temperature;
    const float l = a.dlse ? a.dlse[r] * a.inverse_temperature : 0,
                k = a.dmean_logit ? a.dmean_logit[r] * a.inverse_temperature / float(a.classes) : 0;
    const Vec top(stats[0]), slope(-h / stats[1]), level((h * stats[2] - g + l) / stats[1]), each(k);
    const auto gradient = [&](Vec x, Vec plus) {
      const Vec z = map_logit<Math>(a.map, x), d = (z - top) * inverse,
                dz = Math::fma(Math::exp(d), Math::fma(slope, Math::max(d, lowest), level), each) + plus;
      return is_plain(a.map) ? dz : dz * map_slope(a.map, z);
    };
    float lanes[kLanes];
    if (id >= 0 && id < n) gradient(read(x + id, 1), Vec(g)).store(lanes);  // before x is overwritten, which may be dx
    row_map(n, dx, [&](Vec x) { return flushed(gradient(x, Vec(0.f))); }, x);
    if (id >= 0 && id < n) dx[id] = T(lanes[0]);
  });
}

}  // namespace

LIGER_REGISTER(selective_parts,
               [](const SelectiveParts& a, Stream) { dispatch(a.dtype, [&]<class T>() { parts<T>(a); }); });
LIGER_REGISTER(selective_log_softmax_rows,
               [](const SelectiveLogSoftmax& a, Stream) { dispatch(a.dtype, [&]<class T>() { rows<T>(a); }); });
LIGER_REGISTER(selective_backward,
               [](const SelectiveBackward& a, Stream) { dispatch(a.dtype, [&]<class T>() { backward<T>(a); }); });

}  // namespace LIGER_CPU::selective_log_softmax
