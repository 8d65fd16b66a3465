#pragma once
#include <cstdint>
#include "liger/options.h"

namespace liger {

/// BatchMean divides by the number of rows, Mean by that of elements.
enum class Reduction : int8_t { None = 0, Mean = 1, Sum = 2, BatchMean = 3 };

/// The options of cross_entropy and fused_linear_cross_entropy; formulas in liger/ops/loss/cross_entropy.h.
struct CrossEntropyOptions {
  int64_t ignore_index = -100;
  Reduction reduction = Reduction::Mean;
  double label_smoothing = 0;   // [0, 1]
  double lse_square_scale = 0;  // weight λ of the z-loss λ · logsumexp²
  double softcap = 0;           // logits become softcap · tanh(logits / softcap); 0: none
  bool token_scaling = false;   // a token's loss is multiplied by its label's probability, which is not differentiated
  bool z_loss = false;          // also return the z-loss, which is a part of the loss
  bool accuracy = false;        // also return the share of labels that are the largest logit
  bool predicted = false;       // also return the largest logit's index, −1 for ignored tokens

  bool operator==(const CrossEntropyOptions&) const = default;
  LIGER_OPTIONS(ignore_index, reduction, label_smoothing, lse_square_scale, softcap, token_scaling, z_loss, accuracy,
                predicted)
};

/// The options of fused_linear_cross_entropy besides.
struct HeadOptions : CrossEntropyOptions {
  /// How many labels are not ignored, where the host knows it: then the device is not asked; -1: unknown.
  int64_t valid_count = -1;
  /// Of logits at once; 0: what is fastest within the memory that the weight's gradient needs anyway.
  int64_t max_bytes = 0;
  LIGER_OPTIONS(ignore_index, reduction, label_smoothing, lse_square_scale, softcap, token_scaling, z_loss, accuracy,
                predicted, valid_count, max_bytes)
};

}  // namespace liger
