#pragma once
// The kernel that makes the gradients of all chunks at once, for a gate of each channel.
#include "liger/ops/mixers/channel_delta_rule.cuh"
#include "liger/ops/mixers/gated_delta_rule_gradient.cuh"

namespace liger::cuda::gated_delta_rule {
namespace {

template <class Kd>
struct ChannelGradient {
  static constexpr int C = Kd::C, K = Kd::K, kThreads = Warps<Kd>::kThreads;
  using Wide = Slice<Kd, false>;
  using Narrow = Slice<Kd, true>;
  static constexpr int kRow = C + 1, kSum = K + 8;  // floats of a row of W and Y, and of what states give
  static constexpr int kStage = Wide::kBytes > Narrow::kBytes ? Wide::kBytes : Narrow::kBytes;
  static constexpr int kParts = kThreads / (K / 2);  // of a column of states, in ⟨S, dS'⟩
  static_assert(kThreads % (K / 2) == 0 && kParts * K * 4 <= kStage);
  static constexpr int bytes(int stages) {
    return ChannelRows<Kd>::kBytes + (2 * C * kRow + 3 * C * kSum) * 4 + stages * kStage;
  }
};

/// A pair of a tile's numbers, of all terms.
template <class Tile>
__device__ float2 sum_of_terms(const Tile& tile, int row, int col) {
  float2 sum{0, 0};
#pragma unroll
  for (int t = Tile::kTerms - 1; t >= 0; --t) {
    const float2 v = to_floats<bfloat16>(*reinterpret_cast<const unsigned*>(tile.at(row, col, t)));
    sum.x += v.x, sum.y += v.y;
  }
  return sum;
}

/// dQ, dK, dg and dβ of the chunks of a key head: one block for each chunk, the heads of the key head one after the
/// other. Tensor cores make W, Y and what states give; what tokens give each other is summed by a warp for each row and
/// column, whose gradients stay in its registers. Slices of v come while the one before is used.
template <class Kd>
__global__ void __launch_bounds__(ChannelGradient<Kd>::kThreads, 1) channel_gradient_kernel(GradientArgs args) {
  await_previous();
  using G = ChannelGradient<Kd>;
  using W = Warps<Kd>;
  using T = typename Kd::Number;
  using Own = Lane<Kd>;
  constexpr int C = Kd::C, K = Kd::K, kMade = Kd::kMade, kRaw = Kd::kRaw;
  constexpr int kOfK = K / W::kAcross < 16 ? 16 : K / W::kAcross;  // columns of a warp
  constexpr int kOwnRows = C / W::kAll;
  const Plan& plan = args.plan;
  char* shared = shared_memory<char>();
  const ChannelRows<Kd> rows(shared);
  auto* w = reinterpret_cast<float (*)[G::kRow]>(shared);
  auto* y = w + C;
  auto* by_q = reinterpret_cast<float (*)[G::kSum]>(y + C);  // dO Sᵀ, and then dG
  auto *by_r = by_q + C, *by_d = by_r + C;                   // R Sᵀ; D dS'ᵀ, and then what the last token's gates get
  char* const region = reinterpret_cast<char*>(by_d + C);
  auto* inner = reinterpret_cast<float (*)[K]>(region);  // parts of ⟨S, dS'⟩, where slices were
  const int warp = threadIdx.x / kLanes, row = warp / W::kAcross * 16, k_col = warp % W::kAcross * kOfK;
  const int col = warp % W::kAcross * 16;  // of W and Y
  const bool has_matrix = col <= row, has_columns = k_col < K;
  const int count = count_of(plan), key_heads = int(plan.a.key_heads), key_head = blockIdx.x % key_heads,
            step = gridDim.x / key_heads, heads = int(plan.a.heads), width = int(plan.a.K);
  for (int c = blockIdx.x / key_heads; c < count; c += step) {
    const Chunk chunk = chunk_at(plan, c);
    const int64_t first = chunk.at(plan);
    const bool has_state = chunk.has_before(plan), has_after = chunk.has_after(plan, args.after);
    const int wide = plan.V / G::Wide::kCols, phases = wide + (has_state || has_after ? plan.V / G::Narrow::kCols : 0);
    Own dq[kOwnRows], dk[kOwnRows];
#pragma unroll
    for (int m = 0; m < kOwnRows; ++m) dq[m] = dk[m] = Own::same(0);
    for (int h = 0; h < plan.group; ++h) {
      const int head = key_head * plan.group + h;
      rows.template load<G::kThreads>(plan, chunk, head);
      const auto stage_of = [&](int phase) { return region + (args.stages == 2 ? phase % 2 * G::kStage : 0); };
      int loaded = 0;
      const auto each_slice = [&]<class S>(std::type_identity<S>, int begin, int end, auto use) {
        for (int phase = begin; phase < end; ++phase) {
          for (; loaded < min(phase + args.stages, phases); ++loaded)
            if (loaded < wide)
              typename G::Wide(stage_of(loaded)).load(args, chunk, head, loaded * G::Wide::kCols, false, false);
            else
              typename G::Narrow(stage_of(loaded))
                  .load(args, chunk, head, (loaded - wide) * G::Narrow::kCols, has_state, has_after);
          await_copies(loaded - phase - 1);
          __syncthreads();
          use(S(stage_of(phase)));
          __syncthreads();
        }
      };
      {
        Panel<16> of_w, of_y;
        of_w.clear(), of_y.clear();
        each_slice(std::type_identity<typename G::Wide>(), 0, wide, [&](const auto& slice) {
          if (!has_matrix) return;
#pragma unroll
          for (int k = 0; k < G::Wide::kCols; k += 16) {
            Left<kRaw> of_dout;
            Left<kMade> of_r;
            of_dout.template load<false>(slice.dout, row, k);
            of_r.template load<false>(slice.r, row, k);
            multiply<true, 2>(of_w.of, of_dout, slice.d, k, col);
            multiply<true, 2>(of_y.of, of_r, slice.d, k, col);
          }
        });
        if (has_matrix) {
          of_w.each([&](float& v, int i, int j) {
            i += row, j += col;
            w[i][j] = plan.a.scale * v * rows.beta[j];
          });
          of_y.each([&](float& v, int i, int j) {
            i += row, j += col;
            if (i == j && i < chunk.n) args.dbeta[(first + i) * heads + head] = v;
            y[i][j] = plan.a.delta ? -v * rows.beta[i] * rows.beta[j] : 0.f;
          });
        }
      }
      Panel<kOfK> of_q, of_r, of_d;
      of_q.clear(), of_r.clear(), of_d.clear();
      float2 product{0, 0};  // of S and dS': this thread's part of two columns
      const int pair = threadIdx.x % (K / 2), part = threadIdx.x / (K / 2);
      each_slice(std::type_identity<typename G::Narrow>(), wide, phases, [&](const auto& slice) {
        if (has_columns)
#pragma unroll
          for (int k = 0; k < G::Narrow::kCols; k += 16) {
            if (has_state) {
              Left<kRaw> dout;
              dout.template load<false>(slice.dout, row, k);
              multiply<false, kOfK / 8>(of_q.of, dout, slice.s, k, k_col);
              if (plan.a.delta) {
                Left<kMade> r;
                r.template load<false>(slice.r, row, k);
                multiply<false, kOfK / 8>(of_r.of, r, slice.s, k, k_col);
              }
            }
            if (has_after) {
              Left<kMade> d;
              d.template load<false>(slice.d, row, k);
              multiply<false, kOfK / 8>(of_d.of, d, slice.ds, k, k_col);
            }
          }
        if (has_state && has_after)
          for (int i = part; i < G::Narrow::kCols; i += G::kParts) {
            const float2 before = sum_of_terms(slice.s, i, 2 * pair), after = sum_of_terms(slice.ds, i, 2 * pair);
            product.x += before.x * after.x, product.y += before.y * after.y;
          }
      });
      inner[part][2 * pair] = product.x, inner[part][2 * pair + 1] = product.y;
      if (has_columns) {
        of_q.each([&](float& v, int i, int j) { by_q[row + i][k_col + j] = plan.a.scale * v; });
        of_r.each([&](float& v, int i, int j) { by_r[row + i][k_col + j] = v; });
        of_d.each([&](float& v, int i, int j) { by_d[row + i][k_col + j] = v; });
      }
      __syncthreads();
#pragma unroll
      for (int m = 0; m < kOwnRows; ++m) {
        const int i = warp + m * W::kAll;
        const auto q = Own::read(rows.q + i * K), k = Own::read(rows.k + i * K);
        // What the row takes from the tokens before it, and the column from those after it.
        auto of_w = Own::same(0), of_y = of_w, column = of_w, start = Own::read(rows.decay + i * K), end = Own::same(1);
#pragma unroll 2
        for (int j = i - 1; j >= 0; --j) {
          const auto key = Own::read(rows.k + j * K).times(start);
          Own::each([&](int e) { of_w.of[e] += w[i][j] * key.of[e], of_y.of[e] += y[i][j] * key.of[e]; });
          start = start.times(Own::read(rows.decay + j * K));
        }
#pragma unroll 2
        for (int j = i + 1; j < C; ++j) {
          end = end.times(Own::read(rows.decay + j * K));
          const auto query = Own::read(rows.q + j * K), key = Own::read(rows.k + j * K);
          Own::each([&](int e) { column.of[e] += (w[j][i] * query.of[e] + y[j][i] * key.of[e]) * end.of[e]; });
        }
        const float beta = rows.beta[i], own = w[i][i];
        const auto of_state = Own::read(by_q[i]).times(start), at_end = Own::read(by_d[i]).times(end, beta),
                   at_start = Own::read(by_r[i]).times(start, plan.a.delta ? beta : 0.f);
        Own dg, ends;
        Own::each([&](int e) {
          const float of_q = of_w.of[e] + of_state.of[e];
          dg.of[e] = q.of[e] * of_q + k.of[e] * (of_y.of[e] - column.of[e] - at_end.of[e] - at_start.of[e]);
          ends.of[e] = k.of[e] * at_end.of[e];
          // A token's own key, which does not decay, is in no sum for the gates.
          dq[m].of[e] += of_q + own * k.of[e];
          dk[m].of[e] += of_y.of[e] + column.of[e] + own * q.of[e] + at_end.of[e] - at_start.of[e];
        });
        dg.write(by_q[i]), ends.write(by_d[i]);
      }
      __syncthreads();
      for (int d = threadIdx.x; d < width; d += G::kThreads) {
        // What all tokens' decays to the end have in common.
        float sum = 0, kept = 1;
        for (int i = 0; i < G::kParts; ++i) sum += inner[i][d];
        for (int i = 0; i < C; ++i) kept *= rows.decay[i * K + d];
        sum *= kept;
        for (int i = 0; i < chunk.n; ++i) sum += by_d[i][d];
        for (int i = chunk.n - 1; i >= 0; --i) {
          sum += by_q[i][d];
          // What decays before a document's first token is 0.
          args.dg[((first + i) * heads + head) * width + d] = i == 0 && !has_state ? 0.f : sum;
        }
      }
      __syncthreads();
    }
    // The norms' derivatives.
    const auto finish = [&](const Own& of, const float* normed, const float* norm, int i, void* out) {
      const auto x = Own::read(normed + i * K);
      const float onto = plan.a.eps < 0 ? 0.f : x.dot(of);
      Own d;
      Own::each([&](int e) { d.of[e] = norm[i] * (of.of[e] - onto * x.of[e]); });
      if (i < chunk.n) d.store(static_cast<T*>(out) + ((first + i) * key_heads + key_head) * width, width);
    };
#pragma unroll
    for (int m = 0; m < kOwnRows; ++m) {
      const int i = warp + m * W::kAll;
      finish(dq[m], rows.q, rows.norm_q, i, args.dq), finish(dk[m], rows.k, rows.norm_k, i, args.dk);
    }
  }
}

}  // namespace
}  // namespace liger::cuda::gated_delta_rule
