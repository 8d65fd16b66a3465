#pragma once
#include "liger/core/cuda/dispatch.h"
#include "liger/core/cuda/reduce.cuh"
#include "liger/ops/router/route.h"

// How kernels of routers read a token's logits: by a team of `lanes` neighbouring lanes of a warp, a power of two, that
// has one row of them.

namespace liger::cuda::router {

template <class V>
struct Largest {
  using Value = V;
  __device__ Value operator()(Value a, Value b) const { return a > b ? a : b; }
  __device__ static Value shuffle(Value v, int lane) { return __shfl_xor_sync(~0u, v, lane); }
};

/// A row of logits, of which a lane has every lanes-th: kHeld of them in registers, or with kHeld = 0 any number, read
/// again each time.
template <class T, int kHeld>
struct Logits {
  const T* row;
  int n, lanes, lane;
  float held[kHeld > 0 ? kHeld : 1];

  __device__ Logits(const void* z, int64_t token, int64_t stride, int64_t experts)
      : row(static_cast<const T*>(z) + token * stride), n(int(experts)), lanes(blockDim.x), lane(threadIdx.x) {
    if constexpr (kHeld > 0) each([&](int e, float, int j) { held[j] = float(row[e]); });
  }

  /// f(expert, logit, slot) for each of the lane's.
  template <class F>
  __device__ void each(F f) const {
    if constexpr (kHeld > 0) {
#pragma unroll
      for (int j = 0; j < kHeld; ++j)
        if (const int e = j * lanes + lane; e < n) f(e, held[j], j);
    } else {
      for (int e = lane; e < n; e += lanes) f(e, float(row[e]), 0);
    }
  }

  /// Of an expert that another lane may have.
  __device__ float operator[](int64_t e) const { return float(row[e]); }
};

/// A row's scores. All lanes of a warp must make it together.
struct Scores {
  RouterScore kind;
  float max = 0, sum = 1;

  template <class Row>
  __device__ Scores(RouterScore kind, const Row& z) : kind(kind) {
    if (kind != RouterScore::Softmax) return;
    max = -INFINITY, sum = 0;
    z.each([&](int, float v, int) { max = fmaxf(max, v); });
    max = reduce_lanes<Largest<float>>(max, z.lanes);
    z.each([&](int, float v, int) { sum += expf(v - max); });
    sum = reduce_lanes<Sum>(sum, z.lanes);
  }

  __device__ float operator()(float z) const {
    if (kind == RouterScore::Softmax) return expf(z - max) / sum;
    return kind == RouterScore::Sigmoid ? sigmoid(z) : sqrtf(softplus(z));
  }
};

/// The keys of a lane's experts, as integers (order_of), and which of all lanes' comes next.
template <int kHeld, class Row, class Key>
struct Keys {
  const Row& z;
  const Key& key;
  int held[kHeld > 0 ? kHeld : 1];

  __device__ Keys(const Row& z, const Key& key) : z(z), key(key) {
    if constexpr (kHeld > 0) z.each([&](int e, float v, int j) { held[j] = key(e, v); });
  }

  /// What comes behind `last` (`ranked`), or first. All lanes of a warp must ask together.
  __device__ int64_t next(int64_t last = ranked(std::numeric_limits<int>::max(), -1)) const {
    const int last_key = int(last >> 32), last_expert = int(expert_of(last));
    int best = kNoKey, expert = std::numeric_limits<int>::max();
    z.each([&](int e, float v, int j) {
      const int mine = kHeld > 0 ? held[j] : key(e, v);
      const bool behind = mine < last_key || (mine == last_key && e > last_expert);
      if (behind && mine > best) best = mine, expert = e;  // of equal keys a lane sees the lower number first
    });
    return reduce_lanes<Largest<int64_t>>(ranked(best, expert), z.lanes);
  }
};
template <int kHeld, class Row, class Key>
__device__ Keys<kHeld, Row, Key> keys_of(const Row& z, const Key& key) {
  return {z, key};
}

/// Counts of experts: of a block in shared memory, added to those of all blocks at the end; for many experts the latter
/// at once. Sums of integers do not depend on their order.
struct Counts {
  static constexpr int kMostShared = 8192;
  int *all, *mine;
  int n;

  __host__ __device__ static int shared_ints(int64_t experts) { return experts <= kMostShared ? int(experts) : 0; }

  __device__ Counts(int* all, int* shared, int64_t experts)
      : all(all), mine(shared_ints(experts) > 0 ? shared : all), n(shared_ints(experts)) {
    for_mine([&](int e) { mine[e] = 0; });
  }
  __device__ void add(int64_t e) { atomicAdd(mine + e, 1); }
  /// Behind a barrier.
  __device__ void finish() {
    for_mine([&](int e) {
      if (mine[e] > 0) atomicAdd(all + e, mine[e]);
    });
  }

 private:
  template <class F>
  __device__ void for_mine(F f) {
    for (int e = int(threadIdx.y * blockDim.x + threadIdx.x); e < n; e += int(blockDim.x * blockDim.y)) f(e);
  }
};

/// f.operator()<kHeld>(threads): the lanes of a team, and the teams of a block.
template <class F>
void dispatch_team(int64_t experts, F f) {
  const int held = experts > 32 * 8 ? 16 : 8;
  if (experts > 32 * held) return f.template operator()<0>(dim3(32, 8));
  unsigned lanes = 1;
  while (int64_t(lanes) * held < experts) lanes *= 2;
  if (held == 16) f.template operator()<16>(dim3(lanes, 256 / lanes));
  else f.template operator()<8>(dim3(lanes, 256 / lanes));
}

}  // namespace liger::cuda::router
