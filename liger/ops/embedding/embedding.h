#pragma once
#include "liger/core/math.h"

namespace liger {

/// y_i = w[id_i].
struct EmbeddingForward {
  const void* w;           // [classes, cols]
  const int64_t* ids;      // [tokens]
  void* y;                 // [tokens, cols]
  int64_t* bad_id;         // on the host: an id outside [0, classes); untouched by devices that assert instead
  int64_t tokens, classes, cols;
  DType dtype;
};

/// dw_v = Σ_{i: id_i = v} dy_i, each row written once: 0 where no token has the id, and for v = padding. The tokens of a row follow
/// one another in `order`, from first[v] to before first[v + 1].
struct EmbeddingBackward {
  const void* dy;          // [tokens, cols]
  const int* sorted;       // [tokens]: the ids in ascending order
  const int64_t* order;    // [tokens]: the tokens that have them, ascending for one id
  const int* first;        // [classes + 1]
  float* part;             // [tokens / chunk, cols]: scratch for the sums of chunks of `order` that belong to one row
  void* dw;                // [classes, cols]
  int64_t tokens, classes, cols, chunk, padding;
  DType dtype;
};

/// The same of few tokens: each that is the first with its id looks for the others. dw holds zeros before.
struct EmbeddingBackwardFew {
  const void* dy;          // [tokens, cols]
  const int64_t* ids;      // [tokens]
  void* dw;                // [classes, cols]
  int64_t tokens, classes, cols, padding;
  DType dtype;

  /// Whether token i is that first one, of a row that gets a sum.
  LIGER_HD bool first(int64_t i) const {
    const int64_t id = ids[i];
    if (id < 0 || id >= classes || id == padding) return false;
    for (int64_t j = 0; j < i; ++j)
      if (ids[j] == id) return false;
    return true;
  }
};

inline constinit Kernel<EmbeddingForward> embedding_forward{"embedding_forward"};
inline constinit Kernel<EmbeddingBackward> embedding_backward{"embedding_backward"};
inline constinit Kernel<EmbeddingBackwardFew> embedding_backward_few{"embedding_backward_few"};

}  // namespace liger
