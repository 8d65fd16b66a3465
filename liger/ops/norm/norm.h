#pragma once
#include "liger/core/kernel.h"
#include "liger/options.h"

namespace liger {

/// The table of operators that scale each column of something made of a row:
///   Rms        x̂ = x · rstd
///   Added      the same of s = x + residual, rounded to x's dtype, which is a result too
///   Modulated  as Rms
///   Each       as Modulated, where every row has its own modulation
///   Layer      x̂ = (x − mean(x)) · rstd
///   Tanh       x̂ = tanh(alpha · x)
/// where
///   rstd = 1 / sqrt(mean(x²) + eps)
/// or, in Layer,
///   rstd = 1 / sqrt(mean((x − mean(x))²) + eps)
enum class Norm : int8_t { Rms, Added, Modulated, Each, Layer, Tanh };
constexpr bool centred(Norm n) { return n == Norm::Layer; }
constexpr bool tanh_of(Norm n) { return n == Norm::Tanh; }
constexpr bool modulated(Norm n) { return n == Norm::Modulated || n == Norm::Each; }
/// Those that have b; the reference does not round before w where there is one.
constexpr bool biased(Norm n) { return centred(n) || tanh_of(n); }

///   n = x̂ · (w + offset) + b
///   y = n, or n · (1 + scale) + shift where modulated
/// with a row of scale and shift for every rows / modulations rows.
struct NormForward {
  Norm norm;
  const void *x, *residual;                         // [rows, cols]
  const void *w, *b;                                // [cols] or null
  const void *scale, *shift;                        // [modulations, cols]; shift may be null
  Numbers alpha;                                    // [1]
  void *s, *y;                                      // [rows, cols]
  float *mean, *rstd;                               // [rows], kept for backward
  int64_t rows, cols, modulations, per_modulation;  // rows
  DType dtype, w_dtype, modulation_dtype;
  float eps, offset, inv_cols;  // 1 / cols
  Casting casting;
};

///   g      = dy · (w + offset), where modulated dy · (1 + scale) · (w + offset)
///   dx     = rstd · (g − x̂ · mean(g · x̂))            Rms, Modulated, Each; + ds for Added
///   dx     = rstd · (g − mean(g) − x̂ · mean(g · x̂))  Layer
///   dx     = alpha · (1 − x̂²) · g                    Tanh
///   dw     = Σ_rows dy · x̂, for Each Σ_rows dy · (1 + scale) · x̂
///   db     = Σ_rows dy
///   dalpha = Σ x · (1 − x̂²) · g
/// Sums over rows come as partial sums (liger/core/partial_sums.h). For Modulated as many for each modulation, in that
/// order, of which the gradients are made:
///   of w      Σ (1 + scale) · dw
///   of scale  (w + offset) · dw
///   of shift  db
/// Each has its own rows for the last two:
///   dscale = dy · x̂ · (w + offset)
///   dshift = dy
struct NormBackward {
  Norm norm;
  const void *dy, *ds, *x, *w, *scale;  // x: the normalised one, s for Added; ds may be null
  Numbers alpha;
  const float *mean, *rstd;
  void* dx;                 // null where x is frozen
  float *dw, *db, *dalpha;  // [partials, cols]; dalpha [partials]; null where not wanted
  void *dscale, *dshift;    // [rows, cols] of modulation_dtype; null where not wanted
  int64_t rows, cols, partials, modulations, per_modulation;  // rows
  DType dtype, w_dtype, modulation_dtype;
  float offset, inv_cols;  // 1 / cols
  Casting casting;
};

inline constinit Kernel<NormForward> norm_forward{"norm_forward"};
inline constinit Kernel<NormBackward> norm_backward{"norm_backward"};

/// Calls f.operator()<kNorm>().
template <class F>
void dispatch_norm(Norm norm, F&& f) {
  switch (norm) {
    case Norm::Rms: return f.template operator()<Norm::Rms>();
    case Norm::Added: return f.template operator()<Norm::Added>();
    case Norm::Modulated: return f.template operator()<Norm::Modulated>();
    case Norm::Each: return f.template operator()<Norm::Each>();
    case Norm::Layer: return f.template operator()<Norm::Layer>();
    case Norm::Tanh: return f.template operator()<Norm::Tanh>();
  }
}

}  // namespace liger
