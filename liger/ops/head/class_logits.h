#pragma once
#include "liger/core/kernel.h"

// Logits of a head at a few classes of each row, and their gradients; formulas in liger/functions/head.h. A class
// of −1 is absent.

namespace liger {

/// Terms of a float sum, which then meets that of all before: the error does not grow with the number of tokens.
inline constexpr int64_t kClassTerms = 64;

/// y_k = x w_c + b_c of class c of the row, a float sum; 0 where the class is absent.
struct ClassLogits {
  const void *x, *w, *bias;  // [rows, cols], [classes, cols], [classes] or null
  const int64_t* ids;        // [rows, count]
  float* y;                  // [rows, count]
  int64_t* bad_class;        // on the host: a class outside [−1, classes); null on devices that assert instead
  int64_t rows, count, cols, classes;
  DType dtype;
};

/// dx = Σ_k dy_k w_c, in float, rounded once.
struct ClassLogitsDx {
  const float* dy;     // [rows, count]
  const void* w;       // [classes, cols]
  const int64_t* ids;  // [rows, count]
  void* dx;            // [rows, cols]
  int64_t rows, count, cols;
  DType dtype;
};

/// Over the pairs (row, k) of class c, in their order, in float, rounded once:
///   dw_c = Σ dy_k x
///   db_c = Σ dy_k
/// Classes without a pair are not written.
struct ClassLogitsDw {
  const float* dy;      // [pairs]
  const void* x;        // [rows, cols]
  const int64_t* ids;   // [pairs], of the pairs below: sorted
  const int64_t* from;  // [pairs]: the pair, row · count + k
  void* dw;             // [classes, cols] or null
  float* db;            // [classes] or null
  int64_t pairs, count, cols;
  DType dtype;
};

inline constinit Kernel<ClassLogits> class_logits_forward{"class_logits"};
inline constinit Kernel<ClassLogitsDx> class_logits_dx{"class_logits_dx"};
inline constinit Kernel<ClassLogitsDw> class_logits_dw{"class_logits_dw"};

}  // namespace liger
