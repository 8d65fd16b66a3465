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
  float *dg, *dbeta;
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

template <class Kd, bool kRoom>
struct Gradient {
  static constexpr int C = Kd::C, kThreads = Warps<Kd>::kThreads;
  using Wide = Slice<Kd, false, kRoom>;
  using Narrow = Slice<Kd, true, kRoom>;
  using Matrix = Tile<Kd::kMade, C, C>;
  static constexpr int kRow = C + 1;
  static constexpr int kStage = Wide::kBytes > Narrow::kBytes ? Wide::kBytes : Narrow::kBytes;
  static constexpr int bytes(int stages) {
    return Keys<Kd>::kBytes + C * kRow * 4 + std::max(stages * kStage, Matrix::kBytes);
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

/// dQ, dK, dg and dβ of the chunks of a key head: one block for each chunk, and some warps for 16 of its tokens, each
/// with a part of the columns; the heads of the key head one after the other. Slices of v come while the one before is
/// used. The limit is latency: there are 8 or 16 warps on a multiprocessor.
template <class Kd, bool kRoom>
__global__ void __launch_bounds__(Gradient<Kd, kRoom>::kThreads, 1) gradient_kernel(GradientArgs args) {
  await_previous();
  using G = Gradient<Kd, kRoom>;
  using T = typename Kd::Number;
  using W = Warps<Kd>;
  constexpr int C = Kd::C, K = Kd::K, kMade = Kd::kMade, kRaw = Kd::kRaw;
  constexpr int kOfC = C / W::kAcross, kOfK = K / W::kAcross;  // columns of a warp
  using Sums = RowSums<C, W::kAcross>;
  const Plan& plan = args.plan;
  __shared__ Decays<C> decays;
  __shared__ float dsum[C], dbeta[C], inner[W::kAll], column_sums[W::kDown][C];
  __shared__ Sums by_q, by_k, by_end, by_z;
  char* shared = shared_memory<char>();
  const Keys<Kd> keys(shared);
  auto* products = reinterpret_cast<float (*)[G::kRow]>(shared);  // q̂ k̂ᵀ, and above its diagonal (k̂ k̂ᵀ)ᵀ
  char* const region = shared + C * G::kRow * 4;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = warp / W::kAcross * 16, part = warp % W::kAcross;
  const int col = part * kOfC, k_col = part * kOfK;
  const bool has_columns = col <= row + 15;  // of this warp's part of a matrix, below the diagonal
  const int count = count_of(plan), key_heads = int(plan.a.key_heads), key_head = blockIdx.x % key_heads,
            step = gridDim.x / key_heads;
  for (int c = blockIdx.x / key_heads; c < count; c += step) {
    const Chunk chunk = chunk_at(plan, c);
    const int64_t first = chunk.at(plan);
    const bool has_state = chunk.has_before(plan), has_after = chunk.has_after(plan, args.after);
    const int wide = plan.V / G::Wide::kCols, phases = wide + (has_state || has_after ? plan.V / G::Narrow::kCols : 0);
    keys.template load<G::kThreads>(plan, chunk, key_head);
    {
      Panel<kOfC> kk, qk;
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
    Panel<kOfK> dq, dk;
    Panel<kOfC> w_sum, y_sum;
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
        Panel<kOfC> w, y;
        w.clear(), y.clear();
        each_slice(std::type_identity<typename G::Wide>(), 0, wide, [&](const auto& slice) {
          if (!has_columns) return;
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
        float low = 0, high = 0;
#pragma unroll
        for (int e = 0; e < kOfC / 8; ++e) {
          float z[4] = {};
          if (col + 8 * e <= row + 15)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              const int q = row + lane / 4 + i / 2 * 8, k = col + 8 * e + lane % 4 * 2 + i % 2;
              const float decay = decays.between(q, k) * decays.beta[k];
              if (q == k) dbeta[q] = y.of[e][i];
              w.of[e][i] *= plan.a.scale * decay;
              y.of[e][i] *= k < q && plan.a.delta ? -decays.beta[q] * decay : 0.f;
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
        by_z.put(low, high, row, part);
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
        const float start = decays.from_start[token], beta = decays.beta[token], to_end = decays.to_end[token] * beta,
                    of_start = plan.a.delta ? start * beta : 0.f;
#pragma unroll
        for (int e = 0; e < kOfK / 8; ++e) {
          const int k = k_col + 8 * e + lane % 4 * 2;
          const float2 q = keys.pair_at(keys.q, token, k), key = keys.pair_at(keys.k, token, k);
#pragma unroll
          for (int right = 0; right < 2; ++right) {
            const int i = 2 * down + right;
            const float of_key = right ? key.y : key.x;
            dots[0][down] += (right ? q.y : q.x) * of_q.of[e][i];
            dots[1][down] += of_key * of_k.of[e][i], dots[2][down] += of_key * of_end.of[e][i];
            dq.of[e][i] += plan.a.scale * start * of_q.of[e][i];
            dk.of[e][i] += to_end * of_end.of[e][i] - of_start * of_k.of[e][i];
          }
        }
      }
      by_q.put(dots[0][0], dots[0][1], row, part);
      by_k.put(dots[1][0], dots[1][1], row, part);
      by_end.put(dots[2][0], dots[2][1], row, part);
      __syncthreads();
      if (const int i = threadIdx.x; i < C) {
        float columns = 0;
        for (const auto& of_rows : column_sums) columns += of_rows[i];
        const float end = decays.to_end[i] * decays.beta[i] * keys.norm_k[i] * by_end.total(i);
        by_end.of[0][i] = end;
        dsum[i] = by_z.total(i) - columns + plan.a.scale * decays.from_start[i] * keys.norm_q[i] * by_q.total(i) - end -
                  (plan.a.delta ? decays.from_start[i] * decays.beta[i] * keys.norm_k[i] * by_k.total(i) : 0.f);
      }
      __syncthreads();
      if (const int i = threadIdx.x; i < chunk.n) {
        // What all tokens' decays to the end have in common.
        float sum = 0;
        for (const float of_warp : inner) sum += of_warp;
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
      for (int e = 0; e < kOfC / 8; ++e)
#pragma unroll
        for (int down = 0; down < 2; ++down) {
          const int i = row + lane / 4 + 8 * down, j = col + 8 * e + lane % 4 * 2;
          write_pair<kMade>(number(e, 2 * down, i, j), number(e, 2 * down + 1, i, j + 1), matrix.at(i, j),
                            G::Matrix::kPlane);
        }
    };
    const auto add_product = [&](Panel<kOfK>& to, auto transposed, const auto& rows) {
      __syncthreads();
#pragma unroll
      for (int k = 0; k < C; k += 16) {
        Left<kMade> left;
        left.template load<decltype(transposed)::value>(matrix, row, k);
        multiply<false, kOfK / 8>(to.of, left, rows, k, k_col);
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
    const auto finish = [&](Panel<kOfK>& of, const auto& raw, const float* norm, Sums& sums, void* out) {
      float dots[2] = {};
      const auto each_pair = [&](auto f) {
#pragma unroll
        for (int down = 0; down < 2; ++down)
#pragma unroll
          for (int e = 0; e < kOfK / 8; ++e) {
            const int token = row + lane / 4 + 8 * down, k = k_col + 8 * e + lane % 4 * 2;
            f(down, token, k, of.of[e][2 * down], of.of[e][2 * down + 1], keys.pair_at(raw, token, k));
          }
      };
      if (plan.a.eps >= 0)
        each_pair([&](int down, int, int, float x, float y, float2 raw) { dots[down] += x * raw.x + y * raw.y; });
      sums.put(dots[0], dots[1], row, part);
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

}  // namespace
}  // namespace liger::cuda::gated_delta_rule
