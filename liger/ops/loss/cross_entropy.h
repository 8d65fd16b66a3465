#pragma once
#include "liger/core/kernel.h"

namespace liger {

/// What the sums over a batch are divided by, from its labels; all on the device, so that the host never waits.
/// divisor = (Σ w_y, n) for a mean over the n labels that are not ignored, (1, 1) for a sum, (normalizer, normalizer) where one is given.
struct CrossEntropyNorm {
  const int64_t* target;      // [rows]
  const float* class_weight;  // [cols] or null: all 1
  const float* normalizer;    // [1] or null
  float* norm;                // [4]: divisor of the cross entropy, divisor of the z-loss, Σ_j w_j, n
  int64_t* bad_label;         // on the host: a label outside [0, cols); null on devices that assert instead
  int64_t rows, cols, ignore_index;
  bool mean;
};

/// For a row of logits x with label y, z = softcap · tanh(x / softcap) or x, L = logsumexp(z), p = softmax(z), α = label_smoothing:
///   loss = ((1 − α) w_y (L − z_y) + α/V Σ_j w_j (L − z_j)) / divisor₀ + λ L² / divisor₁          the second term is the z-loss
///   dx_j = s · (A p_j − α/V w_j / divisor₀ − [j = y] (1 − α) w_y / divisor₀) · (1 − (z_j / softcap)²)
///   A    = ((1 − α) w_y + α/V Σ_j w_j) / divisor₀ + 2 λ L / divisor₁
/// s is the token's upstream gradient, times p_y with token scaling, which also multiplies the loss. Ignored rows: 0, predicted −1.
struct CrossEntropy {
  const void* x;              // [rows, cols], rows x_stride elements apart
  void* dx;                   // [rows, cols] or null; may be x
  int64_t x_stride, dx_stride;
  const int64_t* target;      // [rows]
  const float* class_weight;  // [cols] or null: all 1
  const float* norm;          // of CrossEntropyNorm
  const float* upstream;      // [rows] or null: all 1
  float *loss, *z_loss;       // [rows]
  float* correct;             // [rows] or null: 1 where the largest logit is the label's
  int64_t* predicted;         // [rows] or null: the first largest logit
  int64_t rows, cols, ignore_index;
  float label_smoothing, lse_square_scale, softcap;  // softcap 0: none
  bool token_scaling;
  DType dtype;
};

/// The totals over rows: loss and z-loss summed, accuracy = Σ correct / n.
struct CrossEntropyTotal {
  const float *loss, *z_loss, *correct;  // [rows]; correct may be null
  const float* norm;
  void *loss_total, *z_loss_total;       // [1] of dtype
  float* accuracy;                       // [1] or null
  int64_t rows;
  DType dtype;
};

inline constinit Kernel<CrossEntropyNorm> cross_entropy_norm{"cross_entropy_norm"};
inline constinit Kernel<CrossEntropy> cross_entropy_rows{"cross_entropy"};
inline constinit Kernel<CrossEntropyTotal> cross_entropy_total{"cross_entropy_total"};

}  // namespace liger
