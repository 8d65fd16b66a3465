#pragma once
#include "liger/core/kernel.h"
#include "liger/core/math.h"

namespace liger {

/// For each channel d:
///   z[t] = bias + Σ_i w[width − 1 − i] · x[t − i], 0 <= i < width
///   y[t] = act(z[t])
/// over those i for which token t − i is not before starts[t], the first token of t's document. y is 0 where that is
/// negative: such a token is in no document. act is silu or nothing.
struct CausalConv1d {
  static constexpr int kMostTaps = 8;

  const void* x;                     // [batch, channels, time]
  int64_t batch_stride, row_stride;  // x's: of a token where channels are neighbours, else of a channel
  Numbers w, bias;                   // [channels, width], [channels] or null
  const int32_t* starts;             // [batch, time]; null: 0
  int64_t batch, channels, time;
  int width;
  bool
      channels_last;  // memory is [batch, time, channels], else [batch, channels, time]; y's, dy's and dx's has no gaps
  bool silu;
  DType dtype;
};

struct CausalConv1dForward : CausalConv1d {
  void* y;
};

///   dz[t]            = dy[t] · act'(z[t])
///   dx[t]            = Σ_i w[width − 1 − i] · dz[t + i], where token t is not before starts[t + i]
///   dw[width − 1 − i] = Σ_t dz[t] · x[t − i]
///   dbias            = Σ_t dz[t]
/// with z computed again.
struct CausalConv1dBackward : CausalConv1d {
  // Where channels are neighbours: how many a block has, and how many threads run at once on a multiprocessor.
  static constexpr int kLanes = 32, kThreads = 128, kThreadsAtOnce = 384;
  static constexpr int channels_of_block(int width) { return kLanes * (width <= 4 ? 4 : 2); }

  const void* dy;
  void* dx;           // null where not wanted
  float *dw, *dbias;  // [partials, channels, width] and [partials, channels], for add_partials; null where not wanted
  int64_t partials;
};

inline constinit Kernel<CausalConv1dForward> causal_conv1d_forward{"causal_conv1d_forward"};
inline constinit Kernel<CausalConv1dBackward> causal_conv1d_backward{"causal_conv1d_backward"};

/// How many tokens before token t its sum reaches, whose document begins at `start`; −1: it is in no document.
LIGER_HD inline int reach(int32_t start, int32_t t, int width) {
  return start < 0 || t < start ? -1 : t - start < width ? t - start : width - 1;
}
LIGER_HD inline int reach(const CausalConv1d& a, int64_t row, int64_t t) {
  return reach(a.starts ? a.starts[row * a.time + t] : 0, int32_t(t), a.width);
}

/// The tokens of a row in strips of so many; strip i is one of row i / per_row.
struct TokenStrips {
  int64_t time, tokens, per_row, count;

  TokenStrips(const CausalConv1d& a, int64_t tokens)
      : time(a.time), tokens(tokens), per_row(ceil_div(a.time, tokens)), count(a.batch * per_row) {}
  LIGER_HD int64_t row(int64_t i) const { return i / per_row; }
  LIGER_HD int64_t begin(int64_t i) const { return i % per_row * tokens; }
  LIGER_HD int64_t end(int64_t i) const { return begin(i) + tokens < time ? begin(i) + tokens : time; }
  /// The first strip of share i, where all are shared out evenly.
  LIGER_HD int64_t of_share(int64_t i, int64_t shares) const { return i * count / shares; }
};

}  // namespace liger
