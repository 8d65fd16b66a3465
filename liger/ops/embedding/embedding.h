#pragma once
#include "liger/core/kernel.h"
#include "liger/core/math.h"

namespace liger {

/// y_i = w[id_i].
struct EmbeddingForward {
  const void* w;       // [classes, cols]
  const int64_t* ids;  // [tokens]
  void* y;             // [tokens, cols]
  int64_t* bad_id;     // on the host: an id outside [0, classes); untouched by devices that assert instead
  int64_t tokens, classes, cols;
  DType dtype;
};

///   dw_v = Σ_{i: id_i = v} dy_i
/// in the order of i, or of chunks of them: 0 where no token has the id, and for the id `padding`.
struct EmbeddingBackward {
  const void* dy;          // [tokens, cols]
  const int64_t* ids;      // [tokens]
  void* dw;                // [classes, cols]
  void* scratch;           // null: nothing is done, but *scratch_bytes told, at least 1, that are needed here
  int64_t* scratch_bytes;  // on the host
  int64_t tokens, classes, cols, padding;
  DType dtype;

  /// Whether a token with this id adds to a row.
  LIGER_HD bool counts(int64_t id) const { return id >= 0 && id < classes && id != padding; }
};

inline constinit Kernel<EmbeddingForward> embedding_forward{"embedding_forward"};
inline constinit Kernel<EmbeddingBackward> embedding_backward{"embedding_backward"};

}  // namespace liger
