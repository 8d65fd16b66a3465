#pragma once
#include "liger/core/kernel.h"
#include "liger/core/math.h"

namespace liger {

/// The table of divergences; the formulas f(x, t; parameter) of a prediction x and a target t are in liger/core/math.h.
enum class Divergence : int8_t { KL = 0, LogKL = 1, ReverseKL = 2, JensenShannon = 3, TotalVariation = 4 };

/// n = the rows that are not ignored, at least 1, so that a batch of ignored rows has loss 0.
struct DivergenceCount {
  const int64_t* labels;  // [rows]
  float* count;           // [1]
  int64_t rows, ignore_index;
};

///   loss = scale/n · Σ f(x, t), over the rows that are not ignored
///   dx   = g · scale/n · ∂f/∂x, 0 in ignored rows
struct DivergenceChunks {
  const void *x, *target;     // [rows, cols]
  const int64_t* labels;      // [rows] or null: none is ignored
  const float* count;         // [1] or null: n = 1
  const float* upstream;      // g [rows, cols] or null: 1
  void* dx;                   // [rows, cols] or null
  float* each;                // f [rows, cols] or null
  float* sums;                // Σ f of each chunk of a row [rows, ⌈cols / chunk⌉] or null
  int64_t rows, cols, chunk;  // chunk: elements of a row whose losses are summed at once (row_chunk_size)
  int64_t ignore_index;
  DType dtype, target_dtype;  // target_dtype is dtype or float
  Divergence kind;
  float parameter, scale;
};

struct DivergenceTotal {
  const float *sums, *count;  // [chunks]; [1] or null
  void* total;                // [1]
  int64_t chunks;
  DType dtype;  // of the total
  double scale;
};

inline constinit Kernel<DivergenceCount> divergence_count{"divergence_count"};
inline constinit Kernel<DivergenceChunks> divergence_chunks{"divergence"};
inline constinit Kernel<DivergenceTotal> divergence_total{"divergence_total"};

/// Calls f.operator()<Formula>() with the formula of `kind`.
template <class F>
void dispatch_divergence(Divergence kind, F&& f) {
  switch (kind) {
    case Divergence::KL: return f.template operator()<KL>();
    case Divergence::LogKL: return f.template operator()<LogKL>();
    case Divergence::ReverseKL: return f.template operator()<ReverseKL>();
    case Divergence::JensenShannon: return f.template operator()<JensenShannon>();
    case Divergence::TotalVariation: return f.template operator()<TotalVariation>();
  }
}

}  // namespace liger
