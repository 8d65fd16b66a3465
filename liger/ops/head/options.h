#pragma once
#include <cstdint>
#include "liger/options.h"

namespace liger {

/// What is between a student's and a teacher's distribution of a token, S and T, or their logits.
enum class Distillation : int8_t {
  ForwardKL = 0,  // KL(T ‖ S)
  ReverseKL = 1,  // KL(S ‖ T)
  /// β KL(T ‖ M) + (1 − β) KL(S ‖ M) with
  ///   M = β T + (1 − β) S
  /// β = 0 is ForwardKL, β = 1 ReverseKL.
  JensenShannon = 2,
  TotalVariation = 3,  // ½ Σ |S − T|
  Cosine = 4           // 1 − cos of the logits
};

}  // namespace liger
