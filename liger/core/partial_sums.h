#pragma once
#include "liger/core/kernel.h"

namespace liger {

/// Elements of the chunks of a row that are worked on at once, each by other threads: `least`, or up to `most`
/// where there remain chunks for several rounds of all multiprocessors. What a thread does for a chunk, whatever its
/// size, is up to a third of its instructions.
constexpr int64_t row_chunk_size(int64_t elements, int64_t least, int64_t most) {
  constexpr int64_t kEnough = 4096;
  while (least < most && elements >= 2 * least * kEnough) least *= 2;
  return least;
}

/// Into how many partial sums a backend splits the rows of each of `groups` sums over rows. Their number depends on
/// sizes and device, never on the number of threads, so that results repeat bit for bit.
struct RowPartials {
  int device;
  int64_t groups, rows, cols;  // rows: of a group
  int64_t* count;
};
inline constinit Kernel<RowPartials> row_partials{"row_partials"};

///   out = Σ_partials part · (factor + plus)
/// for each group, in a fixed order.
struct PartialSum {
  const float* part;  // [groups, partials, cols]
  Numbers factor;     // [groups · partials / per_factor, cols]; null: 1
  void* out;          // [groups, cols]
  int64_t groups, partials, cols;
  int64_t per_factor;  // partial sums that have a row of factor together
  float plus;
  DType dtype;  // of out
};

/// Several at once: each takes less time than a launch.
struct AddPartials {
  static constexpr int kMost = 4;
  PartialSum sums[kMost];
  int count;
};
inline constinit Kernel<AddPartials> add_partials{"add_partials"};

///   x ← x · g
/// in place, with g one number or one per row. Rows whose factor is 1 are not touched, so that the usual upstream
/// gradient of a loss costs nothing, without asking the host.
struct ScaleRows {
  void* x;    // [rows, cols]
  Numbers g;  // [1] or [rows]
  int64_t rows, cols;
  bool per_row;
  DType dtype;
};
inline constinit Kernel<ScaleRows> scale_rows{"scale_rows"};

/// Whether the current device can run the kernels that were built: a GPU of another architecture may not.
struct RunsHere {
  bool* yes;
};
inline constinit Kernel<RunsHere> runs_here{"runs_here"};

/// Whether the stream records a graph instead of running.
struct StreamCapturing {
  bool* yes;
};
inline constinit Kernel<StreamCapturing> stream_capturing{"stream_capturing"};

}  // namespace liger
