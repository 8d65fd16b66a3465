#include "liger/core/cuda/grouped_gemm.cuh"
#include "liger/core/cuda/math.cuh"
#include "liger/core/cuda/pack.cuh"
#include "liger/ops/experts/experts.h"

namespace liger::cuda::grouped_gemm {
namespace {

/// h of numbers of a row: gates, and as many factors.
template <class T, class Gate, int n>
__device__ void gate(const GateForm& form, float (&gates)[n], const float (&factors)[n], T* h) {
  const typename Gate::template Of<Math<T>, float> gate(form);
#pragma unroll
  for (int i = 0; i < n; ++i) gates[i] = round_to<T>(gate.act(gates[i])) * gate.up(factors[i]);
  Pack<T, n>::from_float(gates).write(h);
}

/// The same by the Gate of the form's activation. dispatch_activation is the host's: here one kernel has every formula,
/// because its products take long to compile.
template <template <class> class Gate, class T>
__device__ void by_activation(const GateForm& form, float (&gates)[8], const float (&factors)[8], T* h) {
  switch (form.activation) {
#define LIGER_CASE(formula, name) \
  case Activation::formula: return gate<T, Gate<formula>>(form, gates, factors, h);
    LIGER_ACTIVATIONS(LIGER_CASE)
#undef LIGER_CASE
  }
}

/// h of a row's gates and their factors, as gated_forward rounds it.
template <class T>
struct GatedHalves {
  static constexpr Makes kMakes = Makes::OfHalves;
  T* h;
  int cols;
  GateForm form;

  __device__ void operator()(const uint4& gates, const uint4& ups, int64_t row, int column) const {
    T* to = h + row * cols + column;
    float a[8], b[8];
    Pack<T, 8>::read(&gates).to_float(a), Pack<T, 8>::read(&ups).to_float(b);
    if (!form.plain()) return gate<T, ClampedGate<false>>(form, a, b, to);
    by_activation<PlainGate>(form, a, b, to);
  }
};

/// The same of gates and factors in turn.
template <class T>
struct GatedPairs {
  static constexpr Makes kMakes = Makes::OfNumbers;
  T* h;
  int cols;
  GateForm form;

  __device__ void operator()(const uint4& numbers, int64_t row, int column) const {
    float both[8], a[4], b[4];
    Pack<T, 8>::read(&numbers).to_float(both);
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = both[2 * i], b[i] = both[2 * i + 1];
    gate<T, ClampedGate<true>>(form, a, b, h + row * cols + column / 2);
  }
};

/// h of numbers without a gate.
template <class T>
struct Activated {
  static constexpr Makes kMakes = Makes::OfNumbers;
  T* h;
  int cols;
  GateForm form;

  __device__ void operator()(const uint4& numbers, int64_t row, int column) const {
    float none[8] = {}, b[8];
    Pack<T, 8>::read(&numbers).to_float(b);
    by_activation<NoGate>(form, none, b, h + row * cols + column);
  }
};

}  // namespace

LIGER_REGISTER(grouped_gated, [](const GroupedGated& a, Stream s) {
  const auto start = [&]<template <class> class Make>() {
    const int cols = int(a.gated ? a.product.cols / 2 : a.product.cols);
    start_rows(a.product, s, [&]<class T>() { return Make<T>{static_cast<T*>(a.h), cols, a.form}; });
  };
  if (!a.gated) start.operator()<Activated>();
  else if (a.form.interleaved) start.operator()<GatedPairs>();
  else start.operator()<GatedHalves>();
});

}  // namespace liger::cuda::grouped_gemm
