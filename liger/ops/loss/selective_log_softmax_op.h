#pragma once
#include "liger/core/math.h"
#include "liger/core/torch/op.h"

namespace liger::op::selective_log_softmax {

/// Logits z / temperature, z = map(x), of x [rows, classes], whose rows lie x_stride elements apart. ids [rows], int64:
/// an id that is neither a class nor ignore_index raises IndexError on the CPU and is a device assertion on CUDA.
struct LogitRows {
  const Tensor& x;
  int64_t x_stride;
  const Tensor& ids;
  double temperature;
  int64_t ignore_index;
  LogitMap map = {};
  bool fixed_chunks = false;  // sums of a row are made in the same order however many rows there are
};

/// Results [rows], float, but for stats [rows, 3], which backward needs; lse and mean_logit may be undefined.
struct LogitColumns {
  Tensor logp, entropy, stats, lse = {}, mean_logit = {};
};

/// Upstream gradients [rows], float; dlse and dmean_logit may be undefined.
struct LogitGradients {
  Tensor dlogp, dentropy, dlse = {}, dmean_logit = {};
};

void run_rows(const LogitRows& of, const LogitColumns& to);

/// dx [rows, classes], which may be x. They may hold some of `classes` classes: `first` and those after it.
void run_backward(const LogitRows& of, const LogitGradients& g, const Tensor& stats, const Tensor& dx, int64_t first,
                  int64_t classes);
inline void run_backward(const LogitRows& of, const LogitGradients& g, const Tensor& stats, const Tensor& dx) {
  run_backward(of, g, stats, dx, 0, cols(dx));
}

/// to [rows, count + 1], float: logp of classes [rows, count], int64, of rows whose statistics are known, and with
/// log_tail the logarithm of the mass of all other classes. A class that is neither -1, for none, nor one of x's is an
/// error, as an id. x has its values in the end.
void run_classes(const LogitRows& of, const Tensor& classes, const Tensor& stats, const Tensor& to, bool log_tail);

/// Overwrites dx at the classes with the gradient there, of which dclass [rows, count] is a part; g.dlse is that of lse
/// which the classes see.
void run_class_backward(const LogitRows& of, const LogitGradients& g, const Tensor& classes, const Tensor& dclass,
                        const Tensor& logp, const Tensor& stats, const Tensor& dx, int64_t first, int64_t all_classes);

}  // namespace liger::op::selective_log_softmax
