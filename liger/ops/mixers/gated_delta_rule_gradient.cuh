#pragma once
// The kernel of the gated delta rule that makes the gradients of all chunks at once.
#include <algorithm>
#include "liger/ops/mixers/gated_delta_rule.cuh"

namespace liger::cuda::gated_delta_rule {
namespace {

struct GradientArgs {
  Plan plan;
  const void* dout;
  void *dq, *dk;
  float *dg, *dbeta, *dskip;
  bool after;  // whether final states have gradients
  int stages;
};

/// The warps of a block: kDown for 16 tokens each, and kAcross of these for a part of the columns. Four of them hide
/// more latency than two, where the registers of their sums suffice.
template <class Kd>
struct Warps {
  static constexpr int kDown = Kd::C / 16,
                       kAcross = Kd::kChannels                                  ? 8
                                 : Kd::C == 64 && (Kd::K == 64 || Kd::K == 128) ? 4
                                                                                : 2,
                       kAll = kDown * kAcross, kThreads = 32 * kAll;
};

/// Whether slices may have twice as many columns; GPUs without the shared memory for them take the others.
template <class Kd>
constexpr bool kMayBeWide = !Kd::kFloat && Kd::K <= 128;

/// Columns of v of a chunk's dO, D and R, and with kStates of the states before and after it.
template <class Kd, bool kStates, bool kRoom = kMayBeWide<Kd>>
struct Slice {
  static constexpr int C = Kd::C, kThreads = Warps<Kd>::kThreads;
  static constexpr int kCols = (kStates ? 16 : 32) * (kRoom ? 2 : 1);
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
        write_pair<Kd::kRaw>(number(k), number(k + 1), dout.at(token, k), Raw::kPlane);
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

/// Floats from one row of the products of q̂ and k̂ to the next.
template <class Kd>
constexpr int kProductRow = Kd::C + 1;

template <class Kd, bool kRoom>
struct Gradient {
  static constexpr int C = Kd::C, kThreads = Warps<Kd>::kThreads;
  using Wide = Slice<Kd, false, kRoom>;
  using Narrow = Slice<Kd, true, kRoom>;
  using Matrix = Tile<Kd::kMade, C, C>;
  static constexpr int kStage = Wide::kBytes > Narrow::kBytes ? Wide::kBytes : Narrow::kBytes;
  static constexpr int bytes(int stages) {
    return Keys<Kd>::kBytes + C * kProductRow<Kd> * 4 + std::max(stages * kStage, Matrix::kBytes);
  }
};

/// Sums over all of a row, of which kParts warps have a part each: each lane's numbers of rows i and i + 8 of its
/// panel.
template <int C, int kParts>
struct RowSums {
  float of[kParts][C];

  __device__ void put(float low, float high, int row, int part) {
    const int lane = threadIdx.x % 32;
    for (int step = 1; step < 4; step *= 2)
      low += __shfl_xor_sync(~0u, low, step), high += __shfl_xor_sync(~0u, high, step);
    if (lane % 4 == 0) of[part][row + lane / 4] = low, of[part][row + lane / 4 + 8] = high;
  }
  __device__ float total(int row) const {
    float sum = 0;
    for (int part = 0; part < kParts; ++part) sum += of[part][row];
    return sum;
  }
};

/// What the threads of a block share besides operands.
template <class Kd, int kAcross, int kHeads = 1>
struct GradientSums {
  static constexpr int C = Kd::C, kDown = C / 16;
  Decays<C> decays[kHeads];  // of heads that are loaded together
  float dsum[C], dbeta[C], dskip[C], inner[kDown * kAcross], column_sums[kDown][C];
  float2 of_warps[2];  // of dsum, and of what decays to the chunk's end
  RowSums<C, kAcross> q, k, end, z;
};

/// What a warp makes of the products of a chunk and the heads of a key head: it has 16 tokens, from `row` on, and the
/// part `part` of kAcross of the columns. All warps call each function but put() together. Without kOfR there is no
/// delta: no Y, and dβ, which is R · V, is made of W instead, as in the sum of z_ij over i >= j of
///   z_ij   = (dO_i · V_j) E_ij (q̂_i · k̂_j) s
///   dβ_j   = Σ_(i>=j) z_ij + e^(G_C − G_j) k̂_j·(V dS'ᵀ)_j
template <class Kd, int kAcross, class Keys, class Sync, bool kOfR = true, int kHeads = 1>
struct WarpGradient {
  static constexpr int C = Kd::C, K = Kd::K, kOfC = C / kAcross, kOfK = K / kAcross;
  const GradientArgs& args;
  GradientSums<Kd, kAcross, kHeads>& sums;
  const Keys& keys;
  float (*products)[kProductRow<Kd>];  // q̂ k̂ᵀ, and above its diagonal (k̂ k̂ᵀ)ᵀ
  int row, part;
  const Decays<C>* decays_of_head = sums.decays;
  int col = part * kOfC, k_col = part * kOfK, lane = threadIdx.x % 32;
  bool has_columns = col <= row + 15;  // of this warp's part of a matrix, below the diagonal
  Sync sync = {};
  Panel<kOfK> dq = {}, dk = {};
  Panel<kOfC> w_sum = {}, y_sum = {};  // y_sum with kOfR

  /// Of K Kᵀ and Q Kᵀ of the raw rows.
  __device__ void put_products(Panel<kOfC>& kk, Panel<kOfC>& qk) {
    if (!has_columns) return;
    kk.each([&](float& v, int i, int j) {
      i += row, j += col;
      if (kOfR && j < i) products[j][i] = v * keys.norm_k[i] * keys.norm_k[j];
    });
    qk.each([&](float& v, int i, int j) {
      i += row, j += col;
      if (j <= i) products[i][j] = v * keys.norm_q[i] * keys.norm_k[j];
    });
  }

  /// W and Y of dO Dᵀ and R Dᵀ, which they overwrite.
  __device__ void add_matrices(Panel<kOfC>& w, Panel<kOfC>& y) {
    const Plan& plan = args.plan;
    const Decays<C>& decays = *decays_of_head;
    float low = 0, high = 0;
#pragma unroll
    for (int e = 0; e < kOfC / 8; ++e) {
      float z[4] = {};
      if (col + 8 * e <= row + 15)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int q = row + lane / 4 + i / 2 * 8, k = col + 8 * e + lane % 4 * 2 + i % 2;
          const float beta = decays.beta[k];
          if (q == k) sums.dskip[q] = w.of[e][i];
          if constexpr (kOfR) {
            const float decay = decays.between(q, k) * beta;
            if (q == k) sums.dbeta[q] = y.of[e][i];
            w.of[e][i] *= plan.a.scale * decay;
            y.of[e][i] *= k < q && plan.a.delta ? -decays.beta[q] * decay : 0.f;
            z[i] = k < q ? w.of[e][i] * products[q][k] + y.of[e][i] * products[k][q] : 0.f;
            (i / 2 ? high : low) += z[i];
            w_sum.of[e][i] += w.of[e][i], y_sum.of[e][i] += y.of[e][i];
          } else {
            w.of[e][i] *= plan.a.scale * decays.between(q, k);
            z[i] = k <= q ? w.of[e][i] * products[q][k] : 0.f;
            if (q == k) sums.dbeta[q] = z[i], z[i] = 0;
            (i / 2 ? high : low) += z[i] * beta;
            w_sum.of[e][i] += w.of[e][i] * beta;
          }
        }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float sum = z[i] + z[i + 2];
        for (int step = 4; step < 32; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
        if (lane < 4) sums.column_sums[row / 16][col + 8 * e + lane * 2 + i] = sum;
      }
    }
    sums.z.put(low, high, row, part);
  }

  /// Of dO Sᵀ, R Sᵀ and D dS'ᵀ, and this thread's part of the product of S and dS'.
  __device__ void add_states(const Panel<kOfK>& of_q, const Panel<kOfK>& of_k, const Panel<kOfK>& of_end,
                             float product) {
    const Plan& plan = args.plan;
    const Decays<C>& decays = *decays_of_head;
    for (int step = 1; step < 32; step *= 2) product += __shfl_xor_sync(~0u, product, step);
    if (lane == 0) sums.inner[row / 16 * kAcross + part] = product;
    float dots[3][2] = {};
#pragma unroll
    for (int down = 0; down < 2; ++down) {
      const int token = row + lane / 4 + 8 * down;
      const float start = decays.from_start[token], beta = decays.beta[token], to_end = decays.to_end[token] * beta,
                  of_start = plan.a.delta ? start * beta : 0.f;
#pragma unroll
      for (int e = 0; e < kOfK / 8; ++e) {
        const int k = k_col + 8 * e + lane % 4 * 2;
        const float2 q = pair_at(keys.q, token, k), key = pair_at(keys.k, token, k);
#pragma unroll
        for (int right = 0; right < 2; ++right) {
          const int i = 2 * down + right;
          const float of_key = right ? key.y : key.x;
          dots[0][down] += (right ? q.y : q.x) * of_q.of[e][i];
          dots[2][down] += of_key * of_end.of[e][i];
          dq.of[e][i] += plan.a.scale * start * of_q.of[e][i];
          if constexpr (kOfR) {
            dots[1][down] += of_key * of_k.of[e][i];
            dk.of[e][i] += to_end * of_end.of[e][i] - of_start * of_k.of[e][i];
          } else {
            dk.of[e][i] += to_end * of_end.of[e][i];
          }
        }
      }
    }
    sums.q.put(dots[0][0], dots[0][1], row, part);
    if constexpr (kOfR) sums.k.put(dots[1][0], dots[1][1], row, part);
    sums.end.put(dots[2][0], dots[2][1], row, part);
  }

  /// dg and dβ of a head, of the sums that the two functions before this have made.
  __device__ void write_gates(const Chunk& chunk, int head) {
    const Plan& plan = args.plan;
    const Decays<C>& decays = *decays_of_head;
    sync();
    const int i = threadIdx.x;
    if (i < kScanned<C>) {
      float end = 0, mine = 0;
      if (i < chunk.n) {
        for (const auto& of_rows : sums.column_sums) mine -= of_rows[i];
        end = decays.to_end[i] * keys.norm_k[i] * sums.end.total(i);
        if constexpr (!kOfR) sums.dbeta[i] += end - mine, mine *= decays.beta[i];
        end *= decays.beta[i];
        mine += sums.z.total(i) + plan.a.scale * decays.from_start[i] * keys.norm_q[i] * sums.q.total(i) - end -
                (kOfR && plan.a.delta ? decays.from_start[i] * decays.beta[i] * keys.norm_k[i] * sums.k.total(i) : 0.f);
      }
      for (int distance = 1; distance < 32; distance *= 2) {
        const float after = __shfl_sync(~0u, mine, min(31, lane + distance));
        if (lane + distance < 32) mine += after;
        end += __shfl_xor_sync(~0u, end, distance);
      }
      if (i < C) sums.dsum[i] = mine;
      if (lane == 0) sums.of_warps[i / 32] = {mine, end};
    }
    sync();
    if (i < chunk.n) {
      // What all tokens' decays to the end have in common.
      float sum = 0;
      for (const float of_warp : sums.inner) sum += of_warp;
      sum *= decays.from_start[C - 1];
      for (int w = 0; w < kScanned<C> / 32; ++w) sum += sums.of_warps[w].y;
      sum += sums.dsum[i] + (i < 32 && C > 32 ? sums.of_warps[1].x : 0.f);
      const int64_t to = (chunk.at(plan) + i) * plan.a.heads + head;
      // What decays before a document's first token is 0.
      const bool nothing = i == 0 && chunk.begins && !(plan.a.state && chunk.document < plan.a.documents);
      args.dg[to] = nothing ? 0.f : sum;
      args.dbeta[to] = sums.dbeta[i];
      if (args.dskip) args.dskip[to] = sums.dskip[i];
    }
  }

  /// dQ̂ += W K̂ and dK̂ += Wᵀ Q̂ + (Y + Yᵀ) K̂. add(to, transposed, rows) adds the product of `matrix`, to which all warps
  /// have written their parts.
  template <class Matrix, class Add>
  __device__ void add_products(const Matrix& matrix, Add add) {
    const auto put = [&](auto number) {  // number(e, i, row, column) of this lane's part of a matrix
#pragma unroll
      for (int e = 0; e < kOfC / 8; ++e)
#pragma unroll
        for (int down = 0; down < 2; ++down) {
          const int i = row + lane / 4 + 8 * down, j = col + 8 * e + lane % 4 * 2;
          write_pair<Kd::kMade>(number(e, 2 * down, i, j), number(e, 2 * down + 1, i, j + 1), matrix.at(i, j),
                                Matrix::kPlane);
        }
    };
    sync();
    if constexpr (kOfR)  // no longer read otherwise
      y_sum.each([&](float& v, int i, int j) { products[row + i][col + j] = v; });
    put([&](int e, int i, int, int j) { return w_sum.of[e][i] * keys.norm_k[j]; });
    add(dq, std::false_type(), keys.k);
    if constexpr (kOfR) {
      put([&](int e, int n, int i, int j) { return (y_sum.of[e][n] + products[j][i]) * keys.norm_k[j]; });
      add(dk, std::false_type(), keys.k);
    }
    put([&](int e, int n, int i, int) { return w_sum.of[e][n] * keys.norm_q[i]; });
    add(dk, std::true_type(), keys.q);
  }

  /// Writes dQ and dK: the norms' derivatives.
  __device__ void write(const Chunk& chunk, int key_head) {
    using T = typename Kd::Number;
    const Plan& plan = args.plan;
    const auto finish = [&](Panel<kOfK>& of, const auto& raw, const float* norm, auto& by_row, void* out) {
      float dots[2] = {};
      const auto each_pair = [&](auto f) {
#pragma unroll
        for (int down = 0; down < 2; ++down)
#pragma unroll
          for (int e = 0; e < kOfK / 8; ++e) {
            const int token = row + lane / 4 + 8 * down, k = k_col + 8 * e + lane % 4 * 2;
            f(down, token, k, of.of[e][2 * down], of.of[e][2 * down + 1], pair_at(raw, token, k));
          }
      };
      if (plan.a.eps >= 0)
        each_pair([&](int down, int, int, float x, float y, float2 raw) { dots[down] += x * raw.x + y * raw.y; });
      by_row.put(dots[0], dots[1], row, part);
      sync();
      T* to = static_cast<T*>(out) + (chunk.at(plan) * plan.a.key_heads + key_head) * plan.a.K;
      each_pair([&](int, int token, int k, float x, float y, float2 raw) {
        if (token >= chunk.n || k >= plan.a.K) return;
        const float r = norm[token], onto = r * r * by_row.total(token);
        const float2 d{r * (x - raw.x * onto), r * (y - raw.y * onto)};
        T* at = to + int64_t(token) * plan.a.key_heads * plan.a.K + k;
        if (sizeof(T) == 2 && plan.a.K % 2 == 0) {
          if constexpr (sizeof(T) == 2) *reinterpret_cast<unsigned*>(at) = to_word<T>(d.x, d.y);
        } else {
          at[0] = T(d.x);
          if (k + 1 < plan.a.K) at[1] = T(d.y);
        }
      });
    };
    finish(dq, keys.q, keys.norm_q, sums.q, args.dq);
    finish(dk, keys.k, keys.norm_k, sums.k, args.dk);
  }
};

/// A thread's part of the product of S and dS', by kThreads threads.
template <int kThreads, int kRows, int kCols, class Tile>
__device__ float inner_product(const Tile& s, const Tile& ds) {
  constexpr int kEights = kCols / 8;
  float product = 0;
#pragma unroll
  for (int first = 0; first < kRows * kEights; first += kThreads) {
    const int i = first + int(threadIdx.x), row = i / kEights, col = i % kEights * 8;
    if (first + kThreads > kRows * kEights && i >= kRows * kEights) break;
    float2 before[4] = {}, after[4] = {};
#pragma unroll
    for (int t = Tile::kTerms - 1; t >= 0; --t) {
      const auto add = [](float2(&to)[4], const bfloat16* from) {
        const uint4 words = *reinterpret_cast<const uint4*>(from);
        const unsigned word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          const float2 of = to_floats<bfloat16>(word[n]);
          to[n].x += of.x, to[n].y += of.y;
        }
      };
      add(before, s.at(row, col, t)), add(after, ds.at(row, col, t));
    }
#pragma unroll
    for (int n = 0; n < 4; ++n) product += before[n].x * after[n].x + before[n].y * after[n].y;
  }
  return product;
}

/// dQ, dK, dg, dβ and dskip of the chunks of a key head: one block for each chunk, some warps for 16 of its tokens,
/// each with a part of the columns; the heads of the key head one after the other. Slices of v come while the one
/// before is used. The limit is latency: there are 8 or 16 warps on a multiprocessor.
template <class Kd, bool kRoom>
__global__ void __launch_bounds__(Gradient<Kd, kRoom>::kThreads, 1) gradient_kernel(GradientArgs args) {
  await_previous();
  using G = Gradient<Kd, kRoom>;
  using W = Warps<Kd>;
  constexpr int C = Kd::C, K = Kd::K, kMade = Kd::kMade, kRaw = Kd::kRaw;
  using Part = WarpGradient<Kd, W::kAcross, Keys<Kd>, AllThreads>;
  constexpr int kOfC = Part::kOfC, kOfK = Part::kOfK;  // columns of a warp
  const Plan& plan = args.plan;
  __shared__ GradientSums<Kd, W::kAcross> sums;
  char* shared = shared_memory<char>();
  const Keys<Kd> keys(shared);
  auto* products = reinterpret_cast<float (*)[kProductRow<Kd>]>(shared);
  char* const region = shared + C * kProductRow<Kd> * 4;
  const int warp = threadIdx.x / 32, row = warp / W::kAcross * 16;
  const int count = count_of(plan), key_heads = int(plan.a.key_heads), key_head = blockIdx.x % key_heads,
            step = gridDim.x / key_heads;
  for (int c = blockIdx.x / key_heads; c < count; c += step) {
    const Chunk chunk = chunk_at(plan, c);
    const bool has_state = chunk.has_before(plan), has_after = chunk.has_after(plan, args.after);
    const int wide = plan.V / G::Wide::kCols, phases = wide + (has_state || has_after ? plan.V / G::Narrow::kCols : 0);
    keys.template load<G::kThreads>(plan, chunk, key_head);
    Part part{args, sums, keys, products, row, warp % W::kAcross};
    const int col = part.col, k_col = part.k_col;
    {
      Panel<kOfC> kk, qk;
      keys.products(row, col, kk, qk);
      part.put_products(kk, qk);
    }
    for (int h = 0; h < plan.group; ++h) {
      const int head = key_head * plan.group + h;
      __syncthreads();
      if (warp == 0) sums.decays[0].load(plan, chunk, head);
      __syncthreads();
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
        Panel<kOfC> w, y;
        w.clear(), y.clear();
        each_slice(std::type_identity<typename G::Wide>(), 0, wide, [&](const auto& slice) {
          if (!part.has_columns) return;
#pragma unroll
          for (int k = 0; k < G::Wide::kCols; k += 16) {
            Left<kRaw> of_dout;
            Left<kMade> of_r;
            of_dout.template load<false>(slice.dout, row, k);
            of_r.template load<false>(slice.r, row, k);
            multiply<true, kOfC / 8>(w.of, of_dout, slice.d, k, col);
            multiply<true, kOfC / 8>(y.of, of_r, slice.d, k, col);
          }
        });
        part.add_matrices(w, y);
      }
      Panel<kOfK> of_q, of_k, of_end;
      of_q.clear(), of_k.clear(), of_end.clear();
      float product = 0;  // of S and dS', this thread's part
      each_slice(std::type_identity<typename G::Narrow>(), wide, phases, [&](const auto& slice) {
#pragma unroll
        for (int k = 0; k < G::Narrow::kCols; k += 16) {
          if (has_state) {
            Left<kRaw> of_dout;
            Left<kMade> of_r;
            of_dout.template load<false>(slice.dout, row, k);
            of_r.template load<false>(slice.r, row, k);
            multiply<false, kOfK / 8>(of_q.of, of_dout, slice.s, k, k_col);
            if (plan.a.delta) multiply<false, kOfK / 8>(of_k.of, of_r, slice.s, k, k_col);
          }
          if (has_after) {
            Left<kMade> of_d;
            of_d.template load<false>(slice.d, row, k);
            multiply<false, kOfK / 8>(of_end.of, of_d, slice.ds, k, k_col);
          }
        }
        if (has_state && has_after) product += inner_product<G::kThreads, G::Narrow::kCols, K>(slice.s, slice.ds);
      });
      part.add_states(of_q, of_k, of_end, product);
      part.write_gates(chunk, head);
    }
    const typename G::Matrix matrix{reinterpret_cast<bfloat16*>(region)};
    part.add_products(matrix, [&](Panel<kOfK>& to, auto transposed, const auto& rows) {
      __syncthreads();
#pragma unroll
      for (int k = 0; k < C; k += 16) {
        Left<kMade> left;
        left.template load<decltype(transposed)::value>(matrix, row, k);
        multiply<false, kOfK / 8>(to.of, left, rows, k, k_col);
      }
      __syncthreads();
    });
    part.write(chunk, key_head);
    __syncthreads();
  }
}

}  // namespace
}  // namespace liger::cuda::gated_delta_rule
