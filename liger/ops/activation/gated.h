#pragma once
#include "liger/core/eight_bit.h"
#include "liger/core/kernel.h"
#include "liger/core/math.h"

namespace liger {

/// What a gate's activation g(a) and its factor u(b) are:
///   g(a) = act(alpha · min(m · a, limit)) / alpha
///   u(b) = clamp(b, −limit, limit) + up_offset
/// limit and what is below it take SiLU. Derivatives are 0 past `last`: limit where values at it still count, as in
/// torch's clamp before 2.14, and the number before limit where they do not.
struct GateForm {
  Activation activation;
  float m = 1, limit = INFINITY, last = INFINITY, alpha = 1, up_offset = 0;
  bool interleaved = false;  // a row holds a and b in turn

  LIGER_HD bool plain() const { return limit == INFINITY && alpha == 1 && up_offset == 0 && !interleaved; }
};

///   c = g(a) · u(b)
/// rounded where the unfused model rounds: g, then the product. Rows may lie apart in memory, as the halves of a fused
/// gate-up product do.
struct GatedForward {
  const void *a, *b;  // [rows, cols], stride elements apart; interleaved: a [rows, 2 cols] has both, without gaps
  void* c;            // [rows, cols]
  int64_t rows, cols, a_stride, b_stride;
  DType dtype;
  GateForm form;
};

///   da = (dc · u(b)) · g'(a)
///   db = dc · g(a) · u'(b)
struct GatedBackward {
  const void *dc, *a, *b;
  void *da, *db;  // d_stride elements apart; interleaved: da is as a
  int64_t rows, cols, a_stride, b_stride, d_stride;
  DType dtype;
  GateForm form;
  void* c = nullptr;  // [rows, cols]: c again, where it is given; may be dc. Not of an interleaved form
};

/// GatedForward of 16-bit numbers, which gives c in 8 bits too.
struct GatedForwardBytes {
  GatedForward gated;
  RowBytes c;
};

/// GatedBackward of 16-bit numbers, which gives the gradients in 8 bits too, side by side:
///   d = da · a_factor, db · b_factor     both [cols]
/// d, of as many bytes as dc, may lie where that does.
struct GatedBackwardBytes {
  GatedBackward gated;
  RowBytes d;  // [rows, 2 cols]
  const float *a_factor, *b_factor;
};

inline constinit Kernel<GatedForward> gated_forward{"gated_forward"};
inline constinit Kernel<GatedBackward> gated_backward{"gated_backward"};
// Optional. They take a plain form, and rows and factors that begin and end at 16-byte boundaries, of at most
// kMostByteColumns.
inline constinit Kernel<GatedForwardBytes> gated_forward_bytes{"gated_forward_bytes"};
inline constinit Kernel<GatedBackwardBytes> gated_backward_bytes{"gated_backward_bytes"};

/// Calls f.operator()<Act>() with the formula of `a`.
template <class F>
void dispatch_activation(Activation a, F&& f) {
  switch (a) {
#define LIGER_CASE(formula, name) \
  case Activation::formula: return f.template operator()<formula>();
    LIGER_ACTIVATIONS(LIGER_CASE)
#undef LIGER_CASE
  }
}

/// The formulas of a form for a float or a vector V, with the functions of M.
template <class Act>
struct PlainGate {
  static constexpr bool kInterleaved = false;

  template <class M, class V>
  struct Of {
    V m;
    LIGER_HD explicit Of(const GateForm& form) : m(form.m) {}
    LIGER_HD V act(V a) const { return Act::template value<M>(m * a); }
    LIGER_HD V slope(V a) const { return Act::template derivative<M>(m * a) * m; }
    LIGER_HD V up(V b) const { return b; }
    /// d times the derivative of up.
    LIGER_HD V through_up(V, V d) const { return d; }
  };
};

template <bool kInterleaved_>
struct ClampedGate {
  static constexpr bool kInterleaved = kInterleaved_;

  template <class M, class V>
  struct Of {
    V m, limit, last, alpha, inverse, up_offset;
    LIGER_HD explicit Of(const GateForm& form)
        : m(form.m),
          limit(form.limit),
          last(form.last),
          alpha(form.alpha),
          inverse(1 / form.alpha),
          up_offset(form.up_offset) {}
    LIGER_HD V act(V a) const { return SiLU::value<M>(alpha * min(m * a)) * inverse; }
    LIGER_HD V slope(V a) const {
      return M::if_positive(m * a - last, V(0), SiLU::derivative<M>(alpha * min(m * a)) * m);
    }
    LIGER_HD V up(V b) const { return M::max(min(b), V(0) - limit) + up_offset; }
    LIGER_HD V through_up(V b, V d) const {
      return M::if_positive(b - last, V(0), M::if_positive(V(0) - last - b, V(0), d));
    }

   private:
    /// min(x, limit), NaN if x is.
    LIGER_HD V min(V x) const { return V(0) - M::max(V(0) - x, V(0) - limit); }
  };
};

/// Calls f.operator()<Gate>() with the formulas of a form.
template <class F>
void dispatch_gate(const GateForm& form, F&& f) {
  if (form.plain()) dispatch_activation(form.activation, [&]<class Act>() { f.template operator()<PlainGate<Act>>(); });
  else if (form.interleaved) f.template operator()<ClampedGate<true>>();
  else f.template operator()<ClampedGate<false>>();
}

}  // namespace liger
