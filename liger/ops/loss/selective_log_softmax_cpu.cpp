#include "liger/core/cpu/row.h"
#include "liger/ops/loss/selective_log_softmax.h"

namespace LIGER_CPU::selective_log_softmax {
namespace {

template <class T>
void parts(const SelectiveParts& a) {
  const int64_t a_row = pieces_of(a.cols, a.piece);
  const Vec inverse(a.inverse_temperature), lowest(kSelectiveLowest);
  for_pieces(a.rows, a.cols, [&](int64_t r, int64_t begin, int64_t n) {
    if (a.ids[r] == a.ignore_index) return;
    const T* x = row_of<T>(a.x, r, a.x_stride) + begin;
    const float max = std::max(row_reduce(n, -INFINITY, Max{}, [](Vec x) { return x; }, x), -3.402823466e38f);  // finite, so that −inf − max is no NaN
    LongSum sum, weighted;
    for_each(n, [&](int64_t c, int64_t k) {
      const Vec d = (read(x + c, k) - Vec(max)) * inverse, e = Math::exp(d);
      sum.add(e, k), weighted.add(e * Math::max(d, lowest), k);
    });
    float* part = a.parts + (r * a_row + begin / a.piece) * 3;
    part[0] = max, part[1] = float(sum.value()), part[2] = float(weighted.value());
  }, a.piece);
}

template <class T>
void rows(const SelectiveLogSoftmax& a) {
  for (int64_t r = 0; r < a.rows; ++r)
    if (a.ids[r] != a.ignore_index && (a.ids[r] < 0 || a.ids[r] >= a.cols)) return void(*a.bad_id = a.ids[r]);
  for_rows(a.rows, a.a_row * 8, [&](int64_t r) {
    a.logp[r] = a.entropy[r] = 0;
    if (a.ids[r] == a.ignore_index) return;
    const float* part = a.parts + r * a.a_row * 3;
    float max = part[0];
    for (int64_t i = 1; i < a.a_row; ++i) max = Max{}(max, part[3 * i]);
    double sum = 0, weighted = 0;
    for (int64_t i = 0; i < a.a_row; ++i, part += 3) {
      const double d = std::max((double(part[0]) - max) * a.inverse_temperature, double(kSelectiveLowest)), e = std::exp(d);
      sum += e * part[1], weighted += e * (part[2] + d * part[1]);
    }
    const float x = float(row_of<T>(a.x, r, a.x_stride)[a.ids[r]]);
    a.logp[r] = float((double(x) - max) * a.inverse_temperature - std::log(sum));
    a.entropy[r] = float(std::log(sum) - weighted / sum);
    float* stats = a.stats + 3 * r;
    stats[0] = max, stats[1] = float(sum), stats[2] = float(weighted / sum);
  });
}

template <class T>
void backward(const SelectiveBackward& a) {
  const Vec inverse(a.inverse_temperature), lowest(kSelectiveLowest);
  for_pieces(a.rows, a.cols, [&](int64_t r, int64_t begin, int64_t n) {
    const int64_t id = a.ids[r] - begin;
    const T* x = row_of<T>(a.x, r, a.x_stride) + begin;
    T* dx = row_of<T>(a.dx, r, a.cols) + begin;
    if (a.ids[r] == a.ignore_index) return void(std::fill_n(dx, n, T(0)));
    const float *stats = a.stats + 3 * r, g = a.dlogp[r] * a.inverse_temperature, h = a.dentropy[r] * a.inverse_temperature;
    const Vec top(stats[0]), slope(-h / stats[1]), level((h * stats[2] - g) / stats[1]);
    const auto gradient = [&](Vec x) {
      const Vec d = (x - top) * inverse;
      return Math::exp(d) * Math::fma(slope, Math::max(d, lowest), level);
    };
    float lanes[kLanes];
    if (id >= 0 && id < n) gradient(read(x + id, 1)).store(lanes);  // before x is overwritten, which may be dx
    row_map(n, dx, [&](Vec x) { return flushed(gradient(x)); }, x);
    if (id >= 0 && id < n) dx[id] = T(g + lanes[0]);
  });
}

}  // namespace

LIGER_REGISTER(selective_parts, [](const SelectiveParts& a, Stream) {
  dispatch(a.dtype, [&]<class T>() { parts<T>(a); });
});
LIGER_REGISTER(selective_log_softmax_rows, [](const SelectiveLogSoftmax& a, Stream) {
  dispatch(a.dtype, [&]<class T>() { rows<T>(a); });
});
LIGER_REGISTER(selective_backward, [](const SelectiveBackward& a, Stream) {
  dispatch(a.dtype, [&]<class T>() { backward<T>(a); });
});

}  // namespace LIGER_CPU::selective_log_softmax
