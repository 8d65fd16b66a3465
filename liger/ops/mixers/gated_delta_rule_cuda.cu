#include <algorithm>
#include "liger/core/cuda/dispatch.h"
#include "liger/core/cuda/reduce.cuh"
#include "liger/core/cuda/split.cuh"
#include "liger/ops/mixers/gated_delta_rule.h"

// Forward is two kernels, backward four:
//   prepare          for each chunk, all at once: U, P and the decays
//   chain            along the chunks of a document, one warp for each 16 columns of v: O; in backward D and the states
//   reverse chain    back along them: R, dV and the gradients of the states
//   gradients        for each chunk, all at once: dQ, dK, dg, dβ
// A warp of a chain holds the state's transpose, 16 rows of K numbers, in registers: with rows of v every left operand is
// made from sums that the warp has, and only k, q, U and P come through shared memory.
// Raw numbers of q, k, v and dO enter products with as many terms as hold them exactly, all others with two, or three
// for float inputs: bfloat16 alone would be off by a multiple of what the float computation is, where keys are alike.

namespace liger::cuda::gated_delta_rule {
namespace {

using namespace split;

/// Sizes and terms of one kind of inputs.
template <class T, int kWidth>
struct Kind {
  using Number = T;
  static constexpr bool kFloat = std::is_same_v<T, float>;
  static constexpr int K = kWidth;                                               // columns of q and k, padded
  static constexpr int C = kFloat ? 32 : 64;                                     // tokens of a chunk
  static constexpr int kRaw = kFloat ? 3 : std::is_same_v<T, bfloat16> ? 1 : 2;  // terms of raw numbers
  static constexpr int kMade = kFloat ? 3 : 2;                                   // and of all others
};

/// Rows of 16-bit terms in global memory: q or k.
struct Operand {
  const bfloat16* numbers;
  int64_t row, token, head, plane;  // elements from one to the next
};

/// What all kernels take.
struct Plan {
  GatedDeltaRule a;
  Operand q, k;
  int group;         // heads of a key head
  int chunk;         // C
  int length;        // tokens of a row
  int64_t tokens;    // of all rows
  int chunks;        // the most that there may be
  int V;             // columns of v, padded
  int64_t* table;    // [chunks + 1]: where each chunk begins; null: every row is one document
  int* count;        // chunks in the table
  bfloat16* planes;  // room for q and k as terms; null: they are read as they are
  float* factors;    // [heads, 4, tokens]: rk eᴳ, β, rk e^(G_C − G) and s rq eᴳ; 1 / |q| and 1 / |k| are rq and rk
  float* kept;       // [heads, tokens]: e^(G_C), where a chunk begins
  bfloat16 *u, *p;   // [heads, terms, tokens, C]
  bfloat16 *d, *r;   // [heads, terms, tokens, V]
  bfloat16 *s, *ds;  // [slots, heads, terms, V, K]: transposed states before chunks, and gradients of those after them
  int row_slots;     // of states in a row of tokens
};

struct Chunk {
  int row, token;  // the first token, in its row
  int n;
  bool begins, ends;  // its document
  int document;

  __device__ int64_t at(const Plan& plan) const { return int64_t(row) * plan.length + token; }
  /// Where the state before it is kept. No two chunks that do not begin a document begin within C tokens of each other;
  /// those that begin one have a place of their own.
  __device__ int64_t slot(const Plan& plan) const {
    return begins ? plan.a.rows * plan.row_slots + document : int64_t(row) * plan.row_slots + token / plan.chunk;
  }
  /// Where the gradient of the state after it is kept.
  __device__ int64_t next_slot(const Plan& plan) const {
    return ends ? plan.a.rows * plan.row_slots + document : int64_t(row) * plan.row_slots + token / plan.chunk + 1;
  }
};

// A chunk in the table: its first token among all rows', whether it begins a document, and which.
constexpr int kBeginsBit = 31, kDocumentBit = 32;
constexpr unsigned kTokenMask = 0x7fffffff;

__device__ int count_of(const Plan& plan) { return plan.table ? *plan.count : plan.chunks; }

__device__ Chunk chunk_at(const Plan& plan, int c) {
  Chunk chunk;
  if (!plan.table) {
    chunk.row = unsigned(c) / unsigned(plan.row_slots);
    chunk.token = (c - chunk.row * plan.row_slots) * plan.chunk;
    chunk.n = min(plan.chunk, plan.length - chunk.token);
    chunk.begins = chunk.token == 0, chunk.ends = chunk.token + chunk.n == plan.length, chunk.document = chunk.row;
    return chunk;
  }
  const int64_t mine = plan.table[c], next = plan.table[c + 1];
  const unsigned first = unsigned(mine) & kTokenMask;
  chunk.row = first / unsigned(plan.length), chunk.token = first - chunk.row * plan.length;
  chunk.n = (unsigned(next) & kTokenMask) - first;
  chunk.begins = unsigned(mine) >> kBeginsBit, chunk.ends = unsigned(next) >> kBeginsBit;
  chunk.document = int(mine >> kDocumentBit);
  return chunk;
}

constexpr int kTableThreads = 1024;

/// The table of chunks: one block counts along all tokens, which are few bytes.
__global__ void __launch_bounds__(kTableThreads) table_kernel(Plan plan) {
  await_previous();
  __shared__ int sums[kTableThreads / 32][2];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int64_t chunks = 0, documents = 0;
  for (int64_t first = 0; first < plan.tokens; first += kTableThreads) {
    const int64_t i = first + threadIdx.x, token = i % plan.a.tokens;
    bool chunk = false, document = false;
    if (i < plan.tokens) {
      const int64_t start = plan.a.starts[i];
      document = token == 0 || start < 0 || start == token || plan.a.starts[i - 1] < 0;
      chunk = document || (token - start) % plan.chunk == 0;
    }
    const unsigned of_chunks = __ballot_sync(~0u, chunk), of_documents = __ballot_sync(~0u, document),
                   before = (1u << lane) - 1;
    if (lane == 0) sums[warp][0] = __popc(of_chunks), sums[warp][1] = __popc(of_documents);
    __syncthreads();
    int64_t chunk_index = chunks + __popc(of_chunks & before),
            document_index = documents + __popc(of_documents & before);
    for (int w = 0; w < kTableThreads / 32; ++w) {
      if (w < warp) chunk_index += sums[w][0], document_index += sums[w][1];
      chunks += sums[w][0], documents += sums[w][1];
    }
    // A chunk that goes on is of the document that began last.
    if (chunk)
      plan.table[chunk_index] = i | int64_t(document) << kBeginsBit | (document_index - !document) << kDocumentBit;
    __syncthreads();
  }
  if (threadIdx.x == 0) plan.table[chunks] = plan.tokens | int64_t(1) << kBeginsBit, *plan.count = int(chunks);
}

/// q and k as terms, their rows padded with zeros: where they are not bfloat16 rows of K numbers already.
template <class Kd>
__global__ void __launch_bounds__(256) planes_kernel(Plan plan) {
  await_previous();
  using T = typename Kd::Number;
  const int64_t rows = plan.tokens * plan.a.key_heads, pairs = 2 * rows * (Kd::K / 2);
  for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < pairs; i += int64_t(gridDim.x) * blockDim.x) {
    const int64_t pair = i % (Kd::K / 2), row = i / (Kd::K / 2) % rows, head = row % plan.a.key_heads,
                  at = row / plan.a.key_heads;
    const bool of_k = i >= pairs / 2;
    const T* from = static_cast<const T*>(of_k ? plan.a.k : plan.a.q) +
                    at / plan.a.tokens * (of_k ? plan.a.k_row : plan.a.q_row) +
                    at % plan.a.tokens * (of_k ? plan.a.k_token : plan.a.q_token) + head * plan.a.K;
    const auto number = [&](int64_t c) { return c < plan.a.K ? float(from[c]) : 0.f; };
    unsigned terms[Kd::kRaw];
    split_pair(number(2 * pair), number(2 * pair + 1), terms);
    auto* to = reinterpret_cast<unsigned*>(plan.planes + (of_k ? Kd::kRaw * rows * Kd::K : 0));
    for (int t = 0; t < Kd::kRaw; ++t) to[t * rows * (Kd::K / 2) + row * (Kd::K / 2) + pair] = terms[t];
  }
}

/// Copies rows of 16-bit numbers into one plane of a tile, n of kRows, zeros below: by kThreads threads, which then
/// await them.
template <int kThreads, int kRows, int kCols, class Tile>
__device__ void copy_rows(const Tile& to, int term, const bfloat16* from, int step, int n = kRows) {
  constexpr int kPacks = kCols / 8;
#pragma unroll
  for (int first = 0; first < kRows * kPacks; first += kThreads) {
    const int i = first + int(threadIdx.x), row = i / kPacks, pack = i % kPacks;
    if (first + kThreads <= kRows * kPacks || i < kRows * kPacks)
      copy_async16<false>(to.at(row, 8 * pack, term), from + row * step + 8 * pack, row < n ? 16 : 0);
  }
}

/// The rows of q or k of a chunk.
template <int kThreads, int kRows, int kCols, class Tile>
__device__ void copy_operand(const Tile& to, const Operand& of, const Chunk& chunk, int head) {
  const bfloat16* from = of.numbers + chunk.row * of.row + chunk.token * of.token + head * of.head;
#pragma unroll
  for (int t = 0; t < Tile::kTerms; ++t)
    copy_rows<kThreads, kRows, kCols>(to, t, from + t * of.plane, int(of.token), chunk.n);
}

/// The rows of a chunk of what has a row of `width` for each token: U, P, D or R of a head, from column col on.
template <int kThreads, int kRows, int kCols, class Tile>
__device__ void copy_made(const Tile& to, const bfloat16* of, const Plan& plan, const Chunk& chunk, int head, int width,
                          int col) {
#pragma unroll
  for (int t = 0; t < Tile::kTerms; ++t)
    copy_rows<kThreads, kRows, kCols>(
        to, t, of + ((int64_t(head) * Tile::kTerms + t) * plan.tokens + chunk.at(plan)) * width + col, width, chunk.n);
}

/// kCols columns, from col on, of the rows of a chunk of v or dO as they are, zeros past the last one. The rows of the
/// copy are kStride apart.
template <int kThreads, int kRows, int kCols, int kStride, class T>
__device__ void copy_raw(T* to, const T* from, int step, int n, int col, int width) {
  constexpr int kPack = 16 / sizeof(T), kPacks = kCols / kPack;
  if (width % kPack == 0) {
#pragma unroll
    for (int first = 0; first < kRows * kPacks; first += kThreads) {
      const int i = first + int(threadIdx.x), row = i / kPacks, c = i % kPacks * kPack;
      if (first + kThreads <= kRows * kPacks || i < kRows * kPacks)
        copy_async16<false>(to + row * kStride + c, from + row * step + col + c, row < n && col + c < width ? 16 : 0);
    }
  } else {
    for (int i = threadIdx.x; i < kRows * kCols; i += kThreads) {
      const int row = i / kCols, c = i % kCols;
      to[row * kStride + c] = row < n && col + c < width ? from[row * step + col + c] : T(0.f);
    }
  }
}

/// The transpose of 16 columns of raw rows: a panel whose columns are tokens.
template <int kCols, class T, int C>
__device__ void read_transposed(Panel<C>& panel, T* tile, int col) {
  if constexpr (sizeof(T) == 2) {
    const Tile<1, C, kCols> words{reinterpret_cast<bfloat16*>(tile)};
#pragma unroll
    for (int e = 0; e < C / 8; e += 2) {
      unsigned pairs[4];
      load_blocks<true, 2, 1>(pairs, words, 0, 8 * e, col);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 of = to_floats<T>(pairs[i]);
        panel.of[e + i / 2][i % 2 * 2] = of.x, panel.of[e + i / 2][i % 2 * 2 + 1] = of.y;
      }
    }
  } else {
    panel.each([&](float& v, int row, int token) { v = tile[token * (kCols + 8) + col + row]; });
  }
}

/// Writes a panel whose columns are tokens to rows of 16 numbers: `to` is the first token's, n tokens are there, and
/// `cols` numbers of a row.
template <class T, int C>
__device__ void write_transposed(Panel<C>& panel, T* to, int step, int n, int cols) {
  if constexpr (sizeof(T) == 2) {
    const int lane = threadIdx.x % 32, token = lane / 4, col = lane % 4 * 2;
    const bool whole = cols >= 16 && step % 2 == 0;
#pragma unroll
    for (int e = 0; e < C / 8; ++e)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const unsigned word = transposed(to_word<T>(panel.of[e][2 * half], panel.of[e][2 * half + 1]));
        T* at = to + (8 * e + token) * step + 8 * half + col;
        if (whole) {
          if (8 * e + token < n) *reinterpret_cast<unsigned*>(at) = word;
        } else if (8 * e + token < n) {
          const float2 pair = to_floats<T>(word);
          if (8 * half + col < cols) at[0] = T(pair.x);
          if (8 * half + col + 1 < cols) at[1] = T(pair.y);
        }
      }
  } else {
    panel.each([&](float& v, int row, int token) {
      if (token < n && row < cols) to[token * step + row] = v;
    });
  }
}

/// The same as terms, for D and R.
template <int kTerms, int C>
__device__ void write_terms(const Panel<C>& panel, bfloat16* to, int step, int64_t plane, int n) {
  const int lane = threadIdx.x % 32, token = lane / 4, col = lane % 4 * 2;
#pragma unroll
  for (int e = 0; e < C / 8; ++e)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      unsigned terms[kTerms];
      split_pair(panel.of[e][2 * half], panel.of[e][2 * half + 1], terms);
#pragma unroll
      for (int t = 0; t < kTerms; ++t) {
        const unsigned word = transposed(terms[t]);
        if (8 * e + token < n)
          *reinterpret_cast<unsigned*>(to + t * plane + (8 * e + token) * step + 8 * half + col) = word;
      }
    }
}

/// A panel of the transposed state as terms, rows of K.
template <int kTerms, int K>
__device__ void write_state(const Panel<K>& panel, bfloat16* to, int64_t plane) {
  const int lane = threadIdx.x % 32, col = lane % 4 * 2;
#pragma unroll
  for (int e = 0; e < K / 8; ++e)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      unsigned terms[kTerms];
      split_pair(panel.of[e][2 * half], panel.of[e][2 * half + 1], terms);
#pragma unroll
      for (int t = 0; t < kTerms; ++t)
        *reinterpret_cast<unsigned*>(to + t * plane + (lane / 4 + 8 * half) * K + 8 * e + col) = terms[t];
    }
}

/// A number in two floats: the sum of a few, of which the second has what rounding took from the first.
struct Sum2 {
  float high, low;
  __device__ void add(float v) {
    const float sum = high + v, back = sum - high;
    low += (high - (sum - back)) + (v - back);
    high = sum;
  }
  __device__ float less(const Sum2& other) const { return (high - other.high) + (low - other.low); }
};

/// The decays of one head's chunk. Sums of g are of one chunk, for decays are their differences, and g is bounded, for no
/// difference of infinities is a number.
template <int C>
struct Decays {
  float g[C], beta[C];
  float from_start[C], to_end[C];  // eᴳ and e^(G_C − G)
  Sum2 sum[C];

  /// By all threads of the block.
  __device__ void load(const Plan& plan, const Chunk& chunk, int head) {
    __syncthreads();
    if (const int i = threadIdx.x; i < C) {
      const int64_t at = (chunk.at(plan) + i) * plan.a.heads + head;
      g[i] = i < chunk.n ? fmaxf(plan.a.g[at], -1000.f) : 0.f;
      beta[i] = i < chunk.n ? plan.a.beta[at] : 0.f;
    }
    __syncthreads();
    if (const int i = threadIdx.x; i < C) {
      Sum2 mine{0, 0};
      for (int j = 0; j <= i; ++j) mine.add(g[j]);
      sum[i] = mine;
      from_start[i] = expf(mine.high + mine.low);
    }
    __syncthreads();
    if (const int i = threadIdx.x; i < C) to_end[i] = expf(sum[C - 1].less(sum[i]));
    __syncthreads();
  }
  /// e^(G_i − G_j) for i >= j, else 0.
  __device__ float between(int i, int j) const { return i >= j ? expf(sum[i].less(sum[j])) : 0.f; }
};

/// q and k of a chunk in shared memory.
template <class Kd>
struct Keys {
  static constexpr int C = Kd::C;
  using Rows = Tile<Kd::kRaw, C, Kd::K>;
  static constexpr int kBytes = 2 * Rows::kBytes + 2 * C * 4;
  Rows q, k;
  float *norm_q, *norm_k;  // what the norms multiply rows by

  __device__ explicit Keys(char*& shared)
      : q(Rows::at_front(shared)),
        k(Rows::at_front(shared)),
        norm_q(reinterpret_cast<float*>(shared)),
        norm_k(norm_q + C) {
    shared += 2 * C * 4;
  }

  /// By all threads of the block.
  template <int kThreads>
  __device__ void load(const Plan& plan, const Chunk& chunk, int key_head) const {
    __syncthreads();
    copy_operand<kThreads, C, Kd::K>(q, plan.q, chunk, key_head);
    copy_operand<kThreads, C, Kd::K>(k, plan.k, chunk, key_head);
    copies_done();
    __syncthreads();
    // The threads of a row, next to each other, take turns at its pairs.
    constexpr int kOfRow = 4;
    for (int i = threadIdx.x / kOfRow; i < 2 * C; i += kThreads / kOfRow) {
      const auto& tile = i < C ? q : k;
      float squares = 0;
      for (int pair = threadIdx.x % kOfRow; pair < Kd::K / 2; pair += kOfRow) {
        const float2 v = pair_at(tile, i % C, 2 * pair);
        squares += v.x * v.x + v.y * v.y;
      }
      for (int step = 1; step < kOfRow; step *= 2) squares += __shfl_xor_sync(~0u, squares, step);
      if (threadIdx.x % kOfRow == 0) norm_q[i] = plan.a.eps < 0 ? 1.f : 1 / sqrtf(squares + plan.a.eps);
    }
    __syncthreads();
  }

  /// Two neighbours of a row, raw.
  static __device__ float2 pair_at(const Rows& tile, int row, int col) {
    float2 sum{0, 0};
#pragma unroll
    for (int t = Kd::kRaw - 1; t >= 0; --t) {
      const float2 v = to_floats<bfloat16>(*reinterpret_cast<const unsigned*>(tile.at(row, col, t)));
      sum.x += v.x, sum.y += v.y;
    }
    return sum;
  }

  /// K Kᵀ and Q Kᵀ of the raw rows: rows `row` to row + 15, in columns from col on, for this warp; nothing is made of
  /// what lies above the diagonal.
  template <int kCols>
  __device__ void products(int row, int col, Panel<kCols>& kk, Panel<kCols>& qk) const {
    kk.clear(), qk.clear();
    if (col > row + 15) return;
#pragma unroll
    for (int c = 0; c < Kd::K; c += 16) {
      Left<Kd::kRaw> of_k, of_q;
      of_k.template load<false>(k, row, c);
      of_q.template load<false>(q, row, c);
      multiply<true, kCols / 8>(kk.of, of_k, k, c, col);
      multiply<true, kCols / 8>(qk.of, of_q, k, c, col);
    }
  }
};

// ---- prepare ----

template <class Kd>
struct Prepare {
  static constexpr int C = Kd::C, kThreads = 2 * C;
  static constexpr int kRow = C + 4;  // floats of a row of A, which is read in runs of four
  static constexpr int kMatrices = 2 * C * kRow * 4;
  static constexpr int kBytes = 2 * C * 4 + (kMatrices > Keys<Kd>::kBytes ? kMatrices : Keys<Kd>::kBytes);
};

/// U, P and the factors of the chunks of a key head: one block for each chunk, a warp for 16 of its tokens. U is made by
/// substitution in float, one column a thread, from
///   U_ij = A_ij − Σ_(j < m < i) A_im β_m U_mj
/// The limit is its latency.
template <class Kd>
__global__ void __launch_bounds__(Prepare<Kd>::kThreads) prepare_kernel(Plan plan) {
  await_previous();
  using P = Prepare<Kd>;
  constexpr int C = Kd::C;
  __shared__ Decays<C> decays;
  char* shared = shared_memory<char>();
  float *norm_q = reinterpret_cast<float*>(shared), *norm_k = norm_q + C;
  shared += 2 * C * 4;
  auto* a = reinterpret_cast<float (*)[P::kRow]>(shared);  // A, and then A β, where q and k were
  auto* scaled = a + C;
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16;
  const int count = count_of(plan), key_heads = int(plan.a.key_heads), key_head = blockIdx.x % key_heads,
            step = gridDim.x / key_heads;
  for (int c = blockIdx.x / key_heads; c < count; c += step) {
    const Chunk chunk = chunk_at(plan, c);
    Panel<C> kk, qk;
    {
      char* at = shared;
      const Keys<Kd> keys(at);
      keys.template load<P::kThreads>(plan, chunk, key_head);
      keys.products(row, 0, kk, qk);
      if (threadIdx.x < 2 * C) norm_q[threadIdx.x] = keys.norm_q[threadIdx.x];
    }
    const int64_t first = chunk.at(plan);
    for (int h = 0; h < plan.group; ++h) {
      const int head = key_head * plan.group + h;
      decays.load(plan, chunk, head);
      if (const int i = threadIdx.x; i < chunk.n) {
        float* to = plan.factors + 4 * head * plan.tokens + first + i;
        to[0] = norm_k[i] * decays.from_start[i], to[plan.tokens] = decays.beta[i];
        to[2 * plan.tokens] = norm_k[i] * decays.to_end[i];
        to[3 * plan.tokens] = plan.a.scale * norm_q[i] * decays.from_start[i];
        if (i == 0) plan.kept[head * plan.tokens + first] = decays.from_start[C - 1];
      }
      const auto term_at = [&](bfloat16* of, int t, int i) {
        return of + ((int64_t(head) * Kd::kMade + t) * plan.tokens + first + i) * C;
      };
#pragma unroll
      for (int e = 0; e < C / 8; ++e)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int i = row + lane / 4 + 8 * half, j = 8 * e + lane % 4 * 2;
          float of_p[2] = {}, of_a[2] = {};
          if (8 * e <= row + 15)
#pragma unroll
            for (int right = 0; right < 2; ++right) {
              const float decay = decays.between(i, j + right) * norm_k[j + right];
              of_p[right] = plan.a.scale * norm_q[i] * qk.of[e][2 * half + right] * decay;
              of_a[right] = j + right < i ? norm_k[i] * kk.of[e][2 * half + right] * decay : 0.f;
            }
          *reinterpret_cast<float2*>(&a[i][j]) = {of_a[0], of_a[1]};
          *reinterpret_cast<float2*>(&scaled[i][j]) = {of_a[0] * decays.beta[j], of_a[1] * decays.beta[j + 1]};
          unsigned terms[Kd::kMade];
          split_pair(of_p[0], of_p[1], terms);
          if (i < chunk.n)
#pragma unroll
            for (int t = 0; t < Kd::kMade; ++t) *reinterpret_cast<unsigned*>(term_at(plan.p, t, i) + j) = terms[t];
        }
      __syncthreads();
      if (const int j = threadIdx.x; j < C) {
        float u[C];
#pragma unroll
        for (int i = 0; i < C; ++i) {
          float sums[4] = {a[i][j], 0, 0, 0};
#pragma unroll
          for (int m = 0; m < i; m += 4) {
            const float4 of = *reinterpret_cast<const float4*>(&scaled[i][m]);  // 0 from column i on
            sums[0] -= of.x * u[m];
            if (m + 1 < i) sums[1] -= of.y * u[m + 1];
            if (m + 2 < i) sums[2] -= of.z * u[m + 2];
            if (m + 3 < i) sums[3] -= of.w * u[m + 3];
          }
          u[i] = (sums[0] + sums[1]) + (sums[2] + sums[3]);
        }
#pragma unroll
        for (int i = 0; i < C; ++i) {
          if (i >= chunk.n) continue;
          float rest = u[i];
#pragma unroll
          for (int t = 0; t < Kd::kMade; ++t) {
            const bfloat16 term(rest);
            *(term_at(plan.u, t, i) + j) = term;
            rest -= float(term);
          }
        }
      }
    }
    __syncthreads();
  }
}

// ---- chains ----

constexpr int kChainWarps = 4, kChainThreads = 32 * kChainWarps, kChainCols = 16 * kChainWarps;

/// What a block of a chain holds in shared memory for one chunk; with kAll also q and p.
template <class Kd, bool kAll>
struct Stage {
  using T = typename Kd::Number;
  static constexpr int C = Kd::C, kStride = kChainCols + 8;
  using Keys = Tile<Kd::kRaw, C, Kd::K>;
  using Matrix = Tile<Kd::kMade, C, C>;
  static constexpr int kBytes =
      (kAll ? 2 : 1) * (Keys::kBytes + Matrix::kBytes) + C * kStride * int(sizeof(T)) + 4 * C * 4;
  Keys k, q;
  Matrix u, p;
  float* factors;
  T* rows;  // of v or dO

  __device__ explicit Stage(char* shared) : k(Keys::at_front(shared)), q(k), u(Matrix::at_front(shared)), p(u) {
    if (kAll) q = Keys::at_front(shared), p = Matrix::at_front(shared);
    factors = reinterpret_cast<float*>(shared), rows = reinterpret_cast<T*>(factors + 4 * C);
  }

  __device__ void load(const Plan& plan, const Chunk& chunk, int head, const T* of, int step, int col) const {
    const int key_head = head / plan.group;
    copy_operand<kChainThreads, C, Kd::K>(k, plan.k, chunk, key_head);
    copy_made<kChainThreads, C, C>(u, plan.u, plan, chunk, head, C, 0);
    if (kAll) {
      copy_operand<kChainThreads, C, Kd::K>(q, plan.q, chunk, key_head);
      copy_made<kChainThreads, C, C>(p, plan.p, plan, chunk, head, C, 0);
    }
    const float* from = plan.factors + 4 * head * plan.tokens + chunk.at(plan);
#pragma unroll
    for (int i = threadIdx.x; i < 4 * C; i += kChainThreads)
      copy_async4(factors + i, from + i / C * plan.tokens + i % C, i % C < chunk.n);
    copy_raw<kChainThreads, C, kChainCols, kStride>(rows, of, step, chunk.n, col, int(plan.a.V));
    close_copies();
  }

  /// Multiplies each column of a panel, which is a token, by factor i.
  template <int kCols>
  __device__ void scale(Panel<kCols>& panel, int i) const {
    const float* of = factors + i * Kd::C + threadIdx.x % 4 * 2;
#pragma unroll
    for (int e = 0; e < kCols / 8; ++e) {
      const float2 by = *reinterpret_cast<const float2*>(of + 8 * e);
      panel.of[e][0] *= by.x, panel.of[e][1] *= by.y, panel.of[e][2] *= by.x, panel.of[e][3] *= by.y;
    }
  }
};

// The factors of a token: plan.factors.
constexpr int kToX = 0, kBeta = 1, kToEnd = 2, kToOut = 3;

/// The chunks of this block: whole documents, of as many chunks as another block's, more or less.
__device__ int first_chunk(const Plan& plan, int slot, int slots, int count) {
  int c = int(int64_t(slot) * count / slots);
  if (!plan.table) return round_up(c, plan.row_slots);
  for (;; c += 32) {
    const int mine = c + threadIdx.x % 32;
    const unsigned begins = __ballot_sync(~0u, mine >= count || unsigned(plan.table[mine]) >> kBeginsBit);
    if (begins) return min(count, c + __popc((begins & -begins) - 1));
  }
}

/// sums[v, n] += Σ_k left[v, k] · tile, for k and n of a chunk: of a tile that is 0 above (kUpper: below) its diagonal.
template <bool kAlongK, int kA, int C, class Tile>
__device__ void multiply_triangle(Panel<C>& sums, const Left<kA> (&left)[C / 16], const Tile& tile) {
  // Rows of the tile are later tokens: with kAlongK these are the columns n, else the k.
#pragma unroll
  for (int k = 0; k < C / 16; ++k)
    multiply<kAlongK, C / 8>(sums.of, left[k], tile, 16 * k, 0, kAlongK ? 2 * k : 0, kAlongK ? C / 8 : 2 * k + 2);
}

struct ChainArgs {
  Plan plan;
  int slots, stages;
  void* out;           // o, or in backward dv
  const void* dout;    // of the reverse chain
  float* last;         // the final states, or in backward the gradients of the first ones; null where not wanted
  const float* after;  // of the reverse chain: gradients of the final states; null: 0
};

/// Reads a panel of transposed states, rows v on, from [documents, heads, K, V] in float.
template <int K>
__device__ void read_state(Panel<K>& panel, const Plan& plan, const float* from, int64_t document, int64_t head,
                           int64_t v) {
  panel.clear();
  if (!from || document >= plan.a.documents) return;
  from += (document * plan.a.heads + head) * plan.a.K * plan.a.V;
  panel.each([&](float& x, int row, int col) {
    if (v + row < plan.a.V && col < plan.a.K) x = from[col * plan.a.V + v + row];
  });
}
template <int K>
__device__ void write_final(Panel<K>& panel, const Plan& plan, float* to, int64_t document, int64_t head, int64_t v) {
  if (!to || document >= plan.a.documents) return;
  to += (document * plan.a.heads + head) * plan.a.K * plan.a.V;
  panel.each([&](float& x, int row, int col) {
    if (v + row < plan.a.V && col < plan.a.K) to[col * plan.a.V + v + row] = x;
  });
}

/// O, or with kBackward D and the states before chunks. A block has a head's chunks of some documents, one after the
/// other, and a warp 16 columns of v. The limit is the chain of products: X needs the state, D needs X, and the next
/// state D; O is made beside them.
template <class Kd, bool kBackward>
__global__ void __launch_bounds__(kChainThreads) chain_kernel(ChainArgs args) {
  await_previous();
  using T = typename Kd::Number;
  constexpr int C = Kd::C, K = Kd::K, kMade = Kd::kMade;
  using Staged = Stage<Kd, !kBackward>;
  const Plan& plan = args.plan;
  const int warp = threadIdx.x / 32, panels = plan.V / kChainCols, heads = int(plan.a.heads),
            block_col = blockIdx.x % panels * kChainCols, v = block_col + 16 * warp, head = blockIdx.x / panels % heads,
            slot = blockIdx.x / panels / heads, count = count_of(plan);
  int c = first_chunk(plan, slot, args.slots, count);
  const int end = first_chunk(plan, slot + 1, args.slots, count);
  if (c >= end) return;
  const auto stage_of = [&](int c) {
    return Staged(shared_memory<char>() + (args.stages == 2 ? c % 2 * Staged::kBytes : 0));
  };
  const auto load = [&](int c) {
    const Chunk chunk = chunk_at(plan, c);
    const T* of =
        static_cast<const T*>(plan.a.v) + chunk.row * plan.a.v_row + chunk.token * plan.a.v_token + head * plan.a.V;
    stage_of(c).load(plan, chunk, head, of, int(plan.a.v_token), block_col);
  };
  Panel<K> state;
  for (int loaded = c; c < end; ++c) {
    const Chunk chunk = chunk_at(plan, c);
    const float kept = plan.kept[head * plan.tokens + chunk.at(plan)];
    for (; loaded < min(c + args.stages, end); ++loaded) load(loaded);
    await_copies(loaded - c - 1);
    __syncthreads();
    const Staged stage = stage_of(c);
    if (chunk.begins) read_state(state, plan, plan.a.state, chunk.document, head, v);
    if constexpr (kBackward)
      if (!chunk.begins || plan.a.state)
        write_state<kMade>(state, plan.s + ((chunk.slot(plan) * plan.a.heads + head) * kMade * plan.V + v) * K,
                           plan.V * K);
    // Kᵀ and Qᵀ times the state.
    Panel<C> x, o;
    x.clear(), o.clear();
    if (!chunk.begins || plan.a.state) {
#pragma unroll
      for (int k = 0; k < K / 16; ++k) {
        const auto left = state.template left<kMade>(k);
        multiply<true, C / 8>(x.of, left, stage.k, 16 * k, 0);
        if constexpr (!kBackward) multiply<true, C / 8>(o.of, left, stage.q, 16 * k, 0);
      }
    }
    Panel<C> d;
    read_transposed<kChainCols>(d, stage.rows, 16 * warp);
    stage.scale(x, kToX);
#pragma unroll
    for (int e = 0; e < C / 8; ++e)
#pragma unroll
      for (int i = 0; i < 4; ++i) d.of[e][i] -= x.of[e][i];  // X
    // D = X − U (β X)
    x = d;
    stage.scale(x, kBeta);
    Left<kMade> left[C / 16];
#pragma unroll
    for (int k = 0; k < C / 16; ++k) left[k] = x.template left<kMade>(k);
    x.clear();
    multiply_triangle<true>(x, left, stage.u);
#pragma unroll
    for (int e = 0; e < C / 8; ++e)
#pragma unroll
      for (int i = 0; i < 4; ++i) d.of[e][i] -= x.of[e][i];
    if constexpr (kBackward) {
      write_terms<kMade>(d, plan.d + (head * kMade * plan.tokens + chunk.at(plan)) * plan.V + v, plan.V,
                         plan.tokens * plan.V, chunk.n);
    } else {
      // O = s eᴳ Q S + P (β D)
      stage.scale(d, kBeta);
#pragma unroll
      for (int k = 0; k < C / 16; ++k) left[k] = d.template left<kMade>(k);
      stage.scale(o, kToOut);
      multiply_triangle<true>(o, left, stage.p);
      T* to = static_cast<T*>(args.out) + (chunk.at(plan) * plan.a.heads + head) * plan.a.V + v;
      write_transposed(o, to, heads * int(plan.a.V), chunk.n, int(plan.a.V) - v);
    }
    // The state after the chunk. Its sum over tokens is made apart, for the tensor core does not round to the nearest.
    if (!chunk.ends || (!kBackward && args.last)) {
      if (kBackward) stage.scale(d, kBeta);
      stage.scale(d, kToEnd);
#pragma unroll
      for (int k = 0; k < C / 16; ++k) left[k] = d.template left<kMade>(k);
      constexpr int kEights = K % 64 ? 4 : 8;
#pragma unroll
      for (int e = 0; e < K / 8; e += kEights) {
        float sums[kEights][4] = {};
#pragma unroll
        for (int k = 0; k < C / 16; ++k) multiply<false, kEights>(sums, left[k], stage.k, 16 * k, 8 * e);
#pragma unroll
        for (int i = 0; i < 4 * kEights; ++i)
          state.of[e + i / 4][i % 4] = kept * state.of[e + i / 4][i % 4] + sums[i / 4][i % 4];
      }
    }
    if constexpr (!kBackward)
      if (chunk.ends) write_final(state, plan, args.last, chunk.document, head, v);
    __syncthreads();
  }
}

/// R, dV and the gradients of the states after chunks, from a document's last chunk to its first. As chain_kernel.
template <class Kd>
__global__ void __launch_bounds__(kChainThreads) reverse_chain_kernel(ChainArgs args) {
  await_previous();
  using T = typename Kd::Number;
  constexpr int C = Kd::C, K = Kd::K, kMade = Kd::kMade;
  using Staged = Stage<Kd, true>;
  const Plan& plan = args.plan;
  const int warp = threadIdx.x / 32, panels = plan.V / kChainCols, heads = int(plan.a.heads),
            block_col = blockIdx.x % panels * kChainCols, v = block_col + 16 * warp, head = blockIdx.x / panels % heads,
            slot = blockIdx.x / panels / heads, count = count_of(plan), step = heads * int(plan.a.V);
  const int begin = first_chunk(plan, slot, args.slots, count);
  int c = first_chunk(plan, slot + 1, args.slots, count) - 1;
  if (c < begin) return;
  const auto stage_of = [&](int c) {
    return Staged(shared_memory<char>() + (args.stages == 2 ? c % 2 * Staged::kBytes : 0));
  };
  const auto load = [&](int c) {
    const Chunk chunk = chunk_at(plan, c);
    stage_of(c).load(plan, chunk, head, static_cast<const T*>(args.dout) + chunk.at(plan) * step + head * plan.a.V,
                     step, block_col);
  };
  Panel<K> dstate;
  for (int loaded = c; c >= begin; --c) {
    const Chunk chunk = chunk_at(plan, c);
    const float kept = plan.kept[head * plan.tokens + chunk.at(plan)];
    for (; loaded > max(c - args.stages, begin - 1); --loaded) load(loaded);
    await_copies(c - loaded - 1);
    __syncthreads();
    const Staged stage = stage_of(c);
    if (chunk.ends) read_state(dstate, plan, args.after, chunk.document, head, v);
    const bool has_after = !chunk.ends || args.after;
    if (has_after)
      write_state<kMade>(dstate, plan.ds + ((chunk.next_slot(plan) * plan.a.heads + head) * kMade * plan.V + v) * K,
                         plan.V * K);
    // dN = Pᵀ dO + rk e^(G_C − G) K dS'; P has s.
    Panel<C> dout, r, x;
    read_transposed<kChainCols>(dout, stage.rows, 16 * warp);
    r.clear(), x.clear();
    if (has_after)
#pragma unroll
      for (int k = 0; k < K / 16; ++k) {
        const auto left = dstate.template left<kMade>(k);
        multiply<true, C / 8>(r.of, left, stage.k, 16 * k, 0);
      }
    stage.scale(r, kToEnd);
    {
      Left<Kd::kRaw> left[C / 16];
#pragma unroll
      for (int k = 0; k < C / 16; ++k) left[k] = dout.template left<Kd::kRaw>(k);
      multiply_triangle<false>(r, left, stage.p);
    }
    // R = dN − Uᵀ (β dN)
    Left<kMade> left[C / 16];
    x = r;
    stage.scale(x, kBeta);
#pragma unroll
    for (int k = 0; k < C / 16; ++k) left[k] = x.template left<kMade>(k);
    x.clear();
    multiply_triangle<false>(x, left, stage.u);
#pragma unroll
    for (int e = 0; e < C / 8; ++e)
#pragma unroll
      for (int i = 0; i < 4; ++i) r.of[e][i] -= x.of[e][i];
    write_terms<kMade>(r, plan.r + (head * kMade * plan.tokens + chunk.at(plan)) * plan.V + v, plan.V,
                       plan.tokens * plan.V, chunk.n);
    stage.scale(r, kBeta);
    write_transposed(r, static_cast<T*>(args.out) + chunk.at(plan) * step + head * plan.a.V + v, step, chunk.n,
                     int(plan.a.V) - v);
    // dS = e^(G_C) dS' + (s rq eᴳ Q)ᵀ dO − (rk eᴳ K)ᵀ (β R)
    if (!chunk.begins || args.last) {
      Left<kMade> of_dout[C / 16];
      stage.scale(dout, kToOut), stage.scale(r, kToX);
      for (auto& eight : r.of)
        for (float& of : eight) of = -of;
#pragma unroll
      for (int k = 0; k < C / 16; ++k) of_dout[k] = dout.template left<kMade>(k), left[k] = r.template left<kMade>(k);
      constexpr int kEights = 4;
#pragma unroll
      for (int e = 0; e < K / 8; e += kEights) {
        float sums[kEights][4] = {};
#pragma unroll
        for (int k = 0; k < C / 16; ++k) {
          multiply<false, kEights>(sums, of_dout[k], stage.q, 16 * k, 8 * e);
          multiply<false, kEights>(sums, left[k], stage.k, 16 * k, 8 * e);
        }
#pragma unroll
        for (int i = 0; i < 4 * kEights; ++i)
          dstate.of[e + i / 4][i % 4] = kept * dstate.of[e + i / 4][i % 4] + sums[i / 4][i % 4];
      }
    }
    if (chunk.begins) write_final(dstate, plan, args.last, chunk.document, head, v);
    __syncthreads();
  }
}

// ---- gradients ----

struct GradientArgs {
  Plan plan;
  const void* dout;
  void *dq, *dk;
  float *dg, *dbeta;
  bool after;  // whether final states have gradients
  int stages;
};

/// Columns of v of a chunk's dO, D and R, and with kStates of the states before and after it.
template <class Kd, bool kStates>
struct Slice {
  static constexpr int C = Kd::C, kWarps = C / 8, kThreads = 32 * kWarps, kCols = kStates ? 16 : 32;
  using Raw = Tile<Kd::kRaw, C, kCols>;
  using Made = Tile<Kd::kMade, C, kCols>;
  using State = Tile<Kd::kMade, kCols, Kd::K>;
  static constexpr int kBytes = Raw::kBytes + 2 * Made::kBytes + (kStates ? 2 * State::kBytes : 0);
  Raw dout;
  Made d, r;
  State s, ds;

  __device__ explicit Slice(char* shared)
      : dout(Raw::at_front(shared)), d(Made::at_front(shared)), r(Made::at_front(shared)) {
    if (kStates) s = State::at_front(shared), ds = State::at_front(shared);
  }

  __device__ void load(const GradientArgs& args, const Chunk& chunk, int head, int v, bool has_state,
                       bool has_after) const {
    using T = typename Kd::Number;
    const Plan& plan = args.plan;
    copy_made<kThreads, C, kCols>(d, plan.d, plan, chunk, head, plan.V, v);
    copy_made<kThreads, C, kCols>(r, plan.r, plan, chunk, head, plan.V, v);
    const int width = int(plan.a.heads * plan.a.V);
    const T* from = static_cast<const T*>(args.dout) + chunk.at(plan) * width + head * plan.a.V;
    if constexpr (std::is_same_v<T, bfloat16>) {
      copy_raw<kThreads, C, kCols, Raw::kStride>(dout.numbers, from, width, chunk.n, v, int(plan.a.V));
    } else {
      for (int i = threadIdx.x; i < C * kCols / 2; i += kThreads) {
        const int token = i / (kCols / 2), k = i % (kCols / 2) * 2;
        const auto number = [&](int k) {
          return token < chunk.n && v + k < plan.a.V ? float(from[token * width + v + k]) : 0.f;
        };
        unsigned terms[Kd::kRaw];
        split_pair(number(k), number(k + 1), terms);
        for (int t = 0; t < Kd::kRaw; ++t) *reinterpret_cast<unsigned*>(dout.at(token, k, t)) = terms[t];
      }
    }
    if constexpr (kStates) {
      const auto load_state = [&](const State& to, const bfloat16* of, int64_t slot) {
#pragma unroll
        for (int t = 0; t < Kd::kMade; ++t)
          copy_rows<kThreads, kCols, Kd::K>(
              to, t, of + (((slot * plan.a.heads + head) * Kd::kMade + t) * plan.V + v) * Kd::K, Kd::K);
      };
      if (has_state) load_state(s, plan.s, chunk.slot(plan));
      if (has_after) load_state(ds, plan.ds, chunk.next_slot(plan));
    }
    close_copies();
  }
};

template <class Kd>
struct Gradient {
  static constexpr int C = Kd::C, kWarps = C / 8, kThreads = 32 * kWarps;
  using Wide = Slice<Kd, false>;
  using Narrow = Slice<Kd, true>;
  using Matrix = Tile<Kd::kMade, C, C>;
  static constexpr int kRow = C + 1;
  static constexpr int kStage = Wide::kBytes > Narrow::kBytes ? Wide::kBytes : Narrow::kBytes;
  static constexpr int bytes(int stages) {
    return Keys<Kd>::kBytes + C * kRow * 4 + std::max(stages * kStage, Matrix::kBytes);
  }
};

/// Sums over all of a row, whose two halves two warps have: each lane's numbers of rows i and i + 8 of its panel.
template <int C>
struct RowSums {
  float of[2][C];  // one half each

  __device__ void put(float low, float high, int row, int half) {
    const int lane = threadIdx.x % 32;
    for (int step = 1; step < 4; step *= 2)
      low += __shfl_xor_sync(~0u, low, step), high += __shfl_xor_sync(~0u, high, step);
    if (lane % 4 == 0) of[half][row + lane / 4] = low, of[half][row + lane / 4 + 8] = high;
  }
  __device__ float total(int row) const { return of[0][row] + of[1][row]; }
};

/// dQ, dK, dg and dβ of the chunks of a key head: one block for each chunk, two warps for 16 of its tokens, each with
/// half of the columns; the heads of the key head one after the other. Slices of v come while the one before is used.
template <class Kd>
__global__ void __launch_bounds__(Gradient<Kd>::kThreads, 1) gradient_kernel(GradientArgs args) {
  await_previous();
  using G = Gradient<Kd>;
  using T = typename Kd::Number;
  constexpr int C = Kd::C, K = Kd::K, kMade = Kd::kMade, kRaw = Kd::kRaw;
  const Plan& plan = args.plan;
  __shared__ Decays<C> decays;
  __shared__ float dsum[C], dbeta[C], inner[G::kWarps], column_sums[C / 16][C];
  __shared__ RowSums<C> by_q, by_k, by_end, by_z;
  char* shared = shared_memory<char>();
  const Keys<Kd> keys(shared);
  auto* products = reinterpret_cast<float (*)[G::kRow]>(shared);  // q̂ k̂ᵀ, and above its diagonal (k̂ k̂ᵀ)ᵀ
  char* const region = shared + C * G::kRow * 4;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = warp / 2 * 16, half = warp % 2;
  const int col = half * (C / 2), k_col = half * (K / 2);
  const bool has_columns = col <= row + 15;  // of this warp's part of a matrix, below the diagonal
  const int count = count_of(plan), key_heads = int(plan.a.key_heads), key_head = blockIdx.x % key_heads,
            step = gridDim.x / key_heads;
  for (int c = blockIdx.x / key_heads; c < count; c += step) {
    const Chunk chunk = chunk_at(plan, c);
    const int64_t first = chunk.at(plan);
    const bool has_state = !chunk.begins || plan.a.state, has_after = !chunk.ends || args.after;
    const int wide = plan.V / G::Wide::kCols, phases = wide + (has_state || has_after ? plan.V / G::Narrow::kCols : 0);
    keys.template load<G::kThreads>(plan, chunk, key_head);
    {
      Panel<C / 2> kk, qk;
      keys.products(row, col, kk, qk);
      if (has_columns) {
        kk.each([&](float& v, int i, int j) {
          i += row, j += col;
          if (j < i) products[j][i] = v * keys.norm_k[i] * keys.norm_k[j];
        });
        qk.each([&](float& v, int i, int j) {
          i += row, j += col;
          if (j <= i) products[i][j] = v * keys.norm_q[i] * keys.norm_k[j];
        });
      }
    }
    Panel<K / 2> dq, dk;
    Panel<C / 2> w_sum, y_sum;
    dq.clear(), dk.clear(), w_sum.clear(), y_sum.clear();
    for (int h = 0; h < plan.group; ++h) {
      const int head = key_head * plan.group + h;
      decays.load(plan, chunk, head);
      const auto stage_of = [&](int phase) { return region + (args.stages == 2 ? phase % 2 * G::kStage : 0); };
      const auto load = [&](int phase) {
        if (phase < wide)
          typename G::Wide(stage_of(phase)).load(args, chunk, head, phase * G::Wide::kCols, false, false);
        else
          typename G::Narrow(stage_of(phase))
              .load(args, chunk, head, (phase - wide) * G::Narrow::kCols, has_state, has_after);
      };
      int loaded = 0;
      const auto each_slice = [&]<class S>(std::type_identity<S>, int begin, int end, auto use) {
        for (int phase = begin; phase < end; ++phase) {
          for (; loaded < min(phase + args.stages, phases); ++loaded) load(loaded);
          await_copies(loaded - phase - 1);
          __syncthreads();
          use(S(stage_of(phase)));
          __syncthreads();
        }
      };
      {
        Panel<C / 2> w, y;
        w.clear(), y.clear();
        each_slice(std::type_identity<typename G::Wide>(), 0, wide, [&](const auto& slice) {
          if (!has_columns) return;
#pragma unroll
          for (int k = 0; k < G::Wide::kCols; k += 16) {
            Left<kRaw> of_dout;
            Left<kMade> of_r;
            of_dout.template load<false>(slice.dout, row, k);
            of_r.template load<false>(slice.r, row, k);
            multiply<true, C / 16>(w.of, of_dout, slice.d, k, col);
            multiply<true, C / 16>(y.of, of_r, slice.d, k, col);
          }
        });
        float low = 0, high = 0;
#pragma unroll
        for (int e = 0; e < C / 16; ++e) {
          float z[4] = {};
          if (col + 8 * e <= row + 15)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              const int q = row + lane / 4 + i / 2 * 8, k = col + 8 * e + lane % 4 * 2 + i % 2;
              const float decay = decays.between(q, k) * decays.beta[k];
              if (q == k) dbeta[q] = y.of[e][i];
              w.of[e][i] *= plan.a.scale * decay;
              y.of[e][i] *= k < q ? -decays.beta[q] * decay : 0.f;
              z[i] = k < q ? w.of[e][i] * products[q][k] + y.of[e][i] * products[k][q] : 0.f;
              (i / 2 ? high : low) += z[i];
              w_sum.of[e][i] += w.of[e][i], y_sum.of[e][i] += y.of[e][i];
            }
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            float sum = z[i] + z[i + 2];
            for (int step = 4; step < 32; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
            if (lane < 4) column_sums[row / 16][col + 8 * e + lane * 2 + i] = sum;
          }
        }
        by_z.put(low, high, row, half);
      }
      Panel<K / 2> of_q, of_k, of_end;
      of_q.clear(), of_k.clear(), of_end.clear();
      float product = 0;  // of S and dS', this thread's part
      each_slice(std::type_identity<typename G::Narrow>(), wide, phases, [&](const auto& slice) {
        if (has_state) {
          Left<kRaw> of_dout;
          Left<kMade> of_r;
          of_dout.template load<false>(slice.dout, row, 0);
          of_r.template load<false>(slice.r, row, 0);
          multiply<false, K / 16>(of_q.of, of_dout, slice.s, 0, k_col);
          multiply<false, K / 16>(of_k.of, of_r, slice.s, 0, k_col);
        }
        if (has_after) {
          Left<kMade> of_d;
          of_d.template load<false>(slice.d, row, 0);
          multiply<false, K / 16>(of_end.of, of_d, slice.ds, 0, k_col);
        }
        if (has_state && has_after)
          for (int i = threadIdx.x; i < G::Narrow::kCols * K / 2; i += G::kThreads) {
            const int at_row = i / (K / 2), at = i % (K / 2) * 2;
            float2 before{0, 0}, after{0, 0};
#pragma unroll
            for (int t = kMade - 1; t >= 0; --t) {
              const float2 b = to_floats<bfloat16>(*reinterpret_cast<const unsigned*>(slice.s.at(at_row, at, t))),
                           a = to_floats<bfloat16>(*reinterpret_cast<const unsigned*>(slice.ds.at(at_row, at, t)));
              before.x += b.x, before.y += b.y, after.x += a.x, after.y += a.y;
            }
            product += before.x * after.x + before.y * after.y;
          }
      });
      for (int step = 1; step < 32; step *= 2) product += __shfl_xor_sync(~0u, product, step);
      if (lane == 0) inner[warp] = product;
      float dots[3][2] = {};
#pragma unroll
      for (int down = 0; down < 2; ++down) {
        const int token = row + lane / 4 + 8 * down;
        const float start = decays.from_start[token], beta = decays.beta[token], to_end = decays.to_end[token] * beta;
#pragma unroll
        for (int e = 0; e < K / 16; ++e) {
          const int k = k_col + 8 * e + lane % 4 * 2;
          const float2 q = keys.pair_at(keys.q, token, k), key = keys.pair_at(keys.k, token, k);
#pragma unroll
          for (int right = 0; right < 2; ++right) {
            const int i = 2 * down + right;
            const float of_key = right ? key.y : key.x;
            dots[0][down] += (right ? q.y : q.x) * of_q.of[e][i];
            dots[1][down] += of_key * of_k.of[e][i], dots[2][down] += of_key * of_end.of[e][i];
            dq.of[e][i] += plan.a.scale * start * of_q.of[e][i];
            dk.of[e][i] += to_end * of_end.of[e][i] - start * beta * of_k.of[e][i];
          }
        }
      }
      by_q.put(dots[0][0], dots[0][1], row, half);
      by_k.put(dots[1][0], dots[1][1], row, half);
      by_end.put(dots[2][0], dots[2][1], row, half);
      __syncthreads();
      if (const int i = threadIdx.x; i < C) {
        float columns = 0;
        for (int part = 0; part < C / 16; ++part) columns += column_sums[part][i];
        const float end = decays.to_end[i] * decays.beta[i] * keys.norm_k[i] * by_end.total(i);
        by_end.of[0][i] = end;
        dsum[i] = by_z.total(i) - columns + plan.a.scale * decays.from_start[i] * keys.norm_q[i] * by_q.total(i) - end -
                  decays.from_start[i] * decays.beta[i] * keys.norm_k[i] * by_k.total(i);
      }
      __syncthreads();
      if (const int i = threadIdx.x; i < chunk.n) {
        // What all tokens' decays to the end have in common.
        float sum = 0;
        for (int part = 0; part < G::kWarps; ++part) sum += inner[part];
        sum *= decays.from_start[C - 1];
        for (int j = 0; j < chunk.n; ++j) sum += by_end.of[0][j];
        for (int j = chunk.n - 1; j >= i; --j) sum += dsum[j];
        const int64_t to = (first + i) * plan.a.heads + head;
        // What decays before a document's first token is 0.
        const bool nothing = i == 0 && chunk.begins && !(plan.a.state && chunk.document < plan.a.documents);
        args.dg[to] = nothing ? 0.f : sum;
        args.dbeta[to] = dbeta[i];
      }
    }
    // dQ̂ += W K̂ and dK̂ += Wᵀ Q̂ + (Y + Yᵀ) K̂
    const typename G::Matrix matrix{reinterpret_cast<bfloat16*>(region)};
    const auto put = [&](auto number) {  // number(e, i, row, column) of this lane's part of a matrix
#pragma unroll
      for (int e = 0; e < C / 16; ++e)
#pragma unroll
        for (int down = 0; down < 2; ++down) {
          const int i = row + lane / 4 + 8 * down, j = col + 8 * e + lane % 4 * 2;
          unsigned terms[kMade];
          split_pair(number(e, 2 * down, i, j), number(e, 2 * down + 1, i, j + 1), terms);
#pragma unroll
          for (int t = 0; t < kMade; ++t) *reinterpret_cast<unsigned*>(matrix.at(i, j, t)) = terms[t];
        }
    };
    const auto add_product = [&](Panel<K / 2>& to, auto transposed, const auto& rows) {
      __syncthreads();
#pragma unroll
      for (int k = 0; k < C; k += 16) {
        Left<kMade> left;
        left.template load<decltype(transposed)::value>(matrix, row, k);
        multiply<false, K / 16>(to.of, left, rows, k, k_col);
      }
      __syncthreads();
    };
    __syncthreads();
    y_sum.each([&](float& v, int i, int j) { products[row + i][col + j] = v; });  // no longer read otherwise
    put([&](int e, int i, int, int j) { return w_sum.of[e][i] * keys.norm_k[j]; });
    add_product(dq, std::false_type(), keys.k);
    put([&](int e, int n, int i, int j) { return (y_sum.of[e][n] + products[j][i]) * keys.norm_k[j]; });
    add_product(dk, std::false_type(), keys.k);
    put([&](int e, int n, int i, int) { return w_sum.of[e][n] * keys.norm_q[i]; });
    add_product(dk, std::true_type(), keys.q);
    // The norms' derivatives.
    const auto finish = [&](Panel<K / 2>& of, const auto& raw, const float* norm, RowSums<C>& sums, void* out) {
      float dots[2] = {};
      const auto each_pair = [&](auto f) {
#pragma unroll
        for (int down = 0; down < 2; ++down)
#pragma unroll
          for (int e = 0; e < K / 16; ++e) {
            const int token = row + lane / 4 + 8 * down, k = k_col + 8 * e + lane % 4 * 2;
            f(down, token, k, of.of[e][2 * down], of.of[e][2 * down + 1], keys.pair_at(raw, token, k));
          }
      };
      if (plan.a.eps >= 0)
        each_pair([&](int down, int, int, float x, float y, float2 raw) { dots[down] += x * raw.x + y * raw.y; });
      sums.put(dots[0], dots[1], row, half);
      __syncthreads();
      T* to = static_cast<T*>(out) + (first * key_heads + key_head) * plan.a.K;
      each_pair([&](int, int token, int k, float x, float y, float2 raw) {
        if (token >= chunk.n || k >= plan.a.K) return;
        const float r = norm[token], onto = r * r * sums.total(token);
        const float2 d{r * (x - raw.x * onto), r * (y - raw.y * onto)};
        T* at = to + int64_t(token) * key_heads * plan.a.K + k;
        if (sizeof(T) == 2 && plan.a.K % 2 == 0) {
          if constexpr (sizeof(T) == 2) *reinterpret_cast<unsigned*>(at) = to_word<T>(d.x, d.y);
        } else {
          at[0] = T(d.x);
          if (k + 1 < plan.a.K) at[1] = T(d.y);
        }
      });
    };
    finish(dq, keys.q, keys.norm_q, by_q, args.dq);
    finish(dk, keys.k, keys.norm_k, by_k, args.dk);
    __syncthreads();
  }
}

// ---- launches ----

/// A bump pointer over the workspace.
struct Room {
  char* base;
  int64_t used = 0;

  template <class T>
  T* take(int64_t n) {
    T* at = base ? reinterpret_cast<T*>(base + used) : nullptr;
    used += round_up(n * int64_t(sizeof(T)), int64_t(256));
    return at;
  }
};

template <class F>
void with_kind(const GatedDeltaRule& a, F&& f) {
  dispatch(a.dtype, [&]<class T>() {
    constexpr bool kUsual = std::is_same_v<T, bfloat16>;  // what nobody trains with takes the next size
    if (a.K <= 64) return f.template operator()<Kind<T, 64>>();
    if (a.K <= 96) return f.template operator()<Kind<T, kUsual ? 96 : 128>>();
    if (a.K <= 128) return f.template operator()<Kind<T, 128>>();
    if (a.K <= 192) return f.template operator()<Kind<T, kUsual ? 192 : 256>>();
    if (a.K <= 256) return f.template operator()<Kind<T, 256>>();
    throw std::runtime_error("gated_delta_rule: q and k may have up to 256 columns on a GPU");
  });
}

/// The plan, and how many bytes of workspace it needs.
template <class Kd>
Plan make_plan(const GatedDeltaRule& a, bool backward, bool after, int64_t& bytes) {
  Plan plan{};
  plan.a = a, plan.group = int(a.heads / a.key_heads), plan.chunk = Kd::C, plan.tokens = a.rows * a.tokens;
  plan.length = int(a.tokens), plan.row_slots = int(ceil_div(a.tokens, int64_t(Kd::C)));
  plan.chunks = int(a.starts ? plan.tokens : a.rows * plan.row_slots);
  plan.V = int(round_up(a.V, int64_t(kChainCols)));
  Room room{static_cast<char*>(a.workspace)};
  if (a.starts) plan.table = room.take<int64_t>(plan.chunks + 1), plan.count = room.take<int>(1);
  const int64_t rows = plan.tokens * a.key_heads;
  if (std::is_same_v<typename Kd::Number, bfloat16> && a.K == Kd::K) {
    plan.q = {static_cast<const bfloat16*>(a.q), a.q_row, a.q_token, a.K, 0};
    plan.k = {static_cast<const bfloat16*>(a.k), a.k_row, a.k_token, a.K, 0};
  } else {
    plan.planes = room.take<bfloat16>(2 * Kd::kRaw * rows * Kd::K);
    const int64_t token = a.key_heads * Kd::K;
    plan.q = plan.k = {plan.planes, a.tokens * token, token, Kd::K, rows * Kd::K};
    plan.k.numbers += Kd::kRaw * rows * Kd::K;
  }
  plan.factors = room.take<float>(4 * a.heads * plan.tokens);
  plan.kept = room.take<float>(a.heads * plan.tokens);
  const int64_t matrix = a.heads * Kd::kMade * plan.tokens;
  plan.u = room.take<bfloat16>(matrix * Kd::C), plan.p = room.take<bfloat16>(matrix * Kd::C);
  if (backward) {
    plan.d = room.take<bfloat16>(matrix * plan.V), plan.r = room.take<bfloat16>(matrix * plan.V);
    const int64_t slots = a.rows * plan.row_slots + (a.state || after ? a.documents : 0),
                  state = slots * a.heads * Kd::kMade * plan.V * Kd::K;
    plan.s = room.take<bfloat16>(state), plan.ds = room.take<bfloat16>(state);
  }
  bytes = room.used;
  return plan;
}

/// The grid of a kernel that has a block for each chunk of a key head, and goes on where there are more chunks than are
/// likely.
template <class Kd>
int64_t chunk_blocks(const Plan& plan) {
  return plan.a.key_heads * std::min<int64_t>(plan.chunks, plan.a.rows * plan.row_slots + 64);
}

template <class Kd>
void prepare(const Plan& plan, Stream s) {
  if (plan.table) launch(table_kernel, {1, dim3(kTableThreads)}, s, plan);
  if (plan.planes)
    launch(planes_kernel<Kd>,
           {std::min<int64_t>(ceil_div(plan.tokens * plan.a.key_heads * Kd::K, int64_t(256)), 65536), dim3(256)}, s,
           plan);
  launch(prepare_kernel<Kd>, {chunk_blocks<Kd>(plan), dim3(Prepare<Kd>::kThreads), Prepare<Kd>::kBytes}, s, plan);
}

template <class Staged>
void chain(void (*kernel)(ChainArgs), ChainArgs args, Stream s) {
  const Plan& plan = args.plan;
  const int64_t blocks = plan.a.heads * (plan.V / kChainCols);
  // A block for each row; with documents, of which nobody knows how many there are, as many as a GPU runs at once.
  args.slots = int(plan.table ? std::clamp<int64_t>(ceil_div(int64_t(1024), blocks), 1, plan.chunks) : plan.a.rows);
  // The next chunk comes while this one is worked on, unless a multiprocessor has other blocks to turn to.
  const bool alone = args.slots * blocks <= 2 * multiprocessors(current_device());
  args.stages = alone && 2 * Staged::kBytes <= shared_bytes_of_block() ? 2 : 1;
  launch(kernel, {args.slots * blocks, dim3(kChainThreads), args.stages * Staged::kBytes}, s, args);
}

}  // namespace

LIGER_REGISTER(gated_delta_rule_workspace, [](const GatedDeltaRuleWorkspace& w, Stream) {
  with_kind(w.like, [&]<class Kd>() { make_plan<Kd>(w.like, w.backward, true, *w.bytes); });
});

LIGER_REGISTER(gated_delta_rule_forward, [](const GatedDeltaRuleForward& a, Stream s) {
  with_kind(a, [&]<class Kd>() {
    int64_t bytes;
    const Plan plan = make_plan<Kd>(a, false, false, bytes);
    prepare<Kd>(plan, s);
    chain<Stage<Kd, true>>(chain_kernel<Kd, false>, {.plan = plan, .out = a.o, .last = a.final_state}, s);
  });
});

LIGER_REGISTER(gated_delta_rule_backward, [](const GatedDeltaRuleBackward& a, Stream s) {
  with_kind(a, [&]<class Kd>() {
    int64_t bytes;
    const Plan plan = make_plan<Kd>(a, true, true, bytes);
    prepare<Kd>(plan, s);
    chain<Stage<Kd, false>>(chain_kernel<Kd, true>, {.plan = plan}, s);
    chain<Stage<Kd, true>>(reverse_chain_kernel<Kd>,
                           {.plan = plan, .out = a.dv, .dout = a.dout, .last = a.dstate, .after = a.dfinal}, s);
    const int stages = Gradient<Kd>::bytes(2) <= shared_bytes_of_block() ? 2 : 1;
    launch(gradient_kernel<Kd>, {chunk_blocks<Kd>(plan), dim3(Gradient<Kd>::kThreads), Gradient<Kd>::bytes(stages)}, s,
           GradientArgs{plan, a.dout, a.dq, a.dk, a.dg, a.dbeta, a.dfinal != nullptr, stages});
  });
});

}  // namespace liger::cuda::gated_delta_rule
