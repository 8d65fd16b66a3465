#include "liger/core/cpu/row.h"
#include "liger/ops/mixers/delta_gates.h"
#include "liger/ops/mixers/softplus.h"

namespace LIGER_CPU::delta_gates {
namespace {

using Softplus = liger::Softplus<Math, Vec>;
constexpr int64_t kRows = 64;  // of which a vector of heads is worked on at once, and whose sums are float

Vec sigmoid(Vec x) { return Vec(1.f) / (Vec(1.f) + Math::exp(Vec(0.f) - x)); }

/// A vector of heads, or the last ones, and what each has in common for all rows.
struct Heads {
  int64_t first, count;
  Vec factor, bias, low, high;

  Heads(const DeltaGates& a, int64_t first, int64_t count) : first(first), count(count), low(a.low), high(a.high) {
    float f[kLanes] = {}, b[kLanes] = {};
    for (int64_t h = 0; h < count; ++h) {
      const float A = number(a.A, first + h);
      f[h] = a.log ? -std::exp(A) : A;
      b[h] = a.dt_bias.of ? number(a.dt_bias, first + h) : 0;
    }
    factor = Vec::loadu(f), bias = Vec::loadu(b);
  }

  Vec clamped(Vec s) const { return at::vec::minimum(Math::max(s, low), high); }

  template <class T>
  Vec of(const void* m, int64_t row, int64_t stride) const {
    return read(static_cast<const T*>(m) + row * stride + first, count);
  }
};

template <class T>
void forward(const DeltaGatesForward& a) {
  for_rows(ceil_div(a.rows, kRows), kRows * a.heads * 16, [&](int64_t task) {
    for_each(a.heads, [&](int64_t first, int64_t n) {
      const Heads heads(a, first, n);
      for (int64_t row = task * kRows; row < std::min(a.rows, (task + 1) * kRows); ++row) {
        const int64_t at = row * a.heads + first;
        const Vec dt = heads.clamped(Softplus(heads.of<T>(a.a, row, a.a_stride) + heads.bias).value);
        write(heads.factor * dt, a.g + at, n);
        write(a.b ? sigmoid(heads.of<T>(a.b, row, a.b_stride)) : dt, a.beta + at, n);
      }
    });
  });
}

/// The sums of a vector of heads over the rows from `begin` to `end`.
template <class T>
std::array<Vec, 2> backward_of(const DeltaGatesBackward& a, const Heads& heads, int64_t begin, int64_t end) {
  Vec dA(0.f), dbias(0.f);
  for (int64_t row = begin; row < end; ++row) {
    const int64_t at = row * a.heads + heads.first;
    const Softplus s(heads.of<T>(a.a, row, a.a_stride) + heads.bias);
    const Vec dg = a.dg ? heads.of<float>(a.dg, row, a.heads) : Vec(0.f),
              dbeta = a.dbeta ? heads.of<float>(a.dbeta, row, a.heads) : Vec(0.f);
    const Vec ddt = a.b ? dg * heads.factor : dg * heads.factor + dbeta,
              da = Vec::blendv(Vec(0.f), ddt * s.slope, (s.value >= heads.low) & (s.value <= heads.high));
    write(da, static_cast<T*>(a.da) + at, heads.count);
    dA = dA + dg * heads.clamped(s.value), dbias = dbias + da;
    if (!a.db) continue;
    const Vec beta = sigmoid(heads.of<T>(a.b, row, a.b_stride));
    write(dbeta * beta * (Vec(1.f) - beta), static_cast<T*>(a.db) + at, heads.count);
  }
  return {dA, dbias};
}

/// Each partial sum is that of a run of rows.
template <class T>
void backward(const DeltaGatesBackward& a) {
  const int64_t run = ceil_div(a.rows, a.partials);
  for_rows(a.partials, run * a.heads * 32, [&](int64_t part) {
    const int64_t end = std::min(a.rows, (part + 1) * run);
    for_each(a.heads, [&](int64_t first, int64_t n) {
      const Heads heads(a, first, n);
      double total[2][kLanes] = {};
      for (int64_t begin = part * run; begin < end; begin += kRows) {
        const auto sums = backward_of<T>(a, heads, begin, std::min(end, begin + kRows));
        for (int k = 0; k < 2; ++k) {
          float of_rows[kLanes];
          sums[k].store(of_rows);
          for (int64_t h = 0; h < n; ++h) total[k][h] += of_rows[h];
        }
      }
      float factor[kLanes];
      heads.factor.store(factor);
      for (int64_t h = 0; h < n; ++h) {
        if (a.dA) a.dA[part * a.heads + first + h] = float(total[0][h] * (a.log ? factor[h] : 1));
        if (a.ddt_bias) a.ddt_bias[part * a.heads + first + h] = float(total[1][h]);
      }
    });
  });
}

}  // namespace

LIGER_REGISTER(delta_gates_forward,
               [](const DeltaGatesForward& a, Stream) { dispatch(a.dtype, [&]<class T>() { forward<T>(a); }); });
LIGER_REGISTER(delta_gates_backward,
               [](const DeltaGatesBackward& a, Stream) { dispatch(a.dtype, [&]<class T>() { backward<T>(a); }); });

}  // namespace LIGER_CPU::delta_gates
