#include "liger/ops/mixers/causal_conv1d_channels.cuh"
#include "liger/ops/mixers/causal_conv1d_time.cuh"

namespace liger::cuda::causal_conv1d {
namespace {

constexpr int kRows = CausalConv1dBackward::kThreads / kLanes;  // warps of a block

/// Whether all matrices have whole packs: of a.width or fewer neighbouring tokens or channels, of so many bytes.
bool whole_packs(const CausalConv1d& a, int width, int bytes, std::initializer_list<const void*> pointers) {
  for (const void* p : pointers)
    if (reinterpret_cast<uintptr_t>(p) % bytes != 0) return false;
  const int64_t longest = std::max(a.row_stride, a.channels);
  return (a.channels_last ? a.channels : a.time) % width == 0 && a.row_stride % width == 0 &&
         a.batch_stride % width == 0 && (!a.channels_last || longest * int64_t(sizeof(float)) < int64_t(1) << 31);
}

/// f.operator()<T, kTaps, kSilu, kWhole>(): with the taps of most models, or with more than there are, where each token
/// is as one near the beginning of a document.
template <class F>
void dispatch_kernel(const CausalConv1d& a, std::initializer_list<const void*> pointers, F f) {
  dispatch(a.dtype, [&]<class T>() {
    const auto kernel = [&]<int kTaps, bool kSilu>() {
      constexpr int kChannels = channels_last::kChannels<kTaps>;
      if (a.channels_last ? whole_packs(a, kChannels, kChannels * sizeof(T), pointers)
                          : whole_packs(a, time_last::kTokens, 16, pointers))
        f.template operator()<T, kTaps, kSilu, true>();
      else f.template operator()<T, CausalConv1d::kMostTaps, kSilu, false>();
    };
    if (a.width <= 4 && a.silu) kernel.template operator()<4, true>();
    else if (a.silu) kernel.template operator()<CausalConv1d::kMostTaps, true>();
    else if (a.width == 3) kernel.template operator()<3, false>();
    else if (a.width <= 4) kernel.template operator()<4, false>();
    else if (a.width == 7) kernel.template operator()<7, false>();
    else kernel.template operator()<CausalConv1d::kMostTaps, false>();
  });
}

/// `wanted` strips, or a multiple of that where they would have more than `most` tokens: the longer, the fewer tokens
/// are read by two threads. They have a multiple of `step` tokens.
TokenStrips strips_of(const CausalConv1d& a, int64_t wanted, int64_t step, int64_t most) {
  const int64_t all = a.batch * a.time, strips = wanted * ceil_div(all, wanted * most);
  return TokenStrips(a, round_up(std::min(ceil_div(all, strips), a.time), step));
}

}  // namespace

LIGER_REGISTER(causal_conv1d_forward, [](const CausalConv1dForward& a, Stream s) {
  // Three times as many warps as run at once.
  const int64_t warps = 60 * int64_t(multiprocessors(current_device()));
  const dim3 threads(kLanes, kRows);
  dispatch_kernel(a, {a.x, a.y, a.channels_last ? nullptr : a.starts},
                  [&]<class T, int kTaps, bool kSilu, bool kWhole>() {
                    if (a.channels_last) {
                      using namespace channels_last;
                      constexpr int kTokens = kTaps > 4 ? 8 : 4;
                      const int64_t across = ceil_div(a.channels, int64_t(kLanes * kChannels<kTaps>));
                      const TokenStrips strips = strips_of(a, ceil_div(warps, across), kTokens, 128);
                      launch(channels_last::forward_kernel<T, kTaps, kSilu, kWhole, kTokens, kRows>,
                             {.blocks = across * ceil_div(strips.count, kRows), .threads = threads}, s, a, strips,
                             unsigned(across));
                    } else {
                      using namespace time_last;
                      const int64_t across = ceil_div(a.channels, int64_t(kRows * kChannels));
                      const TokenStrips strips(a, kWarpTokens);
                      const int64_t shares =
                          std::min(strips.count, std::max(ceil_div(warps, across * kRows), ceil_div(strips.count, 8)));
                      launch(time_last::forward_kernel<T, kTaps, kSilu, kWhole, kRows>,
                             {.blocks = across * shares, .threads = threads}, s, a, strips, shares, unsigned(across));
                    }
                  });
});
LIGER_REGISTER(causal_conv1d_backward, [](const CausalConv1dBackward& a, Stream s) {
  const dim3 threads(kLanes, kRows);
  dispatch_kernel(a, {a.x, a.dy, a.dx, a.channels_last ? nullptr : a.starts},
                  [&]<class T, int kTaps, bool kSilu, bool kWhole>() {
                    if (a.channels_last) {
                      using namespace channels_last;
                      constexpr int kTokens = kTaps > 4 ? 8 : 4;
                      const int64_t across = ceil_div(a.channels, int64_t(kLanes * kBackwardChannels<kTaps>));
                      const TokenStrips strips = strips_of(a, a.partials * kRows, kTokens, 256);
                      launch(channels_last::backward_kernel<T, kTaps, kSilu, kWhole, kTokens, kRows>,
                             {.blocks = across * a.partials, .threads = threads}, s, a, strips, unsigned(across));
                    } else {
                      using namespace time_last;
                      const int64_t across = ceil_div(a.channels, int64_t(kRows * kChannels));
                      TokenStrips strips(a, kOwnTokens);
                      strips.per_row = a.time <= kWarpTokens ? 1 : ceil_div(a.time - kTokens, int64_t(kOwnTokens));
                      strips.count = a.batch * strips.per_row;
                      launch(time_last::backward_kernel<T, kTaps, kSilu, kWhole, kRows>,
                             {.blocks = across * a.partials, .threads = threads}, s, a, strips, unsigned(across));
                    }
                  });
});

}  // namespace liger::cuda::causal_conv1d
