#include "liger/core/cpu/row.h"
#include "liger/ops/norm/gated_rms_norm.h"

namespace LIGER_CPU::gated_rms_norm {
namespace {

/// The weight of all groups as floats.
std::vector<float> weights(const GatedRMSNorm& a) {
  std::vector<float> w(size_t(a.groups * a.cols));
  dispatch(a.w_dtype, [&]<class W>() {
    row_map(a.groups * a.cols, w.data(), [](Vec w) { return w; }, static_cast<const W*>(a.w));
  });
  return w;
}

/// What a row's elements become, and where that is rounded.
template <class T>
struct GatedRow {
  const GatedRMSNorm& a;
  Vec rstd{0.f};

  Vec act(const Vec& gate) const { return gate_value<Math>(a.act, gate); }
  Vec normed(const Vec& x, const Vec& gate) const { return a.gate_first ? x * act(gate) : x; }
  /// x̂ as it meets the weight.
  Vec rounded(const Vec& xhat) const { return a.casting == Casting::Llama ? round_to<T>(xhat) : xhat; }
  /// x̂ · w as it meets the gate.
  Vec weighted(const Vec& xhat, const Vec& w) const {
    const Vec n = rounded(xhat) * w;
    return a.rounds_product() ? round_to<T>(n) : n;
  }
};

template <class T>
void forward(const GatedRMSNormForward& a) {
  const auto w = weights(a);
  for_rows(a.rows, a.cols, [&](int64_t r) {
    const T *x = row_of<T>(a.x, r, a.cols), *gate = row_of<T>(a.gate, r, a.cols);
    GatedRow<T> row{a};
    const auto square = [&](Vec x, Vec gate) {
      const Vec u = row.normed(x, gate);
      return u * u;
    };
    a.rstd[r] = float(1 / std::sqrt(row_sum(a.cols, square, x, gate) / a.cols + a.eps));
    row.rstd = Vec(a.rstd[r]);
    const auto value = [&](Vec x, Vec gate, Vec w) {
      const Vec xhat = row.normed(x, gate) * row.rstd;
      return a.gate_first ? row.rounded(xhat) * w : row.weighted(xhat, w) * row.act(gate);
    };
    row_map(a.cols, row_of<T>(a.y, r, a.cols), value, x, gate, w.data() + r % a.groups * a.cols);
  });
}

/// Partial sum s is that of a run of a group's rows.
template <class T>
void backward(const GatedRMSNormBackward& a) {
  const auto weight = weights(a);
  const int64_t rows = a.rows / a.groups, run = ceil_div(rows, a.partials);
  for_rows(a.groups * a.partials, run * a.cols, [&](int64_t s) {
    const int64_t group = s / a.partials, begin = s % a.partials * run;
    const float* w = weight.data() + group * a.cols;
    float* dw = a.dw ? a.dw + s * a.cols : nullptr;
    if (dw) std::fill_n(dw, a.cols, 0.f);
    for (int64_t i = begin; i < std::min(rows, begin + run); ++i) {
      const int64_t r = i * a.groups + group;
      const T *x = row_of<T>(a.x, r, a.cols), *gate = row_of<T>(a.gate, r, a.cols), *dy = row_of<T>(a.dy, r, a.cols);
      const GatedRow<T> row{a, Vec(a.rstd[r])};
      const auto dn = [&](Vec gate, Vec dy) { return a.gate_first ? dy : dy * row.act(gate); };
      const auto project = [&](Vec x, Vec gate, Vec dy, Vec w) {
        return dn(gate, dy) * w * row.normed(x, gate) * row.rstd;
      };
      const Vec onto(float(row_sum(a.cols, project, x, gate, dy, w) / a.cols));
      for_each(a.cols, [&](int64_t c, int64_t n) {
        const Vec xv = read(x + c, n), gv = read(gate + c, n), dyv = read(dy + c, n), wv = read(w + c, n);
        const Vec xhat = row.normed(xv, gv) * row.rstd, d = dn(gv, dyv), du = row.rstd * (d * wv - xhat * onto);
        if (dw) write(read(dw + c, n) + d * xhat, dw + c, n);
        if (a.dx) write(a.gate_first ? du * row.act(gv) : du, row_of<T>(a.dx, r, a.cols) + c, n);
        const Vec dact = a.gate_first ? du * xv : dyv * row.weighted(xhat, wv);
        if (a.dgate) write(dact * gate_slope<Math>(a.act, gv), row_of<T>(a.dgate, r, a.cols) + c, n);
      });
    }
  });
}

}  // namespace

LIGER_REGISTER(gated_rms_norm_forward,
               [](const GatedRMSNormForward& a, Stream) { dispatch(a.dtype, [&]<class T>() { forward<T>(a); }); });
LIGER_REGISTER(gated_rms_norm_backward,
               [](const GatedRMSNormBackward& a, Stream) { dispatch(a.dtype, [&]<class T>() { backward<T>(a); }); });

}  // namespace LIGER_CPU::gated_rms_norm
