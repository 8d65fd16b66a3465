#pragma once
#include "liger/core/kernel.h"
#include "liger/core/math.h"
#include "liger/ops/head/options.h"

namespace liger {

/// For each row of logits z of a student and a teacher:
///   divergence  D of their softmax(z / T), or of z / T for Cosine
///   nll         −ln softmax(z)_label of the student
///   entropy     that of the student's softmax(z / T)
///   dx          ∂(soft · D + hard · nll)/∂x
/// Rows whose label is ignore_index have nll 0 and, with skip_ignored, 0 for all: they are not read then.
struct LinearDistillation {
  const void *x, *y;  // what the student's and the teacher's GEMM gave [rows, cols], of which x_map and y_map make z
  void* dx;           // [rows, cols]; may be x; null: none
  const int64_t* labels;     // [rows] or null: no nll
  const float *soft, *hard;  // [rows] or null: 0
  float *divergence, *nll;   // [rows]
  float* entropy;            // [rows] or null
  int64_t* bad_label;        // on the host: a label outside [0, cols); null on devices that assert instead
  int64_t rows, cols, ignore_index;
  LogitMap x_map, y_map;
  float inverse_temperature, beta;
  Distillation kind;
  bool skip_ignored;
  DType dtype;
};

inline constinit Kernel<LinearDistillation> linear_distillation_rows{"linear_distillation"};

/// Calls f.operator()<Formula>() with the formula of `kind`.
template <class F>
void dispatch_distillation(Distillation kind, F&& f) {
  switch (kind) {
    case Distillation::ForwardKL: return f.template operator()<OfLogs<ForwardKLTerm>>();
    case Distillation::ReverseKL: return f.template operator()<OfLogs<ReverseKLTerm>>();
    case Distillation::JensenShannon: return f.template operator()<OfLogs<JensenShannonTerm>>();
    case Distillation::TotalVariation: return f.template operator()<OfLogs<TotalVariationTerm>>();
    case Distillation::Cosine: return f.template operator()<CosineDistance>();
  }
}

}  // namespace liger
