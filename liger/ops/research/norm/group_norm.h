#pragma once
#include "liger/core/kernel.h"

namespace liger {

/// The elements of a channel that are summed together, so that their sum does not depend on who sums.
inline constexpr int64_t kGroupSegment = 1024;

/// Group normalisation (Wu and He 2018) over [samples, groups, channels of a group, spatial], with means over a group
/// of a sample, and one w and b per channel:
///   rstd = 1 / sqrt(mean((x − mean(x))²) + eps)
///   x̂    = (x − mean(x)) · rstd
///   y    = x̂ · w + b
struct GroupNorm {
  const void *x, *w;   // w [groups · channels] or null
  float *mean, *rstd;  // [samples, groups], which forward writes
  int64_t samples, groups, channels, spatial;
  DType dtype, w_dtype;

  /// Of a channel.
  constexpr int64_t segments() const { return ceil_div(spatial, kGroupSegment); }
};

struct GroupNormForward : GroupNorm {
  const void* b;
  void* y;
  float eps;
};

///   g  = dy · w
///   dx = rstd · (g − mean(g) − x̂ · mean(g · x̂))
///   dw = Σ dy · x̂, over a segment of a channel
///   db = Σ dy, likewise
struct GroupNormBackward : GroupNorm {
  const void* dy;
  void* dx;        // null where x is frozen
  float *dw, *db;  // [samples, segments, groups · channels]; null where not wanted
};

inline constinit Kernel<GroupNormForward> group_norm_forward{"group_norm_forward"};
inline constinit Kernel<GroupNormBackward> group_norm_backward{"group_norm_backward"};

}  // namespace liger
