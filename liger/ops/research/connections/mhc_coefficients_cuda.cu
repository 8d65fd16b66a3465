#include "liger/core/cuda/stream.cuh"
#include "liger/ops/research/connections/mhc_coefficients.h"

namespace liger::cuda::mhc_coefficients {
namespace {

constexpr int kThreads = 128;

/// r of each row, a block each. The limit is memory.
template <class T>
__global__ void __launch_bounds__(256) rstd_kernel(MHCCoefficientsForward a) {
  await_previous();
  const Row<T> x(a.x, blockIdx.x, a.cols, a.cols);
  float squares = 0;
  for_each_pack<4>(x, 0, x.packs(), T(0), [&](int, const auto& pack) {
    float f[Row<T>::kWidth];
    pack.to_float(f);
    for (const float v : f) squares += v * v;
  });
  RowReduce<Sum> reduce;
  squares = reduce(squares);
  if (threadIdx.x == 0) a.rstd[blockIdx.x] = 1 / sqrtf(squares / a.cols + a.rms_eps);
}

/// A row belongs to kLanes neighbouring threads, of which each has a row of A: thread i has R_i and all C_j. What lies
/// past the streams has factors of 0.
template <int kLanes>
struct Lanes {
  static constexpr int kRows = kThreads / kLanes;  // of a block
  int s, i;
  int64_t row;
  bool mine;  // whether there are such a row, and such a row of A

  template <class Args>
  __device__ Lanes(const Args& a, int64_t row)
      : s(a.streams), i(int(threadIdx.x) % kLanes), row(row), mine(row < a.rows && i < s) {}
  __device__ static int group() { return int(threadIdx.x) / kLanes; }
  __device__ int columns() const { return s * (s + 2); }
  /// This thread's column for pre (0), post (1), or its j-th for res.
  __device__ int column(int which) const { return which * s + i; }
  __device__ int of_res(int j) const { return (2 + i) * s + j; }
  __device__ static float of(float v, int j) {
    return __shfl_sync(~0u, v, int(threadIdx.x) % 32 / kLanes * kLanes + j);
  }
  __device__ static float sum(float v) { return reduce_lanes<Sum>(v, kLanes); }
};

template <int kLanes>
struct Sinkhorn {
  float eps, p[kLanes], c[kLanes], r;
  int s;

  template <class L>
  __device__ Sinkhorn(const Lanes<kLanes>& at, float eps, L logit) : eps(eps), s(at.mine ? at.s : 0) {
    float max = -INFINITY, sum = 0;
    unrolled<kLanes>([&](int j) { p[j] = j < s ? logit(j) : -INFINITY, max = fmaxf(max, p[j]); });
    unrolled<kLanes>([&](int j) { p[j] = j < s ? expf(p[j] - max) : 0, sum += p[j]; });
    unrolled<kLanes>([&](int j) { p[j] = j < s ? p[j] / sum : 0, c[j] = j < at.s; });
    r = at.mine;
  }
  __device__ float a(int j) const { return j < s ? p[j] + eps : 0; }

  __device__ void step(bool rows_too) {
    if (rows_too) {
      float sum = 0;
      unrolled<kLanes>([&](int j) { sum += a(j) * c[j]; });
      if (s > 0) r /= r * sum + eps;
    }
    unrolled<kLanes>([&](int j) {
      const float sum = Lanes<kLanes>::sum(r * a(j));
      if (c[j] > 0) c[j] /= c[j] * sum + eps;
    });
  }

  /// All iterations; factors(t)[0] and factors(t)[s] become R and C of this thread's row and column after step t.
  template <class F>
  __device__ void run(const Lanes<kLanes>& at, int64_t iterations, F factors) {
    for (int64_t t = 0; t < iterations; ++t) {
      step(t > 0);
      if (at.mine) factors(t)[0] = r;
      unrolled<kLanes>([&](int j) {
        if (at.mine && j == at.i) factors(t)[at.s] = c[j];
      });
    }
  }

  /// After run: the gradient of the result becomes that of the logits, by the factors of each iteration from the last
  /// to the first.
  template <class F>
  __device__ void backward(const Lanes<kLanes>& at, int64_t iterations, F factors, float (&g)[kLanes]) {
    unrolled<kLanes>([&](int j) { g[j] *= r * c[j]; });
    float c_after = at.mine ? factors(iterations - 1)[at.s] : 0;
    for (int64_t t = iterations - 1; t >= 0; --t) {
      const float r_now = at.mine ? factors(t)[0] : 0, c_before = at.mine && t > 0 ? factors(t - 1)[at.s] : 0;
      float of_row = 0;
      unrolled<kLanes>([&](int j) {
        g[j] -= r_now * Lanes<kLanes>::of(c_after, j) * Lanes<kLanes>::sum(a(j) * g[j]);
        of_row += a(j) * g[j];
      });
      unrolled<kLanes>([&](int j) { g[j] -= r_now * Lanes<kLanes>::of(c_before, j) * of_row; });  // 0 of the first
      c_after = c_before;
    }
    float dot = 0;
    unrolled<kLanes>([&](int j) { dot += p[j] * g[j]; });
    unrolled<kLanes>([&](int j) { g[j] = p[j] * (g[j] - dot); });
  }
};

/// pre, post and res. Latency is the limit: a row's steps follow one another.
template <int kLanes>
__global__ void __launch_bounds__(kThreads) forward_kernel(MHCCoefficientsForward a) {
  await_previous();
  using Lanes = mhc_coefficients::Lanes<kLanes>;
  const Lanes at(a, int64_t(blockIdx.x) * Lanes::kRows + Lanes::group());
  const float rstd = at.mine ? a.rstd[at.row] : 0;
  const auto logit = [&](const float* alpha, int column) {
    return *alpha * (rstd * a.y[at.row * at.columns() + column]) + a.b[column];
  };
  if (at.mine) {
    a.pre[at.row * at.s + at.i] = sigmoid(logit(a.alpha_pre, at.column(0))) + a.pre_eps;
    a.post[at.row * at.s + at.i] = sigmoid(logit(a.alpha_post, at.column(1))) * a.post_scale;
  }
  Sinkhorn<kLanes> of(at, a.sinkhorn_eps, [&](int j) { return logit(a.alpha_res, at.of_res(j)); });
  for (int64_t t = 0; t < a.iterations; ++t) of.step(t > 0);
  unrolled<kLanes>([&](int j) {
    if (j < of.s) a.res[(at.row * at.s + at.i) * at.s + j] = of.r * of.a(j) * of.c[j];
  });
}

/// The block's partial sums of db and dalpha: the sums over its groups of lanes, in their order.
template <int kLanes>
__device__ void write_partials(const MHCCoefficientsBackward& a, float db_pre, float db_post,
                               const float (&db_res)[kLanes], const float (&dalpha)[3]) {
  using Lanes = mhc_coefficients::Lanes<kLanes>;
  __shared__ float sums[Lanes::kRows][kLanes * (kLanes + 2) + 3];
  const Lanes at(a, 0);
  float* const group = sums[Lanes::group()];
  if (at.i < at.s) {
    group[at.column(0)] = db_pre, group[at.column(1)] = db_post;
    unrolled<kLanes>([&](int j) {
      if (j < at.s) group[at.of_res(j)] = db_res[j];
    });
  }
  for (int k = 0; k < 3; ++k) {
    const float sum = Lanes::sum(dalpha[k]);
    if (at.i == 0) group[at.columns() + k] = sum;
  }
  __syncthreads();
  for (int m = int(threadIdx.x); m < at.columns() + 3; m += kThreads) {
    float sum = 0;
    for (const auto& of_group : sums) sum += of_group[m];
    if (m < at.columns()) a.db[int64_t(blockIdx.x) * at.columns() + m] = sum;
    else a.dalpha[(m - at.columns()) * a.partials + blockIdx.x] = sum;
  }
}

/// dy and scale, and the sums over rows of db and dalpha.
/// A block makes one partial sum and walks along its rows, whose factors it recomputes and keeps in `factors`. Latency
/// is the limit.
template <int kLanes>
__global__ void __launch_bounds__(kThreads) backward_kernel(MHCCoefficientsBackward a) {
  await_previous();
  using Lanes = mhc_coefficients::Lanes<kLanes>;
  float db_pre = 0, db_post = 0, db_res[kLanes] = {}, dalpha[3] = {};
  for (int64_t first = int64_t(blockIdx.x) * Lanes::kRows; first < a.rows; first += int64_t(gridDim.x) * Lanes::kRows) {
    const Lanes at(a, first + Lanes::group());
    const int64_t from = at.row * at.columns();
    const float rstd = at.mine ? a.rstd[at.row] : 0;
    const auto y = [&](int column) { return a.y[from + column]; };
    float along = 0;
    const auto put = [&](float alpha, int column, float dl, float& db, float& dalpha) {
      db += dl, dalpha += dl * rstd * y(column), along += alpha * dl * y(column);
      a.dy[from + column] = rstd * alpha * dl;
    };
    if (at.mine) {
      const auto slope = [&](float alpha, int column) {
        const float p = sigmoid(alpha * (rstd * y(column)) + a.b[column]);
        return p * (1 - p);
      };
      const int64_t i = at.row * at.s + at.i;
      const int pre = at.column(0), post = at.column(1);
      put(*a.alpha_pre, pre, a.dpre[i] * slope(*a.alpha_pre, pre), db_pre, dalpha[0]);
      put(*a.alpha_post, post, a.dpost[i] * a.post_scale * slope(*a.alpha_post, post), db_post, dalpha[1]);
    }
    const float alpha = *a.alpha_res;
    Sinkhorn<kLanes> of(at, a.sinkhorn_eps,
                        [&](int j) { return alpha * (rstd * y(at.of_res(j))) + a.b[at.of_res(j)]; });
    const auto factors = [&](int64_t t) { return a.factors + (t * a.rows + at.row) * 2 * at.s + at.i; };
    of.run(at, a.iterations, factors);
    float g[kLanes];
    unrolled<kLanes>([&](int j) { g[j] = j < of.s ? a.dres[(at.row * at.s + at.i) * at.s + j] : 0; });
    of.backward(at, a.iterations, factors, g);
    unrolled<kLanes>([&](int j) {
      if (j < of.s) put(alpha, at.of_res(j), g[j], db_res[j], dalpha[2]);
    });
    along = Lanes::sum(along);
    if (at.mine && at.i == 0) a.scale[at.row] = -along * rstd * rstd * rstd / a.cols;
  }
  write_partials<kLanes>(a, db_pre, db_post, db_res, dalpha);
}

/// dx, and a partial sum of dphi. A thread has two columns and walks along the chunk's rows: with its columns' phi and
/// sums in registers it reads x once and makes both from it. A block has dy of kTileRows rows in shared memory. The
/// limit are 96 multiply-adds for two columns of a row, which take about as long as reading x and writing dx.
template <class T>
__global__ void __launch_bounds__(kThreads, 3) projection_backward_kernel(MHCProjectionBackward a, int strips) {
  await_previous();
  constexpr int kTileRows = 32, kAtOnce = 4, kColumns = MHCProjectionBackward::kMostColumns;
  using Pair = Pack<T, 2>;
  __shared__ float dy[kTileRows][kColumns], scale[kTileRows];
  const int64_t chunk = ceil_div(a.rows, a.partials), part = blockIdx.x / strips, begin = part * chunk,
                end = min(begin + chunk, a.rows), c = (int64_t(blockIdx.x % strips) * kThreads + threadIdx.x) * 2;
  const bool two = c + 1 < a.cols, pairs = a.cols % 2 == 0 && reinterpret_cast<uintptr_t>(a.x) % sizeof(Pair) == 0;
  float phi[2][kColumns], sums[2][kColumns] = {};
  unrolled<2 * kColumns>([&](int i) {
    const int u = i / kColumns, j = i % kColumns;
    phi[u][j] = c + u < a.cols && j < a.columns ? number(a.phi, (c + u) * a.columns + j) : 0;
  });
  const auto load = [&](int64_t row) {
    const T* x = static_cast<const T*>(a.x) + row * a.cols + c;
    if (pairs) return Pair::read(x);
    const float f[2] = {float(x[0]), two ? float(x[1]) : 0};
    return Pair::from_float(f);
  };
  const auto add = [&](int64_t row, int in_tile, const Pair& pair) {
    float x[2], dx[2];
    pair.to_float(x);
    dx[0] = scale[in_tile] * x[0], dx[1] = scale[in_tile] * x[1];
    unrolled<kColumns>([&](int j) {
      const float d = dy[in_tile][j];
      unrolled<2>([&](int u) { dx[u] = fmaf(d, phi[u][j], dx[u]), sums[u][j] = fmaf(d, x[u], sums[u][j]); });
    });
    if (!a.dx) return;
    T* to = static_cast<T*>(a.dx) + row * a.cols + c;
    if (pairs) return Pair::from_float(dx).write(to);
    to[0] = T(dx[0]);
    if (two) to[1] = T(dx[1]);
  };
  for (int64_t first = begin; first < end; first += kTileRows) {
    const int n = int(min(int64_t(kTileRows), end - first));
    __syncthreads();
    for (int i = int(threadIdx.x); i < n * kColumns; i += kThreads) {
      const int r = i / kColumns, j = i % kColumns;
      dy[r][j] = j < a.columns ? a.dy[(first + r) * a.columns + j] : 0;
    }
    for (int r = int(threadIdx.x); r < n; r += kThreads) scale[r] = a.scale[first + r];
    __syncthreads();
    if (c >= a.cols) continue;
    for (int r = 0; r < n; r += kAtOnce) {
      Pair x[kAtOnce];
      unrolled<kAtOnce>([&](int u) {
        if (r + u < n) x[u] = load(first + r + u);
      });
      unrolled<kAtOnce>([&](int u) {
        if (r + u < n) add(first + r + u, r + u, x[u]);
      });
    }
  }
  if (!a.dphi) return;
  for (int u = 0; u < 2; ++u)
    unrolled<kColumns>([&](int j) {
      if (c + u < a.cols && j < a.columns) a.dphi[(part * a.cols + c + u) * a.columns + j] = sums[u][j];
    });
}

/// f.operator()<kLanes>().
template <class F>
void dispatch_streams(int streams, F f) {
  if (streams <= 4) f.template operator()<4>();
  else if (streams <= 8) f.template operator()<8>();
  else f.template operator()<16>();
}

}  // namespace

LIGER_REGISTER(mhc_coefficients_forward, [](const MHCCoefficientsForward& a, Stream s) {
  dispatch(a.dtype, [&]<class T>() { launch(rstd_kernel<T>, {.blocks = a.rows, .threads = 256}, s, a); });
  dispatch_streams(a.streams, [&]<int kLanes>() {
    launch(forward_kernel<kLanes>, {.blocks = ceil_div(a.rows, kThreads / kLanes), .threads = kThreads}, s, a);
  });
});
LIGER_REGISTER(mhc_coefficients_backward, [](const MHCCoefficientsBackward& a, Stream s) {
  dispatch_streams(a.streams, [&]<int kLanes>() {
    launch(backward_kernel<kLanes>, {.blocks = a.partials, .threads = kThreads}, s, a);
  });
});

LIGER_REGISTER(mhc_projection_backward, [](const MHCProjectionBackward& a, Stream s) {
  const int64_t strips = ceil_div(a.cols, 2 * kThreads);
  dispatch(a.dtype, [&]<class T>() {
    launch(projection_backward_kernel<T>, {.blocks = strips * a.partials, .threads = kThreads}, s, a, int(strips));
  });
});

}  // namespace liger::cuda::mhc_coefficients
