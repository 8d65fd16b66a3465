#include "liger/core/cpu/row.h"
#include "liger/ops/mixers/causal_conv1d.h"

namespace LIGER_CPU::causal_conv1d {
namespace {

constexpr int64_t kBlock = 256;                       // channels that are worked on together
constexpr int64_t kRowTokens = 64;                    // of a strip where channels are neighbours
constexpr int64_t kTokens = 1024;                     // and where tokens are
constexpr int64_t kBefore = CausalConv1d::kMostTaps;  // tokens before a strip that a scratch row has room for

/// Taps as floats, tap i of a channel that of the token i before, and the bias.
struct Taps {
  std::vector<float> w, bias;  // [width, channels], [channels]

  explicit Taps(const CausalConv1d& a) : w(size_t(a.width * a.channels)), bias(size_t(a.channels)) {
    for (int64_t c = 0; c < a.channels; ++c) {
      if (a.bias.of) bias[c] = number(a.bias, c);
      for (int i = 0; i < a.width; ++i) w[i * a.channels + c] = number(a.w, c * a.width + a.width - 1 - i);
    }
  }
};

Vec act(const CausalConv1d& a, const Vec& z) { return a.silu ? SiLU::value<Math>(z) : z; }
Vec slope(const CausalConv1d& a, const Vec& z) { return a.silu ? SiLU::derivative<Math>(z) : Vec(1.f); }

/// Where channels are neighbours: a token's row of channels is a sum of the rows before it.
template <class T>
struct Rows {
  const CausalConv1d& a;
  const Taps& taps;
  int64_t row, channel, n;  // channels

  const T* x(int64_t t) const { return static_cast<const T*>(a.x) + row * a.batch_stride + t * a.row_stride + channel; }
  template <class M>
  auto of(M* matrix, int64_t t) const {
    using Number = std::conditional_t<std::is_const_v<M>, const T, T>;
    return static_cast<Number*>(matrix) + (row * a.time + t) * a.channels + channel;
  }
  Vec w(int i, int64_t c, int64_t k) const { return read(taps.w.data() + i * a.channels + channel + c, k); }

  Vec z(int64_t t, int reach, int64_t c, int64_t k) const {
    Vec sum = read(taps.bias.data() + channel + c, k);
    for (int i = reach; i >= 0; --i) sum = Math::fma(w(i, c, k), read(x(t - i) + c, k), sum);
    return sum;
  }
};

template <class T>
void forward_rows(const CausalConv1dForward& a) {
  const Taps taps(a);
  const TokenStrips strips(a, kRowTokens);
  const int64_t blocks = ceil_div(a.channels, kBlock);
  for_rows(strips.count * blocks, kRowTokens * std::min(kBlock, a.channels), [&](int64_t task) {
    const int64_t strip = task / blocks, channel = task % blocks * kBlock;
    const Rows<T> rows{a, taps, strips.row(strip), channel, std::min(kBlock, a.channels - channel)};
    for (int64_t t = strips.begin(strip); t < strips.end(strip); ++t) {
      T* y = rows.of(a.y, t);
      const int r = reach(a, rows.row, t);
      if (r < 0) std::fill_n(y, rows.n, T(0));
      else for_each(rows.n, [&](int64_t c, int64_t k) { write(act(a, rows.z(t, r, c, k)), y + c, k); });
    }
  });
}

/// A task has the channels of a block and the strips of a partial sum.
template <class T>
void backward_rows(const CausalConv1dBackward& a) {
  const Taps taps(a);
  const TokenStrips strips(a, kRowTokens);
  const int64_t blocks = ceil_div(a.channels, kBlock), each = ceil_div(strips.count, a.partials);
  for_rows(a.partials * blocks, each * kRowTokens * std::min(kBlock, a.channels), [&](int64_t task) {
    const int64_t partial = task / blocks, channel = task % blocks * kBlock, n = std::min(kBlock, a.channels - channel);
    std::vector<float> dz(size_t((kRowTokens + a.width - 1) * n)), sums(size_t((a.width + 1) * n)), near(sums);
    // Of dw by tap, and of dbias. Chains of few tokens: a sum's error does not grow with their number.
    const auto add_up = [&] {
      row_map(int64_t(sums.size()), sums.data(), [](Vec a, Vec b) { return a + b; }, sums.data(), near.data());
      std::fill(near.begin(), near.end(), 0.f);
    };
    for (int64_t strip = partial * each; strip < std::min(strips.count, (partial + 1) * each); ++strip) {
      const Rows<T> rows{a, taps, strips.row(strip), channel, n};
      const int64_t begin = strips.begin(strip), end = strips.end(strip), stop = std::min(end + a.width - 1, a.time);
      for (int64_t t = begin; t < stop; ++t) {
        const T* dy = rows.of(a.dy, t);
        float* of_token = dz.data() + (t - begin) * n;
        const int r = reach(a, rows.row, t);
        if ((t - begin) % 16 == 0) add_up();
        if (r < 0) continue;
        for_each(n, [&](int64_t c, int64_t k) {
          const Vec d = read(dy + c, k) * slope(a, rows.z(t, r, c, k));
          write(d, of_token + c, k);
          if (t >= end) return;
          float* bias = near.data() + a.width * n + c;
          write(read(bias, k) + d, bias, k);
          for (int i = 0; i <= r && a.dw; ++i) {
            float* sum = near.data() + i * n + c;
            write(Math::fma(d, read(rows.x(t - i) + c, k), read(sum, k)), sum, k);
          }
        });
      }
      for (int64_t t = begin; t < end && a.dx; ++t) {
        bool reached[CausalConv1d::kMostTaps];
        for (int i = 0; i < a.width; ++i) reached[i] = t + i < stop && reach(a, rows.row, t + i) >= i;
        for_each(n, [&](int64_t c, int64_t k) {
          Vec sum(0.f);
          for (int i = 0; i < a.width; ++i)
            if (reached[i]) sum = Math::fma(rows.w(i, c, k), read(dz.data() + (t + i - begin) * n + c, k), sum);
          write(sum, rows.of(a.dx, t) + c, k);
        });
      }
    }
    add_up();
    const int64_t at = partial * a.channels + channel;
    for (int64_t c = 0; c < n; ++c) {
      for (int i = 0; i < a.width && a.dw; ++i) a.dw[(at + c) * a.width + a.width - 1 - i] = sums[i * n + c];
      if (a.dbias) a.dbias[at + c] = sums[a.width * n + c];
    }
  });
}

/// Where tokens are neighbours: a strip of a channel in scratch memory, with room for whole vectors around it. What
/// does not count is 0, and how far a token after the strip reaches −1.
template <class T>
struct Channel {
  static constexpr int64_t kSize = kBefore + kTokens + kBefore + kLanes;
  float x[kSize], reach[kSize], dz[kSize];  // of token t at t − begin + kBefore
  const CausalConv1d& a;
  const Taps& taps;
  int64_t row, channel, begin, end, stop;  // stop: of the tokens that `end` is told of

  Channel(const CausalConv1d& a, const Taps& taps, const std::vector<float>& reaches, const TokenStrips& strips,
          int64_t strip, int64_t channel, int64_t after)
      : a(a),
        taps(taps),
        row(strips.row(strip)),
        channel(channel),
        begin(strips.begin(strip)),
        end(strips.end(strip)),
        stop(std::min(end + after, a.time)) {
    const T* of_channel = static_cast<const T*>(a.x) + row * a.batch_stride + channel * a.row_stride;
    const int64_t first = std::max<int64_t>(0, begin - kBefore);
    std::fill_n(x, kBefore + first - begin, 0.f);
    row_map(stop - first, x + kBefore + first - begin, [](Vec x) { return x; }, of_channel + first);
    std::fill(x + kBefore + stop - begin, x + kSize, 0.f);
    std::copy_n(reaches.data() + row * a.time + begin, stop - begin, reach + kBefore);
    std::fill(reach + kBefore + stop - begin, reach + kSize, -1.f);
  }

  int64_t place(int64_t t) const { return t - begin + kBefore; }
  Vec w(int i) const { return Vec(taps.w[i * a.channels + channel]); }
  template <class M>
  auto of(M* matrix, int64_t t) const {
    using Number = std::conditional_t<std::is_const_v<M>, const T, T>;
    return static_cast<Number*>(matrix) + (row * a.channels + channel) * a.time + t;
  }

  /// sum + w · v for those tokens whose reach is at least i.
  static Vec add(const Vec& sum, const Vec& w, const Vec& v, const Vec& reach, int i) {
    return Vec::blendv(sum, Math::fma(w, v, sum), reach >= Vec(float(i)));
  }

  Vec z(int64_t t) const {
    const Vec r = read(reach + place(t));
    Vec sum(taps.bias[channel]);
    for (int i = a.width - 1; i >= 0; --i) sum = add(sum, w(i), read(x + place(t) - i), r, i);
    return sum;
  }
  Vec in_document(int64_t t, const Vec& v) const {
    return Vec::blendv(Vec(0.f), v, read(reach + place(t)) >= Vec(0.f));
  }
};

/// How far all tokens reach, as floats, to be compared in vectors.
std::vector<float> all_reaches(const CausalConv1d& a) {
  std::vector<float> reaches(size_t(a.batch * a.time));
  for_runs(a.batch * a.time, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) reaches[i] = float(reach(a, i / a.time, i % a.time));
  });
  return reaches;
}

template <class T>
void forward_channels(const CausalConv1dForward& a) {
  const Taps taps(a);
  const TokenStrips strips(a, kTokens);
  const auto reaches = all_reaches(a);
  for_rows(strips.count * a.channels, std::min(kTokens, a.time), [&](int64_t task) {
    const Channel<T> of(a, taps, reaches, strips, task / a.channels, task % a.channels, 0);
    for (int64_t t = of.begin; t < of.end; t += kLanes)
      write(of.in_document(t, act(a, of.z(t))), of.of(a.y, t), std::min(kLanes, of.end - t));
  });
}

template <class T>
void backward_channels(const CausalConv1dBackward& a) {
  const Taps taps(a);
  const TokenStrips strips(a, kTokens);
  const auto reaches = all_reaches(a);
  const int64_t each = ceil_div(strips.count, a.partials);
  for_rows(a.partials * a.channels, each * std::min(kTokens, a.time), [&](int64_t task) {
    const int64_t partial = task / a.channels, channel = task % a.channels;
    float dw[CausalConv1d::kMostTaps] = {}, dbias = 0;
    for (int64_t strip = partial * each; strip < std::min(strips.count, (partial + 1) * each); ++strip) {
      Channel<T> of(a, taps, reaches, strips, strip, channel, a.width - 1);
      Vec sums[CausalConv1d::kMostTaps], sum(0.f);
      for (Vec& v : sums) v = Vec(0.f);
      std::fill_n(of.dz, of.kSize, 0.f);
      for (int64_t t = of.begin; t < of.stop; t += kLanes) {
        const Vec dy = read(of.of(a.dy, t), std::min(kLanes, of.stop - t)),
                  d = of.in_document(t, dy * slope(a, of.z(t)));
        write(d, of.dz + of.place(t));
        if (t >= of.end) continue;
        const Vec own = t + kLanes <= of.end ? d : Vec::set(Vec(0.f), d, of.end - t), r = read(of.reach + of.place(t));
        sum = sum + own;
        for (int i = 0; i < a.width && a.dw; ++i) sums[i] = of.add(sums[i], own, read(of.x + of.place(t) - i), r, i);
      }
      for (int i = 0; i < a.width; ++i) dw[i] += reduce_lanes(sums[i], Plus{});
      dbias += reduce_lanes(sum, Plus{});
      for (int64_t t = of.begin; t < of.end && a.dx; t += kLanes) {
        Vec dx(0.f);
        for (int i = 0; i < a.width; ++i)
          dx = of.add(dx, of.w(i), read(of.dz + of.place(t) + i), read(of.reach + of.place(t) + i), i);
        write(dx, of.of(a.dx, t), std::min(kLanes, of.end - t));
      }
    }
    const int64_t at = partial * a.channels + channel;
    for (int i = 0; i < a.width && a.dw; ++i) a.dw[at * a.width + a.width - 1 - i] = dw[i];
    if (a.dbias) a.dbias[at] = dbias;
  });
}

}  // namespace

LIGER_REGISTER(causal_conv1d_forward, [](const CausalConv1dForward& a, Stream) {
  dispatch(a.dtype, [&]<class T>() { a.channels_last ? forward_rows<T>(a) : forward_channels<T>(a); });
});
LIGER_REGISTER(causal_conv1d_backward, [](const CausalConv1dBackward& a, Stream) {
  dispatch(a.dtype, [&]<class T>() { a.channels_last ? backward_rows<T>(a) : backward_channels<T>(a); });
});

}  // namespace LIGER_CPU::causal_conv1d
