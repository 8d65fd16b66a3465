#pragma once
// Stands in for liger/core/cuda/launch.h, so that a .cu file can be compiled as C++ and checked where there is no GPU.
// A block is a set of fibers on one thread, switched at barriers; the blocks of a cluster run on a thread each.
#include <setjmp.h>
#include <ucontext.h>
#include <algorithm>
#include <barrier>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include "device.h"
#include "liger/core/kernel.h"

#define __global__
#define __device__
#define __host__
#define __shared__ static thread_local
#define __launch_bounds__(...)
#define __maxnreg__(...)

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
inline thread_local dim3 threadIdx, blockIdx, blockDim, gridDim;

using std::max;
using std::min;
inline float rsqrtf(float x) { return 1 / std::sqrt(x); }
inline unsigned __float_as_uint(float x) {
  unsigned u;
  std::memcpy(&u, &x, 4);
  return u;
}
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __expf(float x) { return std::exp(x); }
inline float __logf(float x) { return std::log(x); }
inline float __fdividef(float a, float b) { return a / b; }

namespace liger::emulation {

/// A barrier among fibers of one thread: whoever comes early lets the others run.
struct Barrier {
  int expected = 0, arrived = 0;
  uint64_t generation = 0;
  void wait();
};

/// A context begins a fiber; from then on it is left and entered by a jump, which needs no system call.
struct Fiber {
  ucontext_t context;
  jmp_buf jump;
  bool started = false;
  dim3 thread;
  bool done = false;
  std::unique_ptr<char[]> stack;
};

inline constexpr size_t kStack = 128 * 1024;

struct Block {
  jmp_buf scheduler;
  std::vector<Fiber> fibers;
  Fiber* current = nullptr;
  Barrier all;
  std::vector<Barrier> warps;
  std::vector<uint64_t> lanes;  // what each thread of the block shows to its warp
  std::vector<float4> shared;   // dynamic shared memory
  void (*entry)(void*) = nullptr;
  void* closure = nullptr;
};
inline thread_local Block* block;

inline void switch_away() {
  if (!_setjmp(block->current->jump)) _longjmp(block->scheduler, 1);
}

inline void enter(Fiber& f) {
  if (_setjmp(block->scheduler)) return;
  if (f.started) _longjmp(f.jump, 1);
  f.started = true;
  setcontext(&f.context);
}

inline void Barrier::wait() {
  const uint64_t mine = generation;
  if (++arrived == expected) arrived = 0, ++generation;
  while (generation == mine) switch_away();
}

inline int linear_thread() { return int(threadIdx.y * blockDim.x + threadIdx.x); }

inline void fiber_main() {
  Block* b = block;
  b->entry(b->closure);
  b->current->done = true;
  _longjmp(b->scheduler, 1);
}

/// Runs one block of the grid on this thread.
template <class F>
void run_block(F body, dim3 index, dim3 grid, dim3 threads, int shared_bytes) {
  Block b;
  const int n = int(threads.x * threads.y);
  b.fibers.resize(n);
  b.all.expected = n;
  b.warps.resize((n + 31) / 32);
  for (int i = 0; i < n; ++i) ++b.warps[i / 32].expected;
  b.lanes.resize(n);
  b.shared.resize((shared_bytes + 15) / 16);
  std::memset(b.shared.data(), 0x7f, b.shared.size() * 16);  // a read before a write shows
  b.entry = [](void* f) { (*static_cast<F*>(f))(); };
  b.closure = &body;
  block = &b;
  blockIdx = index, gridDim = grid, blockDim = threads;
  static thread_local std::vector<std::unique_ptr<char[]>> stacks;
  while (int(stacks.size()) < n) stacks.push_back(std::make_unique<char[]>(kStack));
  for (int i = 0; i < n; ++i) {
    auto& f = b.fibers[i];
    f.thread = dim3(i % threads.x, i / threads.x);
    getcontext(&f.context);
    f.context.uc_stack.ss_sp = stacks[i].get();
    f.context.uc_stack.ss_size = kStack;
    f.context.uc_link = nullptr;
    makecontext(&f.context, fiber_main, 0);
  }
  for (int alive = n; alive > 0;) {
    alive = 0;
    for (auto& f : b.fibers) {
      if (f.done) continue;
      b.current = &f;
      threadIdx = f.thread;
      enter(f);
      alive += !f.done;
    }
  }
  block = nullptr;
}

/// The blocks of the cluster that runs now, for barriers and for each other's shared memory.
struct Cluster {
  std::barrier<> barrier;
  std::vector<char*> bases;  // the address of each thread's `base`
  explicit Cluster(int n) : barrier(n), bases(n) {}
};
inline thread_local char base;
inline thread_local Cluster* cluster;
inline thread_local int cluster_rank;

}  // namespace liger::emulation

inline void __syncthreads() { liger::emulation::block->all.wait(); }
/// Whether the predicate of any of a block's threads holds.
inline int __syncthreads_or(int mine) {
  auto& b = *liger::emulation::block;
  b.lanes[liger::emulation::linear_thread()] = mine != 0;
  b.all.wait();
  bool any = false;
  for (const uint64_t of_thread : b.lanes) any = any || of_thread;
  b.all.wait();
  return any;
}
inline void __threadfence() {}
inline void __syncwarp() { liger::emulation::block->warps[liger::emulation::linear_thread() / 32].wait(); }

template <class V>
V __ldcg(const V* p) {
  return *p;
}

template <class V>
V __shfl_xor_sync(unsigned, V v, int mask) {
  static_assert(sizeof(V) <= 8);
  auto& b = *liger::emulation::block;
  const int self = liger::emulation::linear_thread();
  std::memcpy(&b.lanes[self], &v, sizeof(V));
  b.warps[self / 32].wait();
  V other;
  std::memcpy(&other, &b.lanes[self ^ mask], sizeof(V));
  b.warps[self / 32].wait();
  return other;
}

/// The value that lane `from` of this thread's warp gives.
template <class V>
V __shfl_sync(unsigned, V v, int from) {
  return __shfl_xor_sync(~0u, v, liger::emulation::linear_thread() % 32 ^ from);
}

/// A block's threads take turns on one thread, and so do the blocks of a grid without clusters.
inline int atomicAdd(int* sum, int v) { return std::exchange(*sum, *sum + v); }

inline int __dp4a(int a, int b, int sum) {
  for (int i = 0; i < 4; ++i) sum += int8_t(a >> 8 * i) * int8_t(b >> 8 * i);
  return sum;
}

template <class V>
void __stcs(V* to, V v) {
  *to = v;
}

inline unsigned __ballot_sync(unsigned, bool mine) {
  unsigned lanes = 0;
  for (int lane = 0; lane < 32; ++lane) lanes |= unsigned(__shfl_sync(~0u, int(mine), lane)) << lane;
  return lanes;
}

inline int __popc(unsigned v) { return __builtin_popcount(v); }

inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned by) {
  return unsigned((uint64_t(high) << 32 | low) >> by % 32);
}

inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selectors) {
  const uint64_t bytes = uint64_t(b) << 32 | a;
  unsigned chosen = 0;
  for (int i = 0; i < 4; ++i) chosen |= unsigned(bytes >> 8 * (selectors >> 4 * i & 7) & 0xff) << 8 * i;
  return chosen;
}

namespace liger::cuda {

inline constexpr Backend kBackend = kCPU;  // this library's CPU tensors run these kernels
inline int rank() { return 9; }

using half = c10::Half;
using bfloat16 = c10::BFloat16;

struct Grid {
  int64_t blocks;
  dim3 threads;
  int shared_bytes = 0;
  int cluster = 1;
};

inline int current_device() { return 0; }
inline bool has_code() { return true; }
inline bool has_byte_mma(bool floats) { return emulation::device().has_byte_mma(floats); }
inline int multiprocessors(int) { return 2; }
inline int shared_bytes() { return emulation::device().shared_kib * 1024; }
inline int shared_bytes_of_block() { return emulation::device().shared_kib_of_block * 1024 - 3072; }
inline bool has_clusters() { return emulation::device().has_clusters(); }
inline int clusters_at_once(int cluster, int = 0) { return has_clusters() && cluster > 2 ? 1 : 2 / cluster; }
inline void clear(void* p, int64_t bytes, Stream) { std::memset(p, 0, size_t(bytes)); }
inline bool capturing(Stream) { return false; }

template <class... P>
void launch(void (*kernel)(P...), const Grid& grid, Stream, const P&... args) {
  if (grid.blocks == 0) return;
  emulation::check_launch(emulation::device(), int(grid.threads.x * grid.threads.y), grid.shared_bytes, grid.cluster);
  if (grid.threads.x * grid.threads.y % 32 != 0) throw std::runtime_error("emulation: a block of half a warp");
  if (grid.blocks % grid.cluster != 0) throw std::runtime_error("emulation: a grid of half a cluster");
  const auto body = [&] { kernel(args...); };
  const dim3 blocks(unsigned(grid.blocks));
  for (int64_t first = 0; first < grid.blocks; first += grid.cluster) {
    emulation::Cluster cluster(grid.cluster);
    const auto run = [&](int rank) {
      emulation::cluster = &cluster, emulation::cluster_rank = rank;
      cluster.bases[rank] = &emulation::base;
      emulation::run_block(body, dim3(unsigned(first + rank)), blocks, grid.threads, grid.shared_bytes);
    };
    if (grid.cluster == 1) {
      run(0);
      continue;
    }
    std::vector<std::thread> pool;
    for (int rank = 0; rank < grid.cluster; ++rank) pool.emplace_back(run, rank);
    for (auto& t : pool) t.join();
  }
}

template <class T>
T* shared_memory() {
  return reinterpret_cast<T*>(emulation::block->shared.data());
}

inline int shared_bytes_here() { return int(emulation::block->shared.size() * sizeof(float4)); }

template <class T>
float2 to_floats(unsigned word) {
  T pair[2];
  std::memcpy(pair, &word, 4);
  return {float(pair[0]), float(pair[1])};
}

template <class T>
unsigned to_word(float low, float high) {
  const T pair[2] = {T(low), T(high)};
  unsigned word;
  std::memcpy(&word, pair, 4);
  return word;
}

inline void store16(void* p, uint4 v) { *static_cast<uint4*>(p) = v; }
inline void await_previous() {}

template <class V>
void forget(V&) {}
inline void prefetch(const void*) {}

template <class T>
unsigned multiply_words(unsigned a, unsigned b) {
  const float2 x = to_floats<T>(a), y = to_floats<T>(b);
  return to_word<T>(x.x * y.x, x.y * y.y);
}

template <class T>
unsigned max_words(unsigned a, unsigned b) {
  const float2 x = to_floats<T>(a), y = to_floats<T>(b);
  return to_word<T>(std::fmax(x.x, y.x), std::fmax(x.y, y.y));
}

[[noreturn]] inline void fail_index(const char* what, int64_t index, int64_t size) {
  std::fprintf(stderr, "liger: %s %lld is outside [0, %lld)\n", what, (long long)index, (long long)size);
  std::abort();
}

[[noreturn]] inline void fail_label(int64_t label, int64_t classes) {
  std::fprintf(stderr, "liger: label %lld is outside [0, %lld) and not ignore_index\n", (long long)label,
               (long long)classes);
  std::abort();
}

}  // namespace liger::cuda
