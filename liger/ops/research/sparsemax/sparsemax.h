#pragma once
#include <cmath>
#include "liger/ops/activation/softmax.h"

namespace liger {

/// The probabilities nearest to x (Martins & Astudillo 2016, arXiv:1602.02068), in softmax's arguments:
///   y  = max(x − τ, 0)
///   τ  = (Σ_S x − 1) / |S|
///   dx = [y > 0] (dy − Σ [y > 0] dy / Σ [y > 0])
/// S is where y > 0. τ is found exactly, by shrinking S from {x > max − 1} to {x > τ of S} until nothing leaves it
/// (Michelot 1986): τ only grows.

/// The largest float that is not above v: x > v and x > floor_of(v) are the same for floats x.
LIGER_HD inline float floor_of(double v) {
  const float f = float(v);
  return f > v ? std::nextafter(f, -INFINITY) : f;
}

}  // namespace liger
