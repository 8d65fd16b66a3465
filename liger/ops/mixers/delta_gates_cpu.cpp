#include "liger/core/cpu/row.h"
#include "liger/ops/mixers/delta_gates.h"

namespace LIGER_CPU::delta_gates {
namespace {

constexpr int64_t kHeads = 256;  // that are worked on at once; their sums are on the stack
constexpr int64_t kRows = 64;    // of a task of forward

Vec sigmoid(Vec x) { return Vec(1.f) / (Vec(1.f) + Math::exp(Vec(0.f) - x)); }
Vec softplus(Vec x) { return Math::max(x, Vec(0.f)) + Math::exp(Vec(0.f) - x.abs()).log1p(); }

/// What some heads have in common for all rows.
struct Heads {
  int64_t first, count;
  float factor[kHeads], bias[kHeads];
  Vec low, high;

  Heads(const DeltaGates& a, int64_t first)
      : first(first), count(std::min(kHeads, a.heads - first)), low(a.low), high(a.high) {
    for (int64_t h = 0; h < count; ++h) {
      const float A = number(a.A, first + h);
      factor[h] = a.log ? -std::exp(A) : A;
      bias[h] = a.dt_bias.of ? number(a.dt_bias, first + h) : 0;
    }
  }

  Vec dt(Vec x) const { return at::vec::minimum(Math::max(softplus(x), low), high); }
  /// ∂dt/∂x
  Vec slope(Vec x) const {
    const Vec s = softplus(x);
    return Vec::blendv(Vec(0.f), sigmoid(x), (s >= low) & (s <= high));
  }
};

template <class T>
const T* at_row(const void* m, int64_t row, int64_t stride, const Heads& heads) {
  return static_cast<const T*>(m) + row * stride + heads.first;
}

template <class T>
void forward(const DeltaGatesForward& a) {
  for_rows(ceil_div(a.rows, kRows), kRows * a.heads * 16, [&](int64_t task) {
    for (int64_t first = 0; first < a.heads; first += kHeads) {
      const Heads heads(a, first);
      for (int64_t row = task * kRows; row < std::min(a.rows, (task + 1) * kRows); ++row) {
        const T* x = at_row<T>(a.a, row, a.a_stride, heads);
        float *g = a.g + row * a.heads + first, *beta = a.beta + row * a.heads + first;
        row_map(
            heads.count, g, [&](Vec x, Vec bias, Vec factor) { return factor * heads.dt(x + bias); }, x, heads.bias,
            heads.factor);
        if (a.b) row_map(heads.count, beta, [](Vec b) { return sigmoid(b); }, at_row<T>(a.b, row, a.b_stride, heads));
        else row_map(heads.count, beta, [&](Vec x, Vec bias) { return heads.dt(x + bias); }, x, heads.bias);
      }
    }
  });
}

/// Partial sum s is that of a run of rows.
template <class T>
void backward(const DeltaGatesBackward& a) {
  const int64_t run = ceil_div(a.rows, a.partials);
  const float zeros[kHeads] = {};
  for_rows(a.partials, run * a.heads * 32, [&](int64_t s) {
    for (int64_t first = 0; first < a.heads; first += kHeads) {
      const Heads heads(a, first);
      double dA[kHeads] = {}, dbias[kHeads] = {};
      for (int64_t row = s * run; row < std::min(a.rows, (s + 1) * run); ++row) {
        const T* x = at_row<T>(a.a, row, a.a_stride, heads);
        const auto upstream = [&](const float* d) { return d ? d + row * a.heads + first : zeros; };
        const float *dg = upstream(a.dg), *dbeta = upstream(a.dbeta);
        T* da = static_cast<T*>(a.da) + row * a.heads + first;
        for_each(heads.count, [&](int64_t h, int64_t n) {
          const Vec z = read(x + h, n) + read(heads.bias + h, n), up = read(dg + h, n);
          Vec ddt = up * read(heads.factor + h, n);
          if (!a.b) ddt = ddt + read(dbeta + h, n);
          const Vec d = ddt * heads.slope(z);
          write(d, da + h, n);
          float of_A[kLanes], of_bias[kLanes];
          (up * heads.dt(z)).store(of_A), d.store(of_bias);
          for (int64_t i = 0; i < n; ++i) dA[h + i] += of_A[i], dbias[h + i] += of_bias[i];
        });
        if (a.db)
          row_map(
              heads.count, static_cast<T*>(a.db) + row * a.heads + first,
              [](Vec b, Vec d) {
                const Vec beta = sigmoid(b);
                return d * beta * (Vec(1.f) - beta);
              },
              at_row<T>(a.b, row, a.b_stride, heads), dbeta);
      }
      for (int64_t h = 0; h < heads.count; ++h) {
        if (a.dA) a.dA[s * a.heads + first + h] = float(dA[h] * (a.log ? heads.factor[h] : 1));
        if (a.ddt_bias) a.ddt_bias[s * a.heads + first + h] = float(dbias[h]);
      }
    }
  });
}

}  // namespace

LIGER_REGISTER(delta_gates_forward,
               [](const DeltaGatesForward& a, Stream) { dispatch(a.dtype, [&]<class T>() { forward<T>(a); }); });
LIGER_REGISTER(delta_gates_backward,
               [](const DeltaGatesBackward& a, Stream) { dispatch(a.dtype, [&]<class T>() { backward<T>(a); }); });

}  // namespace LIGER_CPU::delta_gates
