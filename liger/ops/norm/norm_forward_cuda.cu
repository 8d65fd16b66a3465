#include "liger/core/cuda/row_bytes.cuh"
#include "liger/ops/norm/norm.cuh"

namespace liger::cuda::norm {
namespace {

/// Σ (x − about), and Σ (x − about)² with what it was rounded by.
struct CarriedMoments {
  struct Value {
    float v[1];
    CarriedSum::Value squares;
  };
  static __device__ Value identity() { return {}; }
  __device__ Value operator()(const Value& a, const Value& b) const {
    return {{a.v[0] + b.v[0]}, CarriedSum()(a.squares, b.squares)};
  }
  __device__ static Value shuffle(const Value& v, int lane) {
    return {{__shfl_xor_sync(~0u, v.v[0], lane)}, CarriedSum::shuffle(v.squares, lane)};
  }
};

/// Σ (x − about) and Σ (x − about)² over the elements [begin, end).
template <int kWidth>
__device__ Sums<2>::Value moments(const Vec<kWidth>& x, float about, int begin, int end) {
  Sums<2>::Value s{};
#pragma unroll
  for (int i = 0; i < kWidth; ++i)
    if (i >= begin && i < end) {
      const float d = x.v[i] - about;
      s.v[0] += d, s.v[1] += d * d;
    }
  return s;
}

/// What a row is normalised by; each as RootMeanSquare has it.
template <class T, bool kCentred, bool kSpread>
struct Statistics;

template <class T, bool kSpread>
struct Statistics<T, false, kSpread> : RootMeanSquare<T, kSpread> {};

/// Of 16-bit numbers one pass tells mean and variance: the mean square less the mean's. Where the variance is less than
/// a part of the latter, which multiplies a float's rounding, or squares overflow, a second pass tells it, about the
/// mean.
template <class T, bool kSpread>
struct Statistics<T, true, kSpread> {
  static constexpr float kPart = 1.f / 64;
  RowReduce<Sums<2>, kSpread> reduce;

  template <class Each>
  __device__ Stats operator()(const NormForward& a, Each each) {
    using Both = Sums<2>;
    Both::Value s{};
    each([&](const auto& x, int, int) { s = Both()(s, {sum(x), sum(x * x)}); });
    s = reduce(s);
    float mean = s.v[0] * a.inv_cols, squares = fmaf(-mean, s.v[0], s.v[1]);
    const bool again = !(squares >= kPart * mean * s.v[0] && squares < INFINITY);
    // The rows of a block pass the same barriers, and the warps of a row are of one mind.
    if (blockDim.y > 1 ? __syncthreads_or(again) : again) {
      s = {};
      each([&](const auto& x, int begin, int end) { s = Both()(s, moments(x, mean, begin, end)); });
      s = reduce(s);
      const float d = s.v[0] * a.inv_cols;
      if (again) mean += d, squares = fmaxf(0, s.v[1] - s.v[0] * d);
    }
    return {mean, inverse_root<T>(squares, a)};
  }
};

template <bool kSpread>
struct Statistics<float, true, kSpread> {
  RowReduce<CarriedMoments, kSpread> reduce;

  template <class Each>
  __device__ Stats operator()(const NormForward& a, Each each) {
    CarriedMoments::Value s{};
    each([&](const auto& x, int, int) { s.v[0] += sum(x); });
    const float mean = reduce(s).v[0] / a.cols;
    s = {};
    each([&](const auto& x, int begin, int end) {
      const auto about_mean = moments(x, mean, begin, end);
      s.v[0] += about_mean.v[0], s.squares.v[0] += about_mean.v[1];
    });
    s = reduce(s);
    const float d = s.v[0] / a.cols;  // what the rounding of the sum has left: a constant row's deviations are 0
    return {mean + d, inverse_root(CarriedSum()(s.squares, {{-s.v[0] * d}, 0}), a)};
  }
};

/// x̂ · w or, of LayerNorm, x̂ · w + b, for a pack. weight: 0 where there is none; load(p, dtype): the same columns of a
/// vector.
template <class T, bool kCentred, class Vec, class Load>
__device__ auto output(const NormForward& a, const Vec& x, const Vec& weight, Stats stats, Load load) {
  const Vec xhat = normalised<kCentred>(x, stats), w = weight + (a.w ? a.offset : 1);
  if constexpr (kCentred) {
    const Vec b = a.b ? load(a.b, a.w_dtype) : Vec{};
    return packed<T>(Vec::map([](float x, float w, float b) { return fmaf(x, w, b); }, xhat, w, b));
  } else {
    return packed<T>(weighted<T>(xhat, w, a.casting));
  }
}

/// n · (1 + scale) + shift.
template <class T, class Pack, class Vec>
__device__ Pack modulated(const Pack& n, const Vec& scale, const Vec& shift) {
  return packed<T>(
      Vec::map([](float n, float scale, float shift) { return fmaf(n, scale + 1, shift); }, to_vec(n), scale, shift));
}

/// The same for this thread's packs of row `row`: each(f) calls f(p, k) for x[p], which is pack k of `in`. What has x's
/// dtype is asked for at once; after x̂ · w registers hold that.
template <class T, class Row, int kPacks, class Each>
__device__ void modulate(const NormForward& a, typename Row::Pack (&x)[kPacks], int64_t row, const Row& in, Each each) {
  const int64_t modulation = modulation_of(a, row);
  if (a.modulation_dtype == a.dtype) {
    typename Row::Pack scale[kPacks], shift[kPacks] = {};
    each([&](int p, int k) { scale[p] = Row(a.scale, modulation, a.cols, a.cols).load(k, T(0), in); });
    if (a.shift) each([&](int p, int k) { shift[p] = Row(a.shift, modulation, a.cols, a.cols).load(k, T(0), in); });
    each([&](int p, int) { x[p] = modulated<T>(x[p], to_vec(scale[p]), to_vec(shift[p])); });
    return;
  }
  each([&](int p, int k) {
    const auto load = [&](const void* v) { return load_like(v, DType::F32, modulation, a.cols, k, in); };
    x[p] = modulated<T>(x[p], load(a.scale), a.shift ? load(a.shift) : Vec<Row::kWidth>{});
  });
}

template <bool kCentred>
__device__ void keep(const NormForward& a, Stats stats, int64_t row) {
  a.rstd[row] = stats.rstd;
  if (kCentred) a.mean[row] = stats.mean;
}

constexpr int kForwardThreads = 512;

/// y, the statistics of each row and, where there is a residual, s = x + residual.
/// A block has blockDim.y rows, or a cluster one; a thread has Layout's packs of a row, in registers. x is read once;
/// weight, bias and modulation come from L1, which all blocks of a multiprocessor share. The limit is memory: with 64
/// registers a thread 1,024 threads have 64 bytes each in flight. Bytes: RowBytes of y, or nothing.
template <class T, class Layout, bool kCentred, class... Bytes>
__global__ void __launch_bounds__(kForwardThreads, 2) forward_kernel(NormForward a, Bytes... bytes) {
  await_previous();
  constexpr int kPacks = Layout::kPacks;
  const int64_t row = Layout::row();
  using Row = typename Layout::template Row<T>;
  const auto matrix = [&](const void* p) { return Row(p, row, a.cols, row < a.rows ? a.cols : 0); };
  const Row in = matrix(a.x), weight(a.w, 0, a.cols, a.cols);
  const int packs = row < a.rows ? in.packs() : 0;                     // an empty row may still touch one
  const bool ahead = Layout::kAligned && a.w && a.w_dtype == a.dtype;  // the weight comes with x
  typename Row::Pack x[kPacks], w[kPacks];
  const auto each = [&](auto f) {
    unrolled<kPacks>([&](int p) {
      if (const int k = Layout::pack(p); k < packs) f(p, k);
    });
  };
  unrolled<kPacks>([&](int p) { x[p] = {}; });
  each([&](int p, int k) { x[p] = in.load(k, T(0)); });
  if (!kCentred && a.scale && a.per_modulation == 1)
    each([&](int p, int k) {  // from memory, as x
      const int64_t at = (row * a.cols + max(0, in.column(k))) * (a.modulation_dtype == DType::F32 ? 4 : sizeof(T));
      prefetch(static_cast<const char*>(a.scale) + at);
      if (a.shift) prefetch(static_cast<const char*>(a.shift) + at);
    });
  if (ahead) each([&](int p, int k) { w[p] = weight.load(k, T(0), in); });
  if (a.residual) {
    typename Row::Pack residual[kPacks];
    each([&](int p, int k) { residual[p] = matrix(a.residual).load(k, T(0), in); });
    each([&](int p, int) { x[p] = packed<T>(to_vec(x[p]) + to_vec(residual[p])); });
    each([&](int p, int k) { matrix(a.s).store(k, x[p], in); });
  }
  Statistics<T, kCentred, Layout::kSpread> statistics;
  const Stats stats =
      statistics(a, [&](auto f) { each([&](int p, int k) { f(to_vec(x[p]), in.begin(k), in.end(k)); }); });
  // Two 16-bit numbers multiply exactly in a float, so that this product is rounded once either way.
  const bool product = sizeof(T) == 2 && ahead && a.casting == Casting::Llama && a.offset == 0;
  each([&](int p, int k) {
    if (!kCentred && product) {
      x[p] = packed<T>(normalised<false>(to_vec(x[p]), stats)) * w[p];
      return;
    }
    const auto load = [&](const void* v, DType dtype) { return load_like(v, dtype, 0, a.cols, k, in); };
    const auto weight = ahead ? to_vec(w[p]) : a.w ? load(a.w, a.w_dtype) : Vec<Row::kWidth>{};
    x[p] = output<T, kCentred>(a, to_vec(x[p]), weight, stats, load);
  });
  if (!kCentred && a.scale) modulate<T>(a, x, row, in, each);
  each([&](int p, int k) { matrix(a.y).store(k, x[p], in); });
  if (threadIdx.x == 0 && row < a.rows) keep<kCentred>(a, stats, row);
  if constexpr (sizeof...(Bytes) > 0) {
    const RowBytes& to = (bytes, ...);
    float most = 0;
    each([&](int p, int) { most = largest_magnitude(most, to_vec(x[p])); });
    const ByteScale by(statistics.reduce(most, LargestMagnitude()), to.format);
    if (threadIdx.x == 0 && row < a.rows) to.scale[row] = by.scale;
    each([&](int p, int k) { by.write(to.out + row * a.cols + in.column(k), to_vec(x[p])); });
  }
}

/// The same for longer rows: a block walks along its row, and reads it again, from a cache, for each pass.
template <class T, bool kCentred>
__global__ void __launch_bounds__(kLongRowThreads) forward_long_kernel(NormForward a) {
  await_previous();
  const int64_t row = blockIdx.x;
  const Row<T> x(a.x, row, a.cols, a.cols), y(a.y, row, a.cols, a.cols);
  const auto input = [&](int k) {
    const auto v = to_vec(x.load(k, T(0)));
    return a.residual ? round_to<T>(v + load_like(a.residual, a.dtype, row, a.cols, k, x)) : v;
  };
  Statistics<T, kCentred, false> statistics;
  const Stats stats =
      statistics(a, [&](auto f) { for_each_pack_of(x, [&](int k) { f(input(k), x.begin(k), x.end(k)); }); });
  for_each_pack_of(x, [&](int k) {
    const auto v = input(k);
    if (a.residual) Row<T>(a.s, row, a.cols, a.cols).store(k, packed<T>(v), x);
    const auto of_row = [&](int64_t row) {
      return [&, row](const void* p, DType dtype) { return load_like(p, dtype, row, a.cols, k, x); };
    };
    const auto load = of_row(0);
    const auto weight = a.w ? load(a.w, a.w_dtype) : Vec<Row<T>::kWidth>{};
    auto out = output<T, kCentred>(a, v, weight, stats, load);
    if (!kCentred && a.scale) {
      const auto modulation = of_row(modulation_of(a, row));
      out = modulated<T>(out, modulation(a.scale, a.modulation_dtype),
                         a.shift ? modulation(a.shift, a.modulation_dtype) : Vec<Row<T>::kWidth>{});
    }
    y.store(k, out, x);
  });
  if (threadIdx.x == 0) keep<kCentred>(a, stats, row);
}

constexpr int kForwardPacks = 4;
constexpr Threads kForwardBlock{.few = 128, .most = kForwardThreads, .spread = 256};

template <class T, bool kCentred>
void forward(const NormForward& a, Stream s) {
  const auto in_registers = [&]<class Layout>(const RowThreads& t) {
    launch(forward_kernel<T, Layout, kCentred>, t.of_rows(a.rows), s, a);
  };
  if (whole_packs<T>(a.cols, {a.x, a.residual, a.s, a.y, a.w, a.b, a.scale, a.shift})
          ? dispatch_layout<T, kForwardPacks, true, true>(a.cols, kForwardBlock, in_registers)
          : dispatch_layout<T, kForwardPacks, false, false>(a.cols, kForwardBlock, in_registers))
    return;
  launch(forward_long_kernel<T, kCentred>, {.blocks = a.rows, .threads = kLongRowThreads}, s, a);
}

}  // namespace

LIGER_REGISTER(norm_forward, [](const NormForward& a, Stream s) {
  dispatch(a.dtype, [&]<class T>() { a.centred ? forward<T, true>(a, s) : forward<T, false>(a, s); });
});

LIGER_REGISTER(norm_forward_bytes, [](const NormForwardBytes& a, Stream s) {
  dispatch16(a.norm.dtype, [&]<class T>() {
    const auto start = [&]<class Layout>(const RowThreads& t) {
      launch(forward_kernel<T, Layout, false, RowBytes>, t.of_rows(a.norm.rows), s, a.norm, a.y);
    };
    dispatch_layout<T, kForwardPacks, true, true>(a.norm.cols, kForwardBlock, start);
  });
});

}  // namespace liger::cuda::norm
