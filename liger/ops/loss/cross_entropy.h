#pragma once
#include <cmath>
#include "liger/core/kernel.h"
#include "liger/core/math.h"

namespace liger {

/// What is known of a batch from its labels; all on the device, so that the host need not wait. The divisors are
///   (Σ w_y, n)                for a mean over the n labels that are not ignored
///   (1, 1)                    for a sum
///   (normalizer, normalizer)  where one is given
struct CrossEntropySums {
  float divisor, z_divisor;  // of the cross entropy and of the z-loss; a loss divided by 0 is 0
  float class_weights;       // Σ_j w_j
  float gradient_scale;      // a power of two by which gradients are multiplied
  int blocks_done;           // of the launch that makes the totals, too
  int64_t valid;             // n
};

struct CrossEntropyNorm {
  const int64_t* target;        // [rows]
  const float* class_weight;    // [cols] or null: all 1
  const float* normalizer;      // [1] or null
  const float* largest_weight;  // [1], the largest |w_j|, or null: 1
  CrossEntropySums* sums;
  int64_t* bad_label;  // on the host: a label outside [0, cols); null on devices that assert instead
  int64_t rows, cols, ignore_index;
  bool mean;
  float z_bound;  // the most that 2 λ L can be, where gradients are scaled; negative: they are not
};

/// The power of two that float16 gradients are stored times until backward knows what they are to be multiplied by. A
/// row's gradient is at most about 2 (w_y / divisor₀ + 2 λ L / divisor₁); stored, at most 2^13: none overflows, and
/// what vanishes is below 2^-36 of that.
LIGER_HD inline float gradient_scale(float divisor, float z_divisor, float largest_weight, float z_bound) {
  const float most =
      (divisor == 0 ? 0 : largest_weight / fabsf(divisor)) + (z_divisor == 0 ? 0 : z_bound / fabsf(z_divisor));
  if (!(most > 0 && most < INFINITY)) return 1;
  int exponent;
  frexpf(most, &exponent);  // most < 2^exponent
  exponent = 12 - exponent;
  return ldexpf(1, exponent > 126 ? 126 : exponent < -126 ? -126 : exponent);
}

/// The totals over a batch's rows: loss and z-loss summed, accuracy = Σ correct / n.
struct CrossEntropyTotals {
  const float *loss, *z_loss, *correct;  // [rows]; z_loss and correct may be null
  void *loss_total, *z_loss_total;       // [1] of dtype; z_loss_total may be null
  float* accuracy;                       // [1] or null
  int64_t rows;
  DType dtype;
};

/// For a row of logits x with label y, of V classes, with α = label_smoothing and λ = lse_square_scale:
///   z      = softcap · tanh(x / softcap), or x without a softcap
///   L      = ln Σ_j exp(z_j)
///   p      = softmax(z)
///   z_loss = λ L² / divisor₁
///   loss   = ((1 − α) w_y (L − z_y) + α/V Σ_j w_j (L − z_j)) / divisor₀ + z_loss
///   A      = ((1 − α) w_y + α/V Σ_j w_j) / divisor₀ + 2 λ L / divisor₁
///   dx_j   = s · (A p_j − α/V w_j / divisor₀ − [j = y] (1 − α) w_y / divisor₀) · (1 − (z_j / softcap)²)
/// s is the token's upstream gradient times gradient_scale, and times p_y with token scaling, which also multiplies
/// loss and z_loss. Ignored rows: 0, predicted −1. predicted is the first of the largest logits, or the first NaN.
struct CrossEntropy {
  const void* x;  // [rows, cols], rows x_stride elements apart
  void* dx;       // [rows, cols] or null; may be x
  int64_t x_stride, dx_stride;
  const int64_t* target;      // [rows]
  const float* class_weight;  // [cols] or null: all 1
  CrossEntropySums* sums;     // of CrossEntropyNorm
  const float* upstream;      // [rows] or null: all 1
  float* loss;                // [rows]
  float* z_loss;              // [rows] or null
  float* correct;             // [rows] or null: 1 where the largest logit is the label's
  int64_t* predicted;         // [rows] or null
  int64_t rows, cols, ignore_index;
  float label_smoothing, lse_square_scale, softcap;  // softcap 0: none
  bool token_scaling;
  DType dtype;
  CrossEntropyTotals totals;  // made after these rows, the batch's last; loss_total null: not yet
};

inline constinit Kernel<CrossEntropyNorm> cross_entropy_norm{"cross_entropy_norm"};
inline constinit Kernel<CrossEntropy> cross_entropy_rows{"cross_entropy"};

}  // namespace liger
