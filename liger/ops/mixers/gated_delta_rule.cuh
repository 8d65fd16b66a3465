#pragma once
// What the kernels of the gated delta rule share: where chunks lie, copies of their rows, and decays.
#include "liger/core/cuda/dispatch.h"
#include "liger/core/cuda/split.cuh"
#include "liger/ops/mixers/gated_delta_rule.h"

namespace liger::cuda::gated_delta_rule {
namespace {

using namespace split;

/// Sizes and terms of one kind of inputs. With gates of channels, q and k enter the chains multiplied by decays, as
/// more terms and three matrices instead of two: chunks are shorter.
template <class T, int kWidth, bool kOfChannels = false>
struct Kind {
  using Number = T;
  static constexpr bool kFloat = std::is_same_v<T, float>, kChannels = kOfChannels;
  static constexpr int K = kWidth;  // columns of q and k, padded
  static constexpr int C = !kChannels ? kFloat ? 32 : 64 : kFloat || kWidth > 128 ? 16 : 32;  // tokens of a chunk
  static constexpr int kRaw = kFloat ? 3 : std::is_same_v<T, bfloat16> ? 1 : 2;               // terms of raw numbers
  static constexpr int kMade = kFloat ? 3 : 2;                                                // and of all others
  static constexpr int kKeys = kChannels ? kMade : kRaw;  // of q and k in the chains
  static constexpr int kFactors = kChannels ? 1 : 4;      // of a token
};

/// Rows of 16-bit terms in global memory: q or k.
struct Operand {
  const bfloat16* numbers;
  int64_t row, token, head, plane;  // elements from one to the next
};

/// What all kernels take.
struct Plan {
  GatedDeltaRule a;
  Operand q, k, end;  // of channels: s e^G q̂, e^G k̂ and e^(G_C − G) k̂, each head's; else q, k and k as they are
  int group;          // heads of a key head
  int chunk;          // C
  int length;         // tokens of a row
  int64_t tokens;     // of all rows
  int chunks;         // the most that there may be
  int V;              // columns of v, padded
  int64_t* table;     // [chunks + 1]: where each chunk begins; null: every row is one document
  int* count;         // chunks in the table, and whether a document is long
  bfloat16* planes;   // room for q, k and end as terms; null: q and k are read as they are
  float* factors;     // [heads, 4, tokens]: β, rk eᴳ, rk e^(G_C − G) and s rq eᴳ; 1 / |q| and 1 / |k| are rq and rk. Of
                      // channels β alone
  float* kept;  // [heads, tokens]: e^(G_C), where a chunk begins; of channels [slots, heads, K], where it has a state
  bfloat16 *u, *p;   // [heads, terms, tokens, C]
  bfloat16 *d, *r;   // [heads, terms, tokens, V]
  bfloat16 *s, *ds;  // [slots, heads, terms, V, K]: transposed states before chunks, and gradients of those after them
  int row_slots;     // of states in a row of tokens
  int segments;      // of all chains of a head, of about as many chunks each; 0: chains are whole documents
  // What a segment adds to the state after it, and e^G of all its tokens. With a table there are segments where one
  // document has long_document tokens.
  float *segment_states, *segment_kept;
  int64_t long_document;
};

struct Chunk {
  int row, token;  // the first token, in its row
  int n;
  bool begins, ends;  // its document
  int document;

  __device__ int64_t at(const Plan& plan) const { return int64_t(row) * plan.length + token; }
  /// Whether there is a state before it, and the gradient of one after it, given whether final states have gradients.
  __device__ bool has_before(const Plan& plan) const {
    return !begins || (plan.a.state && document < plan.a.documents);
  }
  __device__ bool has_after(const Plan& plan, bool finals) const {
    return !ends || (finals && document < plan.a.documents);
  }
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

/// Rows of plan.s and plan.ds.
__device__ __host__ inline int64_t state_rows(const Plan& plan, int terms) {
  return (plan.a.rows * plan.row_slots + plan.a.documents) * plan.a.heads * terms * plan.V;
}

// A chunk in the table: its first token among all rows', whether it begins a document, and which.
constexpr int kBeginsBit = 31, kDocumentBit = 32;
constexpr unsigned kTokenMask = 0x7fffffff;

__device__ int count_of(const Plan& plan) { return plan.table ? *plan.count : plan.chunks; }

/// Whether chains begin and end anywhere in a document.
__device__ bool has_segments(const Plan& plan) { return plan.segments && (!plan.table || plan.count[1]); }

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
  __shared__ int sums[kTableThreads / 32][2], any_long;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int64_t chunks = 0, documents = 0;
  bool is_long = false;
  if (threadIdx.x == 0) any_long = 0;
  for (int64_t first = 0; first < plan.tokens; first += kTableThreads) {
    const int64_t i = first + threadIdx.x, token = i % plan.a.tokens;
    bool chunk = false, document = false;
    if (i < plan.tokens) {
      const int64_t start = plan.a.starts[i];
      document = token == 0 || start < 0 || start == token || plan.a.starts[i - 1] < 0;
      chunk = document || (token - start) % plan.chunk == 0;
      is_long |= start >= 0 && token - start >= plan.long_document;
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
  if (is_long) any_long = 1;
  __syncthreads();
  if (threadIdx.x > 0) return;
  plan.table[chunks] = plan.tokens | int64_t(1) << kBeginsBit;
  plan.count[0] = int(chunks), plan.count[1] = any_long;
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
    write_pair<Kd::kRaw>(number(2 * pair), number(2 * pair + 1),
                         plan.planes + (of_k ? Kd::kRaw * rows * Kd::K : 0) + row * Kd::K + 2 * pair, rows * Kd::K);
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

/// The transpose of 16 columns of a tile of raw rows: a panel whose columns are tokens.
template <class T, int C, class Rows>
__device__ void read_transposed(Panel<C>& panel, const Rows& rows, int col) {
#pragma unroll
  for (int e = 0; e < C / 8; e += 2) {
    unsigned pairs[4];
    load_blocks<true, 2, 1>(pairs, rows, 0, 8 * e, col);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 of = to_floats<T>(pairs[i]);
      panel.of[e + i / 2][i % 2 * 2] = of.x, panel.of[e + i / 2][i % 2 * 2 + 1] = of.y;
    }
  }
}

/// The same of rows kCols + 8 numbers apart.
template <int kCols, class T, int C>
__device__ void read_transposed(Panel<C>& panel, T* tile, int col) {
  if constexpr (sizeof(T) == 2) read_transposed<T>(panel, Tile<1, C, kCols>{reinterpret_cast<bfloat16*>(tile)}, col);
  else panel.each([&](float& v, int row, int token) { v = tile[token * (kCols + 8) + col + row]; });
}

/// Writes eight rows of 16 numbers of 16 bits, of each half of which a lane has the pair lane % 4 of row lane / 4:
/// `row` is that row. Neighbours exchange a pair, so that each lane writes 8 bytes, and the lanes of a row the 32 that
/// memory takes at once. All lanes of a warp must call it together.
template <class T>
__device__ void write_halves(unsigned low, unsigned high, T* row, bool there) {
  const int odd = threadIdx.x % 2;
  const unsigned other = __shfl_xor_sync(~0u, odd ? low : high, 1);
  const uint64_t both = odd ? other | uint64_t(high) << 32 : low | uint64_t(other) << 32;
  if (there) *reinterpret_cast<uint64_t*>(row + 8 * odd + threadIdx.x % 4 / 2 * 4) = both;
}

/// Writes a panel whose columns are tokens to rows of 16 numbers: `to` is the first token's, n tokens are there, and
/// `cols` numbers of a row.
template <class T, int C>
__device__ void write_transposed(Panel<C>& panel, T* to, int step, int n, int cols) {
  if constexpr (sizeof(T) == 2) {
    const int lane = threadIdx.x % 32, token = lane / 4, col = lane % 4 * 2;
    const bool whole = cols >= 16 && step % 4 == 0 && reinterpret_cast<uintptr_t>(to) % 8 == 0;
#pragma unroll
    for (int e = 0; e < C / 8; ++e) {
      const auto& of = panel.of[e];
      const unsigned words[2]{transposed(to_word<T>(of[0], of[1])), transposed(to_word<T>(of[2], of[3]))};
      T* const row = to + (8 * e + token) * step;
      const bool there = 8 * e + token < n;
      if (whole) {
        write_halves(words[0], words[1], row, there);
      } else if (there) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float2 pair = to_floats<T>(words[half]);
          T* const at = row + 8 * half + col;
          if (8 * half + col < cols) at[0] = T(pair.x);
          if (8 * half + col + 1 < cols) at[1] = T(pair.y);
        }
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
  const int token = threadIdx.x % 32 / 4;
#pragma unroll
  for (int e = 0; e < C / 8; ++e) {
    unsigned low[kTerms], high[kTerms];
    split_pair(panel.of[e][0], panel.of[e][1], low);
    split_pair(panel.of[e][2], panel.of[e][3], high);
#pragma unroll
    for (int t = 0; t < kTerms; ++t)
      write_halves(transposed(low[t]), transposed(high[t]), to + t * plane + (8 * e + token) * step, 8 * e + token < n);
  }
}

/// A panel of the transposed state as terms, rows of K.
template <int kTerms, int K>
__device__ void write_state(const Panel<K>& panel, bfloat16* to, int64_t plane) {
#pragma unroll
  for (int e = 0; e < K / 8; e += 2)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      unsigned low[kTerms], high[kTerms];
      split_pair(panel.of[e][2 * half], panel.of[e][2 * half + 1], low);
      split_pair(panel.of[e + 1][2 * half], panel.of[e + 1][2 * half + 1], high);
#pragma unroll
      for (int t = 0; t < kTerms; ++t)
        write_halves(low[t], high[t], to + t * plane + (threadIdx.x % 32 / 4 + 8 * half) * K + 8 * e, true);
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
  __device__ void add(const Sum2& other) { add(other.high), low += other.low; }
  __device__ float less(const Sum2& other) const { return (high - other.high) + (low - other.low); }
};

/// Threads that sum along the tokens of a chunk: whole warps.
template <int C>
constexpr int kScanned = C < 32 ? 32 : C;

/// The decays of one head's chunk. Sums of g are of one chunk, for decays are their differences, and g is bounded, for
/// no difference of infinities is a number.
template <int C>
struct Decays {
  float beta[C];
  float from_start[C], to_end[C];  // eᴳ and e^(G_C − G)
  Sum2 sum[C];

  /// By a warp.
  __device__ void load(const Plan& plan, const Chunk& chunk, int head) {
    constexpr int kRuns = kScanned<C> / 32;  // of 32 tokens, which a lane has one of each of
    const int lane = threadIdx.x % 32;
    Sum2 sums[kRuns];
    float betas[kRuns];
#pragma unroll
    for (int run = 0; run < kRuns; ++run) {
      const int i = 32 * run + lane;
      const int64_t at = (chunk.at(plan) + i) * plan.a.heads + head;
      sums[run] = {i < chunk.n ? fmaxf(plan.a.g[at], -1000.f) : 0.f, 0};
      betas[run] = i < chunk.n ? plan.a.beta[at] : 0.f;
    }
    Sum2 all{0, 0};
#pragma unroll
    for (int run = 0; run < kRuns; ++run) {
      Sum2& mine = sums[run];
      for (int distance = 1; distance < 32; distance *= 2) {
        const int from = max(0, lane - distance);
        const Sum2 before{__shfl_sync(~0u, mine.high, from), __shfl_sync(~0u, mine.low, from)};
        if (lane >= distance) mine.add(before);
      }
      if (run > 0) mine.add(all);
      all = {__shfl_sync(~0u, mine.high, 31), __shfl_sync(~0u, mine.low, 31)};
    }
#pragma unroll
    for (int run = 0; run < kRuns; ++run) {
      const int i = 32 * run + lane;
      const Sum2& mine = sums[run];
      if (i < C) {
        beta[i] = betas[run], sum[i] = mine;
        from_start[i] = expf(mine.high + mine.low), to_end[i] = expf(all.less(mine));
      }
    }
  }
  /// e^(G_i − G_j) for i >= j, else 0.
  __device__ float between(int i, int j) const { return i >= j ? expf(sum[i].less(sum[j])) : 0.f; }
};

/// Waits for all threads of the block.
struct AllThreads {
  __device__ void operator()() const { __syncthreads(); }
};

/// Two neighbours of a row of raw numbers.
template <class Rows>
__device__ float2 pair_at(const Rows& tile, int row, int col) {
  float2 sum{0, 0};
#pragma unroll
  for (int t = Rows::kTerms - 1; t >= 0; --t) {
    const float2 v = to_floats<bfloat16>(*reinterpret_cast<const unsigned*>(tile.at(row, col, t)));
    sum.x += v.x, sum.y += v.y;
  }
  return sum;
}

/// What the norms multiply rows of q and k by: norms[i] and norms[C + i], by kThreads threads. Those of a row, next to
/// each other, take turns at its pairs.
template <int kThreads, int C, int K, class Rows>
__device__ void norm_rows(const Plan& plan, const Rows& q, const Rows& k, float* norms) {
  constexpr int kOfRow = 4;
  for (int i = threadIdx.x / kOfRow; i < 2 * C; i += kThreads / kOfRow) {
    const auto& tile = i < C ? q : k;
    float squares = 0;
    for (int pair = threadIdx.x % kOfRow; pair < K / 2; pair += kOfRow) {
      const float2 v = pair_at(tile, i % C, 2 * pair);
      squares += v.x * v.x + v.y * v.y;
    }
    for (int step = 1; step < kOfRow; step *= 2) squares += __shfl_xor_sync(~0u, squares, step);
    if (threadIdx.x % kOfRow == 0) norms[i] = plan.a.eps < 0 ? 1.f : 1 / sqrtf(squares + plan.a.eps);
  }
}

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
    norm_rows<kThreads, C, Kd::K>(plan, q, k, norm_q);
    __syncthreads();
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

}  // namespace
}  // namespace liger::cuda::gated_delta_rule
