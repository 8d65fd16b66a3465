#include "liger/core/cuda/grouped_gemm.cuh"
#include "liger/core/cuda/math.cuh"
#include "liger/core/cuda/pack.cuh"
#include "liger/ops/experts/experts.h"

namespace liger::cuda::grouped_gemm {
namespace {

/// h of a row's gates and their factors, as gated_forward rounds it.
template <class T>
struct GatedHalves {
  T* h;
  int cols;
  GateForm form;

  /// dispatch_gate is the host's: here one kernel has every formula, because its products take long to compile.
  __device__ void operator()(const uint4& gates, const uint4& ups, int64_t row, int column) const {
    T* to = h + row * cols + column;
    if (!form.plain()) return write<ClampedGate<false>>(gates, ups, to);
    switch (form.activation) {
#define LIGER_CASE(formula, name) \
  case Activation::formula: return write<PlainGate<formula>>(gates, ups, to);
      LIGER_ACTIVATIONS(LIGER_CASE)
#undef LIGER_CASE
    }
  }

  template <class Gate>
  __device__ void write(const uint4& gates, const uint4& ups, T* to) const {
    const typename Gate::template Of<Math<T>, float> gate(form);
    float a[8], b[8];
    Pack<T, 8>::read(&gates).to_float(a), Pack<T, 8>::read(&ups).to_float(b);
#pragma unroll
    for (int i = 0; i < 8; ++i) a[i] = round_to<T>(gate.act(a[i])) * gate.up(b[i]);
    Pack<T, 8>::from_float(a).write(to);
  }
};

}  // namespace

LIGER_REGISTER(grouped_gated, [](const GroupedGated& a, Stream s) {
  start_rows(a.product, s,
             [&]<class T>() { return GatedHalves<T>{static_cast<T*>(a.h), int(a.product.cols / 2), a.form}; });
});

}  // namespace liger::cuda::grouped_gemm
