#pragma once
#include "liger/core/cuda/dispatch.h"
#include "liger/core/cuda/math.cuh"
#include "liger/core/cuda/row_layout.cuh"
#include "liger/ops/norm/norm.h"

namespace liger::cuda::norm {

/// What a row is normalised by.
struct Stats {
  float mean, rstd;
};

template <bool kCentred, class Vec>
__device__ Vec normalised(const Vec& x, Stats stats) {
  if constexpr (!kCentred) return x * stats.rstd;
  // A product with the mean would be rounded: of a constant row something would remain.
  else return (x + -stats.mean) * stats.rstd;
}

/// x̂ · w as the reference rounds it; w has its offset.
template <class T, class Vec>
__device__ Vec weighted(Vec xhat, Vec w, Casting casting) {
  if (casting != Casting::Gemma) xhat = round_to<T>(xhat);
  if (casting == Casting::None) w = round_to<T>(w);
  return xhat * w;
}

/// The row of scale and shift that row `row` shares with others.
template <class Args>
__device__ int64_t modulation_of(const Args& a, int64_t row) {
  return row >> 32 ? row / a.per_modulation : unsigned(row) / unsigned(a.per_modulation);  // in 32 bits where it can be
}

/// The columns of pack k of `like`, in row `row` of a matrix or vector that is of T or of floats; zeros outside it.
template <class T, template <class> class R>
__device__ Vec<R<T>::kWidth> load_like(const void* p, DType dtype, int64_t row, int64_t cols, int k, const R<T>& like) {
  if (dtype == DType::F32) return to_vec(R<float>(p, row, cols, cols).load(k, 0.f, like));
  return to_vec(R<T>(p, row, cols, cols).load(k, T(0), like));
}

/// A row's statistics, waited for here, where no other load of them is in flight: ptxas leaves a shuffle where it is.
/// Where their first use comes after the load of the next row's, it may wait for those, too: measured, a fifth of the
/// time.
__device__ inline Stats arrived(Stats s) {
  const int lane = int(threadIdx.y * blockDim.x) % 32;  // the row's first
  return {__shfl_sync(~0u, s.mean, lane), __shfl_sync(~0u, s.rstd, lane)};
}

/// The column sums of a block's rows are partial sum `index`.
template <class Layout, class Like>
__device__ void put_columns(Vec<Like::kWidth> (&sums)[Layout::kPacks], float* partials, int64_t index, int64_t cols,
                            const Like& like) {
  if (!partials) return;
  sum_over_rows(sums);
  if (threadIdx.y > 0) return;
  const typename Layout::template Row<float> to(partials, index, cols, cols);
  unrolled<Layout::kPacks>([&](int p) {
    if (const int k = Layout::pack(p); k < like.packs()) to.store(k, packed<float>(sums[p]), like);
  });
}

/// Adds pack k of a row's part to partial sum blockIdx.x, which its first row begins.
template <class T>
__device__ void add_columns(float* partials, const Vec<Row<T>::kWidth>& v, bool first, int64_t cols, int k,
                            const Row<T>& like) {
  if (!partials) return;
  const Row<float> to(partials, blockIdx.x, cols, cols);
  to.store(k, (first ? v : to_vec(to.load(k, 0.f, like)) + v).v, like);
}

/// 1 / sqrt(sum / cols + eps).
template <class T, class Args>
__device__ float inverse_root(float squares, const Args& a) {
  const float rstd = rsqrtf(squares * a.inv_cols + a.eps);
  return a.casting == Casting::None ? round_to<T>(rstd) : rstd;
}

/// The same to a float's last place, which shows where rows are floats: all of a row, and of its gradient, is off by as
/// much.
template <class Args>
__device__ float inverse_root(const CarriedSum::Value& squares, const Args& a) {
  const float mean = squares.v[0] / a.cols,
              of_mean = (fmaf(-mean, float(a.cols), squares.v[0]) + squares.rest) / a.cols;
  const auto square = CarriedSum()({{mean}, of_mean}, {{a.eps}, 0});
  const float v = square.v[0], root = rsqrtf(v), v_root = v * root;
  const float left =
      fmaf(-v_root, root, 1.f) - fmaf(fmaf(v, root, -v_root), root, square.rest * root * root);  // 1 - square · root²
  return left == left ? fmaf(.5f * root, left, root)  // a step of Newton's, but where the square is 0 or infinite
                      : root;
}

/// What RMSNorm normalises a row by. kSpread: the row's sums meet over a cluster. each(f) calls f(x, begin, end) for
/// each pack of the row that a thread has: of its elements [begin, end) are the row's, the others 0.
template <class T, bool kSpread = false>
struct RootMeanSquare {
  static constexpr bool kFloat = sizeof(T) == 4;
  RowReduce<std::conditional_t<kFloat, CarriedSum, Sum>, kSpread> reduce;

  template <class Args, class Each>
  __device__ Stats operator()(const Args& a, Each each) {
    float squares = 0;
    each([&](const auto& x, int, int) { squares += sum(x * x); });
    if constexpr (kFloat) return {0, inverse_root(reduce({{squares}, 0}), a)};
    else return {0, inverse_root<T>(reduce(squares), a)};
  }
};

/// The three kinds of gradient, each with a kernel: of LayerNorm, of RMSNorm, and of RMSNorm where several rows share a
/// modulation.
enum class Kind { Layer, Rms, SharedModulation };
constexpr bool centred(Kind k) { return k == Kind::Layer; }
constexpr bool has_db(Kind k) { return k != Kind::Rms; }

template <Kind kKind>
using Projections = Sums<centred(kKind) ? 2 : 1>;

/// A pack's values in both passes. dn: dy, times 1 + scale where each row has its own.
template <class T, class Vec, Kind kKind>
struct Gradient {
  Vec xhat, dn, g;  // g = dn · w, rounded, also where it meets a sum

  Gradient() = default;
  __device__ Gradient(const Vec& x, const Vec& dn, const Vec& w, Stats stats)
      : xhat(normalised<centred(kKind)>(x, stats)),
        dn(dn),
        g(Vec::map([](float dn, float w) { return __fmul_rn(dn, w); }, dn, w)) {}

  /// Its part of the row's sums: Σ g · x̂ and, where the mean counts, Σ g.
  __device__ typename Projections<kKind>::Value project() const {
    typename Projections<kKind>::Value sums{};
    sums.v[0] = sum(g * xhat);
    if constexpr (centred(kKind)) sums.v[1] = sum(g);
    return sums;
  }

  template <class Args>
  __device__ Vec dx(const Args& a, const typename Projections<kKind>::Value& sums, Stats stats) const {
    const float onto = sums.v[0] * a.inv_cols, mean = centred(kKind) ? sums.v[centred(kKind)] * a.inv_cols : 0,
                rstd = stats.rstd;
    if constexpr (sizeof(T) == 4)  // g − mean(g) is 0 where it should be
      return Vec::map([=](float g, float xhat) { return rstd * (g - mean - xhat * onto); }, g, xhat);
    const float by = -onto * rstd, plus = -mean * rstd;
    return Vec::map(
        [=](float g, float xhat) { return fmaf(g, rstd, centred(kKind) ? fmaf(xhat, by, plus) : xhat * by); }, g, xhat);
  }
};

}  // namespace liger::cuda::norm
