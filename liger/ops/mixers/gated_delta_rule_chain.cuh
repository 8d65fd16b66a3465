#pragma once
// The kernels of the gated delta rule that go along the chunks of a document, for gates of either kind.
#include "liger/ops/mixers/gated_delta_rule.cuh"

namespace liger::cuda::gated_delta_rule {
namespace {

constexpr int kChainWarps = 4, kChainThreads = 32 * kChainWarps, kChainCols = 16 * kChainWarps;

/// Multiplies each column of a panel, which is a token, by its factor.
template <int C>
__device__ void scale_tokens(Panel<C>& panel, const float* factors) {
  const float* of = factors + threadIdx.x % 4 * 2;
#pragma unroll
  for (int e = 0; e < C / 8; ++e) {
    const float2 by = *reinterpret_cast<const float2*>(of + 8 * e);
    panel.of[e][0] *= by.x, panel.of[e][1] *= by.y, panel.of[e][2] *= by.x, panel.of[e][3] *= by.y;
  }
}

/// What a block of a chain holds in shared memory for one chunk; with kAll also q and p.
template <class Kd, bool kAll>
struct Stage {
  using T = typename Kd::Number;
  static constexpr int C = Kd::C, kStride = kChainCols + 8;
  using Keys = Tile<Kd::kKeys, C, Kd::K>;
  using Matrix = Tile<Kd::kMade, C, C>;
  static constexpr int kBytes = ((kAll ? 2 : 1) + Kd::kChannels) * Keys::kBytes + (kAll ? 2 : 1) * Matrix::kBytes +
                                C * kStride * int(sizeof(T)) + Kd::kFactors * C * 4;
  Keys k, q, end;
  Matrix u, p;
  float* factors;
  T* rows;  // of v or dO

  __device__ explicit Stage(char* shared) : k(Keys::at_front(shared)), q(k), end(k), u(Matrix::at_front(shared)), p(u) {
    if (kAll) q = Keys::at_front(shared), p = Matrix::at_front(shared);
    if (Kd::kChannels) end = Keys::at_front(shared);
    factors = reinterpret_cast<float*>(shared), rows = reinterpret_cast<T*>(factors + Kd::kFactors * C);
  }

  __device__ void load(const Plan& plan, const Chunk& chunk, int head, const T* of, int step, int col) const {
    const int key_head = Kd::kChannels ? head : head / plan.group;
    copy_operand<kChainThreads, C, Kd::K>(k, plan.k, chunk, key_head);
    if (Kd::kChannels) copy_operand<kChainThreads, C, Kd::K>(end, plan.end, chunk, key_head);
    if (plan.a.delta) copy_made<kChainThreads, C, C>(u, plan.u, plan, chunk, head, C, 0);
    if (kAll) {
      copy_operand<kChainThreads, C, Kd::K>(q, plan.q, chunk, key_head);
      copy_made<kChainThreads, C, C>(p, plan.p, plan, chunk, head, C, 0);
    }
    const float* from = plan.factors + Kd::kFactors * head * plan.tokens + chunk.at(plan);
#pragma unroll
    for (int i = threadIdx.x; i < Kd::kFactors * C; i += kChainThreads)
      copy_async4(factors + i, from + i / C * plan.tokens + i % C, i % C < chunk.n);
    copy_raw<kChainThreads, C, kChainCols, kStride>(rows, of, step, chunk.n, col, int(plan.a.V));
    close_copies();
  }

  /// Multiplies each column of a panel, which is a token, by factor i, where the operands do not have it.
  __device__ void scale(Panel<C>& panel, int i) const {
    if (i < Kd::kFactors) scale_tokens(panel, factors + i * C);
  }
};

// The factors of a token: plan.factors.
constexpr int kBeta = 0, kToX = 1, kToEnd = 2, kToOut = 3;

/// The blocks of a slot of chains: one for each head and kChainCols columns of v.
__device__ __host__ inline int64_t blocks_of_slot(const Plan& plan) { return plan.a.heads * (plan.V / kChainCols); }

/// What a block of a chain has: a head, the documents of a slot, and columns of v from `col` on, of which those of this
/// thread's warp begin at v.
struct ChainPlace {
  int col, v, head, slot;

  __device__ explicit ChainPlace(const Plan& plan) {
    const int panels = plan.V / kChainCols, heads = int(plan.a.heads);
    col = blockIdx.x % panels * kChainCols, v = col + threadIdx.x / 32 * 16;
    head = blockIdx.x / panels % heads, slot = blockIdx.x / panels / heads;
  }
};

/// The chunks of this block: whole documents, of as many chunks as another block's, more or less, or a segment.
__device__ int first_chunk(const Plan& plan, int slot, int slots, int count) {
  int c = int(int64_t(slot) * count / slots);
  if (has_segments(plan)) return c;
  if (!plan.table) return round_up(c, plan.row_slots);
  for (;; c += 32) {
    const int mine = c + threadIdx.x % 32;
    const unsigned begins = __ballot_sync(~0u, mine >= count || unsigned(plan.table[mine]) >> kBeginsBit);
    if (begins) return min(count, c + __popc((begins & -begins) - 1));
  }
}

/// sums[v, n] += Σ_k left[v, k] · tile, for k and n of a chunk: of a tile that is 0 above its diagonal.
template <bool kAlongK, int kA, int C, class Tile>
__device__ void multiply_triangle(Panel<C>& sums, const Left<kA> (&left)[C / 16], const Tile& tile) {
  // Rows of the tile are later tokens: with kAlongK these are the columns n, else the k.
#pragma unroll
  for (int k = 0; k < C / 16; ++k)
    multiply<kAlongK, C / 8>(sums.of, left[k], tile, 16 * k, 0, kAlongK ? 2 * k : 0, kAlongK ? C / 8 : 2 * k + 2);
}

/// What a head's skip connection multiplies v by.
__device__ float skip_of(const Plan& plan, int head) { return plan.a.skip ? plan.a.skip[head] : 0.f; }

template <int C>
__device__ void add_scaled(Panel<C>& to, float factor, const Panel<C>& what) {
#pragma unroll
  for (int e = 0; e < C / 8; ++e)
#pragma unroll
    for (int i = 0; i < 4; ++i) to.of[e][i] += factor * what.of[e][i];
}

template <int C>
__device__ void subtract(Panel<C>& from, const Panel<C>& what) {
#pragma unroll
  for (int e = 0; e < C / 8; ++e)
#pragma unroll
    for (int i = 0; i < 4; ++i) from.of[e][i] -= what.of[e][i];
}

/// A panel as left operands, all of its columns.
template <int kTerms, int C>
__device__ void make_left(Left<kTerms> (&left)[C / 16], const Panel<C>& of) {
#pragma unroll
  for (int k = 0; k < C / 16; ++k) left[k] = of.template left<kTerms>(k);
}

/// e^(G_C) of a chunk.
template <class Kd>
struct Kept {
  const float* of_channels = nullptr;  // null: 0
  float of_head = 0;

  __device__ explicit Kept(float of_head) : of_head(of_head) {}
  __device__ Kept(const Plan& plan, const Chunk& chunk, int head) {
    if constexpr (!Kd::kChannels) of_head = plan.kept[head * plan.tokens + chunk.at(plan)];
    else if (chunk.has_before(plan)) of_channels = plan.kept + (chunk.slot(plan) * plan.a.heads + head) * Kd::K;
  }
  /// Of columns col and col + 1 of the state.
  __device__ float2 pair(int col) const {
    if constexpr (!Kd::kChannels) return {of_head, of_head};
    else return of_channels ? *reinterpret_cast<const float2*>(of_channels + col) : float2{0, 0};
  }
};

/// state ← kept · state + sums, for as many eights of its columns as there are sums, from e on.
template <class Kd, int kEights>
__device__ void keep_and_add(Panel<Kd::K>& state, int e, const Kept<Kd>& kept, const float (&sums)[kEights][4]) {
#pragma unroll
  for (int i = 0; i < kEights; ++i) {
    const float2 by = kept.pair(8 * (e + i) + threadIdx.x % 4 * 2);
    auto& of = state.of[e + i];
    of[0] = by.x * of[0] + sums[i][0], of[1] = by.y * of[1] + sums[i][1];
    of[2] = by.x * of[2] + sums[i][2], of[3] = by.y * of[3] + sums[i][3];
  }
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
  const ChainPlace place(plan);
  const int block_col = place.col, v = place.v, head = place.head, slot = place.slot, heads = int(plan.a.heads),
            count = count_of(plan);
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
  const float skip = skip_of(plan, head);
  Panel<K> state;
  for (int loaded = c; c < end; ++c) {
    const Chunk chunk = chunk_at(plan, c);
    const Kept<Kd> kept(plan, chunk, head);
    for (; loaded < min(c + args.stages, end); ++loaded) load(loaded);
    await_copies(loaded - c - 1);
    __syncthreads();
    const Staged stage = stage_of(c);
    const bool has_before = chunk.has_before(plan);
    if (chunk.begins) read_state(state, plan, plan.a.state, chunk.document, head, v);
    if constexpr (kBackward)
      if (has_before)
        write_state<kMade>(state, plan.s + ((chunk.slot(plan) * plan.a.heads + head) * kMade * plan.V + v) * K,
                           plan.V * K);
    // Kᵀ and Qᵀ times the state.
    Panel<C> x, o;
    x.clear(), o.clear();
    if (has_before) {
#pragma unroll
      for (int k = 0; k < K / 16; ++k) {
        const auto left = state.template left<kMade>(k);
        if (plan.a.delta) multiply<true, C / 8>(x.of, left, stage.k, 16 * k, 0);
        if constexpr (!kBackward) multiply<true, C / 8>(o.of, left, stage.q, 16 * k, 0);
      }
    }
    Panel<C> d;
    read_transposed<kChainCols>(d, stage.rows, v - block_col);
    Left<kMade> left[C / 16];
    if (plan.a.delta) {
      stage.scale(x, kToX);
      subtract(d, x);  // X
      // D = X − U (β X)
      x = d;
      stage.scale(x, kBeta);
      make_left(left, x);
      x.clear();
      multiply_triangle<true>(x, left, stage.u);
      subtract(d, x);
    }
    if constexpr (kBackward) {
      write_terms<kMade>(d, plan.d + (head * kMade * plan.tokens + chunk.at(plan)) * plan.V + v, plan.V,
                         plan.tokens * plan.V, chunk.n);
    } else {
      // O = s eᴳ Q S + P (β D) + skip D
      stage.scale(o, kToOut);
      add_scaled(o, skip, d);
      stage.scale(d, kBeta);
      make_left(left, d);
      multiply_triangle<true>(o, left, stage.p);
      T* to = static_cast<T*>(args.out) + (chunk.at(plan) * plan.a.heads + head) * plan.a.V + v;
      write_transposed(o, to, heads * int(plan.a.V), chunk.n, int(plan.a.V) - v);
    }
    // The state after the chunk. Its sum over tokens is made apart, for the tensor core does not round to the nearest.
    if (!chunk.ends || (!kBackward && args.last)) {
      if (kBackward) stage.scale(d, kBeta);
      stage.scale(d, kToEnd);
      make_left(left, d);
      constexpr int kEights = K % 64 ? 4 : 8;
#pragma unroll
      for (int e = 0; e < K / 8; e += kEights) {
        float sums[kEights][4] = {};
#pragma unroll
        for (int k = 0; k < C / 16; ++k) multiply<false, kEights>(sums, left[k], stage.end, 16 * k, 8 * e);
        keep_and_add(state, e, kept, sums);
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
  const ChainPlace place(plan);
  const int block_col = place.col, v = place.v, head = place.head, slot = place.slot, count = count_of(plan),
            step = int(plan.a.heads * plan.a.V);
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
  const float skip = skip_of(plan, head);
  Panel<K> dstate;
  for (int loaded = c; c >= begin; --c) {
    const Chunk chunk = chunk_at(plan, c);
    const Kept<Kd> kept(plan, chunk, head);
    for (; loaded > max(c - args.stages, begin - 1); --loaded) load(loaded);
    await_copies(c - loaded - 1);
    __syncthreads();
    const Staged stage = stage_of(c);
    if (chunk.ends) read_state(dstate, plan, args.after, chunk.document, head, v);
    const bool has_after = chunk.has_after(plan, args.after);
    if (has_after)
      write_state<kMade>(dstate, plan.ds + ((chunk.next_slot(plan) * plan.a.heads + head) * kMade * plan.V + v) * K,
                         plan.V * K);
    // dN = Pᵀ dO + rk e^(G_C − G) K dS'; P has s.
    Panel<C> dout, r, x;
    read_transposed<kChainCols>(dout, stage.rows, v - block_col);
    r.clear(), x.clear();
    if (has_after)
#pragma unroll
      for (int k = 0; k < K / 16; ++k) {
        const auto left = dstate.template left<kMade>(k);
        multiply<true, C / 8>(r.of, left, stage.end, 16 * k, 0);
      }
    stage.scale(r, kToEnd);
    {
      Left<Kd::kRaw> left[C / 16];
      make_left(left, dout);
      multiply_triangle<false>(r, left, stage.p);
    }
    // R = dN − Uᵀ (β dN)
    Left<kMade> left[C / 16];
    if (plan.a.delta) {
      x = r;
      stage.scale(x, kBeta);
      make_left(left, x);
      x.clear();
      multiply_triangle<false>(x, left, stage.u);
      subtract(r, x);
    }
    write_terms<kMade>(r, plan.r + (head * kMade * plan.tokens + chunk.at(plan)) * plan.V + v, plan.V,
                       plan.tokens * plan.V, chunk.n);
    stage.scale(r, kBeta);
    add_scaled(r, skip, dout);  // without delta nobody reads it below
    write_transposed(r, static_cast<T*>(args.out) + chunk.at(plan) * step + head * plan.a.V + v, step, chunk.n,
                     int(plan.a.V) - v);
    // dS = e^(G_C) dS' + (s rq eᴳ Q)ᵀ dO − (rk eᴳ K)ᵀ (β R)
    if (!chunk.begins || args.last) {
      Left<kMade> of_dout[C / 16];
      stage.scale(dout, kToOut), stage.scale(r, kToX);
      for (auto& eight : r.of)
        for (float& of : eight) of = -of;
      make_left(of_dout, dout);
      make_left(left, r);
      constexpr int kEights = 4;
#pragma unroll
      for (int e = 0; e < K / 8; e += kEights) {
        float sums[kEights][4] = {};
#pragma unroll
        for (int k = 0; k < C / 16; ++k) {
          multiply<false, kEights>(sums, of_dout[k], stage.q, 16 * k, 8 * e);
          if (plan.a.delta) multiply<false, kEights>(sums, left[k], stage.k, 16 * k, 8 * e);
        }
        keep_and_add(dstate, e, kept, sums);
      }
    }
    if (chunk.begins) write_final(dstate, plan, args.last, chunk.document, head, v);
    __syncthreads();
  }
}

}  // namespace
}  // namespace liger::cuda::gated_delta_rule
