#include "liger/ops/router/logits.cuh"

namespace liger::cuda::route {
namespace {

using namespace router;

/// A token's groups of experts, those that are kept; all of them where they are not `needed`. Lanes take turns; all
/// threads of a block must make it together.
class Groups {
 public:
  static int shared_floats(const RouteForward& a) { return a.groups > 1 ? 2 * int(a.groups) : 0; }

  template <class Key>
  __device__ Groups(const RouteForward& a, bool needed, float* shared, const Key& key)
      : size_(int(a.experts / a.groups)) {
    if (a.groups == 1 || !needed) return;
    float* const scores = shared + threadIdx.y * 2 * a.groups;
    float* const kept = scores + a.groups;
    kept_ = kept;
    for (int g = threadIdx.x; g < a.groups; g += blockDim.x) {
      GroupScore score;
      for (int e = g * size_; e < (g + 1) * size_; ++e) score.push(key(e));
      scores[g] = score.value(a.group_best);
    }
    __syncthreads();
    for (int g = threadIdx.x; g < a.groups; g += blockDim.x)
      kept[g] = is_kept(scores, a.groups, a.kept_groups, g) ? 1 : 0;
    __syncthreads();
  }

  __device__ bool has(int e) const { return !kept_ || kept_[e / size_] > 0; }

 private:
  int size_;
  const float* kept_ = nullptr;
};

/// Whether the experts of the team's token are given. All lanes of a warp must ask together.
template <class Row>
__device__ bool is_given(const RouteForward& a, int64_t token, const Row& z) {
  if (!a.given.of) return false;
  int wrong = 0;
  for (int64_t i = z.lane; i < a.k; i += z.lanes) wrong |= !a.given.is_new(token, i, a.experts);
  return reduce_lanes<Largest<int>>(wrong, z.lanes) == 0;
}

/// A team of lanes has a token: it finds the k largest keys one after the other, each by a reduction over its lanes,
/// and then makes their weights. The limit is the latency of the reductions: a token's logits are read once. A block
/// all of whose tokens have given experts looks for none.
template <class T, int kHeld>
__global__ void __launch_bounds__(256) forward_kernel(RouteForward a) {
  await_previous();
  int* const shared = shared_memory<int>();
  Counts counts(a.counts, shared, a.experts);
  const int64_t at = int64_t(blockIdx.x) * blockDim.y + threadIdx.y, token = at < a.tokens ? at : a.tokens - 1;
  const Logits<T, kHeld> z(a.z, token, a.stride, a.experts);
  const Scores score(a.form.score, z);
  const auto key = [&](int e, float v) { return a.by_score() ? score(v) + (a.bias ? a.bias[e] : 0) : v; };
  const bool given = is_given(a, token, z), choose = !a.given.of || __syncthreads_or(!given);
  const Groups groups(a, choose, reinterpret_cast<float*>(shared + Counts::shared_ints(a.experts)),
                      [&](int e) { return key(e, z[e]); });
  const auto ordered = [&](int e, float v) { return groups.has(e) ? order_of(key(e, v)) : kNoKey; };
  const auto keys = keys_of<kHeld>(z, ordered);
  int64_t last = 0;
  float sum = 0;
  for (int64_t i = 0; i < a.k; ++i) {
    if (choose) last = i == 0 ? keys.next() : keys.next(last);
    const int64_t e = given ? a.given(token, i) : expert_of(last);
    sum += score(z[e]);
    if (z.lane == 0 && at < a.tokens) a.index[token * a.k + i] = e;
  }
  __syncthreads();  // indices, and counts that are 0
  const float by = a.form.divisor(sum);
  for (int64_t i = z.lane; i < a.k && at < a.tokens; i += z.lanes) {
    const int64_t e = a.index[token * a.k + i];
    write_number(a.weights, a.weights_dtype, token * a.k + i, score(z[e]) / by * a.form.scale);
    counts.add(e);
  }
  __syncthreads();
  counts.finish();
}

/// dz. A team of lanes has a token. The limit is memory: logits are read and their gradients written once, of the
/// chosen ones twice.
template <class T, int kHeld>
__global__ void __launch_bounds__(256) backward_kernel(RouteBackward a) {
  await_previous();
  const int64_t at = int64_t(blockIdx.x) * blockDim.y + threadIdx.y, token = at < a.tokens ? at : a.tokens - 1;
  const Logits<T, kHeld> z(a.z, token, a.stride, a.experts);
  const Scores score(a.form.score, z);
  const auto for_chosen = [&](auto f) {
    for (int64_t i = token * a.k + z.lane; i < (token + 1) * a.k; i += z.lanes)
      if (const int64_t e = a.index[i]; e >= 0 && e < a.experts) f(e, z[e], number(a.dweights, i));
  };
  Sums<2>::Value sums{};
  for_chosen([&](int64_t, float v, float g) { sums.v[0] += score(v), sums.v[1] += g * score(v); });
  sums = reduce_lanes<Sums<2>>(sums, z.lanes);
  const RouterSlope slope(a.form, sums.v[0], sums.v[1]);
  T* const dz = static_cast<T*>(a.dz) + token * a.experts;
  if (at < a.tokens) z.each([&](int e, float v, int) { dz[e] = T(slope.other(score(v))); });
  __syncthreads();  // another lane may have written what this one overwrites
  if (at < a.tokens) for_chosen([&](int64_t e, float v, float g) { dz[e] = T(slope.chosen(v, score(v), g)); });
}

}  // namespace

LIGER_REGISTER(route_forward, [](const RouteForward& a, Stream s) {
  clear(a.counts, a.experts * 4, s);
  dispatch(a.dtype, [&]<class T>() {
    dispatch_team(a.experts, [&]<int kHeld>(dim3 threads) {
      const int floats = Counts::shared_ints(a.experts) + int(threads.y) * Groups::shared_floats(a);
      launch(forward_kernel<T, kHeld>,
             {.blocks = ceil_div(a.tokens, threads.y), .threads = threads, .shared_bytes = floats * 4}, s, a);
    });
  });
});
LIGER_REGISTER(route_backward, [](const RouteBackward& a, Stream s) {
  dispatch(a.dtype, [&]<class T>() {
    dispatch_team(a.experts, [&]<int kHeld>(dim3 threads) {
      launch(backward_kernel<T, kHeld>, {.blocks = ceil_div(a.tokens, threads.y), .threads = threads}, s, a);
    });
  });
});

}  // namespace liger::cuda::route
