#include "liger/core/cpu/row.h"
#include "liger/ops/mixers/channel_gates.h"

namespace LIGER_CPU::channel_gates {
namespace {

using Gate = ChannelGate<Math, Vec>;

/// What every row reads again, in float.
struct Constants {
  std::vector<float> rate, bias;  // [heads], [heads, channels]

  explicit Constants(const ChannelGates& a) : rate(size_t(a.heads)), bias(size_t(a.heads * a.channels)) {
    for (int64_t h = 0; h < a.heads; ++h) rate[size_t(h)] = std::exp(number(a.A, h));
    if (!a.dt_bias.of) return;
    for (int64_t c = 0; c < a.heads * a.channels; ++c) bias[size_t(c)] = number(a.dt_bias, c);
  }
};

template <class T, class G>
void forward(const ChannelGatesForward& a) {
  const Constants of(a);
  for_rows(a.rows, a.heads * a.channels * 16, [&](int64_t row) {
    for (int64_t h = 0; h < a.heads; ++h) {
      const Gate gate(of.rate[size_t(h)], a.low);
      const int64_t first = h * a.channels;
      row_map(
          a.channels, row_of<G>(a.g, row, a.heads * a.channels) + first,
          [&](Vec x, Vec bias) { return gate.value(x + bias); }, row_of<T>(a.a, row, a.a_stride) + first,
          of.bias.data() + first);
    }
  });
}

/// da of one row and head; adds it to ddt_bias, and returns the row's part of dA.
template <class T, class G>
float backward_row(const ChannelGatesBackward& a, const Gate& gate, int64_t at, const T* x, const float* bias,
                   float* ddt_bias) {
  const G* dg = static_cast<const G*>(a.dg) + at;
  T* da = static_cast<T*>(a.da) + at;
  Vec sum(0.f);
  for_each(a.channels, [&](int64_t c, int64_t n) {
    const Gate::Slopes slopes = gate.slopes(read(x + c, n) + read(bias + c, n));
    const Vec up = read(dg + c, n), d = up * slopes.by_x;
    write(d, da + c, n);
    write(read(ddt_bias + c, n) + d, ddt_bias + c, n);
    sum = sum + Vec::set(Vec(0.f), up * slopes.by_A, n);
  });
  return reduce_lanes(sum, Plus{});
}

/// Each partial sum is that of a run of rows, at most 64 (row_partials).
template <class T, class G>
void backward(const ChannelGatesBackward& a) {
  const Constants of(a);
  const int64_t columns = a.heads * a.channels, run = ceil_div(a.rows, a.partials);
  for_rows(a.partials, run * columns * 32, [&](int64_t part) {
    std::vector<double> dA(size_t(a.heads));
    std::vector<float> ddt_bias(size_t(columns), 0.f);
    for (int64_t row = part * run; row < std::min(a.rows, (part + 1) * run); ++row)
      for (int64_t h = 0; h < a.heads; ++h) {
        const int64_t first = h * a.channels;
        dA[size_t(h)] += backward_row<T, G>(a, Gate(of.rate[size_t(h)], a.low), row * columns + first,
                                            row_of<T>(a.a, row, a.a_stride) + first, of.bias.data() + first,
                                            ddt_bias.data() + first);
      }
    if (a.dA) std::copy(dA.begin(), dA.end(), a.dA + part * a.heads);
    if (a.ddt_bias) std::copy(ddt_bias.begin(), ddt_bias.end(), a.ddt_bias + part * columns);
  });
}

}  // namespace

LIGER_REGISTER(channel_gates_forward, [](const ChannelGatesForward& a, Stream) {
  dispatch_weighted(a.dtype, a.g_dtype, [&]<class T, class G>() { forward<T, G>(a); });
});
LIGER_REGISTER(channel_gates_backward, [](const ChannelGatesBackward& a, Stream) {
  dispatch_weighted(a.dtype, a.g_dtype, [&]<class T, class G>() { backward<T, G>(a); });
});

}  // namespace LIGER_CPU::channel_gates
