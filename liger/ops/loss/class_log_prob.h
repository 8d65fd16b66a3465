#pragma once
#include "liger/core/kernel.h"
#include "liger/core/math.h"
#include "liger/ops/loss/selective_log_softmax.h"

// Log-probabilities of a few classes of each row, beside those of SelectiveLogSoftmax: z = map(x), with the row's
// maximum m and sum s of exp((z − m)/T). A class of −1 is absent; rows whose id is ignore_index are not read.

namespace liger {

/// logp_k = (z_k − m)/T − ln s, 0 where the class is absent or the row is ignored.
struct ClassLogProbs {
  const void* x;           // [rows, cols], x_stride elements apart
  const int64_t* ids;      // [rows]
  const int64_t* classes;  // [rows, count]
  const float* stats;      // [rows, 3]: m, s
  float* logp;             // [rows, count]
  float* logits;           // [rows, count], x_k, or null
  int64_t* bad_class;      // on the host: a class outside [−1, cols); null on devices that assert instead
  int64_t rows, cols, count, x_stride, ignore_index;
  float inverse_temperature;
  LogitMap map;
  DType dtype;
};

/// x_k = logits_k, or −inf.
struct ClassLogitsWrite {
  void* x;  // [rows, cols], x_stride elements apart
  const int64_t *ids, *classes;
  const float* logits;  // [rows, count], or null: −inf
  int64_t rows, count, x_stride, ignore_index;
  DType dtype;
};

/// The gradient of x at the classes, which stands in dx's place there, rounded once. With the gradients g of logp at
/// the row's id, h of entropy, k of mean_logit, g_c of the classes' logp, and l = the gradient of lse minus Σ g_c minus
/// that of the mass outside:
///   p    = exp(logp_c)
///   dx_c = (g ([c = id] − p) − h p (logp_c + entropy) + l p + k / classes + g_c) / T · ∂z_c/∂x_c
/// A class that a row has several times gets the sum of its g_c.
struct ClassGradients {
  const float *dlogp, *dentropy, *level, *dmean_logit;  // g, h, l, k [rows]; k may be null: 0
  const float *dclass, *logp;                           // g_c, logp_c [rows, count]
  const float* stats;                                   // of SelectiveLogSoftmax
  const int64_t *ids, *classes;
  void* dx;  // [rows, cols]: some of the classes: first, first + 1, ...
  int64_t rows, cols, count, ignore_index;
  int64_t first, all_classes;
  float inverse_temperature;
  LogitMap map;
  DType dtype;
};

/// dx_c of the k-th class of a row, or none where it is absent, not among dx's or the row's earlier ones. exp, log: of
/// float.
template <class Exp, class Log>
LIGER_HD inline bool class_gradient(const ClassGradients& a, int64_t row, int64_t k, Exp exp, Log log, float* dx) {
  const int64_t *classes = a.classes + row * a.count, at = classes[k], id = a.ids[row];
  if (id == a.ignore_index || at < a.first || at - a.first >= a.cols) return false;
  float g = 0;
  for (int64_t j = 0; j < a.count; ++j) {
    if (classes[j] != at) continue;
    if (j < k) return false;
    g += a.dclass[row * a.count + j];
  }
  const float* stats = a.stats + 3 * row;
  const float log_sum = log(stats[1]), entropy = log_sum - stats[2],
              logp = fmaxf(a.logp[row * a.count + k], kSelectiveLowest), p = exp(logp);
  const float dz = a.dlogp[row] * (float(at == id) - p) + p * (a.level[row] - a.dentropy[row] * (logp + entropy)) + g +
                   (a.dmean_logit ? a.dmean_logit[row] / float(a.all_classes) : 0);
  const float z = (logp + log_sum) / a.inverse_temperature + stats[0];
  *dx = dz * a.inverse_temperature * (is_plain(a.map) ? 1 : map_slope(a.map, z));
  return true;
}

inline constinit Kernel<ClassLogProbs> class_log_probs{"class_log_probs"};
inline constinit Kernel<ClassLogitsWrite> class_logits_write{"class_logits_write"};
inline constinit Kernel<ClassGradients> class_gradients{"class_gradients"};

}  // namespace liger
