#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <mutex>
#include <set>
#include <type_traits>
#include <utility>
#include "liger/core/kernel.h"

extern "C" __device__ void __assertfail(const char* message, const char* file, unsigned line, const char* function,
                                        size_t char_size);

namespace liger::cuda {

inline constexpr Backend kBackend = kCUDA;
inline int rank() { return 0; }

using half = __half;
using bfloat16 = __nv_bfloat16;

inline void check(cudaError_t e) {
  if (e != cudaSuccess) throw std::runtime_error(std::string("CUDA: ") + cudaGetErrorString(e));
}

/// What a launch asks of the device. threads.x threads work on a row, threads.y rows a block.
struct Grid {
  int64_t blocks;
  dim3 threads;
  int shared_bytes = 0;
  int cluster = 1;  // neighbouring blocks that share a row (compute capability 9.0 and newer)
};

inline constexpr int kMaxDevices = 64;

inline int current_device() {
  int device;
  check(cudaGetDevice(&device));
  return device;
}

/// An attribute of a device, asked for once.
template <cudaDeviceAttr kAttribute>
int attribute(int device = current_device()) {
  static int known[kMaxDevices];
  int& value = known[device];
  if (value == 0) check(cudaDeviceGetAttribute(&value, kAttribute, device));
  return value;
}

inline int multiprocessors(int device) { return attribute<cudaDevAttrMultiProcessorCount>(device); }
/// Shared memory of a multiprocessor, and how much of it a block can ask for beside a little of its own.
inline int shared_bytes() { return attribute<cudaDevAttrMaxSharedMemoryPerMultiprocessor>(); }
inline int shared_bytes_of_block() { return attribute<cudaDevAttrMaxSharedMemoryPerBlockOptin>() - 3072; }
inline bool has_clusters() { return attribute<cudaDevAttrComputeCapabilityMajor>() >= 9; }

template <int>
__global__ void nothing_kernel() {}

/// How many clusters of so many blocks run at once, one block a multiprocessor: a cluster must fit into a part of the
/// chip, and not every part has a multiple of its blocks.
inline int clusters_at_once(int cluster, int device = current_device()) {
  if (cluster == 1 || !has_clusters()) return multiprocessors(device) / cluster;
  static int known[kMaxDevices][9];
  int& value = known[device][cluster];
  if (value == 0) {
    cudaLaunchAttribute size{};
    size.id = cudaLaunchAttributeClusterDimension;
    size.val.clusterDim = {unsigned(cluster), 1, 1};
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(unsigned(cluster));
    config.blockDim = dim3(32);
    config.dynamicSmemBytes = attribute<cudaDevAttrMaxSharedMemoryPerBlockOptin>();  // which a multiprocessor has once
    config.attrs = &size;
    config.numAttrs = 1;
    check(cudaFuncSetAttribute(nothing_kernel<0>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               int(config.dynamicSmemBytes)));
    check(cudaOccupancyMaxActiveClusters(&value, nothing_kernel<0>, &config));
  }
  return value;
}

inline bool capturing(Stream s) {
  cudaStreamCaptureStatus status;
  check(cudaStreamIsCapturing(cudaStream_t(s), &status));
  return status != cudaStreamCaptureStatusNone;
}

inline void clear(void* p, int64_t bytes, Stream s) { check(cudaMemsetAsync(p, 0, size_t(bytes), cudaStream_t(s))); }

/// Starts a kernel, whose first words are await_previous(), without waiting for the one before it in the stream.
template <class... P>
void launch(void (*kernel)(P...), const Grid& grid, Stream s, const P&... args) {
  if (grid.blocks == 0) return;
  if (grid.blocks > 2147483647) throw std::runtime_error("liger: more blocks than one launch can have");
  if (grid.shared_bytes > 32 * 1024) {
    // Raised once per kernel and device: a block gets no more than 48 KiB unasked, its static variables among them.
    // Kernels of one signature share this function.
    static std::mutex mutex;
    static std::set<std::pair<const void*, int>> raised;
    const std::lock_guard lock(mutex);
    if (raised.insert({reinterpret_cast<const void*>(kernel), current_device()}).second) {
      cudaFuncAttributes of{};
      check(cudaFuncGetAttributes(&of, kernel));
      check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 attribute<cudaDevAttrMaxSharedMemoryPerBlockOptin>() - int(of.sharedSizeBytes)));
    }
  }
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned(grid.blocks));
  config.blockDim = grid.threads;
  config.dynamicSmemBytes = grid.shared_bytes;
  config.stream = cudaStream_t(s);
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {unsigned(grid.cluster), 1, 1};
  config.attrs = attributes;
  config.numAttrs = has_clusters() ? 1 + (grid.cluster > 1) : 0;
  check(cudaLaunchKernelEx(&config, kernel, args...));
}

/// Waits until the kernels before this one are done and what they wrote can be seen; from then on the next one's blocks
/// may come where there is room for them, and wait here: the end of one kernel and the beginning of the next overlap
/// (compute capability 9.0 and newer).
__device__ inline void await_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

extern __shared__ float4 dynamic_shared[];

/// The block's dynamic shared memory.
template <class T>
__device__ T* shared_memory() {
  return reinterpret_cast<T*>(dynamic_shared);
}

/// Bytes of shared memory that this block has, static and dynamic.
__device__ inline int shared_bytes_here() {
  unsigned bytes;
  asm("mov.u32 %0, %%total_smem_size;" : "=r"(bytes));
  return int(bytes);
}

/// This block's place among the blocks that share its row.
__device__ inline int cluster_rank() {
#if __CUDA_ARCH__ >= 900
  unsigned r;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  return int(r);
#else
  return 0;
#endif
}

__device__ inline int cluster_size() {
#if __CUDA_ARCH__ >= 900
  unsigned n;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(n));
  return int(n);
#else
  return 1;
#endif
}

__device__ inline unsigned shared_address(const void* p) { return unsigned(__cvta_generic_to_shared(p)); }

/// What each block of a cluster has to tell the others, again and again: every block calls this as often. Values are
/// sent into the others' shared memory, where a barrier of the receiver's counts their bytes. (A barrier of the cluster
/// would wait until the whole device sees all that a thread has written, and drop what the multiprocessor has cached:
/// measured, a fifth of a wide norm.) kTurns = 1: once.
template <class V, int kTurns = 2>
class ClusterExchange {
 public:
  __device__ ClusterExchange() {
#if __CUDA_ARCH__ >= 900
    if (cluster_size() == 1) return;
    __shared__ Box mine;
    box_ = &mine;
    if (threadIdx.x == 0) {
      for (uint64_t& barrier : box_->barriers)
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(&barrier)) : "memory");
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
#endif
  }

  /// f(v of each block, in their order). All threads of a block come here with one v.
  template <class F>
  __device__ void operator()(const V& v, F f) {
#if __CUDA_ARCH__ >= 900
    const int size = cluster_size();
    if (size == 1) return f(v);
    if (!open_) asm volatile("barrier.cluster.wait;" ::: "memory");  // until the others' memory is ready
    open_ = true;
    const unsigned barrier = shared_address(&box_->barriers[slot_]);
    if (threadIdx.x == 0)
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(size * int(sizeof(V)))
                   : "memory");
    if (int(threadIdx.x) < size) {
      unsigned to, its_barrier, words[kWords];
      memcpy(words, &v, sizeof(V));
      asm("mapa.shared::cluster.u32 %0, %1, %2;"
          : "=r"(to)
          : "r"(shared_address(&box_->slots[slot_][cluster_rank()])), "r"(threadIdx.x));
      asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(its_barrier) : "r"(barrier), "r"(threadIdx.x));
#pragma unroll
      for (int i = 0; i < kWords; ++i)
        asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(to + 4 * i),
                     "r"(words[i]), "r"(its_barrier)
                     : "memory");
    }
    for (unsigned arrived = 0; !arrived;)
      asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                   : "=r"(arrived)
                   : "r"(barrier), "r"(parities_ >> slot_ & 1)
                   : "memory");
    for (int rank = 0; rank < size; ++rank) f(box_->slots[slot_][rank]);
    if (kTurns > 1)
      parities_ ^= 1u << slot_,
          slot_ ^= 1;  // a block that is ahead writes beside what others still read; further ahead it cannot get
#else
    f(v);
#endif
  }

 private:
  static constexpr int kMost = 8, kWords = sizeof(V) / 4;
  static_assert(sizeof(V) % 4 == 0);
  struct Box {
    uint64_t barriers[kTurns];
    V slots[kTurns][kMost];
  };
  Box* box_ = nullptr;
  unsigned slot_ = 0, parities_ = 0;
  bool open_ = false;
};

/// Two neighbours of a row in one register. They stay so until the arithmetic: an array of 16-bit values would take a
/// register each.
template <class T>
__device__ inline float2 to_floats(unsigned word) {
  if constexpr (std::is_same_v<T, bfloat16>) return {__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u)};
  else return __half22float2(*reinterpret_cast<const __half2*>(&word));
}

template <class T>
__device__ inline unsigned to_word(float low, float high) {
  const auto pair = [&] {
    if constexpr (std::is_same_v<T, bfloat16>) return __floats2bfloat162_rn(low, high);
    else return __floats2half2_rn(low, high);
  }();
  return *reinterpret_cast<const unsigned*>(&pair);
}

/// Writes 16 bytes of global memory in one access, into which the compiler does not always make an assignment (it split
/// those of stream.cuh in four, measured on nvcc 13.0).
__device__ inline void store16(void* p, uint4 v) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(p)), "r"(v.x), "r"(v.y),
               "r"(v.z), "r"(v.w)
               : "memory");
}

/// Copies `bytes` of 16 from global to shared memory, zeros for the rest; a thread's copies are there after
/// copies_done(), or those of all groups that it has closed but the last `pending`, 0 to 3, after await_copies().
/// kNear: through L1. Around it, the L2 is asked for every 64 bytes alone (ncu: four times the requests), which a
/// kernel then waits for (measured: a tenth of cross_entropy and of norms of 65536 columns); but what is on its way
/// takes room there, of which shared memory may leave too little.
template <bool kNear = true>
__device__ void copy_async16(void* shared, const void* global, int bytes = 16) {
#if __CUDA_ARCH__ >= 800
  const unsigned to = shared_address(shared);
  const size_t from = __cvta_generic_to_global(global);
  if (kNear) asm volatile("cp.async.ca.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
  else asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
#endif
}

/// As copy_async16, of 4 bytes, all of them.
__device__ inline void copy_async4(void* shared, const void* global) {
#if __CUDA_ARCH__ >= 800
  const unsigned to = shared_address(shared);
  const size_t from = __cvta_generic_to_global(global);
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
#endif
}

__device__ inline void copies_done() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

__device__ inline void close_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

__device__ inline void await_copies(int pending) {
#if __CUDA_ARCH__ >= 800
  if (pending == 3) asm volatile("cp.async.wait_group 3;" ::: "memory");
  else if (pending == 2) asm volatile("cp.async.wait_group 2;" ::: "memory");
  else if (pending == 1) asm volatile("cp.async.wait_group 1;" ::: "memory");
  else asm volatile("cp.async.wait_group 0;" ::: "memory");
#endif
}

/// What follows from v is computed again after this: in a loop, carrying it along would take registers.
template <class V>
__device__ inline void forget(V& v) {
  if constexpr (sizeof(V) == 4) asm volatile("" : "+r"(reinterpret_cast<unsigned&>(v)));
}

/// p, worked out here and no more: as parts of a sum that each access makes anew it takes several instructions a time.
template <class T>
__device__ inline T* pinned(T* p) {
#ifdef __CUDA_ARCH__
  asm("" : "+l"(p));
  __builtin_assume(__isGlobal(p));
#endif
  return p;
}

/// The product of each neighbour, rounded once.
template <class T>
__device__ inline unsigned multiply_words(unsigned a, unsigned b) {
  using Pair = std::conditional_t<std::is_same_v<T, bfloat16>, __nv_bfloat162, __half2>;
  const Pair p = __hmul2(*reinterpret_cast<const Pair*>(&a), *reinterpret_cast<const Pair*>(&b));
  return *reinterpret_cast<const unsigned*>(&p);
}

/// The larger of each neighbour; of a number and NaN, the number.
template <class T>
__device__ inline unsigned max_words(unsigned a, unsigned b) {
  using Pair = std::conditional_t<std::is_same_v<T, bfloat16>, __nv_bfloat162, __half2>;
  const Pair m = __hmax2(*reinterpret_cast<const Pair*>(&a), *reinterpret_cast<const Pair*>(&b));
  return *reinterpret_cast<const unsigned*>(&m);
}

/// The tensor core's product of a 16 x 32 matrix of unsigned bytes and a 32 x 8 one of signed bytes, added to sum [16 x
/// 8]. With group = lane / 4 and quad = lane % 4: a has rows group, group + 8 in k = 4 quad … + 3, then the same at k +
/// 16; b has column group there; sum has row group in columns 2 quad, + 1, then row group + 8.
__device__ inline void tensor_multiply_add(int (&sum)[4], const unsigned (&a)[4], const int (&b)[2]) {
#if __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(sum[0]), "+r"(sum[1]), "+r"(sum[2]), "+r"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}

/// Four 8 x 8 matrices of 16-bit numbers from shared memory, whose row i of matrix j is where lane 8 j + i says: a lane
/// gets the pair lane % 4 of row lane / 4 of each.
__device__ inline void load_matrices(unsigned (&words)[4], const void* row) {
#if __CUDA_ARCH__ >= 750
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(shared_address(row))
               : "memory");
#endif
}

/// As tensor_multiply_add above for two a and a wider b, whose 8 kEights columns lie in shared memory: 128 bytes of k
/// each, of which chunks of 16 `chunk` and the next are b's; chunk c of column r lies at c ^ r % 8, the columns from a
/// multiple of 1024 bytes on. Four neighbouring warps come here together, with the same columns. On compute
/// capability 9.0 (wgmma) the products are on their way until await_products.
template <int kEights>
__device__ void tensor_multiply_add(int (&sums)[2][kEights][4], unsigned (&a)[2][4], const uint4 (*columns)[8],
                                    int chunk) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#pragma unroll
  for (int i = 0; i < 8; ++i) forget(a[i / 4][i % 4]);  // made before the fence
  // PTX ISA, "Matrix descriptor": address / 16, no matter, 1024 / 16 bytes from eight columns to the next, the swizzle
  // of 128 bytes
  const uint64_t matrix =
      (shared_address(&columns[0][chunk]) >> 4) | uint64_t(1) << 16 | uint64_t(64) << 32 | uint64_t(1) << 62;
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
  constexpr int kAtOnce = 8;
  static_assert(kEights % kAtOnce == 0);
#pragma unroll
  for (int e = 0; e < kEights; e += kAtOnce)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#define LIGER_SUMS(i) "+r"(sums[h][e + i][0]), "+r"(sums[h][e + i][1]), "+r"(sums[h][e + i][2]), "+r"(sums[h][e + i][3])
      asm volatile(
          "wgmma.mma_async.sync.aligned.m64n64k32.s32.u8.s8 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, "
          "%13, %14, %15, %16, %17, %18, "
          "%19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, {%32, %33, %34, %35}, %36, 1;"
          : LIGER_SUMS(0), LIGER_SUMS(1), LIGER_SUMS(2), LIGER_SUMS(3), LIGER_SUMS(4), LIGER_SUMS(5), LIGER_SUMS(6),
            LIGER_SUMS(7)
          : "r"(a[h][0]), "r"(a[h][1]), "r"(a[h][2]), "r"(a[h][3]), "l"(matrix + e * 64));
#undef LIGER_SUMS
    }
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#else
  const int lane = threadIdx.x % 32, of = lane / 8;  // each column's two chunks, of two columns of eight at once
#pragma unroll
  for (int e = 0; e < kEights; e += 2) {
    unsigned b[4];
    const int column = 8 * (e + of / 2) + lane % 8;
    load_matrices(b, &columns[column][(chunk + of % 2) ^ column % 8]);
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int i = 0; i < 2; ++i) tensor_multiply_add(sums[h][e + i], a[h], {int(b[2 * i]), int(b[2 * i + 1])});
  }
#endif
}

/// Waits for all such products of this warp, or all but the last call's.
template <bool kButLast>
__device__ void await_products() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(int(kButLast)) : "memory");
#endif
}

/// After the next barrier such products may read what this thread has written, or copied and awaited, in shared memory.
__device__ inline void show_tensor_core() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

/// Device assertions with a message, as torch's own kernels raise them on a bad index.
__device__ inline void fail_index(const char* what, int64_t index, int64_t size) {
  printf("liger: %s %lld is outside [0, %lld)\n", what, (long long)index, (long long)size);
  __assertfail("index is in range", __FILE__, __LINE__, "fail_index", 1);
}

__device__ inline void fail_label(int64_t label, int64_t classes) {
  printf("liger: label %lld is outside [0, %lld) and not ignore_index\n", (long long)label, (long long)classes);
  __assertfail("label is in range or ignore_index", __FILE__, __LINE__, "fail_label", 1);
}

}  // namespace liger::cuda
