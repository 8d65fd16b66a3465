#include <algorithm>
#include <utility>
#include "liger/core/cuda/sort_by_key.cuh"
#include "liger/core/cuda/stream.cuh"
#include "liger/ops/embedding/embedding.h"

namespace liger::cuda::embedding {
namespace {

/// y_i = w[id_i]. blockDim.x threads have the row of a token, and up to four packs each in flight. The limit is memory.
template <class T>
__global__ void __launch_bounds__(256) forward_kernel(EmbeddingForward a) {
  await_previous();
  const int64_t i = int64_t(blockIdx.x) * blockDim.y + threadIdx.y;
  if (i >= a.tokens) return;
  const int64_t id = a.ids[i];
  if (id < 0 || id >= a.classes) fail_index("id", id, a.classes);
  const Row<T> w(a.w, id, a.cols, a.cols), y(a.y, i, a.cols, a.cols);
  for_each_pack<4>(w, 0, w.packs(), T(0), [&](int k, const auto& pack) {
    float f[Row<T>::kWidth];
    pack.to_float(f);
    y.store(k, f, w);
  });
}

inline constexpr int kAtOnce = 8;  // rows that a thread has in flight

/// sum += the packs k of `n` rows, in their order: row(i) is the i-th.
template <class T, class F>
__device__ void add_rows(float* sum, int k, const Row<T>& like, int n, F row) {
  constexpr int kWidth = Row<T>::kWidth;
  for (int i = 0; i < n; i += kAtOnce) {
    typename Row<T>::Pack packs[kAtOnce] = {};
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u)
      if (i + u < n) packs[u] = row(i + u).load(k, T(0), like);
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      float f[kWidth];
      packs[u].to_float(f);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) sum[j] += f[j];
    }
  }
}

/// The tokens in the order of their ids, those of one id one after another; ids without a row come last, as `classes`.
struct Sorted {
  int *ids, *order;
  float* part;  // [tokens / chunk, cols]: the sums of chunks of `order` that belong to one row
  int chunk;

  /// Whether chunk i is a whole one, and all of it belongs to one row.
  __device__ bool of_one(const EmbeddingBackward& a, int i) const {
    const int64_t begin = int64_t(i) * chunk;
    return begin + chunk <= a.tokens && ids[begin] == ids[begin + chunk - 1] && ids[begin] != a.classes;
  }
  template <class T>
  __device__ Row<T> token(const EmbeddingBackward& a, int i) const {
    return Row<T>(a.dy, order[i], a.cols, a.cols);
  }
};

/// The key by which tokens are sorted.
struct TokenKey {
  EmbeddingBackward a;
  __device__ int operator()(int i) const { return a.counts(a.ids[i]) ? int(a.ids[i]) : int(a.classes); }
};

/// For each row, and for the ids without one, whether a token has its id. A thread has a token.
__global__ void __launch_bounds__(256) present_kernel(TokenKey key, unsigned char* present) {
  await_previous();
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < key.a.tokens) present[key(int(i))] = 1;
}

constexpr int kAsked = 4;  // rows

/// Zeros in the rows of no token, of kAsked that a thread asks for at once. Beside those of the others, in one kernel,
/// they came at three quarters of the speed. beside: the kernel before, behind present_kernel, is one block that sorts,
/// and need not be done before this one is.
template <class T>
__global__ void __launch_bounds__(256) absent_kernel(EmbeddingBackward a, const unsigned char* present, bool beside) {
  if (!beside) await_previous();
  const int64_t first = (int64_t(blockIdx.x) * blockDim.y + threadIdx.y) * kAsked;
  // Read past L1, which may still hold the bytes from before present_kernel wrote them.
  const unsigned known = first < a.classes ? __ldcg(reinterpret_cast<const unsigned*>(present + first)) : ~0u;
  for (int i = 0; i < kAsked; ++i) {
    if (first + i >= a.classes || (known >> 8 * i & 0xff)) continue;
    const Row<T> dw(a.dw, first + i, a.cols, a.cols);
    constexpr float zeros[Row<T>::kWidth] = {};
    for (int k = threadIdx.x; k < dw.packs(); k += blockDim.x) dw.store(k, zeros, dw);
  }
  if (beside && blockIdx.x + 1 == gridDim.x) await_previous();
}

/// A chunk and 32 packs of a row: one warp's, so that the few chunks of one id are all multiprocessors' work.
struct Slice {
  int chunk, k;  // k: this lane's pack

  __device__ explicit Slice(int slices) {
    const unsigned thread = threadIdx.y * blockDim.x + threadIdx.x,
                   i = blockIdx.x * (blockDim.x * blockDim.y / 32) + thread / 32;
    chunk = int(i / slices), k = int(i % slices * 32 + thread % 32);
  }
};

/// The sums of the chunks that belong to one row. A warp has a Slice of a chunk: 32 packs of its rows, one a lane, with
/// kAtOnce rows in flight. The limit is memory: rows of dy lie anywhere, and are read once.
template <class T>
__global__ void __launch_bounds__(256) chunks_kernel(EmbeddingBackward a, Sorted s, int slices) {
  await_previous();
  const Slice at(slices);
  const Row<T> like(a.dw, 0, a.cols, a.cols);
  if (!s.of_one(a, at.chunk) || at.k >= like.packs()) return;
  float sum[Row<T>::kWidth] = {};
  add_rows(sum, at.k, like, s.chunk, [&](int i) { return s.token<T>(a, at.chunk * s.chunk + i); });
  for (int j = 0; j < Row<T>::kWidth; ++j)
    if (const int c = like.column(at.k) + j; c >= 0 && c < like.n) s.part[at.chunk * a.cols + c] = sum[j];
}

/// Behind the last that is `id` of `ids`, which are sorted and of which the first is; all lanes of a warp look for it.
__device__ int end_of(const int* ids, int n, int id) {
  if (n == 1 || ids[1] != id) return 1;  // most
  int known = 1;
  while (known < n) {
    const int step = ceil_div(n - known, 32), at = known + (int(threadIdx.x) % 32 + 1) * step - 1;
    const int steps = __popc(__ballot_sync(~0u, at < n && ids[at] == id));
    known += steps * step;
    if (step == 1) break;
    n = min(n, known + step - 1);
  }
  return known;
}

/// The row of an id with chunks that are all its own, by the warps of the first of them: from the tokens before it,
/// such chunks, and the tokens after them.
template <class T>
__device__ void long_row(const EmbeddingBackward& a, const Sorted& s, const Slice& at) {
  if (!s.of_one(a, at.chunk)) return;
  const int first = at.chunk * s.chunk, id = s.ids[first];
  if (at.chunk > 0 && s.ids[first - s.chunk] == id) return;  // the warps of an earlier chunk do it
  const int end = first + end_of(s.ids + first, int(a.tokens) - first, id), last = end / s.chunk;
  int begin = first;
  for (int same = 32; same == 32 && begin > 0;) {
    const int i = begin - 1 - int(threadIdx.x) % 32;
    same = __popc(__ballot_sync(~0u, i >= 0 && s.ids[i] == id));
    begin -= same;
  }
  const Row<T> dw(a.dw, id, a.cols, a.cols);
  if (at.k >= dw.packs()) return;
  float sum[Row<T>::kWidth] = {};
  add_rows(sum, at.k, dw, first - begin, [&](int i) { return s.token<T>(a, begin + i); });
#pragma unroll 8
  for (int p = at.chunk; p < last; ++p)
#pragma unroll
    for (int j = 0; j < Row<T>::kWidth; ++j)
      if (const int c = dw.column(at.k) + j; c >= 0 && c < dw.n) sum[j] += s.part[p * a.cols + c];
  add_rows(sum, at.k, dw, end - last * s.chunk, [&](int i) { return s.token<T>(a, last * s.chunk + i); });
  dw.store(at.k, sum, dw);
}

/// dw of the ids that have tokens. The first blocks make rows of ids with whole chunks, which take longest, from the
/// sums of those (long_row); behind them blockDim.x threads have a token, and make the row of its id from dy where it
/// is the id's first. The limit is memory: dy is read once, and a row of dw written once.
template <class T>
__global__ void __launch_bounds__(256, 4) rows_kernel(EmbeddingBackward a, Sorted s, int slices, unsigned long_blocks) {
  await_previous();
  if (blockIdx.x < long_blocks) return long_row<T>(a, s, Slice(slices));
  const int64_t i = int64_t(blockIdx.x - long_blocks) * blockDim.y + threadIdx.y;
  if (i >= a.tokens) return;
  const int id = s.ids[i], its_token = s.order[i];  // which is asked for before it is known whether the row begins here
  if (id == a.classes || (i > 0 && s.ids[i - 1] == id)) return;
  const int begin = int(i), n = end_of(s.ids + i, int(a.tokens - i), id);
  if (ceil_div(begin, s.chunk) < (begin + n) / s.chunk) return;
  const Row<T> dw(a.dw, id, a.cols, a.cols);
  if (n == 1) {  // most
    const Row<T> dy(a.dy, its_token, a.cols, a.cols);
    for_each_load<2>(
        0, dw.packs(), [&](int k) { return dy.load(k, T(0), dw); },
        [&](int k, const auto& pack) {
          const typename Row<T>::Pack packs[] = {pack};
          dw.template store<1>(k, packs, dw);
        });
    return;
  }
  for (int k = threadIdx.x; k < dw.packs(); k += blockDim.x) {
    float sum[Row<T>::kWidth] = {};
    add_rows(sum, k, dw, n, [&](int i) { return s.token<T>(a, begin + i); });
    dw.store(k, sum, dw);
  }
}

/// 256 threads, so many on a row that each has `packs` of its packs.
template <class T>
Grid grid(int64_t rows, int64_t cols, int packs) {
  unsigned x = 32;
  while (x < 256 && x * packs * Row<T>::kWidth < cols) x *= 2;
  const dim3 threads(x, 256 / x);
  return {.blocks = ceil_div(rows, threads.y), .threads = threads};
}

}  // namespace

LIGER_REGISTER(embedding_forward, [](const EmbeddingForward& a, Stream s) {
  dispatch(a.dtype, [&]<class T>() { launch(forward_kernel<T>, grid<T>(a.tokens, a.cols, 4), s, a); });
});
LIGER_REGISTER(embedding_backward, [](const EmbeddingBackward& a, Stream s) {
  int64_t chunk = 16;  // about √tokens: an id that all tokens share then has two short sums behind each other
  while (chunk * chunk * 4 < a.tokens) chunk *= 2;
  const KeySort<16> sort(int(a.tokens), a.classes, s);
  int64_t used = 0;
  const auto take = [&](int64_t bytes) {
    const int64_t at = std::exchange(used, used + round_up(bytes, 256));
    return a.scratch ? static_cast<char*>(a.scratch) + at : nullptr;
  };
  const Sorted sorted{.ids = reinterpret_cast<int*>(take(a.tokens * 4)),
                      .order = reinterpret_cast<int*>(take(a.tokens * 4)),
                      .part = reinterpret_cast<float*>(take(a.tokens / chunk * a.cols * 4)),
                      .chunk = int(chunk)};
  auto* present = reinterpret_cast<unsigned char*>(take(round_up(a.classes + 1, kAsked)));
  void* scratch = take(sort.scratch_bytes());
  if (!a.scratch) return void(*a.scratch_bytes = used);
  dispatch(a.dtype, [&]<class T>() {
    clear(present, round_up(a.classes, kAsked), s);
    const TokenKey key{a};
    launch(present_kernel, {.blocks = ceil_div(a.tokens, 256), .threads = 256}, s, key, present);
    sort(key, sorted.ids, sorted.order, scratch);
    launch(absent_kernel<T>, grid<T>(ceil_div(a.classes, kAsked), a.cols, 2), s, a,
           static_cast<const unsigned char*>(present), sort.by_block());
    const int slices = int(ceil_div(Row<T>::packs(a.cols, false), 32));
    const int64_t long_blocks = ceil_div(a.tokens / chunk * slices, 8);
    launch(chunks_kernel<T>, {.blocks = long_blocks, .threads = {32, 8}}, s, a, sorted, slices);
    Grid rows = grid<T>(a.tokens, a.cols, 2);
    rows.blocks += long_blocks;
    launch(rows_kernel<T>, rows, s, a, sorted, slices, unsigned(long_blocks));
  });
});

}  // namespace liger::cuda::embedding
