#include "liger/core/cpu/row.h"
#include "liger/ops/research/connections/mhc_mix.h"

namespace LIGER_CPU::mhc_mix {
namespace {

template <class T, class F>
void forward(const MHCMixForward& a) {
  for_rows(a.rows, a.in * a.out * a.cols, [&](int64_t row) {
    const T* x = row_of<T>(a.x, row * a.in, a.cols);
    const F* f = a.f ? row_of<F>(a.f, row, a.cols) : nullptr;
    for (int o = 0; o < a.out; ++o) {
      const float* weight = a.weight + (row * a.out + o) * a.in;
      T* y = row_of<T>(a.y, row * a.out + o, a.cols);
      for_each(a.cols, [&](int64_t c, int64_t n) {
        Vec sum = f ? Vec(a.of_f[row * a.out + o]) * read(f + c, n) : Vec(0.f);
        for (int i = 0; i < a.in; ++i) sum = Math::fma(Vec(weight[i]), read(x + i * a.cols + c, n), sum);
        write(sum, y + c, n);
      });
    }
  });
}

template <class T, class F>
void backward(const MHCMixBackward& a) {
  for_rows(a.rows, 2 * a.in * a.out * a.cols, [&](int64_t row) {
    const T* dy = row_of<T>(a.dy, row * a.out, a.cols);
    // dx of an input x and the gradients of its weights, `step` apart.
    const auto input = [&]<class X>(const X* x, X* dx, const float* weight, float* dweight, int step) {
      for (int o = 0; o < a.out; ++o)
        dweight[o * step] = float(row_sum(a.cols, [](Vec dy, Vec x) { return dy * x; }, dy + o * a.cols, x));
      if (!dx) return;
      for_each(a.cols, [&](int64_t c, int64_t n) {
        Vec sum(0.f);
        for (int o = 0; o < a.out; ++o) sum = Math::fma(Vec(weight[o * step]), read(dy + o * a.cols + c, n), sum);
        write(sum, dx + c, n);
      });
    };
    for (int i = 0; i < a.in; ++i)
      input(row_of<T>(a.x, row * a.in + i, a.cols), a.dx ? row_of<T>(a.dx, row * a.in + i, a.cols) : nullptr,
            a.weight + row * a.out * a.in + i, a.dweight + row * a.out * a.in + i, a.in);
    if (a.f)
      input(row_of<F>(a.f, row, a.cols), a.df ? row_of<F>(a.df, row, a.cols) : nullptr, a.of_f + row * a.out,
            a.dof_f + row * a.out, 1);
  });
}

}  // namespace

LIGER_REGISTER(mhc_mix_forward, [](const MHCMixForward& a, Stream) {
  dispatch_weighted(a.dtype, a.f_dtype, [&]<class T, class F>() { forward<T, F>(a); });
});
LIGER_REGISTER(mhc_mix_backward, [](const MHCMixBackward& a, Stream) {
  dispatch_weighted(a.dtype, a.f_dtype, [&]<class T, class F>() { backward<T, F>(a); });
});

}  // namespace LIGER_CPU::mhc_mix
